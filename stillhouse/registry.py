"""Loads all add-ons. These are entry points that installed packages register by group and name.

Stillhouse registers its own add-ons in the same way as other distributions, in pyproject.toml:

    [project.entry-points."stillhouse.trackers"]
    wandb = "stillhouse.output.trackers:Wandb"

The group of an entry point determines the kind of its object; docs/extending.md describes the groups. The
object's module must not import a heavy library such as torch, because the configuration and `stillhouse info` load
all entries of a group.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

#: the groups of entry points, each with a description of its entries
GROUPS = {
    "stillhouse.commands": "commands of the command line",
    "stillhouse.divergences": "divergences of a loss",
    "stillhouse.engines": "engines that train a student",
    "stillhouse.environments": "kinds of environments and tools",
    "stillhouse.media": "kinds of media in documents",
    "stillhouse.optimizers": "optimizers",
    "stillhouse.parts": "losses that arise inside layers",
    "stillhouse.readers": "formats of data",
    "stillhouse.servers": "programming interfaces of servers",
    "stillhouse.sources": "sources of a teacher's signals",
    "stillhouse.trackers": "trackers of metrics",
}


@cache
def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of one of `GROUPS` by name, in alphabetical order.

    Raises ValueError if the group is empty, or if two installed distributions register the same name with different
    values.
    """
    if group not in GROUPS:
        raise ValueError(f"no group of add-ons is called {group!r}: expected one of {', '.join(GROUPS)}")
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group)):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ValueError(
                f"{distribution(other)} ({other.value}) and {distribution(point)} ({point.value}) both register "
                f"{point.name!r} in {group}: uninstall one of them"
            )
    if not points:  # every group has entries of Stillhouse; without an error, nobody would notice their absence
        raise ValueError(
            f"no {GROUPS[group]} are registered ({group}), not even those of Stillhouse: its installed metadata are "
            "of another version; install Stillhouse again (pip install -e . in a checkout)"
        )
    return points


@cache
def load(group: str, name: str) -> Any:
    """Return a registered object. Raises ValueError for an unknown name, or if the add-on cannot be imported."""
    points = registered(group)
    if name not in points:
        raise ValueError(
            f"got {name!r}: expected one of {', '.join(points) or '(none)'}; these are the installed "
            f"{GROUPS[group]} ({group})"
        )
    point = points[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{distribution(point)} registers {name!r} in {group} as {point.value}: {error}") from error


def load_all(group: str) -> dict[str, Any]:
    """Return all registered objects of a group by name."""
    return {name: load(group, name) for name in registered(group)}


def distribution(point: EntryPoint) -> str:
    """Return the name and version of the distribution that registers an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
