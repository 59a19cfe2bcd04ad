"""The metrics of a step or an evaluation, from the engine's sums over target tokens.

loss/forward_kl_nats_per_token           a term of the objective, unscaled
loss/mtp_1/forward_kl_nats_per_token     the same at depth 1 of multi-token prediction, per token of this depth
eval/mtp_1/acceptance                    the share of held-out tokens at which a greedy draft of depth 1 is accepted
"""

from collections.abc import Collection, Mapping, Sequence

from stillhouse.engine.losses import LossPart
from stillhouse.engine.losses.mtp import PREFIX
from stillhouse.objective.metrics import CHUNK_TOKENS, WEIGHTS
from stillhouse.objective.spec import ObjectiveSpec

#: the keys of a step's metrics that are not terms of the loss
_STEP_KEYS = {
    "student_entropy": "train/student_entropy_nats",
    "teacher_entropy": "train/teacher_entropy_nats",
    "agreement": "train/agreement",
    "teacher_mass": "train/teacher_mass",
}
#: sums over sampled tokens, which `rollout_records.py` reports
_OF_SAMPLED_TOKENS = ("log_ratio", "sampled", "ratio", "clipped")
#: the names of an evaluation's metrics, each with the key `eval/<name>`
_EVALUATED = (
    "cross_entropy",
    "forward_kl",
    "reverse_kl",
    "agreement",
    "student_entropy",
    "teacher_entropy",
    "teacher_cross_entropy",
)
#: metrics of one distribution, which depend on its temperature
_ENTROPIES = ("student_entropy", "teacher_entropy")
#: metrics that describe tokens and are not terms of a loss
_DESCRIPTIONS = (*_ENTROPIES, "agreement", "teacher_mass")


def step_metrics(sums: Mapping[str, float], objective: ObjectiveSpec, parts: Sequence[LossPart]) -> dict[str, float]:
    """Return each unscaled term and the scaled total, in nats per target token, and the other metrics of a step."""
    metrics = {"loss/total_nats_per_token": sums["loss"]}
    keys = _STEP_KEYS | {name: term.metric for part in parts for name, term in part.terms.items()}
    temperatures = {share.temperature or objective.temperature for share in objective.teachers.values()}
    for depth, sums_of_depth in split_by_depth(sums).items():
        for name, mean in means(sums_of_depth, objective, temperatures).items():
            kind, slash, teacher = name.partition("/")
            if kind.partition("#")[0] in _OF_SAMPLED_TOKENS:
                continue
            key = f"{keys[kind]}{slash}{teacher}" if kind in keys else f"loss/{name}_nats_per_token"
            metrics[_depth_key(key, depth)] = mean
    return metrics


def evaluation_metrics(
    sums: Mapping[str, float], objective: ObjectiveSpec, temperatures: Collection[float]
) -> dict[str, float]:
    """Return the metrics of some held-out documents. temperatures: the temperatures of the teachers' signals."""
    sums_by_depth = split_by_depth(sums)
    averages = means(sums_by_depth[0], objective, temperatures)
    metrics: dict[str, float] = {}
    for suffix in ("", *(f"/{teacher}" for teacher in objective.teachers)):
        # the engine's sums have the forward KL of a span in two terms: the later tokens are in `continuation`
        if f"continuation{suffix}" in averages:
            averages[f"forward_kl{suffix}"] += averages[f"continuation{suffix}"]
        names = (name + suffix for name in _EVALUATED)
        metrics |= {f"eval/{name}": averages[name] for name in names if name in averages}
    for depth, depth_sums in sums_by_depth.items():
        if depth and depth_sums["tokens"]:
            tokens = depth_sums["tokens"]
            metrics |= {
                _depth_key("eval/acceptance", depth): depth_sums["agreement"] / tokens,
                _depth_key("eval/sampled_acceptance", depth): 1 - depth_sums["total_variation"] / tokens,
                _depth_key("eval/cross_entropy", depth): depth_sums["cross_entropy"] / tokens,
            }
    return metrics | {"eval/tokens": sums["tokens"]}


def means(sums: Mapping[str, float], objective: ObjectiveSpec, temperatures: Collection[float]) -> dict[str, float]:
    """Return the means per target token, under the objective's names of the metrics.

    temperatures: the temperatures of the teachers. If the temperatures differ, entropies have no common mean.

    With several teachers, `<name>/<teacher>` is the metric of one teacher, per token that this teacher scores.
    `<name>` is the mean over the teachers that report it. This mean is weighted with the teachers' weights or, if
    each token is routed to one teacher, it is a mean over tokens.
    """
    mixes_temperatures = len(temperatures) > 1
    averages, teacher_means, weights = dict[str, float](), dict[str, float](), dict[str, float]()
    for name, value in sums.items():
        kind, _, teacher = name.partition("/")
        # terms of the loss are divided by the number of targets, metrics of the tokens by the sum of the weights
        count = WEIGHTS if kind.partition("#")[0] in _DESCRIPTIONS and WEIGHTS in sums else "tokens"
        tokens = sums[count] or 1.0
        if kind in ("loss", "tokens", WEIGHTS, CHUNK_TOKENS) or (name == "student_entropy" and mixes_temperatures):
            continue
        if not teacher:
            averages[name] = value / tokens
            continue
        routed = sums.get(f"{count}/{teacher}")
        tokens_of_term = tokens if routed is None else routed
        share = objective.teachers[teacher].weight if routed is None else 1.0
        if tokens_of_term:
            teacher_means[name] = value / tokens_of_term
        if not (mixes_temperatures and kind in _ENTROPIES):
            averages[kind] = averages.get(kind, 0.0) + share * value
            weights[kind] = weights.get(kind, 0.0) + share * tokens_of_term
    return {name: value / (weights.get(name) or 1.0) for name, value in averages.items()} | teacher_means


def split_by_depth(sums: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Return the sums by the depth of multi-token prediction, under keys without the prefixes of the depths."""
    sums_by_depth: dict[int, dict[str, float]] = {0: {}}
    for name, value in sums.items():
        first, _, rest = name.partition("/")
        if first.startswith(PREFIX):
            sums_by_depth.setdefault(int(first.removeprefix(PREFIX)), {})[rest] = value
        else:
            sums_by_depth[0][name] = value
    return sums_by_depth


def _depth_key(key: str, depth: int) -> str:
    """The metric key of a depth, such as loss/mtp_1/jsd_nats_per_token for loss/jsd_nats_per_token at depth 1."""
    namespace, _, rest = key.partition("/")
    return f"{namespace}/{PREFIX}{depth}/{rest}" if depth else key
