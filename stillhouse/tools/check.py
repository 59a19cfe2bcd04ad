"""`stillhouse check`: does everything that a run does before its first update, and prints what it finds.

It prints facts about the data, the tokenizer and the models as soon as they are known, and runs one step to measure
its peak memory and the gradient norm of each loss. It changes no weight and writes no file. By default, it compiles
nothing, because compiling can take minutes.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.checkpoint.resume import RunIdentity, candidates, require_unchanged_sources
from stillhouse.checkpoint.save import require_room
from stillhouse.config import RunConfig
from stillhouse.display import counted, duration, escaped, print_escaped
from stillhouse.engine.engine import Engine
from stillhouse.loops.not_finite import not_finite_error
from stillhouse.loops.prompt_evaluation import held_out_prompts, shared_prompts
from stillhouse.loops.rollouts import first_rollouts
from stillhouse.loops.session import Data, Models, RolloutPlan, Schedule, Session
from stillhouse.loops.training import no_targets_in_words
from stillhouse.models import element_count
from stillhouse.models.dtensors import local
from stillhouse.objective.divergence import weighted_parts
from stillhouse.objective.sampled_tokens import ORIGINS
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.output.folder import RunFolder
from stillhouse.output.progress import read_state
from stillhouse.parallel import ShardedMicroBatches, is_first
from stillhouse.parallel.apply.compiled_layers import layers_not_compiled
from stillhouse.run.run import build_session, data_reports, make_schedule, read_data, steps_in_words
from stillhouse.run.setup import RunSetup, with_precision
from stillhouse.tools.check_prompts import function_rows, in_brackets, prompt_rows, sample_rows

#: the number of characters of the sample document that are shown
_SAMPLE = 600
#: the verdict names a loss whose gradient norm is more than this many times smaller than the largest one
SMALLER = 30
#: the title of the row with the gradient of the cross-entropy plus its z-loss
WITH_Z_LOSS = "with z_loss"
#: the prefixes of the names of regularisers, whose gradients should be small compared with other losses' gradients
_REGULARISERS = ("entropy", "objective.router_aux_loss")
#: the number of documents with media that are shown
_MEDIA_SAMPLES = 3

Result = TypeVar("Result")
#: a title with its text, or a complete line
Row = tuple[str, str] | str


def print_check(config: RunConfig, *, compiles: bool = False) -> None:
    """Print the findings. Raises the same errors as a run; an error about the run's folder is raised at the end.

    compiles: whether to compile what a run would compile.
    """
    setup, folder = RunSetup(with_precision(config)), RunFolder(Path(config.out))
    data = read_data(setup, announce=is_first())
    _print(_data_rows(data, *make_schedule(data, setup)))
    _print(("warning", warning) for warning in dict.fromkeys(map(escaped, data.warnings)))
    _print(_sample_rows(data, on_policy=config.rollout is not None))
    with (
        nullcontext() if compiles else layers_not_compiled(),
        closing(build_session(setup, data, announce=is_first())) as session,
    ):
        models, rollout, warned = session.models, session.rollout, {*map(escaped, data.warnings)}
        state, occupied = _folder_state(
            folder, config.checkpoint.resume, session.values, session.identity, models.engine
        )
        _print(_model_rows(models, data.tokenizer, session.identity.models["tokenizer"]))
        _print(("warning", warning) for warning in session.warnings if warning not in warned)
        if session.data.by_length:  # a model runs one document per row, so the rows above have changed
            _print(_data_rows(session.data, session.schedule, rollout))
        if rollout is not None and (prompts := config.eval.prompts) is not None:
            held_out = held_out_prompts(models, session.data, rollout, prompts)
            warning = shared_prompts(session.data.train.documents, held_out)
            _print([] if warning is None else [("warning", warning)])
        _print([("device", f"{models.device}, {session.schedule.train_config.precision}")])
        _print([("run folder", f"{session.values['out']}: {state}")])
        try:
            _print(_step_rows(session, folder, compiles=compiles))
        except torch.OutOfMemoryError as error:
            if compiles:
                raise
            first = str(error).partition("\n")[0]
            advice = "nothing is compiled, which can need more memory: try `stillhouse check --compile`."
            raise torch.OutOfMemoryError(f"{first} In this step, {advice}") from error
        _print(function_rows(session))
        if occupied is not None:
            raise occupied


def _folder_state(
    folder: RunFolder, resume: str, values: Mapping[str, Any], identity: RunIdentity, engine: Engine
) -> tuple[str, ValueError | None]:
    """Return the state of the run's folder in words, and the error if a run cannot use the folder."""
    try:
        newest = next(iter(candidates(folder, resume, values)), None)
        if newest is not None and folder.owns(newest):
            require_unchanged_sources(newest, read_state(newest).progress, identity)
        if folder.complete:
            return "contains this run, which is complete", None
        gib = require_room(folder.checkpoints, engine) / 2**30
        return f"{f'resumes from {newest.name}' if newest else 'a new run'}; a checkpoint has {gib:.2f} GiB", None
    except ValueError as error:
        return "cannot be used, see the error below", error


