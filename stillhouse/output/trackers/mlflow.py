"""MLflow. It reads its own environment variables, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

import os
import re
import time
from collections.abc import Mapping

from stillhouse.libraries import imported, reading
from stillhouse.output.trackers import TrackedRun, Tracker

_LONGEST = 500  # the number of characters of a parameter that all versions of mlflow can store
_BATCH = 100  # parameters per request
#: give up after 90 s if a server does not answer; mlflow's default is 16 minutes, longer than a job waits for a rank
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}


class Mlflow(Tracker):
    library = "mlflow"

    def __init__(self, run: TrackedRun):
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._mlflow = mlflow = imported("mlflow", "track")
        where = f"{mlflow.get_tracking_uri()}; set MLFLOW_TRACKING_URI to a store that works"
        texts = {_allowed(key): str(value)[:_LONGEST] for key, value in run.values.items()}
        with reading(f"track: mlflow cannot start or continue a run at {where}", library="mlflow"):
            self._client = mlflow.MlflowClient()
            if run.own_id is None:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "stillhouse")
                experiment = self._client.get_experiment_by_name(name)
                number = experiment.experiment_id if experiment else self._client.create_experiment(name)
                run.own_id = self._client.create_run(str(number), run_name=run.name).info.run_id
            else:
                self._client.update_run(run.own_id, status="RUNNING")
            self._id = run.own_id
            logged = self._client.get_run(self._id).data.params  # a parameter cannot be changed
            params = [mlflow.entities.Param(key, text) for key, text in texts.items() if key not in logged]
            for start in range(0, len(params), _BATCH):
                self._client.log_batch(self._id, params=params[start : start + _BATCH])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        entities = [self._mlflow.entities.Metric(_allowed(key), value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entities)

    def close(self, *, complete: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if complete else "FAILED")


def _allowed(name: str) -> str:
    """mlflow allows letters, digits and `_-. :/` in names: `loss/jsd(0.5)` becomes `loss/jsd_0.5_`."""
    return re.sub(r"[^\w\-. :/]", "_", name)
