"""`stillhouse info`: lists the registered add-ons and the versions of the libraries."""

import platform
from importlib.metadata import PackageNotFoundError, version
from textwrap import fill

import click

from stillhouse.display import print_escaped
from stillhouse.registry import GROUPS, distribution, load, registered


@click.command()
def info() -> None:
    """List what is installed.

    Lists the add-ons of each kind with the distribution that registers them and what they can do, and the versions of
    Python and of the most important libraries.

    \b
    stillhouse info
    """
    versions = {"python": platform.python_version()}
    for library in ("stillhouse", "torch", "transformers"):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    print_escaped(", ".join(f"{name} {number}" for name, number in versions.items()))
    for group, content in GROUPS.items():
        if points := registered(group):
            print_escaped(f"\n{content} ({group})")
        for name, point in points.items():
            capabilities = ", ".join(getattr(load(group, name), "capabilities", ()))
            print_escaped(f"  {name:<18} {distribution(point)}")
            if capabilities:
                print_escaped(fill(capabilities, 118, initial_indent=" " * 21, subsequent_indent=" " * 21))
