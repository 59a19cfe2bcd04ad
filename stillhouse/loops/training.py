"""The parts that both training loops share: progress, logs, evaluations, checkpoints, stopping."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from stillhouse.checkpoint.checkpoint_folder import ROLLOUTS, IntactCheckpoint, prune
from stillhouse.checkpoint.resume import RunIdentity
from stillhouse.checkpoint.save import load_checkpoint, read_queue, require_room, save_checkpoint
from stillhouse.config import ConfigError
from stillhouse.display import named_if_slow
from stillhouse.engine.engine import StepOutput
from stillhouse.engine.schedule import learning_rate
from stillhouse.loops.early_stopping import has_ended_early, is_best, load_best
from stillhouse.loops.greedy_evaluation import GreedyEvaluation, greedy_evaluation
from stillhouse.loops.held_out import held_out_metrics
from stillhouse.loops.not_finite import not_finite_error
from stillhouse.loops.prompt_evaluation import PROMPTS
from stillhouse.loops.session import Models, RolloutPlan, Session
from stillhouse.loops.step_metrics import step_metrics
from stillhouse.models import NotFiniteError
from stillhouse.objective.metrics import CHUNK_TOKENS
from stillhouse.output.folder import RunFolder
from stillhouse.output.log import NoLog, RunLog, open_log
from stillhouse.output.metrics import WITHOUT_BEST
from stillhouse.output.progress import DamagedCheckpointError, Progress, folder_name
from stillhouse.parallel import ShardedMicroBatches, destroy_process_group, is_first, watchdog
from stillhouse.preemption import OverdueError, Preempted, finishing, requested
from stillhouse.rollout import QueueState, RolloutQueue
from stillhouse.rollout.user_functions import loaded_functions, warn
from stillhouse.signals import SignalsLostError
from stillhouse.user_code.function_state import FunctionStates
from stillhouse.user_code.functions import UserFunctionError

#: the suffix of the keys of the teacher's own cross-entropy, on all held-out data and on each set
_TEACHER = "/teacher_cross_entropy"

#: the phase of a first step in which functions are compiled
FIRST_STEP = "the first forward and backward passes, for which the loss is compiled"
#: a warning after a first step that changed no weight
_NO_GRADIENT = (
    "warning: the gradient of step 1 is 0: a divergence is 0 between a model and itself (also if one has an adapter "
    "that has not been trained), and a policy gradient is 0 if all completions of a prompt have the same reward"
)

#: the end of the error for a state of the user's functions that cannot be saved
_NOT_SAVED = (
    "no checkpoint can be written without this state, and the steps since the last checkpoint are lost; correct the "
    "cause, and the same command continues from the last checkpoint, or from the start if there is none yet"
)


class Training:
    """The state of a run between two steps. `progress` is up to date after each step.

    queue: the queue of an on-policy run; a checkpoint stores its samples.
    functions: the user's functions, on rank 0; a checkpoint stores their states.
    greedy: the evaluations that need completions, or None if the run has none.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        progress: Progress,
        log: RunLog | NoLog,
        queue: RolloutQueue | None,
        functions: FunctionStates | None,
        greedy: GreedyEvaluation | None,
    ):
        self.session, self.folder, self.progress, self.log = session, folder, progress, log
        self.queue, self.functions, self.greedy = queue, functions, greedy
        self.last_step, self._first_step = session.schedule.steps, progress.step
        self._teacher_metrics: dict[str, float] | None = None
        self._started = time.monotonic()
        self._norm = self._rate = 0.0
        self._has_warned = False  # whether the warning about a step without targets has been printed
        #: the samples for the next checkpoint; they belong to the states in `progress`
        self._queue_state: QueueState | None = None
        self._have_states = session.models.ranks.from_first(functions is not None and bool(functions.with_state))
        if self._have_states:
            self._record()

    @property
    def has_ended_early(self) -> bool:
        """Whether eval.patience ends the training after this step."""
        return has_ended_early(self.session.schedule, self.progress)

    @property
    def steps(self) -> range:
        """The remaining steps."""
        done = self.progress.step
        return range(done, done if self.has_ended_early else self.last_step)

    def named_at_first(self, step: int, phase: str) -> AbstractContextManager[None]:
        """In the first step of this process, print the name of a phase if it takes long."""
        return named_if_slow(phase, self.log.print_line) if step == self._first_step else nullcontext()

    def begin(self, step: int) -> None:
        watchdog.enter(f"step {step + 1}")
        self._started = time.monotonic()

    def update(self, step: int, micro_batches: ShardedMicroBatches, output: StepOutput) -> None:
        """Make the optimizer step. A step without targets is skipped, because weight decay and momentum would change
        the weights. Raises ValueError, and leaves the weights unchanged, if the loss or the gradient is not finite.
        """
        session = self.session
        self._rate = learning_rate(session.schedule.train_config, self.last_step, step)
        if not micro_batches.all_ranks.targets:
            session.models.engine.zero_grad()
            self._norm = 0.0
            if not self._has_warned:
                self._has_warned = True
                self.log.print_line(
                    f"warning: step {step + 1} {no_targets_in_words(session.rollout)}, and changes no weight"
                )
            return
        try:
            self._norm = session.models.engine.update(self._rate, output)
        except NotFiniteError as error:
            raise not_finite_error(
                session.models, self.folder.checkpoints, step + 1, micro_batches, output, error.norm
            ) from None

    def end(
        self,
        step: int,
        micro_batches: ShardedMicroBatches,
        output: StepOutput,
        more_metrics: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Log the step, and evaluate and save if they are due.

        seconds: the time of the step; if it is None, the time since `begin`.

        Raises Preempted if a rank has received a signal.
        """
        seconds = time.monotonic() - self._started if seconds is None else seconds
        session, progress = self.session, self.progress
        progress.step, progress.tokens = step + 1, progress.tokens + int(output.sums["tokens"])
        metrics = step_metrics(output.sums, session.loss.spec, session.models.engine.parts) | {
            "train/learning_rate": self._rate,
            "train/gradient_norm": self._norm,
            "speed/tokens_per_second": micro_batches.all_ranks.tokens / seconds,
            "speed/step_seconds": seconds,
            "speed/chunk_tokens": output.sums[CHUNK_TOKENS],
        }
        self.log.train(progress.step, progress.tokens, metrics | dict(more_metrics or {}))
        if progress.step == 1 and self._norm == 0.0 and micro_batches.all_ranks.targets:
            self.log.print_line(_NO_GRADIENT)
        progress.metrics = {}  # a checkpoint must not contain the evaluation of an earlier step
        if self._have_states:
            self._record()
        has_new_best = session.schedule.evaluates_after(progress.step) and self.evaluate()
        ranks, last = session.models.ranks, not self.steps
        stopped_by = 0 if last else ranks.largest(requested())
        if stopped_by or last or has_new_best or session.schedule.saves_after(progress.step):
            saved = self.save()
            if not stopped_by and not last:
                stopped_by = ranks.largest(requested())  # a signal can have come while the checkpoint was written
        if stopped_by:
            destroy_process_group()
            raise Preempted(stopped_by, progress.step, saved)

    def evaluate(self) -> bool:
        """Evaluate the student, and log the metrics. Return whether a checkpoint must be saved, because eval.patience
        is set and the metric of checkpoint.best has a new best value.
        """
        session, metrics = self.session, dict[str, float]()
        held_out = session.data.evaluation
        if held_out is None and self.greedy is None:
            return False
        with self.log.evaluating(self.progress.step):
            if held_out is not None:
                metrics = held_out_metrics(
                    session.models,
                    held_out,
                    session.loss.spec,
                    session.schedule.held_out_tokens,
                    with_teacher=self._teacher_metrics is None,
                )
            if self._teacher_metrics is None:  # the teachers' metrics do not change during a run
                self._teacher_metrics = {key: value for key, value in metrics.items() if key.endswith(_TEACHER)}
            metrics |= self._teacher_metrics
            if self.greedy is not None:
                metrics |= self.greedy.evaluate(self.progress.step, metrics)
        self.progress.metrics = metrics  # at the end, so that a resumed run repeats an interrupted evaluation
        has_new_best = is_best(session.schedule, session.models.ranks, self.folder, self.progress)
        logged = {} if session.schedule.eval_config.patience is None else {WITHOUT_BEST: self.progress.without_best}
        self.log.evaluation(self.progress.step, self.progress.tokens, metrics | logged)
        return has_new_best

    def save(self, *, after_error: bool = False) -> Path:
        """Write a checkpoint, and then remove older checkpoints that need not be kept. Returns the path of the new
        checkpoint.

        after_error: whether a step has failed. The calls of this step are made again after a resume, so the saved
            states of functions must be those before this step.
        """
        progress, session, folder = self.progress, self.session, self.folder
        watchdog.enter(f"the checkpoint of step {progress.step}", timed=False)
        progress.seconds, progress.log_bytes, progress.log_sha256 = self.log.seconds(), *self.log.position
        if not (after_error and self._have_states):
            self._record()
        saved = save_checkpoint(
            folder.checkpoints,
            progress,
            session.models.engine,
            session.data.tokenizer,
            self._queue_state,
            session.data.processor_files,
        )
        if is_first():
            settings = session.schedule.checkpoint_config
            for damage in prune(folder.checkpoints, settings.keep, settings.best, settings.greater_is_better):
                self.log.print_line(f"warning: {damage}")
        return saved

    def _record(self) -> None:
        """Record samples and functions' states. Raises ValueError on all ranks if a state cannot be saved."""
        self._queue_state = None if self.queue is None else self.queue.state()
        with self.session.models.ranks.all_raise(ValueError):
            if self.functions is None:
                return
            try:
                self.progress.functions, self.progress.sources = self.functions.texts(), self.functions.sources
            except (UserFunctionError, OverdueError) as error:
                raise ValueError(_first_line_with(error, _NOT_SAVED)) from error


def no_targets_in_words(rollout: RolloutPlan | None) -> str:
    """The problem of a step without targets, for a message."""
    cause = " (its completions are cut at rollout.max_new_tokens, and rollout.truncated=mask excludes such ones)"
    return f"has no token to train on{'' if rollout is None else cause}"


@contextmanager
def training(
    session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None, queue: RolloutQueue | None = None
) -> Iterator[Training]:
    """Yield a run that is ready for its remaining steps. If there is a checkpoint, it has been loaded.

    At the end, the student has the final weights, and the run's progress is that of these weights. If teachers'
    signals or completions are not available, or if a function of the user fails, the finished steps are saved, and
    SignalsLostError or UserFunctionError is raised.
    """
    models, schedule, rollout, functions = session.models, session.schedule, session.rollout, None
    with models.ranks.all_raise(ConfigError):
        if is_first():
            sections = ((), None) if rollout is None else (rollout.configs, rollout.config)
            loaded = loaded_functions(schedule.eval_config, *sections)
            functions = FunctionStates([*loaded, *session.loss.classes])
    progress = _progress(
        models,
        session.identity,
        schedule.steps,
        folder=folder,
        checkpoint=checkpoint,
        queue=queue,
        functions=functions,
        on_policy=rollout is not None,
    )
    if progress.step < schedule.steps:
        require_room(folder.checkpoints, models.engine)  # before any step, because the result of a step must be saved
    with ExitStack() as stack:
        log = stack.enter_context(
            open_log(
                folder,
                progress,
                schedule.steps,
                session.values,
                models.ranks,
                session.later_steps,
                [step for step in range(schedule.steps + 1) if schedule.evaluates_after(step)],
            )
        )
        # whether the first evaluation, or one that was interrupted, must be made now
        is_due = schedule.evaluates_after(progress.step) and not progress.metrics
        greedy = stack.enter_context(greedy_evaluation(session, folder, progress.step - is_due))
        if greedy is not None and greedy.prompts is not None:
            hashes = greedy.prompts.hashes
            if any(progress.data.get(name, digest) != digest for name, digest in hashes.items()):
                raise ValueError(
                    "eval.prompts.data: the prompts have changed since the run's last checkpoint, so that "
                    "evaluations before and after it could not be compared; restore the prompts, or use another path "
                    "for the new prompts"
                )
            progress.data = progress.data | hashes
        run = Training(session, folder, progress, log, queue, functions, greedy)
        if is_due:
            is_best_step = run.evaluate()
            if is_best_step:
                run.save()
        stack.enter_context(finishing("this step and a checkpoint of it"))
        stack.enter_context(_saving_finished_steps(run))
        yield run
        run.progress = load_best(session.schedule, session.models, folder, run.progress, log)
    watchdog.enter("the final model", timed=False)


def _progress(
    models: Models,
    identity: RunIdentity,
    steps: int,
    *,
    folder: RunFolder,
    checkpoint: IntactCheckpoint | None,
    queue: RolloutQueue | None,
    functions: FunctionStates | None,
    on_policy: bool,
) -> Progress:
    progress = Progress()
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, models.engine)
        if folder.owns(checkpoint.path):
            if on_policy:
                with models.ranks.all_raise(DamagedCheckpointError):
                    try:
                        if queue is not None:  # only rank 0 has a queue
                            queue.restore(read_queue(checkpoint), progress.step)
                    except ValueError as error:
                        raise DamagedCheckpointError(
                            f"{checkpoint.path / ROLLOUTS} is not what this run has written: {error}; restore it, or "
                            f"remove {checkpoint.path}, so that the run continues from the checkpoint before it"
                        ) from error
            with models.ranks.all_raise(UserFunctionError):
                if functions is not None:
                    functions.load(progress.functions, progress.sources, warn)
        if progress.step > steps:
            raise ValueError(
                f"{checkpoint.path} is at step {progress.step}, and this run ends at step {steps}: expected a "
                "checkpoint before the run's last step"
            )
        if not folder.owns(checkpoint.path):  # the checkpoint is of another run, whose log is not continued
            no_history: dict[str, Any] = {"log_bytes": 0, "data": {}, "functions": {}, "sources": {}}
            progress = replace(progress, started_from=str(checkpoint.path.resolve()), without_best=0, **no_history)
    prompts = {name: digest for name, digest in progress.data.items() if name.startswith(PROMPTS)}
    data = identity.data | prompts
    return replace(progress, data=data, models=identity.models, configuration=identity.configuration)


@contextmanager
def _saving_finished_steps(run: Training) -> Iterator[None]:
    """If servers or a function of the user fail, save the finished steps and raise the error again. All processes
    must raise the error. After a resume, the failed step begins anew and repeats the failed call.
    """
    try:
        yield
    except (SignalsLostError, UserFunctionError) as error:
        step, ranks = run.progress.step, run.session.models.ranks
        saved = run.folder.checkpoints / folder_name(step) if step else None  # step 0 needs no checkpoint
        if saved is not None and not ranks.from_first(saved.exists()):
            saved = run.save(after_error=True)
        if stopped_by := ranks.largest(requested()):
            destroy_process_group()
            raise Preempted(stopped_by, step, saved) from error
        if saved is None:
            raise
        words = f"the run has stopped after a checkpoint: {saved}"
        if isinstance(error, SignalsLostError):
            raise SignalsLostError(_first_line_with(error, words)) from error
        words += "; correct the cause, and the same command continues"
        raise UserFunctionError(_first_line_with(error, words)) from error


def _first_line_with(error: BaseException, words: str) -> str:
    first, *frames = str(error).split("\n")
    return "\n".join([f"{first}; {words}", *frames])
