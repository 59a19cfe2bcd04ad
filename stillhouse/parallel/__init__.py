"""Student and teacher laid over processes, from outside (see `runner.py`)."""

from stillhouse.parallel import watchdog
from stillhouse.parallel.loading import empty_decoder, fill, local_folder
from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.pipeline import SCHEMES
from stillhouse.parallel.processes import (
    gathered,
    is_first,
    join,
    layout_of,
    leave,
    local_processes,
    local_rank,
    log_rank0,
    process_count,
    require_sharing,
    start,
)
from stillhouse.parallel.runner import Layout, Origin, Runner, alone, lay_out
from stillhouse.parallel.separate import Extent
from stillhouse.parallel.twin import Twin, Work

__all__ = [
    "SCHEMES",
    "Degrees",
    "Extent",
    "Layout",
    "Mesh",
    "Origin",
    "Runner",
    "Twin",
    "Work",
    "alone",
    "empty_decoder",
    "fill",
    "gathered",
    "is_first",
    "join",
    "lay_out",
    "layout_of",
    "leave",
    "local_folder",
    "local_processes",
    "local_rank",
    "log_rank0",
    "process_count",
    "require_sharing",
    "start",
    "watchdog",
]
