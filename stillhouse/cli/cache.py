"""`stillhouse cache`: writes a teacher's signals to disk, and verifies such caches."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stillhouse.cli.arguments import configured, is_override, load_arguments, misused, quiet_libraries
from stillhouse.display import print_escaped

if TYPE_CHECKING:
    from stillhouse.signals import SignalCache
    from stillhouse.signals.signal_spec import SignalKind

FOLDER = click.Path(path_type=Path)
SIGNALS = ("hidden", "top_k", "sampled")
_REMOVED = ("merge", "export", "import")


class _Group(click.Group):
    """Adds `write` if no command is named: `stillhouse cache run.yaml` means `stillhouse cache write run.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        removed = args[0] if args and args[0] in _REMOVED else "--packed" if "--packed" in args else None
        if removed is not None:
            raise misused(
                f"`cache` has no {removed} any more: removed in November 2026, because nobody but its authors "
                "used it; 68748665 is the last commit that has it"
            )
        if not args or args[0] not in {*self.commands, "-h", "--help"}:
            args = ["write", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Group)
def cache() -> None:
    """Write a teacher's signals to disk, once, for any number of runs.

    \b
    stillhouse cache run.yaml --out caches/a            see `stillhouse cache write --help`
    stillhouse cache info caches/a
    """


@cache.command()
@partial(configured, out="Folder of the cache.")
@click.option("--signal", type=click.Choice(SIGNALS), help="hidden: exact, at any temperature. "
              "top_k: the most likely ids. sampled: sampled ids. [default: hidden; with teacher.url, "
              "teacher.signal]")  # fmt: skip
@click.option(
    "--top-k", type=click.IntRange(1), help="Ids (top_k), or samples (sampled), per token. [default: 64, or 50]"
)
@click.option("--dtype", help="float32, bfloat16 or float16. [default: the teacher's; float32 for top_k]")
@click.option("--with-label", is_flag=True, help="With top_k, also store the next token.")
def write(
    arguments: tuple[str, ...],
    signal: "SignalKind | None",
    top_k: int | None,
    dtype: str | None,
    with_label: bool,
    **flags: str | None,
) -> None:
    """Write a cache. The same command continues after an interruption.

    CONFIG is the configuration of a run. The cache uses its data, template, lengths and teacher.

    \b
    stillhouse cache run.yaml --out caches/a --signal top_k --top-k 64
    stillhouse cache run.yaml --out caches/b --signal sampled
    """
    if flags["out"] is None:
        raise misused("--out is missing: expected the folder of the cache")
    out = Path(flags["out"])
    arguments, flags = _with_student(arguments, flags)
    config = load_arguments(arguments, flags)
    from stillhouse.parallel import destroy_process_group, is_first
    from stillhouse.tools.write_cache import write_cache

    if config.teacher is not None and "signal" in config.teacher.source_kind.options:
        options = {"signal": signal, "top_k": top_k, "dtype": dtype}
        overrides = [f"teacher.{name}={value}" for name, value in options.items() if value is not None]
        config = load_arguments((*arguments, *overrides), flags)
        if with_label or (dtype is not None and config.teacher is not None and config.teacher.signal != "hidden"):
            raise misused(
                "a served teacher sends no labels, and log-probabilities only in float32: expected no --with-label, "
                "and --dtype only with the signal hidden"
            )
    kind = signal or "hidden"
    top_k = top_k or (50 if kind == "sampled" else 64)
    manifest = write_cache(config, out, kind, top_k=top_k, dtype=dtype, with_label=with_label)
    if is_first():
        print_escaped(manifest.summary(out))
    destroy_process_group()


def _with_student(
    arguments: tuple[str, ...], flags: dict[str, str | None]
) -> tuple[tuple[str, ...], dict[str, str | None]]:
    """Set the student to the teacher if neither a file nor an option names a student.

    A cache needs only the tokenizer of the student, which must be the teacher's tokenizer.
    """
    if flags["student"] is not None or not all(map(is_override, arguments)):
        return arguments, flags
    keys = ("teacher.model=", "teacher.revision=", "teacher.trust_remote_code=")
    same = (text.replace("teacher", "student", 1) for text in arguments if text.startswith(keys))
    return (*same, *arguments), {**flags, "student": flags["teacher"]}


@cache.command("info")
@click.argument("folder", type=FOLDER)
def cache_info(folder: Path) -> None:
    """Show the content of a cache."""
    print_escaped(_opened(folder).manifest.summary(folder))


@cache.command("verify")
@click.argument("folder", type=FOLDER)
def verify_cache(folder: Path) -> None:
    """Compare every shard with its hash, and check all rows."""
    opened = _opened(folder)
    opened.verify()
    print_escaped(opened.manifest.summary(folder))


def _opened(folder: Path) -> "SignalCache":
    quiet_libraries()
    from stillhouse.signals import SignalCache

    return SignalCache(folder)
