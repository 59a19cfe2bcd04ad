"""The samples of an on-policy run that are finished and not trained, in a checkpoint: `rollouts.safetensors`.

The checkpoint's state.json has a hash of the file. N tokens of all samples, R samples.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from stillhouse.data.prefixes import offsets_of
from stillhouse.libraries import reading
from stillhouse.rollouts import Completion, QueueState, Sample
from stillhouse.train.integrity import ROLLOUTS, IntactCheckpoint
from stillhouse.train.progress import DamagedCheckpointError

_FINISHES: tuple[Literal["stop", "length"], ...] = ("stop", "length")


def write_queue(folder: Path, state: QueueState) -> None:
    samples = state.samples
    completions = [each.completion for each in samples]
    lengths = [len(each.ids_N) for each in completions]
    arrays = {
        "number_R": np.array([each.number for each in samples], dtype=np.int64),
        "prompt_R": np.array([each.prompt for each in samples], dtype=np.int64),
        "tokens_R": np.array(lengths, dtype=np.int64),
        "finish_R": np.array([_FINISHES.index(each.finish) for each in completions], dtype=np.uint8),
        "has_reward_R": np.array([each.reward is not None for each in samples], dtype=np.uint8),
        "reward_R": np.array([each.reward or 0.0 for each in samples], dtype=np.float64),
        "ids_N": _joined([each.ids_N for each in completions], np.int32),
        "log_probs_N": _joined([each.log_probs_N for each in completions], np.float32),
        "versions_N": _joined([each.versions_N for each in completions], np.int32),
        "is_written_N": _joined([each.is_written_N for each in samples], np.uint8),
    }
    groups = {"asked_at": list(state.asked_at.items()), "trained": state.trained}
    save_file(arrays, folder / ROLLOUTS, metadata={"groups": json.dumps(groups)})


def read_queue(checkpoint: IntactCheckpoint) -> QueueState:
    """Raises DamagedCheckpointError if the checkpoint has no such file, or another form of it."""
    path = checkpoint.path / ROLLOUTS
    if ROLLOUTS not in checkpoint.state.files:
        raise DamagedCheckpointError(f"{checkpoint.path} has no {ROLLOUTS}: it is not of an on-policy run")
    with reading(f"{path} cannot be read"), safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        groups = json.loads(file.metadata()["groups"])
        ends = pairwise(offsets_of(arrays["tokens_R"]).tolist())
        samples = [_sample(arrays, number, slice(*each)) for number, each in enumerate(ends)]
        return QueueState(samples, dict(groups["asked_at"]), groups["trained"])


def _sample(arrays: Mapping[str, np.ndarray], number: int, tokens: slice) -> Sample:
    completion = Completion(
        arrays["ids_N"][tokens],
        arrays["log_probs_N"][tokens],
        arrays["versions_N"][tokens],
        _FINISHES[arrays["finish_R"][number]],
    )
    reward = float(arrays["reward_R"][number]) if arrays["has_reward_R"][number] else None
    is_written_N = arrays["is_written_N"][tokens].astype(bool)
    return Sample(int(arrays["number_R"][number]), int(arrays["prompt_R"][number]), completion, is_written_N, reward)


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
