"""What only a GPU uses, on a CPU: sums by pieces of a row, and a gradient that is written in a shorter dtype."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Divergence,
    Entropy,
    FullVocab,
    Mixture,
    OutputHead,
    Term,
    TopK,
    alpha_beta,
    forward_kl,
    jsd,
    linear_objective,
    reverse_kl,
    skew_forward_kl,
    total_variation,
)
from stillhouse.objective.tile import tile
from stillhouse.objective.tile.logits_provider import HeadLogits
from stillhouse.objective.tile.pieces import PIECE, pieced_normalized_sums, pieced_raw_sums
from stillhouse.objective.tile.pointwise import normalized_sums, raw_sums
from stillhouse.objective.tile.statistics import RowStatistics, statistics
from stillhouse.objective.tile.tile_plan import PointwisePlan, StudentSoftmax, TeacherSoftmax, TileIndex

C = 7
#: student and teacher: far apart, close, and close and nearly certain
KINDS = {"far": (3.0, 1.0), "close": (3.0, 1e-3), "sure": (12.0, 1e-3)}
DIVERGENCES = [forward_kl(), reverse_kl(), jsd(0.3), skew_forward_kl(0.1), total_variation(), alpha_beta(0.5, 0.7)]


def tiles(kind: str, columns: int) -> list[Tensor]:
    """Logits of a student and a teacher, with infinite ones, and whole pieces without any mass."""
    scale, distance = KINDS[kind]
    draw = torch.Generator().manual_seed(columns)
    student_CV = scale * torch.randn(C, columns, generator=draw)
    teacher_CV = student_CV + distance * torch.randn(C, columns, generator=draw)
    student_CV[0, -1] = teacher_CV[0, -1] = -torch.inf
    teacher_CV[1, 0] = -torch.inf
    student_CV[2, :PIECE] = teacher_CV[2, :PIECE] = -torch.inf
    student_CV[3, PIECE:] = teacher_CV[3, PIECE:] = -torch.inf
    student_CV[4, 0] = student_CV[4, -1] = teacher_CV[4, 0] = teacher_CV[4, -1] = 40.0  # two largest logits
    return [student_CV, teacher_CV]


def plan_of(divergence: Divergence) -> PointwisePlan:
    """A plan with two temperatures and every kind of sum."""
    softmaxes = [(TeacherSoftmax(at), StudentSoftmax(at)) for at in range(2)]
    return PointwisePlan(
        tiles=2,
        temperatures=(1.0, 1.5),
        teachers=((TileIndex(1), 1.0), (TileIndex(1), 1.5)),
        pairs=tuple((divergence, *pair) for pair in softmaxes),
        uniform=True,
    )


def numbers(plan: PointwisePlan, tiles_CV: list[Tensor], *, pieced: bool) -> tuple[list[Tensor], list[Tensor]]:
    """All numbers of the statistics, [C] each, and the slopes."""
    raw, normalized = (pieced_raw_sums, pieced_normalized_sums) if pieced else (raw_sums, normalized_sums)
    known: RowStatistics = statistics(plan, raw(plan, tiles_CV)[None])
    if plan.two_sweep:
        known.add_normalized(plan, normalized(plan, tiles_CV, known.normalizers())[None])
    assert known.mean_log_prob is not None
    assert known.vocabulary is not None
    lists = (known.references, known.student_log_mass, known.student_entropy, known.teacher_log_mass)
    lists += (known.teacher_entropy, known.both_top, known.mass_ratio)
    single = [*known.values.values(), known.mean_log_prob, known.vocabulary]
    return [*(number_C for entry in lists for number_C in entry), *single], list(known.slopes.values())


@pytest.mark.parametrize("columns", [2 * PIECE + 3, 2 * PIECE, PIECE + 1, PIECE, 41])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_sums_of_pieces_are_as_exact_as_sums_of_rows(divergence: Divergence, kind: str, columns: int) -> None:
    plan, tiles_CV = plan_of(divergence), tiles(kind, columns)
    exact, exact_slopes = numbers(plan, [tile_CV.double() for tile_CV in tiles_CV], pieced=False)
    (of_rows, row_slopes), (of_pieces, piece_slopes) = (numbers(plan, tiles_CV, pieced=at) for at in (False, True))
    for exact_C, row_C, piece_C in zip(exact, of_rows, of_pieces, strict=True):
        finite_C = exact_C.isfinite()
        assert torch.equal(piece_C[~finite_C].double().nan_to_num(), exact_C[~finite_C].nan_to_num())
        gaps = [(number_C[finite_C] - exact_C[finite_C]).abs() for number_C in (row_C, piece_C)]
        errors = [(gap_C / exact_C[finite_C].abs()).nan_to_num() for gap_C in gaps]
        assert errors[1].amax() <= 4 * errors[0].amax() + 1e-6
    # a slope is a sum of numbers of both signs, each with a rounding error of 1e-7. It moves the gradient by q·slope
    for exact_C, row_C, piece_C in zip(exact_slopes, row_slopes, piece_slopes, strict=True):
        finite_C = exact_C.isfinite()
        gaps = [(number_C[finite_C] - exact_C[finite_C]).abs() for number_C in (row_C, piece_C)]
        assert gaps[1].amax() <= 4 * gaps[0].amax() + 3e-7


def test_pieces_in_float64_equal_rows() -> None:
    for divergence in DIVERGENCES:
        plan, tiles_CV = plan_of(divergence), [tile_CV.double() for tile_CV in tiles("close", 2 * PIECE + 3)]
        both = (chain(*numbers(plan, tiles_CV, pieced=pieced)) for pieced in (False, True))
        for row_C, piece_C in zip(*both, strict=True):
            assert torch.allclose(row_C, piece_C, rtol=1e-9, atol=1e-15, equal_nan=True)


T, V, D = 23, PIECE + 37, 16


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def terms() -> list[Term]:
    """Terms whose ids repeat: a label is also one of the teacher's ids, and an id occurs twice in a row."""
    labels_T = torch.arange(T) * 31 % V
    labels_T[::5] = -100
    teachers = [FullVocab(normal(seed, T, D), OutputHead(normal(seed + 1, V, D))) for seed in (2, 4)]
    log_p_TK, ids_TK = torch.log_softmax(normal(6, T, V), 1).topk(8, 1)
    ids_TK[:, 0] = labels_T
    ids_TK[::3, 2] = -1
    log_p_TK = torch.log_softmax(normal(7, T, 9), 1)[:, :8]
    return [
        CrossEntropy(labels_T, 0.3, 0.1, 1e-2),
        CrossEntropy(labels_T, 0.2),
        Distill(teachers[0], jsd(0.3), 0.7, 1.5),
        Distill(Mixture(teachers, [2, 1], 1.5), forward_kl() + 0.5 * reverse_kl(), 0.7, 1.5),
        Distill(TopK(ids_TK, log_p_TK), reverse_kl(), 0.4),
        Entropy(-0.05),
    ]


