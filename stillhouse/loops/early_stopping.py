"""Early stopping, `eval.patience`: counts the evaluations without a new best value, and loads the best checkpoint.

Each new best value causes a checkpoint, so the checkpoints in the run's folder contain the best value so far. A
checkpoint also has the count (`Progress.without_best`), so a resumed run ends after the same step. Rank 0 decides,
because the metrics of the ranks can differ by rounding.
"""

from stillhouse.checkpoint.checkpoint_folder import best_checkpoint, checkpoints, is_new_best, verified
from stillhouse.checkpoint.save import load_checkpoint
from stillhouse.config import ConfigError
from stillhouse.loops.session import Models, Schedule
from stillhouse.output.folder import RunFolder
from stillhouse.output.log import NoLog, RunLog
from stillhouse.output.metrics import ended_early
from stillhouse.output.progress import DamagedCheckpointError, Progress
from stillhouse.parallel import Ranks, is_first


def has_ended_early(schedule: Schedule, progress: Progress) -> bool:
    """Return whether eval.patience ends the training after this step."""
    patience = schedule.eval_config.patience
    return patience is not None and progress.without_best >= patience


def is_best(schedule: Schedule, ranks: Ranks, folder: RunFolder, progress: Progress) -> bool:
    """Compare the metrics of this step with those of the checkpoints, and count evaluations without a new best value.

    Returns whether a checkpoint must be saved, because the step has a new best value; False without eval.patience.
    The evaluation before training does not count. A collective. Raises ConfigError if the evaluation has no metric
    checkpoint.best.
    """
    patience, settings = schedule.eval_config.patience, schedule.checkpoint_config
    if patience is None or not progress.step:
        return False
    result: bool | None = None
    if is_first() and settings.best in progress.metrics:
        value = progress.metrics[settings.best]
        result = is_new_best(folder.checkpoints, settings.best, value, settings.greater_is_better)
    result = ranks.from_first(result)
    if result is None:
        raise ConfigError(
            "eval.patience",
            f"got {patience}, but the evaluation of step {progress.step} has no {settings.best}: expected null, or a "
            f"metric of the evaluation in checkpoint.best: {', '.join(progress.metrics)}",
        )
    progress.without_best = 0 if result else progress.without_best + 1
    return result


def load_best(
    schedule: Schedule, models: Models, folder: RunFolder, progress: Progress, log: RunLog | NoLog
) -> Progress:
    """With eval.patience, load the best checkpoint, whose weights become the final model, and return its progress.
    Without eval.patience, return `progress`. A collective.

    Raises DamagedCheckpointError if the best checkpoint is not known or is damaged.
    """
    settings, patience, ranks, best = schedule.checkpoint_config, schedule.eval_config.patience, models.ranks, ""
    if patience is None or settings.best is None:
        return progress
    if has_ended_early(schedule, progress):
        log.print_line(f"step {progress.step}: training ended early: {ended_early(settings.best, patience)}")
    with ranks.all_raise(ValueError):
        if is_first():
            path, damage = best_checkpoint(checkpoints(folder.checkpoints), settings.best, settings.greater_is_better)
            if damage:
                raise DamagedCheckpointError(
                    "the best checkpoint, whose weights become the final model, is not known: "
                    f"{next(iter(damage.values()))}; restore or remove this checkpoint, and the same command writes "
                    "the model"
                )
            best = "" if path is None else path.name
    if not (best := ranks.from_first(best)):
        log.print_line(f"warning: {settings.best} was never finite, so the final model has the last weights")
        return progress
    checkpoint = verified(folder.checkpoints / best, ranks)
    if checkpoint.state.progress.step == progress.step:
        return progress
    best_progress = load_checkpoint(checkpoint, models.engine)
    log.print_line(
        f"the final model has the weights of step {best_progress.step}, which has the best {settings.best}"
    )
    return best_progress
