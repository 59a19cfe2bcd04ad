"""The contestants of the objective's benchmarks: one loss, written by each project as its users would call it.

A contestant takes `Inputs` and returns the mean over tokens of a `Case`, a scalar for backward. Peers have their
default chunk sizes and other defaults. The floor for all of them is `Products`: the matrix products without other
work.

T tokens, C rows of a chunk, D student width, E teacher width, V vocabulary, K ids of a top-k teacher.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    Signal,
    Term,
    TopK,
    VocabShard,
    forward_kl,
    jsd,
    linear_objective,
    reverse_kl,
)

#: standard deviation of the student's and the teacher's logits
LOGIT_SCALE = 2.0


@dataclass(frozen=True)
class Sizes:
    """T, D, E and V."""

    tokens: int
    width: int
    teacher_width: int
    vocabulary: int

    def product_flops(self, teacher: bool = True) -> int:
        """Operations of the products that every exact loss needs: 2TV(3D + E), or 2TV·3D without a teacher."""
        return 2 * self.tokens * self.vocabulary * (3 * self.width + (self.teacher_width if teacher else 0))


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of every contestant. `hidden_TD` and `weight_VD` are leaves that require a gradient."""

    hidden_TD: Tensor
    weight_VD: Tensor
    teacher_hidden_TE: Tensor
    teacher_weight_VE: Tensor
    labels_T: Tensor
    top_ids_TK: Tensor
    top_log_probs_TK: Tensor

    def gradients(self) -> tuple[Tensor, Tensor]:
        assert self.hidden_TD.grad is not None
        assert self.weight_VD.grad is not None
        return self.hidden_TD.grad, self.weight_VD.grad

    def clear_gradients(self) -> None:
        self.hidden_TD.grad = self.weight_VD.grad = None


@dataclass(frozen=True)
class Case:
    """A loss: generalised JSD against a dense teacher, or forward KL against a top-k one, plus cross-entropy.

    `beta`: 0 forward KL, 1 reverse KL, between them the JSD with that share of the teacher in its mixture; None: no
    divergence. `top_k`: ids of the teacher, the mass outside in one more outcome; 0: a dense teacher.
    """

    beta: float | None
    cross_entropy: float = 0.0
    top_k: int = 0

    @property
    def dense_teacher(self) -> bool:
        return self.beta is not None and not self.top_k


TOP_K = 64
CASES = {
    "forward_kl": Case(0.0),
    "reverse_kl": Case(1.0),
    "jsd": Case(0.5),
    "jsd+0.3*cross_entropy": Case(0.5, cross_entropy=0.3),
    f"top{TOP_K}": Case(0.0, top_k=TOP_K),
    "cross_entropy": Case(None, cross_entropy=1.0),
}

Loss = Callable[[Inputs], Tensor]


class Unavailable(Exception):
    """A contestant cannot take part; the message is the reason."""