def _print(rows: Iterable[Row]) -> None:
    for row in rows:  # all processes make all rows, because making some of them is a collective
        if is_first():
            print_escaped(row if isinstance(row, str) else f"{row[0]:<16}{escaped(row[1], lines=True)}")


def _model_rows(models: Models, tokenizer: PreTrainedTokenizerBase, tokenizer_hash: str) -> Iterator[Row]:
    for section, decoder in {"student": models.student, **models.teachers}.items():
        parameters = sum(map(element_count, decoder.parameters()))
        dtype = str(next(decoder.parameters()).dtype).removeprefix("torch.")
        head = f"head of {decoder.vocabulary_rows:,} rows{', tied' if decoder.tied else ''}"
        name = type(decoder.pretrained).__name__
        yield section.removeprefix("teachers."), f"{name}, {parameters:,} parameters, {dtype}, {head}"
    for section, store in models.stores.items():
        name = "signals" if section == "teacher" else section.removeprefix("teachers.")
        yield name, f"{store.signal}, from {store.name}"
    for section, words in models.packing_in_words.items():
        yield "documents", f"of {section}: {words}"
    for part in models.engine.parts:
        yield from part.check_rows(models.student, models.student_config).items()
    if models.adapter_in_words is not None:
        yield "adapter", models.adapter_in_words
    teachers, same = models.teacher_configs, ""
    if teachers and all(teacher.source_kind.compares_tokenizer for teacher in teachers.values()):
        same = f", the same for {'student and teacher' if 'teacher' in teachers else 'all models'}"
    yield "tokenizer", f"{len(tokenizer):,} tokens, hash {tokenizer_hash[:12]}{same}"


def _data_rows(data: Data, schedule: Schedule, rollout: RolloutPlan | None) -> Iterator[Row]:
    for which, report in data_reports(data, schedule.step_schedule).items():
        yield f"data {which}", report.summary()
    if data.evaluation is None:
        yield "data eval", "no data is held out, so there will be no held-out metrics"
    if rollout is None:
        filling = f"{data.train.filled_share:.0%} full"
        if data.by_length:
            filling = f"each with documents of similar lengths, {data.train.padding_share:.1%} padding in rows"
        yield "packing", f"{counted(len(data.train), 'sequence')}, {filling}"
    yield "steps", steps_in_words(schedule.step_schedule, data.train.max_tokens, rollout)
    if rollout is not None:
        yield from prompt_rows(rollout, schedule.steps)


def _sample_rows(data: Data, *, on_policy: bool) -> Iterator[Row]:
    """Yield the first document, then a description and the beginning of each of the first documents with media."""
    documents, processor = data.train.documents, data.processor
    words = "the completion follows it" if on_policy else "the tokens to predict are in ⟦ ⟧"
    yield "prompt" if on_policy else "sample", f"{documents.sources[0]}, {words}:"
    yield _sample(data, 0)
    if documents.media is None or processor is None:
        return
    for document in np.flatnonzero(np.diff(documents.media.offsets))[:_MEDIA_SAMPLES].tolist():
        yield processor.kind, processor.in_words(documents, document)
        if document:
            yield _sample(data, document)


def _sample(data: Data, document: int) -> str:
    """Return the beginning of a training document as the student sees it, with the targets in brackets."""
    documents = data.train.documents
    text = in_brackets(data.tokenizer, documents.tokens(document), documents.targets(document))
    if documents.media is not None and data.processor is not None:
        text = data.processor.shortened(text)
    return escaped(text[:_SAMPLE], lines=True) + ("…" if len(text) > _SAMPLE else "")


