"""Distributes student and teacher over processes, without changes to the models' code (see `runner.py`)."""

from stillhouse.parallel import watchdog
from stillhouse.parallel.apply.context_parallel import NextTokens
from stillhouse.parallel.build_runner import build_runner, load_head, only_layers, single_process_runner
from stillhouse.parallel.mesh import Degrees, Mesh, join
from stillhouse.parallel.processes import (
    best_precision,
    choose_device,
    connect_processes,
    destroy_process_group,
    is_first,
    local_processes,
    local_rank,
    log_rank0,
    process_count,
    process_rank,
    start_alone,
    temporary_groups,
    use_deterministic_algorithms,
    wait_for_all,
)
from stillhouse.parallel.ranks import ONE_PROCESS, Ranks
from stillhouse.parallel.run_layout import SCHEMES, Layout
from stillhouse.parallel.runner import (
    DistributedStudent,
    Runner,
    ShardedMicroBatches,
    StageWeight,
    padded_shapes,
    shard_micro_batches,
)
from stillhouse.parallel.sharded_loading import ModelSource, empty_decoder, load_weights, local_folder
from stillhouse.parallel.teacher_student_pair import (
    IN_STAGE,
    DecoderHead,
    StageInputs,
    TeacherHead,
    TeacherHidden,
)

__all__ = [
    "IN_STAGE",
    "ONE_PROCESS",
    "SCHEMES",
    "DecoderHead",
    "Degrees",
    "DistributedStudent",
    "Layout",
    "Mesh",
    "ModelSource",
    "NextTokens",
    "Ranks",
    "Runner",
    "ShardedMicroBatches",
    "StageInputs",
    "StageWeight",
    "TeacherHead",
    "TeacherHidden",
    "best_precision",
    "build_runner",
    "choose_device",
    "connect_processes",
    "destroy_process_group",
    "empty_decoder",
    "is_first",
    "join",
    "load_head",
    "load_weights",
    "local_folder",
    "local_processes",
    "local_rank",
    "log_rank0",
    "only_layers",
    "padded_shapes",
    "process_count",
    "process_rank",
    "shard_micro_batches",
    "single_process_runner",
    "start_alone",
    "temporary_groups",
    "use_deterministic_algorithms",
    "wait_for_all",
    "watchdog",
]
