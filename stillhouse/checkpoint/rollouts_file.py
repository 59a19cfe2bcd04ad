"""Writes and reads `rollouts.safetensors`: the samples of an on-policy run that are finished but not trained yet.

R samples with N tokens in total.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from stillhouse.checkpoint.integrity import ROLLOUTS, IntactCheckpoint
from stillhouse.data.offsets import offsets_of
from stillhouse.libraries import reading
from stillhouse.output.progress import DamagedCheckpointError
from stillhouse.rollout import Completion, QueueState, Sample

#: the arrays of the file and their dtypes
_DTYPES: dict[str, type] = {
    "number_R": np.int64,
    "prompt_R": np.int64,
    "tokens_R": np.int64,
    "finish_R": np.uint8,
    "has_reward_R": np.uint8,
    "reward_R": np.float64,
    "ids_N": np.int32,
    "log_probs_N": np.float32,
    "versions_N": np.int32,
    "is_written_N": np.uint8,
}
_FINISHES: tuple[Literal["stop", "length"], ...] = ("stop", "length")


def write_queue(folder: Path, state: QueueState) -> None:
    samples = state.samples
    completions = [sample.completion for sample in samples]
    per_sample = {
        "number_R": [sample.number for sample in samples],
        "prompt_R": [sample.prompt for sample in samples],
        "tokens_R": [len(completion.ids_N) for completion in completions],
        "finish_R": [_FINISHES.index(completion.finish) for completion in completions],
        "has_reward_R": [sample.reward is not None for sample in samples],
        "reward_R": [sample.reward or 0.0 for sample in samples],
    }
    per_token = {
        "ids_N": [completion.ids_N for completion in completions],
        "log_probs_N": [completion.log_probs_N for completion in completions],
        "versions_N": [completion.versions_N for completion in completions],
        "is_written_N": [sample.is_generated_N for sample in samples],
    }
    arrays: dict[str, np.ndarray] = {name: np.array(values, _DTYPES[name]) for name, values in per_sample.items()}
    for name, parts in per_token.items():
        arrays[name] = np.concatenate([np.zeros(0, _DTYPES[name]), *parts]).astype(_DTYPES[name])
    groups = {
        "asked_at": list(state.requested_at.items()),
        "trained": state.trained,
        "reward_parts": [sample.reward_parts for sample in samples],
        "tool_calls": [[sample.tool_calls, sample.tool_errors] for sample in samples],
        "object_rewards": [sample.object_reward for sample in samples],
    }
    save_file(arrays, folder / ROLLOUTS, metadata={"groups": json.dumps(groups)})


def read_queue(checkpoint: IntactCheckpoint) -> QueueState:
    """Raises ValueError if the checkpoint has no rollouts.safetensors, or if the file has another format."""
    path = checkpoint.path / ROLLOUTS
    if ROLLOUTS not in checkpoint.state.files:
        raise DamagedCheckpointError(f"{checkpoint.path} has no {ROLLOUTS}: it is not of an on-policy run")
    with reading(f"{path} cannot be read"), safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        groups = json.loads(file.metadata()["groups"])
        requested_at, trained = dict(groups["asked_at"]), list(groups["trained"])
    try:
        _require_form(arrays)
        if len(requested_at) != len(groups["asked_at"]):
            raise ValueError("a group that was asked for more than once")
        if not all(type(number) is int for number in [*requested_at, *requested_at.values(), *trained]):
            raise ValueError("groups and steps that are no integers")
        ends = pairwise(offsets_of(arrays["tokens_R"]).tolist())
        # a file of an earlier version has no parts, no calls and no rewards of objects
        count = len(arrays["tokens_R"])
        parts_R = _checked_parts(groups.get("reward_parts", [[]] * count), arrays)
        calls_R = _checked_calls(groups.get("tool_calls", [[0, 0]] * count), count)
        object_rewards_R = _checked_object_rewards(groups.get("object_rewards", [None] * count), count)
        samples = [
            replace(
                _sample(arrays, number, slice(*tokens)),
                reward_parts=parts_R[number],
                tool_calls=calls_R[number][0],
                tool_errors=calls_R[number][1],
                object_reward=object_rewards_R[number],
            )
            for number, tokens in enumerate(ends)
        ]
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return QueueState(samples, requested_at, trained)


def _checked_parts(parts_R: Any, arrays: Mapping[str, np.ndarray]) -> list[tuple[float, ...]]:
    """The parts of the samples' rewards. Raises ValueError unless these are finite numbers for each sample."""
    is_list = isinstance(parts_R, list) and len(parts_R) == len(arrays["tokens_R"])
    if not is_list or not all(isinstance(parts, list) and all(map(_is_finite, parts)) for parts in parts_R):
        raise ValueError(f"reward_parts {str(parts_R)[:80]}: expected a list of finite numbers for each sample")
    return [tuple(map(float, parts)) for parts in parts_R]


