"""Student and teacher laid over processes, from outside (see `runner.py`)."""

from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.pipeline import SCHEMES
from stillhouse.parallel.processes import gathered, is_first, join, layout_of, leave, local_rank, process_count
from stillhouse.parallel.runner import Layout, Runner, alone, lay_out
from stillhouse.parallel.twin import Twin, Work

__all__ = [
    "SCHEMES",
    "Degrees",
    "Layout",
    "Mesh",
    "Runner",
    "Twin",
    "Work",
    "alone",
    "gathered",
    "is_first",
    "join",
    "lay_out",
    "layout_of",
    "leave",
    "local_rank",
    "process_count",
]
