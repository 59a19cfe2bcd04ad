"""Formulas for the costs of a layout: the bytes that each rank sends in a step, and those that it holds.

benchmarks/parallel.py compares the formulas with measurements; benchmarks/scaling.py applies them to large models.
Collectives are counted as rings: for N bytes over n ranks, each rank sends (n − 1)/n · N in a gather, a scatter or an
exchange, and twice as much in a sum.

The models have Qwen3's architecture. T tokens of a micro-batch on one rank, D and E widths of student and teacher,
V vocabulary, m micro-batches of a data rank in a step.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from stillhouse.parallel import SCHEMES, Layout
from stillhouse.parallel.stages import Cost, Stage, split

#: numbers per token that each vocabulary shard sends to the others: ten raw sums of jsd and cross-entropy and the
#: label's logit in the first collective, the two sums of jsd in the second
STATISTICS = 10 + 1 + 2
#: bytes of a batch per token: ids, positions, labels, rows and documents in int64, weights in float32
BATCH_BYTES = 5 * 8 + 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. tensor: the degree; the methods count one rank's part, with all replicated weights."""

    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
        return cls(*(getattr(config, name) for name in (*names, "head_dim", "intermediate_size", "vocab_size")))

    @property
    def attention(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_dim

    def layer(self, tensor: int = 1) -> int:
        """Weights of one layer: four matrices of attention, three of the MLP, and four replicated norms."""
        matrices = 2 * self.width * (self.attention + self.keys) + 3 * self.width * self.intermediate
        return matrices // tensor + 2 * self.width + 2 * self.head_dim

    def rows(self, tensor: int = 1) -> int:
        """Weights of the embedding, or of the head."""
        return self.vocabulary * self.width // tensor

    def root(self, first: bool, last: bool, tensor: int = 1) -> int:
        """Weights that FSDP gathers with the root module: embedding and last norm."""
        return first * self.rows(tensor) + last * self.width

    def weights(self, layers: int, first: bool, last: bool, tensor: int = 1) -> int:
        return layers * self.layer(tensor) + (first + last) * self.rows(tensor) + last * self.width

    def kept(self, tensor: int = 1) -> int:
        """Numbers per token that a layer keeps for its backward: the tensors around two norms; queries before and
        after their norm, after the rotation, and attention's output; the same of keys, and values; in the MLP the
        gate twice, the up projection, and their product.
        """
        return 6 * self.width + (4 * self.attention + 4 * self.keys + 4 * self.intermediate) // tensor

    def cost(self, passes: int) -> Cost:
        return Cost(self.layers, self.layer(), self.rows(), passes)


@dataclass(frozen=True)
class Job:
    """Models, layout and sizes of a run.

    tokens: per micro-batch, over all context ranks. chunk: rows of the objective's tile. scratch_tiles: temporary
    tiles of the objective's pointwise part; none if it is compiled.

    student_bytes: bytes per number of the student's weights, gradients and hidden states. teacher_bytes: of the
    teacher's weights and hidden states. product_bytes: of the student's matrix products, which autocast rounds.
    """

    student: Shape
    teacher: Shape
    layout: Layout
    micro_batches: int
    tokens: int
    chunk: int
    scratch_tiles: int
    recomputed: bool = False
    student_bytes: int = 4
    teacher_bytes: int = 4
    product_bytes: int = 4

    @property
    def gathered_bytes(self) -> int:
        """Bytes per number in which the student's weights outside the root are gathered."""
        dtype = self.layout.gather_dtype
        return self.student_bytes if dtype is None else dtype.itemsize

    @property
    def own_tokens(self) -> int:
        return self.tokens // self.layout.degrees.context

    def stages(self, pipeline_rank: int) -> list[Stage]:
        layout = self.layout
        if layout.stages == 1:
            return [Stage(0, 1, range(self.student.layers), range(self.teacher.layers))]
        made = split(layout.stages, self.student.cost(3), self.teacher.cost(1))
        return [made[number] for number in SCHEMES[layout.schedule].stages_of(pipeline_rank, layout.degrees.pipeline)]


def ring(ranks: int, size: float) -> float:
    return (ranks - 1) / ranks * size


# sent bytes


def traffic(job: Job, pipeline_rank: int) -> Counter[str]:
    """Return the bytes that a rank sends in a step after the first one, by their purpose."""
    sent: Counter[str] = Counter()
    for stage in job.stages(pipeline_rank):
        _weights(job, stage, sent)
        _tensor(job, stage, sent)
        _context(job, stage, sent)
        _borders(job, stage, sent)
    sent["norm of the gradient"] = 2 * ring(job.layout.degrees.processes, 4)
    return Counter({name: round(number) for name, number in sent.items() if number})


def _weights(job: Job, stage: Stage, sent: Counter[str]) -> None:
    """FSDP gathers weights for every micro-batch, in a pipeline once a step. Without a pipeline, the student's layers
    are gathered again for backward; its embedding and head stay gathered. Replicas sum their gradients once a step.
    """
    degrees, student, teacher = job.layout.degrees, job.student, job.teacher
    times, tensor, piped = job.micro_batches, degrees.tensor, job.layout.stages > 1
    if piped:
        times = 1
    ends = stage.is_first, stage.is_last
    root, layers = student.root(*ends, tensor), len(stage.student) * student.layer(tensor)
    weights = student.weights(len(stage.student), *ends, tensor)

    def gather(size: float) -> float:
        return times * ring(degrees.shard, size)

    sent["student's weights, forward"] += gather(root * job.student_bytes + (weights - root) * job.gathered_bytes)
    sent["student's weights, backward"] += gather(0 if piped else layers * job.gathered_bytes)
    of_teacher = teacher.weights(len(stage.teacher), *ends, tensor)
    sent["teacher's weights, forward"] += gather(of_teacher * job.teacher_bytes)
    sent["gradients to their shards"] += gather(weights * 4)
    sent["gradients between copies"] += 2 * ring(degrees.replicate, weights / degrees.shard * 4)


def _tensor(job: Job, stage: Stage, sent: Counter[str]) -> None:
    """A layer's forward sums hidden states twice, and the embedding once. Its backward sums the gradients of the
    inputs of attention and of the MLP.
    """
    ranks, tokens = job.layout.degrees.tensor, job.own_tokens
    student, teacher, first = job.student, job.teacher, stage.is_first

    def total(width: int, times: int, size: int) -> float:
        return 2 * job.micro_batches * times * ring(ranks, tokens * width * size)

    layers, teachers = len(stage.student), len(stage.teacher)
    sent["student's layers, forward"] += total(student.width, 2 * layers, job.product_bytes)
    sent["student's layers, forward"] += total(student.width, first, job.student_bytes)
    sent["student's layers, backward"] += total(student.width, 2 * layers, job.student_bytes)
    sent["teacher's layers, forward"] += total(teacher.width, 2 * teachers + first, job.teacher_bytes)
    sent["student's layers, update"] += 2 * 2 * layers * ring(ranks, student.head_dim * 4)
    if stage.is_last:
        sent["objective's statistics"] += job.micro_batches * ring(ranks, ranks * tokens * STATISTICS * 4)
        sent["objective's gradient"] += total(student.width, 1, 4)


def _context(job: Job, stage: Stage, sent: Counter[str]) -> None:
    """Queries, keys, values and attention's output are exchanged in forward and in backward, positions in forward."""
    degrees, tokens = job.layout.degrees, job.own_tokens

    def exchange(shape: Shape, layers: int, size: int) -> float:
        width = 2 * (shape.attention + shape.keys) // degrees.tensor
        return job.micro_batches * layers * ring(degrees.context, tokens * width * size)

    of_student = exchange(job.student, len(stage.student), job.product_bytes)
    sent["student's heads, forward"] += of_student
    sent["student's heads, backward"] += of_student
    sent["teacher's heads, forward"] += exchange(job.teacher, len(stage.teacher), job.teacher_bytes)
    sent["positions"] += 2 * job.micro_batches * (degrees.context - 1) * tokens * 8


def _borders(job: Job, stage: Stage, sent: Counter[str]) -> None:
    """Stages send the hidden states of both models, and back the gradient of the student's; nothing has V columns."""
    scheme, ranks = SCHEMES[job.layout.schedule], job.layout.degrees.pipeline
    numbers = job.micro_batches * job.own_tokens

    def away(number: int) -> bool:
        return 0 <= number < stage.count and scheme.rank_of(number, ranks) != scheme.rank_of(stage.number, ranks)

    behind, before = away(stage.number + 1), away(stage.number - 1)
    both_ways = (behind + before) * numbers * job.student.width * job.student_bytes
    sent["student's hidden states and their gradients"] += both_ways
    sent["teacher's hidden states"] += behind * numbers * job.teacher.width * job.teacher_bytes


# held bytes


def between_steps(job: Job, pipeline_rank: int) -> Counter[str]:
    """Return the bytes that a rank holds between steps, without gradients."""
    degrees, held = job.layout.degrees, Counter[str]()
    numbers, tensor = job.micro_batches * job.own_tokens, degrees.tensor
    for stage in job.stages(pipeline_rank):
        ends = stage.is_first, stage.is_last
        student = job.student.weights(len(stage.student), *ends, tensor) / degrees.shard
        held["student's weights"] += student * job.student_bytes
        held["AdamW"] += 2 * student * job.student_bytes
        teacher = job.teacher.weights(len(stage.teacher), *ends, tensor) / degrees.shard
        held["teacher's weights"] += teacher * job.teacher_bytes
        pair = job.student.width * job.student_bytes + job.teacher.width * job.teacher_bytes
        held["buffers of the borders"] += (not stage.is_first) * numbers * pair
        held["buffers of the borders"] += (not stage.is_last) * numbers * job.student.width * job.student_bytes
    held["batches"] = numbers * BATCH_BYTES
    return Counter({name: round(number) for name, number in held.items() if number})


def within_step(job: Job, pipeline_rank: int, in_flight: int) -> Counter[str]:
    """Return the additional bytes at the peak within a step, with one stage per rank. The peak is in the objective of
    the step's last micro-batch or, on a stage without a head, when the most micro-batches are in flight.
    """
    (stage,) = job.stages(pipeline_rank)
    degrees, student, teacher = job.layout.degrees, job.student, job.teacher
    ends, tensor, tokens = (stage.is_first, stage.is_last), degrees.tensor, job.own_tokens
    held = Counter[str]()
    weights, piped = student.weights(len(stage.student), *ends, tensor), job.layout.stages > 1
    # GPipe's last forward comes before its first backward
    held["gradients"] = (job.layout.schedule != "gpipe" or not piped) * 4 * weights / (1 if piped else degrees.shard)
    held["gathered weights"] = _gathered(job, stage)
    kept = student.width if job.recomputed else student.kept(tensor)
    held["activations"] = in_flight * len(stage.student) * tokens * kept * 4
    if stage.is_last:
        rows = student.vocabulary // tensor
        # with vocabulary shards, the next chunk's tiles already exist
        tiles = 2 * (2 if tensor > 1 else 1)
        held["tiles of logits"] = (tiles + job.scratch_tiles) * job.chunk * rows * 4
        # these are computed in forward and kept until backward
        held["gradients of the head, in flight"] = in_flight * rows * student.width * 4
        # the embedding's output, the tensors around the last norm, and a gradient; the teacher's hidden states
        held["hidden states"] = tokens * (5 * student.width * 4 + teacher.width * job.teacher_bytes)
    else:
        held["hidden states"] = in_flight * tokens * (student.width * 4 + teacher.width * job.teacher_bytes)
    return Counter({name: round(number) for name, number in held.items() if number})


def _gathered(job: Job, stage: Stage) -> float:
    """Bytes of weights that FSDP has gathered at the peak.

    In a pipeline these are all weights of the stage. Otherwise the peak is in the student's objective: the teacher's
    head is gathered for it, and the student's embedding and head stay gathered until their backward. FSDP also keeps
    the buffer of the last all-gather in the student's forward, which is that of the head.
    """
    degrees, ends, tensor = job.layout.degrees, (stage.is_first, stage.is_last), job.layout.degrees.tensor
    if degrees.replicate * degrees.shard == 1:
        return 0.0
    student, teacher = job.student.rows(tensor), job.teacher.rows(tensor) * job.teacher_bytes
    if job.layout.stages > 1:
        root = job.student.root(*ends, tensor)
        others = job.student.weights(len(stage.student), *ends, tensor) - root + stage.is_last * student
        of_teacher = job.teacher.weights(len(stage.teacher), *ends, tensor) * job.teacher_bytes
        return root * job.student_bytes + others * job.gathered_bytes + of_teacher
    buffers = degrees.shard > 1
    return student * (job.student_bytes + (1 + buffers) * job.gathered_bytes) + teacher