def _step_rows(session: Session, folder: RunFolder, *, compiles: bool) -> Iterator[Row]:
    """Run one step without its update; yield rows about its time, peak memory, loss, and each loss's gradient norm.

    compiles: whether the step is compiled as in a run. If so, it runs twice, to show its time without compiling.
    If servers generate the completions, no step runs, because the servers would have to load the student's weights.
    """
    engine = session.models.engine
    if session.rollout is not None and session.rollout.config.urls:
        yield "one step", "not run, because servers generate the completions"
        return
    peak_memory = _peak_memory(session.models.device)
    size = ""  # the step may take minutes, so its size is printed before the step runs
    if session.rollout is None:
        steps = session.schedule.step_schedule
        count = -(-steps.sequences_per_step // steps.rows_per_micro_batch)
        size = f" (sequences: {steps.sequences_per_step}, micro-batches: {count})"
        micro_batches = session.models.shard(steps.micro_batches(session.data.train, 0))
    else:
        yield "running one step: the completions …"
        samples, micro_batches = first_rollouts(session, folder)
        yield from sample_rows(session.data, session.rollout, samples)
        if not micro_batches.all_ranks.targets:
            yield "verdict", f"the first step {no_targets_in_words(session.rollout)}"
            return
    layers = engine.student.layout.compile
    compiled = "the loss and the layers are compiled" if layers else "the loss is compiled"
    now = compiled if compiles else "nothing is compiled"
    if engine.needs_teacher:
        with_layers = "; the layers are compiled" if layers and compiles else ""
        yield f"running one step{size}: the teacher's signals{with_layers} …"
    teacher_seconds, signals = _timed(lambda: session.models.source_for(engine).request(micro_batches).result())
    yield f"running one step{size}: forward and backward; {now} …"
    normalizer = micro_batches.all_ranks.normalizer
    step_seconds, output = _timed(lambda: engine.forward_backward(micro_batches, signals, normalizer))
    first = seconds = teacher_seconds + step_seconds
    norm, memory, loss = engine.gradient_norm(), peak_memory(), output.sums["loss"]
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise not_finite_error(session.models, folder.checkpoints, 1, micro_batches, output, norm)
    trainable = [parameter for parameter in session.models.student.parameters() if parameter.requires_grad]
    optimizer_bytes = 2 * sum(local(weight).numel() * weight.element_size() for weight in trainable)
    tokens = sum(micro_batch.input_ids_BS.numel() for micro_batch in micro_batches)
    engine.zero_grad()
    times = f"{first:.1f} s when nothing is compiled"
    if compiles:
        yield f"running the step again, with what was compiled in {first:.1f} s …"
        seconds, _ = _timed(lambda: session.models.step(micro_batches).sums)
        times = f"{seconds:.1f} s ({first:.1f} s the first time, when {compiled})"
    else:
        memory += f", when nothing is compiled (in a run, {compiled}: `stillhouse check --compile` measures this)"
    yield "one step", f"{tokens:,} tokens in {times}, loss {loss:.4f}, gradient norm {norm:.4g}"
    if session.rollout is None:
        count = session.schedule.steps
        yield "all steps", f"{counted(count, 'step')} at this speed: {duration(count * seconds)}, without evaluations"
    yield "peak memory", f"{memory}; the optimizer will add about {optimizer_bytes / 2**30:.2f} GiB"
    yield from _loss_rows(session.models, micro_batches)


def _loss_rows(models: Models, micro_batches: ShardedMicroBatches) -> Iterator[Row]:
    """Run the step with each loss alone, and yield the loss's gradient norm; then a verdict about all of them."""
    engine = models.engine
    losses = list(single_losses(engine))
    if len(losses) < 2:  # a single loss has the gradient of the whole step, which is already printed
        return
    yield f"running the same step with each of {len(losses)} losses alone …"
    norms = dict[str, float]()
    for name, single in losses:
        engine.zero_grad()
        models.step(micro_batches, single)
        norms[name] = engine.gradient_norm()
        yield f"  {name} ", f"gradient norm {norms[name]:.4g}"
    if (words := verdict(norms)) is not None:
        yield "verdict", words
    engine.zero_grad()


def verdict(norms: Mapping[str, float]) -> str | None:
    """Return a sentence about losses whose gradients are much smaller than the largest; None for a single loss.

    norms: for each loss, the gradient norm of coefficient · loss. The norm of the cross-entropy with its z-loss is
    ignored. The norm of a regulariser counts only if it is the largest.
    """
    norms = {name: norm for name, norm in norms.items() if name != WITH_Z_LOSS}
    largest = max(norms, key=lambda name: norms[name], default="")
    norms = {name: norm for name, norm in norms.items() if name == largest or not name.startswith(_REGULARISERS)}
    if len(norms) < 2:
        return None
    small = {name: norm for name, norm in norms.items() if norm * SMALLER < norms[largest]}
    words = []
    for name, norm in small.items():
        if norm:
            times = f"{norms[largest] / norm:,.0f}"
            new = " (which is normal while the student is new)" if largest.startswith("cross_entropy") else ""
            words.append(
                f"the gradient of {name} is {times} times smaller than that of {largest}{new}, so it has almost "
                f"no effect: multiply its coefficient by about {times} for an equal effect, or remove it"
            )
            continue
        origin = next((origin for origin in ORIGINS if name.endswith(f" ({origin})")), None)
        cause = f" (which is normal if no document of the step is the {origin}'s)" if origin else ""
        if name.startswith("policy_gradient"):
            cause = " (which is normal if all completions of a prompt have the same reward)"
        words.append(f"the gradient of {name} is 0 in this step{cause}")
    return "; ".join(words) or f"no gradient is more than {SMALLER} times smaller than the largest"


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    started = time.monotonic()
    result = call()
    return time.monotonic() - started, result


def single_losses(engine: Engine) -> Iterator[tuple[str, Engine]]:
    """Yield the name of each loss, and an engine with only this loss and its coefficient. The z-loss has no engine of
    its own, because it is computed with the cross-entropy.
    """
    for name, spec in _single_terms(engine.objective):
        yield name, engine.with_losses(spec)
    for part in engine.parts:
        if part != part.silent():
            # this objective has a gradient of 0, so that only the loss of `part` has a gradient
            yield part.key, engine.with_losses(ObjectiveSpec(entropy=0.0), [part])


def _single_terms(spec: ObjectiveSpec) -> Iterator[tuple[str, ObjectiveSpec]]:
    for origin, origin_spec in spec.by_origin.items():
        for name, single in _single_terms(origin_spec):
            yield f"{name} ({origin})", replace(spec, by_origin={origin: single})
    terms = ("cross_entropy", "divergence", "entropy", "sampled_kl", "policy_gradient")
    without: dict[str, Any] = dict.fromkeys(terms)
    none = replace(spec, z_loss=0.0, **without)
    if spec.cross_entropy is not None:
        yield "cross_entropy", replace(none, cross_entropy=spec.cross_entropy)
    if spec.z_loss:
        yield WITH_Z_LOSS, replace(none, cross_entropy=spec.cross_entropy, z_loss=spec.z_loss)
    if spec.divergence is not None:
        for scale, part in weighted_parts(spec.divergence):
            yield str(part), replace(none, divergence=part, divergence_scale=scale * spec.divergence_scale)
    labels = {"sampled_kl": f"sampled_kl({spec.estimator})"}
    for name in ("sampled_kl", "policy_gradient", "entropy"):
        if (scale := getattr(spec, name)) is not None:
            yield labels.get(name, name), replace(none, **{name: scale})


def _peak_memory(device: torch.device) -> Callable[[], str]:
    """Start measuring the peak memory of the GPU or, without a GPU, of the process (only on Linux).

    Returns a function that returns the peak since this call as text.
    """
    reset = Path("/proc/self/clear_refs")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before, peak = torch.cuda.memory_allocated(device), partial(torch.cuda.max_memory_allocated, device)
    elif reset.exists():
        reset.write_text("5")  # resets VmHWM, the peak of the resident set
        before, peak = _status_bytes("VmRSS"), partial(_status_bytes, "VmHWM")
    else:
        return lambda: "not measured on this system"

    def in_words() -> str:
        peak_bytes = peak()
        added = peak_bytes - before
        return f"{peak_bytes / 2**30:.2f} GiB, of which this step added {added / 2**30:.2f} GiB"

    return in_words


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
