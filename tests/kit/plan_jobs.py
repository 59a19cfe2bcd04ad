"""A real step over gloo, counted as a plan counts its step."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from kit.shard_ranks import Rank
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stillhouse.config import load_config
from stillhouse.data import DataReport, Documents, PackedSequences
from stillhouse.engine.schedule import make_step_schedule
from stillhouse.parallel import Mesh, ShardedMicroBatches, shard_micro_batches
from stillhouse.plan.device_counts import DeviceCounts, StepCounts
from stillhouse.plan.fake_cuda import FakeCudaMode
from stillhouse.plan.rank_step import _axes
from stillhouse.run.setup import RunSetup, with_precision


class HostCounts(DeviceCounts):
    """Counts the memory of tensors on the CPU."""

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = super().__torch_dispatch__(operation, types, args, kwargs)
        if outputs is not NotImplemented:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                    self._hold(leaf)
        return outputs


def real_step(rank: Rank, job: dict[str, Any]) -> StepCounts:
    """Return what a real step of this rank counts. job: of `stillhouse.plan.child`, for models with weights."""
    os.environ |= {"RANK": str(rank.number), "WORLD_SIZE": str(job["ranks"]), "LOCAL_RANK": str(rank.number)}
    config = with_precision(load_config(None, settings=job["config"] | {"device": "cpu"}))
    setup = RunSetup(config)
    layout = setup.layout
    mesh = Mesh(layout.degrees, torch.device("cpu"))
    rows, max_tokens = config.train.tokens_per_step // config.data.max_tokens, config.data.max_tokens
    packed = PackedSequences(_documents(2 * rows * max_tokens, job["document_tokens"]), max_tokens=max_tokens, seed=0)
    schedule = make_step_schedule(config.train, len(packed), max_tokens, layout.degrees.data, layout.stages)
    with HostCounts(FakeCudaMode(), job["document_tokens"], _axes(mesh)) as counts:
        engine, source = setup.engine(setup.models(mesh), layout)
        for number in range(2):
            step = shard_micro_batches(schedule.micro_batches(packed, number), mesh, uniform_shapes=layout.stages > 1)
            counts.restart()
            _run(engine, source, step)
        return counts.restart()


def _documents(tokens: int, length: int) -> Documents:
    """Return documents of one length."""
    count = tokens // length
    starts = np.arange(count + 1) * length
    targets_N = np.arange(tokens) % length > 0
    hashes, sources = np.arange(count, dtype=np.uint64), [f"made:{number}" for number in range(count)]
    return Documents(np.zeros(tokens, dtype=np.int32), targets_N, starts, hashes, sources, DataReport("made"))


def _run(engine: Any, source: Any, step: ShardedMicroBatches) -> None:
    output = engine.forward_backward(step, source.request(step).result(), step.of_all_ranks.normalizer)
    _ = output.sums
    engine.update(1e-5)