def make_inputs(sizes: Sizes, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Make random inputs from a seed: independent student and teacher whose logits have deviation `LOGIT_SCALE`."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
        return values.mul_(deviation)

    tokens, vocabulary = sizes.tokens, sizes.vocabulary
    options = {"generator": generator, "device": device}
    # the ids of a row are all different and far from each other, as in real data
    first_T1 = torch.randint(vocabulary, (tokens, 1), **options)
    steps_K = torch.arange(TOP_K, device=device) * (vocabulary // TOP_K)
    scores_TK = torch.randn(tokens, TOP_K, **options) * LOGIT_SCALE
    return Inputs(
        hidden_TD=normal(tokens, sizes.width, 1.0).requires_grad_(),
        weight_VD=normal(vocabulary, sizes.width, LOGIT_SCALE / math.sqrt(sizes.width)).requires_grad_(),
        teacher_hidden_TE=normal(tokens, sizes.teacher_width, 1.0),
        teacher_weight_VE=normal(vocabulary, sizes.teacher_width, LOGIT_SCALE / math.sqrt(sizes.teacher_width)),
        labels_T=torch.randint(vocabulary, (tokens,), **options),
        top_ids_TK=(first_T1 + steps_K) % vocabulary,
        top_log_probs_TK=torch.log_softmax(scores_TK, 1) + math.log(0.9),
    )


def contestants(case: Case, device: torch.device) -> tuple[dict[str, Loss], dict[str, str]]:
    """Return the contestants of a case, ours first, and for all others the reason why they do not take part."""
    present: dict[str, Loss] = {}
    absent: dict[str, str] = {}
    for name, make in MAKERS.items():
        try:
            present[name] = make(case, device)
        except Unavailable as reason:
            absent[name] = str(reason)
    return present, absent


def make_stillhouse(case: Case, device: torch.device) -> Loss:
    return lambda inputs: stillhouse_output(case, inputs).loss


def stillhouse_output(case: Case, inputs: Inputs, shard: VocabShard | None = None) -> ObjectiveOutput:
    """Run our objective. shard: the vocabulary rows of the two weights; None: all rows."""
    terms = stillhouse_terms(case, inputs, OutputHead(inputs.teacher_weight_VE, shard=shard))
    head = OutputHead(inputs.weight_VD, shard=shard)
    return linear_objective(inputs.hidden_TD, head, terms, normalizer=len(inputs.hidden_TD))


def stillhouse_terms(case: Case, inputs: Inputs, teacher_head: OutputHead) -> list[Term]:
    terms: list[Term] = []
    if case.beta is not None:
        signal: Signal = FullVocab(inputs.teacher_hidden_TE, teacher_head)
        if case.top_k:
            signal = TopK(inputs.top_ids_TK, inputs.top_log_probs_TK)
        divergence = {0.0: forward_kl, 1.0: reverse_kl}.get(case.beta, lambda: jsd(case.beta))
        terms.append(Distill(signal, divergence()))
    if case.cross_entropy:
        terms.append(CrossEntropy(inputs.labels_T, case.cross_entropy))
    return terms


def make_pytorch(case: Case, device: torch.device) -> Loss:
    """Plain PyTorch: all logits at once, float32 log-probabilities, no graph for the teacher, no spare tensor."""

    def loss(inputs: Inputs) -> Tensor:
        if case.beta is None:
            return F.cross_entropy(F.linear(inputs.hidden_TD, inputs.weight_VD).float(), inputs.labels_T)
        log_q_TV = log_softmax_of(inputs.hidden_TD, inputs.weight_VD)
        if case.top_k:
            return bucketed_forward_kl(inputs, log_q_TV)
        with torch.no_grad():
            log_p_TV = log_softmax_of(inputs.teacher_hidden_TE, inputs.teacher_weight_VE)
        value = divergence_value(case.beta, log_p_TV, log_q_TV)
        if case.cross_entropy:
            value = value + case.cross_entropy * F.nll_loss(log_q_TV, inputs.labels_T)
        return value

    return loss


def log_softmax_of(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.log_softmax(F.linear(hidden, weight), -1, dtype=torch.float32)


def divergence_value(beta: float, log_p_TV: Tensor, log_q_TV: Tensor) -> Tensor:
    """Return the generalised JSD, mean over tokens: β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q."""

    def kl(log_of_TV: Tensor, log_from_TV: Tensor) -> Tensor:
        return F.kl_div(log_from_TV, log_of_TV, reduction="batchmean", log_target=True)

    if beta == 0.0:
        return kl(log_p_TV, log_q_TV)
    if beta == 1.0:
        return kl(log_q_TV, log_p_TV)
    log_m_TV = torch.logaddexp(log_p_TV + math.log(beta), log_q_TV + math.log(1 - beta))
    return beta * kl(log_p_TV, log_m_TV) + (1 - beta) * kl(log_q_TV, log_m_TV)


def bucketed_forward_kl(inputs: Inputs, log_q_TV: Tensor) -> Tensor:
    """Return forward KL over the teacher's K ids and one outcome for the mass outside, mean over tokens."""

    def with_tail(log_probs_TK: Tensor) -> Tensor:
        tail_T1 = torch.log1p(-log_probs_TK.exp().sum(1, keepdim=True))
        return torch.cat([log_probs_TK, tail_T1], 1)

    log_q_TB = with_tail(log_q_TV.gather(1, inputs.top_ids_TK))
    return F.kl_div(log_q_TB, with_tail(inputs.top_log_probs_TK), reduction="batchmean", log_target=True)


def make_trl(case: Case, device: torch.device) -> Loss:
    if not case.dense_teacher or case.cross_entropy:
        raise Unavailable("its chunked divergence has no top-k teacher and no cross-entropy")
    try:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    except ImportError as error:
        raise Unavailable(f"not importable: {error}") from error

    def loss(inputs: Inputs) -> Tensor:
        student = (inputs.hidden_TD, inputs.weight_VD, None)
        teacher = (inputs.teacher_hidden_TE, inputs.teacher_weight_VE, None)
        divergence_T, _ = ChunkedDivergenceFunction.apply(*student, *teacher, case.beta)
        return divergence_T.mean()

    return loss


def make_linear_cross_entropy(case: Case, device: torch.device) -> Loss:
    """Return torch's function in its chunked form; without options it computes all logits, like plain PyTorch."""
    if case.beta is not None:
        raise Unavailable("it has only cross-entropy")
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"not in torch {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda inputs: F.linear_cross_entropy(inputs.hidden_TD, inputs.weight_VD, inputs.labels_T, options=options)


def make_liger_chunked(case: Case, device: torch.device) -> Loss:
    """Return Liger's JSD by torch.compile and torch.func, in chunks of 1024 rows."""
    require_liger(case, device)
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(case.cross_entropy, 1.0, case.beta)
    return lambda inputs: module(
        inputs.hidden_TD, inputs.weight_VD, inputs.teacher_hidden_TE, inputs.teacher_weight_VE, inputs.labels_T
    )


def make_liger_fused(case: Case, device: torch.device) -> Loss:
    """Return Liger's JSD by a Triton kernel."""
    require_liger(case, device)
    if case.cross_entropy:
        raise Unavailable("its fused JSD has no cross-entropy")
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    module = LigerFusedLinearJSD(jsd_beta=case.beta)
    return lambda inputs: module(
        inputs.hidden_TD, inputs.weight_VD, inputs.teacher_hidden_TE, inputs.teacher_weight_VE, None
    )


def require_liger(case: Case, device: torch.device) -> None:
    if not case.dense_teacher:
        raise Unavailable("its JSD needs a dense teacher")
    if device.type != "cuda":
        raise Unavailable("needs a GPU")
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unavailable("liger-kernel is not installed")


MAKERS: dict[str, Callable[[Case, torch.device], Loss]] = {
    "stillhouse": make_stillhouse,
    "pytorch": make_pytorch,
    "trl": make_trl,
    "linear_cross_entropy": make_linear_cross_entropy,
    "liger_chunked": make_liger_chunked,
    "liger_fused": make_liger_fused,
}


class Products:
    """The floor: a loss's matrix products in chunks of rows, written to preallocated memory.

    panel: vocabulary rows of one product for logits; 0: all rows at once. The products are those of the student's
    logits, the teacher's logits (if there is a teacher), the hidden states' gradient and the weight's gradient, which
    addmm sums over chunks in float32, or a separate addition where this torch's addmm cannot. Logits are float32.
    Half-precision operands keep their dtype, and random numbers of this dtype replace the logits' gradient.
    """

    def __init__(self, inputs: Inputs, rows: int, teacher: bool, panel: int = 0):
        self.hidden_TD, self.weight_VD = inputs.hidden_TD.detach(), inputs.weight_VD.detach()
        self.teacher = (inputs.teacher_hidden_TE, inputs.teacher_weight_VE) if teacher else None
        self.rows = min(rows, len(self.hidden_TD))
        self.panel = panel or len(self.weight_VD)
        vocabulary, device = len(self.weight_VD), self.weight_VD.device
        self.logits_CV = torch.empty(self.rows, vocabulary, device=device)
        self.grad_CV = self.logits_CV
        if self.weight_VD.dtype != torch.float32:
            self.grad_CV = torch.randn(self.rows, vocabulary, device=device, dtype=self.weight_VD.dtype)
        self.hidden_grad_TD = torch.empty_like(self.hidden_TD, dtype=torch.float32)
        self.weight_grad_VD = torch.empty_like(self.weight_VD, dtype=torch.float32)
        self.adds_in_place = self.weight_VD.dtype == torch.float32 or adds_half_products(device)

    def __call__(self) -> None:
        for start in range(0, len(self.hidden_TD), self.rows):
            hidden_CD = self.hidden_TD[start : start + self.rows]
            logits_CV, grad_CV = self.logits_CV[: len(hidden_CD)], self.grad_CV[: len(hidden_CD)]
            if self.teacher is not None:
                hidden_TE, weight_VE = self.teacher
                self._project(hidden_TE[start : start + self.rows], weight_VE, logits_CV)
            self._project(hidden_CD, self.weight_VD, logits_CV)
            product(grad_CV, self.weight_VD, self.hidden_grad_TD[start : start + self.rows])
            if start == 0:
                product(grad_CV.t(), hidden_CD, self.weight_grad_VD)
            elif self.adds_in_place:
                add_product(grad_CV.t(), hidden_CD, self.weight_grad_VD)
            else:
                self.weight_grad_VD += torch.mm(grad_CV.t(), hidden_CD, out_dtype=torch.float32)

    def _project(self, hidden: Tensor, weight: Tensor, logits_CV: Tensor) -> None:
        for start in range(0, len(weight), self.panel):
            part = slice(start, start + self.panel)
            product(hidden, weight[part].t(), logits_CV[:, part])


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


@cache
def adds_half_products(device: torch.device) -> bool:
    """Whether addmm of this torch adds a product of bfloat16 matrices to a float32 matrix."""
    half = torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    try:
        add_product(half, half, torch.zeros(16, 16, device=device))
    except RuntimeError:
        return False
    return True


def add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
