"""How each claim of claims.yaml is measured; those that are missing here are not measured yet."""

from benchmarks.claims.claim import Claim
from benchmarks.claims.divergence_claims import ALPHA_BETA, GKD, TEACHER_SIZE
from benchmarks.claims.earlier_results import CROSS_TOKENIZER, DRAFT_HEADS, REINFORCEMENT, SAMPLED_IDS, STUDENT_INIT
from benchmarks.claims.mixture_claims import BALANCE, CONTRAST, TOKEN_SELECTION
from benchmarks.claims.rollout_claims import FORGETTING, ONE_PROMPT, PREFIX_AND_DIRECTION

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (
        FORGETTING,
        ONE_PROMPT,
        PREFIX_AND_DIRECTION,
        GKD,
        ALPHA_BETA,
        CONTRAST,
        BALANCE,
        TOKEN_SELECTION,
        DRAFT_HEADS,
        TEACHER_SIZE,
        SAMPLED_IDS,
        STUDENT_INIT,
        CROSS_TOKENIZER,
        REINFORCEMENT,
    )
}