def gradients(dtype: torch.dtype) -> list[Tensor]:
    hidden_TD, weight_VD = normal(0, T, D).to(dtype).requires_grad_(), normal(1, V, D).to(dtype).requires_grad_()
    weights_T = torch.ones(T, dtype=dtype)
    weights_T[4] = 0
    output = linear_objective(
        hidden_TD, OutputHead(weight_VD, softcap=20.0), terms(), weights_T=weights_T, normalizer=T, chunk_tokens=9
    )
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert hidden_TD.grad is not None
    assert weight_VD.grad is not None
    return [output.loss.detach(), hidden_TD.grad, weight_VD.grad, *output.metrics.values()]


def test_a_pass_by_pieces_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rows = gradients(torch.float64)
    monkeypatch.setattr(tile, "PIECED", {"cpu"})
    of_pieces = gradients(torch.float64)
    for row, piece in zip(of_rows, of_pieces, strict=True):
        assert torch.allclose(row, piece, rtol=1e-9, atol=1e-12)


def test_a_rounded_gradient_is_the_gradient_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[torch.dtype, list[Tensor]] = {torch.float32: [], torch.bfloat16: []}
    pull_back = HeadLogits.pull_back

    def recorded(provider: HeadLogits, rows: Any, counted_C: Tensor, grad_CV: Tensor) -> None:
        received[grad_CV.dtype].append(grad_CV.clone())
        pull_back(provider, rows, counted_C, grad_CV)

    monkeypatch.setattr(HeadLogits, "pull_back", recorded)
    gradients(torch.float32)
    monkeypatch.setattr(HeadLogits, "rounded_buffer", lambda _, rows: torch.full((rows, V), torch.nan).bfloat16())
    gradients(torch.float32)
    for exact_CV, rounded_CV in zip(received[torch.float32], received[torch.bfloat16], strict=True):
        assert torch.equal(exact_CV.bfloat16(), rounded_CV)
