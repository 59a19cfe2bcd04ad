"""The origin of a row's label, which is the token that the row predicts, and objectives that depend on it.

    dataset    a document of the dataset
    student    a completion that the student has generated
    teacher    a completion that the teacher has generated

The terms of all origins share one pass. A term has a weight per row, which is 0 at the rows of other origins, so that
the origins need no passes of their own. T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from stillhouse.objective.metric_keys import IS_SAMPLED, POLICY_VERSION
from stillhouse.objective.sampled_terms import SampledTerm
from stillhouse.objective.terms import Term

DATASET, STUDENT, TEACHER = ORIGINS = ("dataset", "student", "teacher")


def origin_masks(labels_T: Tensor, per_token: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, for each origin, a mask of its rows, [T] bool.

    per_token: the tensors of a batch of rollouts. Without them, all rows are of the dataset.
    """
    if IS_SAMPLED not in per_token:
        none_T = labels_T.new_zeros(labels_T.shape, dtype=labels_T.dtype).bool()
        return {DATASET: ~none_T, STUDENT: none_T, TEACHER: none_T}
    if POLICY_VERSION not in per_token:
        raise ValueError(
            f"{POLICY_VERSION} is missing in per_token (it has {', '.join(sorted(per_token))}): expected it beside "
            f"{IS_SAMPLED}, because it tells the teacher's completions from the dataset's"
        )
    is_student_T = per_token[IS_SAMPLED] != 0
    is_teacher_T = ~is_student_T & (per_token[POLICY_VERSION] >= 0)
    return {DATASET: ~is_student_T & ~is_teacher_T, STUDENT: is_student_T, TEACHER: is_teacher_T}


def terms_of_origin(terms: Sequence[Term], origin: str, mask_T: Tensor) -> Iterator[Term]:
    """Yield the terms with the weight 0 at rows outside the mask, and with the origin as their label.

    Terms at sampled tokens keep their names, because only the student's completions have such terms.
    """
    for term in terms:
        weights_T = mask_T.float() if term.weights_T is None else term.weights_T * mask_T
        label: Any = {} if isinstance(term, SampledTerm) else {"label": origin}
        yield replace(term, weights_T=weights_T, **label)  # type: ignore[type-var]
