"""Student and teacher laid over processes, from outside (see `runner.py`)."""

from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.pipeline import SCHEMES
from stillhouse.parallel.runner import Layout, Runner, lay_out
from stillhouse.parallel.twin import Twin, Work

__all__ = ["SCHEMES", "Degrees", "Layout", "Mesh", "Runner", "Twin", "Work", "lay_out"]