def _checked_calls(calls_R: Any, count: int) -> list[list[int]]:
    """The samples' numbers of calls and of errors. Raises ValueError unless these can be the numbers of a sample."""
    if not (isinstance(calls_R, list) and len(calls_R) == count and all(map(_is_count_of_calls, calls_R))):
        raise ValueError(f"tool_calls {str(calls_R)[:80]}: expected calls and at most as many errors for each sample")
    return calls_R


def _is_count_of_calls(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
    return is_pair and 0 <= pair[1] <= pair[0]


def _checked_object_rewards(values: Any, samples: int) -> list[float | None]:
    """The rewards that objects give. Raises ValueError unless there is a finite number or None for each sample."""
    is_list = isinstance(values, list) and len(values) == samples
    if not is_list or not all(number is None or _is_finite(number) for number in values):
        raise ValueError(f"object_rewards {str(values)[:80]}: expected a finite number or null for each sample")
    return [None if number is None else float(number) for number in values]


def _is_finite(number: Any) -> bool:
    return type(number) in (int, float) and math.isfinite(number)


def _require_form(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless the arrays have the names, dtypes and lengths that `write_queue` writes."""
    if arrays.keys() != _DTYPES.keys():
        raise ValueError(f"the arrays {sorted(arrays)}: expected {sorted(_DTYPES)}")
    for name, array in arrays.items():
        if array.dtype != _DTYPES[name] or array.ndim != 1:
            raise ValueError(f"{name} of {array.dtype} with {array.ndim} dimensions: expected {_DTYPES[name]} with 1")
    samples, tokens = len(arrays["tokens_R"]), int(arrays["tokens_R"].sum())
    for name, array in arrays.items():
        expected = samples if name.endswith("_R") else tokens
        if len(array) != expected:
            raise ValueError(f"{name} has {len(array)} values: expected {expected}, for {samples} samples")
    if samples and arrays["tokens_R"].min() < 1:
        raise ValueError("a sample without tokens")
    for name, most in (("finish_R", len(_FINISHES) - 1), ("has_reward_R", 1), ("is_written_N", 1)):
        if len(arrays[name]) and arrays[name].max() > most:
            raise ValueError(f"{name} with the value {arrays[name].max()}: expected 0 to {most}")


def _sample(arrays: Mapping[str, np.ndarray], number: int, tokens: slice) -> Sample:
    completion = Completion(
        arrays["ids_N"][tokens],
        arrays["log_probs_N"][tokens],
        arrays["versions_N"][tokens],
        _FINISHES[arrays["finish_R"][number]],
    )
    reward = float(arrays["reward_R"][number]) if arrays["has_reward_R"][number] else None
    is_generated_N = arrays["is_written_N"][tokens].astype(bool)
    return Sample(
        int(arrays["number_R"][number]), int(arrays["prompt_R"][number]), completion, is_generated_N, reward
    )
