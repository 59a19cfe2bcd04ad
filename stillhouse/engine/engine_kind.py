"""The interface of an entry of `stillhouse.engines`, which builds an `Engine` (`engine.py`).

An entry is a class, such as that in `torch_engine_kind.py`. The configuration loads all entries, so the module of an
entry imports neither torch nor the library of its engine.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from stillhouse.config.engine_capabilities import EngineCapabilities

if TYPE_CHECKING:
    from stillhouse.engine.engine import Engine
    from stillhouse.objective.spec import ObjectiveSpec
    from stillhouse.parallel import DistributedStudent, Layout, Mesh, ModelSource


class EngineKind(ABC):
    """The capabilities of an engine, and the methods that build its students and the engine itself."""

    capabilities: ClassVar[EngineCapabilities]

    @abstractmethod
    def distribute(
        self,
        layout: "Layout",
        mesh: "Mesh",
        student: "ModelSource",
        teacher: "ModelSource | None",
        *,
        teacher_head_only: bool = False,
    ) -> "DistributedStudent":
        """Build and prove this process's part of the student, and of a teacher in the student's stages.

        This is a collective.

        teacher_head_only: whether the last stage gets the teacher's head, and no stage gets the teacher's layers.
        """

    @abstractmethod
    def engine(self, student: Any, objective: "ObjectiveSpec", **options: Any) -> "Engine":
        """Create the engine for a student of `distribute`; the options are the arguments of `Engine`."""
