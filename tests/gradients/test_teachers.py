"""Signal sources: requests ahead, the routing table of a separate teacher, and teachers that read other tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.families import build
from kit.runs import forward_backward, session_of
from kit.teacher_gradients import named_gradients
from kit.tensors import assert_equal_tensors

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.models import Decoder
from stillhouse.objective import TEACHER, FullVocab, Signals
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import (
    IN_STAGE,
    DecoderHead,
    Degrees,
    ShardedMicroBatches,
    TeacherHidden,
    padded_shapes,
    single_process_runner,
)
from stillhouse.signals import PendingSignals, RequestedSteps, SignalSource
from stillhouse.signals.separate_teacher import MicroBatchShape, route

DEGREES = st.builds(
    Degrees, replicate=st.integers(1, 2), fsdp=st.integers(1, 2), context=st.integers(1, 3), tensor=st.integers(1, 2)
)


def grid(degrees: Degrees) -> torch.Tensor:
    return torch.arange(degrees.processes).view(degrees.data, degrees.context, degrees.tensor)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    teacher=DEGREES,
    student=DEGREES,
    shapes_BS=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 13)), min_size=1, max_size=5),
    uniform_shapes=st.booleans(),
)
def test_every_student_process_gets_each_of_its_columns_once(
    teacher: Degrees, student: Degrees, shapes_BS: list[tuple[int, int]], uniform_shapes: bool
) -> None:
    theirs, ours = padded_shapes(shapes_BS, teacher), padded_shapes(shapes_BS, student, uniform_shapes=uniform_shapes)
    shapes = [MicroBatchShape(*shape_BS, theirs[at], ours[at], at) for at, shape_BS in enumerate(shapes_BS)]
    shapes += [MicroBatchShape(0, 0, (0, 0), shape_BS) for shape_BS in ours[len(shapes_BS) :]]
    received: dict[tuple[int, int], list[int]] = {}
    for transfer in route(shapes, grid(teacher), grid(student)):
        shape = shapes[transfer.micro_batch]
        sender = (grid(teacher) == transfer.sender).nonzero()[0].tolist()
        width = shape.teacher_BS[1] // teacher.context
        assert sender[0] == transfer.micro_batch % teacher.data
        # these are columns of the sender's part
        assert sender[1] * width <= transfer.start < transfer.stop <= (sender[1] + 1) * width
        received.setdefault((transfer.micro_batch, transfer.receiver), []).extend(
            range(transfer.start, transfer.stop)
        )
    for at, shape in enumerate(shapes):
        for target in range(student.processes):
            data, context, _ = (grid(student) == target).nonzero()[0].tolist()
            width = shape.student_BS[1] // student.context
            columns = range(context * width, min((context + 1) * width, shape.tokens))
            expected = list(columns) if at % student.data == data else []
            assert sorted(received.get((at, target), [])) == expected


class RecordedRequests(SignalSource):
    """A source that records its requests, and the steps between them."""

    def __init__(self, steps_ahead: int):
        self.steps_ahead, self.events = steps_ahead, list[str]()

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        self.events.append(f"request {len(micro_batches)}")
        return PendingSignals.ready([{}] * len(micro_batches))


@pytest.mark.parametrize(
    ("steps_ahead", "expected"),
    [
        (0, ["request 1", "step", "request 2", "step", "request 3", "step"]),
        (1, ["request 1", "request 2", "step", "request 3", "step", "step"]),
        (5, ["request 1", "request 2", "request 3", "step", "step", "step"]),
    ],
)
def test_requests_run_as_far_ahead_as_the_source_can_use(steps_ahead: int, expected: list[str]) -> None:
    batch = micro_batch()
    steps = [ShardedMicroBatches([batch] * count, StepMicroBatches([batch] * count)) for count in (1, 2, 3)]
    source = RecordedRequests(steps_ahead)
    for micro_batches, signals in RequestedSteps(source, steps):
        assert len(signals.result()) == len(micro_batches)
        source.events.append("step")
    assert source.events == expected


def test_a_step_that_is_built_early_is_requested_at_its_turn() -> None:
    source = RecordedRequests(1)

    def steps() -> Iterator[ShardedMicroBatches]:
        for count in (1, 2, 3):
            source.events.append(f"build {count}")
            yield ShardedMicroBatches([micro_batch()] * count, StepMicroBatches([micro_batch()] * count))

    requests = RequestedSteps(source, steps())
    for micro_batches, _ in requests:
        requests.build_next()
        requests.build_next()
        source.events.append(f"step {len(micro_batches)}")
    first = ["build 1", "request 1", "build 2", "request 2", "build 3"]
    assert source.events == [*first, "step 1", "request 3", "step 2", "step 3"]


def micro_batch(seed: int = 0) -> MicroBatch:
    ids_BS = torch.randint(3, 251, (2, 13), generator=torch.Generator().manual_seed(seed))
    labels_T = ids_BS.roll(-1, 1).flatten()
    return MicroBatch(
        inputs={"input_ids": ids_BS, "position_ids": torch.arange(13).repeat(2, 1)},
        labels_T=labels_T,
        weights_T=torch.ones(26),
        document_T=torch.zeros(26, dtype=torch.int64),
        valid_index=torch.arange(26),
    )


def models() -> tuple[Decoder, Decoder]:
    """Return a student and a teacher."""
    return Decoder(build("llama"), verify=False), Decoder(build("qwen3", seed=1), verify=False)


def engine_of(student: Decoder, teacher: Decoder | None) -> TorchEngine:
    return TorchEngine(single_process_runner(student, teacher), parse_objective("0.3*cross_entropy + 0.7*jsd(0.5)"))


def gradients(engine: TorchEngine, batch: MicroBatch, signals: Sequence[Signals]) -> dict[str, torch.Tensor]:
    engine.zero_grad()
    engine.forward_backward(engine.student.shard(StepMicroBatches([batch])), signals, batch.valid_tokens)
    return {name: gradient.clone() for name, gradient in named_gradients(engine.student.decoders[0]).items()}


def test_a_teachers_signal_is_the_same_however_it_comes() -> None:
    """The teacher is in the stage, gives hidden states computed before, or gives a signal with a separate head."""
    (student, teacher), batch = models(), micro_batch()
    exact = teacher.signal(**batch.inputs)
    hidden = TeacherHidden(exact.hidden_TE, DecoderHead(teacher))
    expected = gradients(engine_of(student, teacher), batch, [{TEACHER: IN_STAGE}])
    assert len(expected) > 10
    for model, signal in ((teacher, hidden), (None, exact)):
        actual = gradients(engine_of(student, model), batch, [{TEACHER: signal}])
        assert_equal_tensors(actual, expected)


def test_a_teacher_may_read_other_tokens_than_the_student() -> None:
    (student, teacher), batch, other = models(), micro_batch(), micro_batch(seed=1)
    exact: FullVocab = teacher.signal(**other.inputs)
    expected = gradients(engine_of(student, None), batch, [{TEACHER: exact}])
    engine, of_other = engine_of(student, teacher), replace(batch, teacher_inputs=other.inputs)
    assert_equal_tensors(gradients(engine, of_other, [{TEACHER: IN_STAGE}]), expected)
    same = gradients(engine, batch, [{TEACHER: IN_STAGE}])
    assert not any(torch.equal(same[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("signals", [[], [{}, {}]])
def test_another_number_of_signals_is_refused(signals: list[Signals]) -> None:
    engine = engine_of(models()[0], None)
    with pytest.raises(
        ValueError, match=f"{len(signals)} signals for 1 micro-batches: expected one signal per micro-batch"
    ):
        gradients(engine, micro_batch(), signals)


def test_an_objective_without_a_teacher_requests_no_signals(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session = replace(session, models=replace(session.models, source=None))  # type: ignore[arg-type]
    assert forward_backward(session, objective=parse_objective("cross_entropy")).sums["loss"] > 0
