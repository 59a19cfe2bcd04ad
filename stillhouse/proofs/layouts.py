"""Proves the models of a runner under its layout, after their weights are loaded.

`models/load_proof.py` describes the proof of one model. Under tensor parallelism, each layer is also compared with
its full copy, and backward passes show which gradients have to be summed (`layers.py`).

B rows and S columns of the global sequences, D width of the student, E width of the teacher.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stillhouse.data import MicroBatch
from stillhouse.data.micro_batch import NO_LABEL
from stillhouse.display import name_list, named_if_slow
from stillhouse.models import Decoder, OutputProcessor, ProofError, evaluating
from stillhouse.models.document_packing import KERNELS, KernelError, PackingError, packing_errors
from stillhouse.models.forward_modes import autocast, autocast_dtype, in_mode
from stillhouse.models.lm_head import input_embedding
from stillhouse.models.load_proof import ProbeDocuments, Subject, prove_hidden, prove_logits, require_no_noise
from stillhouse.models.model_checks import prefixed
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import TEACHER, FullVocab, OutputHead, Signals
from stillhouse.parallel.apply.compiled_layers import layers_not_compiled
from stillhouse.parallel.apply.context_parallel import NextTokens, gather_sequences
from stillhouse.parallel.build_runner import build_runner
from stillhouse.parallel.layer_loss import MtpLayersRun
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.run_layout import Layout
from stillhouse.parallel.runner import Runner, reshard
from stillhouse.parallel.sharded_loading import ModelSource
from stillhouse.parallel.teacher_student_pair import IN_STAGE, StageInputs, model_inputs
from stillhouse.proofs import layers


class _Side(NamedTuple):
    """The student or the teacher: its decoders on this rank, its name, and the signals with which it is run."""

    decoders: Sequence[Decoder]
    name: str
    signals: Signals

    def refuse(self, error: PackingError) -> None:
        """Let the decoders pack documents in the next way, because the error refuses the present way."""
        for decoder in self.decoders:
            decoder.packing.refuse(error)


def build_proven_runner(
    layout: Layout, mesh: Mesh, student: ModelSource, teacher: ModelSource | None, *, teacher_head_only: bool = False
) -> Runner:
    """Build this process's runner (`build_runner`), and prove its models. If `student.without_noise` is true, also
    prove that the student has no noise in train mode.

    Raises ValueError for a model that does not fit the layout. Raises ProofError, on all processes, for a model that
    gives wrong results. A collective of all processes.
    """
    runner = build_runner(layout, mesh, student, teacher, teacher_head_only=teacher_head_only)
    if needs_proof(layout, mesh, student, teacher):
        has_layers = student.teacher_is_base or (teacher is not None and not teacher_head_only)
        with named_if_slow("proving the models under their layout"):
            prove_runner(runner, student, teacher, teacher_in_stages=has_layers)
    if student.without_noise and student.has_values:
        with in_mode(*runner.decoders, training=True), layers_not_compiled():
            hidden = ProbeForward(runner, {}).exchanged(other_noise=True)
        with _raised(runner, student.name):
            require_no_noise(runner.decoders[-1], hidden)
        _reshard(runner)
    return runner


def needs_proof(layout: Layout, mesh: Mesh, *sources: ModelSource | None) -> bool:
    """Return True if models have to be proven under a layout: if there are several processes, if the layout changes
    the results, or if a model was not proven before. Models without values (in a dry run) cannot be proven.
    """
    models = [source for source in sources if source is not None]
    return all(source.has_values for source in models) and (
        mesh.ranks.size > 1 or layout.changes_results or not all(source.is_proven for source in models)
    )


def prove_runner(
    runner: Runner, student: ModelSource, teacher: ModelSource | None, *, teacher_in_stages: bool
) -> None:
    """Prove the student and the teacher of a runner. A collective of all the runner's processes, which all raise
    ProofError if a proof fails. Weights, modes and the states of random generators do not change.

    teacher_in_stages: True if the teacher's layers run in the student's stages. If False, only the head is proven.
    """
    names = student.name, "teacher" if teacher is None else teacher.name
    modes = (False, True) if runner.decoders[0].training else (False,)
    while not all(_prove_passes(runner, names, mode, teacher_in_stages=teacher_in_stages) for mode in modes):
        pass  # after a failure, the model packs documents in its next way, and the proofs run again
    for pair in runner.pairs.values():
        for decoder, name in zip((pair.student, pair.teacher), names, strict=True):
            with _raised(runner, name):
                if decoder is not None and decoder.has_head:
                    # `prove_logits` compares two results of the same layers, so plain layers are enough
                    with layers_not_compiled(), evaluating(decoder), autocast(runner.device, probe_precision(runner)):
                        prove_logits(decoder, _logit_inputs(runner, decoder))
    _reshard(runner)
    if runner.layout.compile:
        student_forward = ProbeForward(runner, {})
        forward = ProbeForward(runner, {TEACHER: IN_STAGE} if teacher_in_stages else {})
        inputs = student_forward.inputs(student_forward.micro_batch(), layers.cross_entropies(0))
        with _raised(runner, student.name):
            layers.prove_compiled(runner, forward, inputs, probe_precision(runner))
        _reshard(runner)
    if runner.layout.degrees.tensor > 1:
        _prove_sharded_layers(runner, student, teacher if teacher_in_stages else None)
        if any(parameter.requires_grad for _, parameter in runner.named_parameters()):
            # compiled layers do not run the hooks of their modules
            with _raised(runner, student.name), layers_not_compiled():
                student_forward = ProbeForward(runner, {})
                inputs_of = partial(student_forward.inputs, student_forward.micro_batch())
                runner.summed_over_tensor_ranks = layers.partial_gradients(runner, inputs_of)


def prove_heads(mesh: Mesh, decoders: Mapping[str, Decoder]) -> None:
    """Prove the heads of decoders that have no layers. A collective of all processes of the mesh, which all raise
    ProofError if a proof fails. decoders: decoders by name; empty on processes without the student's last stage.
    """
    with mesh.ranks.all_raise(ProofError):
        for name, decoder in decoders.items():
            device = mesh.device if isinstance(decoder, FSDPModule) else decoder.output_weight.device
            columns = ProbeDocuments.of(decoder.vocabulary_rows).ids_BS.shape[1]
            position_ids_BS = torch.arange(columns, device=device)[None]
            with prefixed(name, ProofError), evaluating(decoder):
                prove_logits(decoder, _embedded(decoder, position_ids_BS))
            reshard(decoder)


def _prove_passes(runner: Runner, names: tuple[str, str], training: bool, *, teacher_in_stages: bool) -> bool:
    """Prove that hidden states depend on the right tokens only. names: the names of student and teacher.

    Returns False if documents that a model packs in its present way influence each other, or if the model does not
    accept masks or lengths. The model then packs documents in its next way.
    """
    pair, students = runner.pairs[max(runner.pairs)], runner.decoders
    sides = [_Side(students, names[0], {})]
    if teacher_in_stages:
        sides.append(_Side(students if pair.teacher_is_base else _teachers(runner), names[1], {TEACHER: IN_STAGE}))
    _require_same_packing(runner, sides)
    # compiled layers in train mode are compared with plain layers later, by gradients
    compiled = layers_not_compiled() if training else nullcontext()
    with in_mode(*students, training=training), compiled:
        passes = _run_passes(runner, sides)
        if passes is None:
            return False
        forward, exchanged = passes
        whole_rows = [] if training else forward.whole_rows()
    end, is_exact, precision = len(exchanged) - teacher_in_stages, True, probe_precision(runner)
    for side, part in zip(sides, (slice(end), slice(end, None)), strict=False):
        results = forward.probe, exchanged[part], whole_rows[part]
        try:
            with _raised(runner, side.name):
                if exchanged[part]:
                    prove_hidden(side.decoders[-1], *results, precision, training=training)
        except PackingError as error:
            side.refuse(error)
            is_exact = False
    return is_exact


def _require_same_packing(runner: Runner, sides: Sequence[_Side]) -> None:
    """Raise ValueError on all ranks if they pack documents in different ways, and so use different collectives."""
    packings = [side.decoders[0].packing for side in sides]
    names = [
        f"{packing.name} with variable-length attention" if packing.attention.reads_lengths else packing.name
        for packing in packings
    ]
    first, *others = runner.ranks.gather(names)
    for rank, other in enumerate(others, start=1):
        for side, packing, packing_of_rank in zip(sides, first, other, strict=True):
            if packing != packing_of_rank:
                raise ValueError(
                    f"{side.name}: rank 0 would pack documents as '{packing}', and rank {rank} as "
                    f"'{packing_of_rank}': expected {name_list(KERNELS.values())} to be installed on all machines or "
                    "on none, and GPUs of one kind, or data.packing: rows"
                )


def _run_passes(
    runner: Runner, sides: Sequence[_Side]
) -> tuple["ProbeForward", Sequence[tuple[Tensor, Tensor]]] | None:
    """Return a `ProbeForward` of all models and their hidden states; None if a model refuses masks or lengths.

    sides: the student and, if it runs in the student's stages, the teacher. One pass with the teacher's signals runs
        both. If the student gets masks or lengths, it first runs alone, so that an error names the right model.
    """
    passes = None
    for side in sides:
        packing = side.decoders[0].packing
        if side is not sides[-1] and not packing.has_arguments:
            continue
        forward, decoder = ProbeForward(runner, side.signals), side.decoders[0]
        raised = partial(_raised, runner, side.name, decoder)
        try:
            if packing.has_arguments and runner.layout.stages > 1:
                # the first stage runs alone, because other stages would wait for a stage that refuses arguments
                with raised(), torch.no_grad(), evaluating(decoder), autocast(runner.device, probe_precision(runner)):
                    if 0 in runner.pairs:
                        decoder(**model_inputs(forward.micro_batch(), None), head=False)
            with raised():
                passes = forward, forward.exchanged()
        except PackingError as error:
            side.refuse(error)
            return None
    return passes


def _prove_sharded_layers(runner: Runner, student: ModelSource, teacher: ModelSource | None) -> None:
    """Prove the layers of the student and of a teacher in its stages, which tensor parallelism has sharded."""
    forward = ProbeForward(runner, {} if teacher is None else {TEACHER: IN_STAGE})
    sides: list[tuple[ModelSource | None, list[Decoder]]] = [(student, runner.decoders), (teacher, _teachers(runner))]
    compared: list[tuple[str, Decoder, Mapping[str, Tensor]]] = []
    with ExitStack() as stack:
        for source, decoders in sides:
            if source is None:
                continue
            for decoder in decoders:
                stack.enter_context(evaluating(decoder))
                errors = stack.enter_context(layers.layers_compared(decoder, source.build, probe_precision(runner)))
                compared.append((source.name, decoder, errors))
        forward.exchanged()
    with runner.ranks.all_raise(ProofError):
        for name, decoder, by_layer in compared:
            with prefixed(name, ProofError):
                layers.require_equal_layers(decoder, by_layer)


class ProbeForward(Subject):
    """A forward pass of the runner that returns hidden states of global sequences, gathered over the context ranks:
    [B, S, D] for the student and for each of its MTP depths, then [B, S, E] for the teacher; an empty list on
    processes without the last stage.
    """

    def __init__(self, runner: Runner, signals: Signals):
        self.runner, self.signals = runner, signals
        self.device = runner.device
        depths = [0 if part.mtp is None else part.mtp.depths for part in runner.decoders]
        # only the last stage has the MTP layers, so the other stages get their number from it
        self.depths = max(runner.ranks.gather(max(depths)))
        decoders = [decoder for decoder in (runner.decoders[0], runner.teacher) if decoder is not None]
        run = [*runner.decoders, *(_teachers(runner) if signals else [])]
        self.attentions = [decoder.packing.attention for decoder in run]
        vocabulary = min(decoder.vocabulary_rows for decoder in decoders)
        self.probe = ProbeDocuments.of(vocabulary, depths=self.depths, multiple=runner.layout.degrees.context)

    def inputs(self, micro_batch: MicroBatch, processor: OutputProcessor) -> StageInputs:
        mtp = [MtpLayersRun(NextTokens(self.depths, self.runner.mesh.group("context")))] if self.depths else []
        return StageInputs(micro_batch, self.signals, processor, mtp, autocast=probe_precision(self.runner))

    def micro_batch(self) -> MicroBatch:
        """Return this process's columns of the probe."""
        return _micro_batch(self.runner, self.probe.ids_BS, self.probe.position_ids_BS)

    def run(self, ids_BS: Tensor, position_ids_BS: Tensor) -> Sequence[Tensor]:
        return self.hidden(_micro_batch(self.runner, ids_BS, position_ids_BS))

    def hidden(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        """Return the hidden states for a micro-batch with this process's columns, like `run`."""
        results = self.runner.forward([self.inputs(micro_batch, _hidden)])
        # a runner without a head (of a separate teacher) does not call `_hidden`: its result is a tensor, not a list
        parts = results[0] if results and isinstance(results[0], list) else results
        return [gather_sequences(part, self.runner.mesh.group("context")) for part in parts]


def _hidden(*, hidden_states: Any, head: OutputHead, context: DistillTargets, depth: int = 0) -> list[Tensor]:
    """Return the student's hidden states by depth, then the teacher's if it ran. This is an output processor."""
    hidden = [*hidden_states] if isinstance(hidden_states, tuple) else [hidden_states]
    for signal in context.signals.values():
        with signal.opened(head) as opened:
            assert isinstance(opened, FullVocab)
            hidden.append(opened.hidden_TE.unflatten(0, hidden[0].shape[:2]))
    return hidden


def probe_precision(runner: Runner) -> torch.dtype | None:
    """Return the autocast dtype of the proofs: the layout's autocast dtype if the layout changes the results of the
    layers; otherwise the dtype in which weights are gathered or, without one, the dtype that the model needs.
    """
    layout = runner.layout
    dtype = layout.autocast if layout.changes_results else None
    return dtype or layout.gather_dtype or autocast_dtype(runner.decoders[0].pretrained)


def _micro_batch(runner: Runner, ids_BS: Tensor, position_ids_BS: Tensor) -> MicroBatch:
    """Return this process's columns of global sequences, as a micro-batch without targets."""
    count = ids_BS.numel()
    micro_batch = MicroBatch(
        inputs={"input_ids": ids_BS.cpu(), "position_ids": position_ids_BS.cpu()},
        labels_T=torch.full((count,), NO_LABEL),
        weights_T=torch.zeros(count),
        document_T=torch.zeros(count, dtype=torch.int64),
        valid_index=torch.zeros(0, dtype=torch.int64),
    )
    return micro_batch.part(runner.mesh.coordinate("context"), runner.layout.degrees.context).to(runner.device)


def _logit_inputs(runner: Runner, decoder: Decoder) -> dict[str, Any]:
    probe = ProbeDocuments.of(decoder.vocabulary_rows, multiple=runner.layout.degrees.context)
    ids_BS = probe.ids_BS[:1]
    micro_batch = _micro_batch(runner, ids_BS, torch.arange(ids_BS.shape[1])[None])  # the columns are one document
    if getattr(input_embedding(decoder.pretrained), "weight", None) is None:
        return _embedded(decoder, micro_batch.position_ids_BS)
    if runner.layout.degrees.context == 1:  # without position ids, because some models do not accept them
        return {"input_ids": micro_batch.input_ids_BS}
    return dict(micro_batch.inputs)


def _embedded(decoder: Decoder, position_ids_BS: Tensor) -> dict[str, Any]:
    """Return the inputs of a decoder without an embedding: fixed hidden states."""
    shape_BSD = (*position_ids_BS.shape, decoder.width)
    place_T = torch.arange(math.prod(shape_BSD), device=position_ids_BS.device, dtype=torch.float32)
    embeds_BSD = place_T.sin().view(shape_BSD).to(decoder.output_weight.dtype)
    return {"input_ids": None, "inputs_embeds": embeds_BSD, "position_ids": position_ids_BS}


def _teachers(runner: Runner) -> list[Decoder]:
    return [pair.teacher for pair in runner.pairs.values() if pair.teacher is not None]


def _reshard(runner: Runner) -> None:
    for pair in runner.pairs.values():
        reshard(pair)


@contextmanager
def _raised(runner: Runner, name: str, packed: Decoder | None = None) -> Iterator[None]:
    """Raise an error of the block on all processes, with the model's name if it is a ProofError.

    packed: a decoder whose errors about masks or lengths are raised as PackingError.
    """
    packing = nullcontext() if packed is None else packing_errors(packed.pretrained, packed.packing)
    with runner.ranks.all_raise(KernelError, PackingError, ProofError), prefixed(name, ProofError), packing:
        yield
