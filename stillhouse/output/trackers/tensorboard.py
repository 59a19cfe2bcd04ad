"""TensorBoard, in the folder `tensorboard` of the run."""

from collections.abc import Mapping

from stillhouse.output.trackers import TrackedRun, Tracker


class TensorBoard(Tracker):
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
