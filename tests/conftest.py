"""Before any test: an interrupt must reach the processes that tests start, and one worker starts those of a module.

A shell starts background jobs with SIGINT ignored, and children inherit that; continuous integration is such a job.
"""

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import shard_ranks

# how long an example takes says how busy the machine is
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
signal.signal(signal.SIGINT, signal.default_int_handler)

#: modules whose processes or folders one worker makes for all of their tests
TOGETHER = {
    "test_parity": "ranks of parity",
    "test_teacher_prefetch": "ranks of parity",
    "test_gathering": "ranks of parity",
    "test_objective_shards": "ranks of shards",
    "test_objective_shards_layout": "ranks of shards",
    "test_train_layouts": "layouts",
    "test_megatron": "ranks of megatron",
    "test_megatron_example": "ranks of megatron",
    "test_demo_run": "demo",
    "test_train_adapter": "adapter",
    "test_parallel_loading": "loading",
    "test_checkpoints": "faults of checkpoints",
    "test_origins": "faults of checkpoints",
    "test_ranks_agree": "faults of checkpoints",
    "test_signals": "faults of signals",
    "test_hung_rank": "faults of ranks",
}


@pytest.fixture(scope="module", autouse=True)
def ranks_rest() -> Iterator[None]:
    """Those that have nothing to do cost time all the same."""
    yield
    shard_ranks.rest()


@pytest.hookimpl(tryfirst=True)  # before xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if group := TOGETHER.get(item.path.stem):
            item.add_marker(pytest.mark.xdist_group(group))
