"""The capabilities of the engines that can train a student, which the configuration reads.

Each entry of the group `stillhouse.engines` is an `EngineKind` (`engine/engine_kind.py`). Its capabilities determine
the rules between keys, the layout of a run, and the layouts that `stillhouse parity` tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stillhouse.display import enumerated
from stillhouse.registry import load

GROUP = "stillhouse.engines"


@dataclass(frozen=True)
class EngineCapabilities:
    """The capabilities of an engine. By default, an engine supports every key and every layout.

    title: the engine's name in messages.
    without: the keys that must have their defaults, and `key=value` for a value that the engine does not support.
    schedules: the supported pipeline schedules. If it is None, all schedules are supported.
    axes: the degrees that `stillhouse parity` sets above 1.
    sequence: whether the engine supports `parallel.sequence`; if so, experts with parallel.tensor > 1 need it.
    settings: whether the key `parallel.<name of the engine>` contains settings under the engine's own names.
    recomputes: whether the engine itself recomputes layers in backward (`Layout.recompute`).
    always_in_group: whether a single process also needs a process group.
    """

    title: str
    without: tuple[str, ...] = ()
    schedules: tuple[str, ...] | None = None
    axes: tuple[str, ...] = ("fsdp", "replicate", "tensor", "context", "pipeline")
    sequence: bool = False
    settings: bool = False
    recomputes: bool = False
    always_in_group: bool = False

    def __iter__(self) -> Iterator[str]:
        """Yield the capabilities in words, for `stillhouse info`."""
        yield "all schedules" if self.schedules is None else f"schedules {enumerated(self.schedules, 'and')}"
        if self.sequence:
            yield "sequence parallelism"
        if self.without:
            yield f"without {enumerated(self.without, 'and')}"


def capabilities(engine: str) -> EngineCapabilities:
    """Return the capabilities of a registered engine."""
    return load(GROUP, engine).capabilities
