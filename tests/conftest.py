"""Before any test: enable SIGINT, interpret Triton kernels, and give the tests of a module to one worker.

A shell starts background jobs, such as continuous integration, with SIGINT ignored, and their children inherit this.
"""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
from kit import shard_ranks

from stillhouse.libraries import FEATURES, is_supported

# Triton reads it when it is imported. Its interpreter runs kernels on a CPU
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest_plugins = ["kit.damaged_checkpoints", "kit.serving", "kit.writer_cases"]
# no deadline, because the time of an example depends on the load of the machine
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
signal.signal(signal.SIGINT, signal.default_int_handler)

#: modules that share processes, folders, compiled functions or imported model families, by the group that one worker
#: runs; every other module is a group of its own, so that what its tests share is made once
TOGETHER = {
    "test_objective_compiled": "compiled",
    "test_parity": "ranks of parity",
    "test_gathering": "ranks of parity",
    "test_objective_shards": "ranks of shards",
    "test_objective_shards_layout": "ranks of shards",
    "test_objective_shards_refused": "ranks of shards",
    "test_exchange": "ranks of shards",
    "test_megatron": "ranks of megatron",
    "test_megatron_weights": "ranks of megatron",
    "test_megatron_loading": "ranks of megatron",
    "test_teacher_cache": "cache",
    "test_teacher_cache_layouts": "cache",
    "test_checkpoints": "faults of checkpoints",
    "test_origins": "faults of checkpoints",
    "test_ranks_agree": "faults of checkpoints",
    "test_export_families": "families",
    "test_causal_families": "families",
    "test_families": "families",
    "test_teacher_served": "served",
    "test_teacher_served_layouts": "served",
}

#: the modules that take longest, in this order. They begin first, so that two workers end at about the same time
LONGEST = (
    *("test_parity", "test_chaos", "test_train_layouts", "test_objective_close", "test_fake_steps"),
    *("test_gpu_rehearsal", "test_megatron_engine", "test_megatron_weights", "test_megatron_signals"),
    *("test_megatron_runs", "test_objective_compiled", "test_objective_shards", "test_parallel_loading"),
    *("test_checkpoints", "test_export_families", "test_causal_families", "test_families"),
    *("test_image_served", "test_megatron_publish", "test_plan_runs", "test_recipes"),
    *("test_demo_run", "test_trainer_examples", "test_train_mtp", "test_several_teachers_layouts"),
    *("test_teacher_served", "test_rollout_faults", "test_train_adapter", "test_signals", "test_on_policy"),
    *("test_serve_hostile", "test_train_bad_input", "test_serve_connections", "test_hung_rank"),
)

#: modules that cannot be imported with an older transformers
collect_ignore = (
    []
    if is_supported("multi-token prediction")
    else ["gradients/test_mtp.py", "unit/test_mtp_decoder.py", "runs/test_mtp_drafting.py", "runs/test_train_mtp.py"]
)


@pytest.fixture(scope="session", autouse=True)
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs fetch from servers goes to a temporary folder, not to that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STILLHOUSE_CACHE", str(tmp_path_factory.getbasetemp() / "downloads"))
        yield


@pytest.fixture(scope="module", autouse=True)
def ranks_rest() -> Iterator[None]:
    """End idle ranks after a module, because their threads cost time."""
    yield
    shard_ranks.rest()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        assert isinstance(item, pytest.Function)
        if missing := _missing(item):
            item.add_marker(pytest.mark.skip(reason=missing))
        item.add_marker(pytest.mark.xdist_group(TOGETHER.get(item.path.stem, item.path.stem)))
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def _missing(item: pytest.Function) -> str:
    """The version of a library that a test's layout needs, if an older one is installed; else ""."""
    case = getattr(item.module, "CASE", None)
    if hasattr(item, "callspec"):
        case = item.callspec.params.get("case", case)
    for layout in (getattr(case, "layout", None), getattr(case, "teacher", None)):
        expert = getattr(layout, "degrees", None) and layout.degrees.expert > 1
        if expert and not is_supported("expert parallelism"):
            return f"expert parallelism needs {' '.join(FEATURES['expert parallelism'][:2])}"
    return ""
