"""MLflow. It reads its own environment variables, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from stillhouse.libraries import imported, reading
from stillhouse.output.folder import RunFolder
from stillhouse.output.trackers.tracker_state import TrackerState

EXPERIMENT = "stillhouse"
_LONGEST = 500  # the number of characters of a parameter that all versions of mlflow can store
_BATCH = 100  # parameters per request
#: give up after 90 s if a server does not answer; mlflow's default is 16 minutes, longer than a job waits for a rank
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}


class MlflowRun:
    def __init__(self, mlflow: Any, client: Any, run_id: str):
        self._mlflow, self._client, self._id = mlflow, client, run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        entities = [self._mlflow.entities.Metric(_name(key), value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entities)

    def close(self, *, complete: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if complete else "FAILED")


def open_mlflow(folder: RunFolder, state: TrackerState, values: Mapping[str, Any]) -> MlflowRun:
    """Start a run, or continue the run with the id `state.mlflow`. Raises ValueError if mlflow fails."""
    for variable, value in _PATIENCE.items():
        os.environ.setdefault(variable, value)
    mlflow = imported("mlflow", "track")
    where = f"{mlflow.get_tracking_uri()}; set MLFLOW_TRACKING_URI to a store that works"
    texts = {_name(key): str(value)[:_LONGEST] for key, value in values.items()}
    with reading(f"track: mlflow cannot start or continue a run at {where}", library="mlflow"):
        client = mlflow.MlflowClient()
        if state.mlflow is None:
            state.mlflow = client.create_run(_experiment(client), run_name=state.name).info.run_id
        else:
            client.update_run(state.mlflow, status="RUNNING")
        logged = client.get_run(state.mlflow).data.params  # a parameter cannot be changed
        params = [mlflow.entities.Param(key, text) for key, text in texts.items() if key not in logged]
        for start in range(0, len(params), _BATCH):
            client.log_batch(state.mlflow, params=params[start : start + _BATCH])
    return MlflowRun(mlflow, client, state.mlflow)


def _experiment(client: Any) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if experiment is None else experiment.experiment_id)


def _name(key: str) -> str:
    """mlflow allows letters, digits and `_-. :/` in names: `loss/jsd(0.5)` becomes `loss/jsd_0.5_`."""
    return re.sub(r"[^\w\-. :/]", "_", key)
