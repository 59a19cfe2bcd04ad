"""The interface of trackers, which receive a run's metrics in addition to metrics.jsonl, and this project's trackers.

A tracker reads the environment variables of its library, such as WANDB_MODE, MLFLOW_TRACKING_URI and TRACKIO_DIR.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from stillhouse.libraries import imported, reading

#: the maximum number of seconds that a run waits for wandb at its end; `wandb sync` can send the remaining data later
WANDB_SECONDS = 120.0
#: give up after 90 s if a server does not answer: mlflow's default, 16 minutes, is longer than a job waits for a rank
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
#: the maximum characters of a parameter in all versions of mlflow, and the maximum parameters of a request
_MLFLOW_LONGEST, _MLFLOW_BATCH = 500, 100


@dataclass
class TrackedRun:
    """The description of a run for a tracker.

    name: the name of the run's folder. id: distinguishes runs whose folders have the same name.
    values: the configuration by dotted keys.
    step: the step from which the run resumes; 0 for a new run.
    own_id: the run's id in this tracker. The tracker may set it, and gets the same id when the run is resumed.
    """

    folder: Path
    name: str
    id: str
    values: Mapping[str, Any]
    step: int = 0
    own_id: str | None = None


class Tracker(Protocol):
    """A run in one tracker. The entry points of the group `stillhouse.trackers` refer to classes with this interface.

    library: the name of the module that must be installed. It must not be imported before a run is opened.
    in_folder: whether the tracker writes only to the run's folder. Such a tracker gets all values of repeated steps
        again, and an error ends the run. Any other tracker gets each finite value of a step once. If it fails, a
        warning is printed, and the run continues without this tracker.
    """

    library: ClassVar[str]
    in_folder: ClassVar[bool] = False

    def __init__(self, run: TrackedRun):
        """Start the run or continue it. Raises ValueError if that fails."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, complete: bool) -> None:
        """End the run in the tracker. complete: whether the run ended without an error or a signal."""


class TensorBoard(Tracker):
    """Writes to the folder `tensorboard` in the run's folder."""

    library = "tensorboard"
    in_folder = True

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.folder / "tensorboard"
        # hide the metrics that an earlier process wrote after the checkpoint, because those steps are repeated
        self._writer = SummaryWriter(str(self._folder), purge_step=run.step + 1 if run.step else 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from stillhouse.output.disk import explained_write_errors

        with explained_write_errors(self._folder):
            for key, value in metrics.items():
                self._writer.add_scalar(key, value, step)

    def close(self, *, complete: bool) -> None:
        self._writer.close()


class Wandb(Tracker):
    library = "wandb"

    def __init__(self, run: TrackedRun):
        wandb = imported("wandb", "track")
        hint = "log in with `wandb login`, or set WANDB_MODE=offline"
        with reading(f"track: wandb cannot start a run; {hint}", library="wandb"):
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "stillhouse"),
                name=os.environ.get("WANDB_NAME", run.name),
                id=run.id,
                # offline, wandb cannot look up the run, so a resumed run can only reuse the id
                resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
                dir=os.environ.get("WANDB_DIR", str(run.folder)),
                config=dict(run.values),
                settings=wandb.Settings(
                    console=os.environ.get("WANDB_CONSOLE", "off"),
                    # by default, wandb waits forever for a server, and the model would never be written
                    finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", WANDB_SECONDS)),
                    finish_timeout_raises=True,
                ),
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class Trackio(Tracker):
    """The environment variable TRACKIO_PROJECT names the project."""

    library = "trackio"

    def __init__(self, run: TrackedRun):
        trackio = imported("trackio", "track")
        with reading("track: trackio cannot start a run", library="trackio"):
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "stillhouse"),
                name=f"{run.name}-{run.id}",  # trackio identifies runs by name, so the name contains the id
                config=dict(run.values),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, complete: bool) -> None:  # trackio does not distinguish failed runs
        self._run.finish()


class Mlflow(Tracker):
    library = "mlflow"

    def __init__(self, run: TrackedRun):
        for variable, value in _MLFLOW_PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._mlflow = mlflow = imported("mlflow", "track")
        where = f"{mlflow.get_tracking_uri()}; set MLFLOW_TRACKING_URI to a store that works"
        texts = {_allowed(key): str(value)[:_MLFLOW_LONGEST] for key, value in run.values.items()}
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
            logged = self._client.get_run(self._id).data.params  # mlflow cannot change a parameter
            params = [mlflow.entities.Param(key, text) for key, text in texts.items() if key not in logged]
            for start in range(0, len(params), _MLFLOW_BATCH):
                self._client.log_batch(self._id, params=params[start : start + _MLFLOW_BATCH])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        entities = [self._mlflow.entities.Metric(_allowed(key), value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entities)

    def close(self, *, complete: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if complete else "FAILED")


#: mlflow allows only letters, digits and `_-. :/` in names: `loss/jsd(0.5)` becomes `loss/jsd_0.5_`
_allowed = partial(re.compile(r"[^\w\-. :/]").sub, "_")
