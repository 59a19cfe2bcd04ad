"""`stillhouse cache`: writes a teacher's signals to disk, and looks at what was written."""

from pathlib import Path

import click

from stillhouse.cli.arguments import configured, load, misused, quiet_libraries


@click.command()
@configured
@click.option("--signal", type=click.Choice(["hidden", "top_k"]), default="hidden", show_default=True,
              help="hidden: exact, at any temperature. top_k: only the likeliest ids.")  # fmt: skip
@click.option("--top-k", type=click.IntRange(1), default=64, show_default=True, help="Ids per token of top_k.")
@click.option("--dtype", help="float32, bfloat16 or float16. [default: the teacher's; float32 for top_k]")
def cache(arguments: tuple[str, ...], signal: str, top_k: int, dtype: str | None, **flags: str | None) -> None:
    """Write a teacher's signals to disk, once, for any number of runs.

    CONFIG is the configuration of a run: its data, template, lengths and teacher. `--out` is the folder of the
    cache. The same command continues an interrupted one.

    \b
    stillhouse cache run.yaml --out caches/a --signal top_k --top-k 64
    stillhouse cache info caches/a           what it holds
    stillhouse cache verify caches/a         compare every shard with its hash
    """
    if arguments[:1] in (("info",), ("verify",)):
        return _look_at_cache(arguments)
    if flags["out"] is None:
        raise misused("--out is missing: expected the folder of the cache")
    out = Path(flags["out"])
    given = {**flags, "student": flags["student"] or flags["teacher"]} if not arguments else flags
    config = load(arguments, given)
    quiet_libraries()
    from stillhouse.parallel import destroy_process_group, is_first
    from stillhouse.train.write_cache import write_cache

    manifest = write_cache(config, out, "top_k" if signal == "top_k" else "hidden", top_k=top_k, dtype=dtype)
    if is_first():
        click.echo(manifest.summary(out))
    destroy_process_group()


def _look_at_cache(arguments: tuple[str, ...]) -> None:
    what, *folders = arguments
    if len(folders) != 1:
        raise misused(f"`stillhouse cache {what}` takes the folder of one cache")
    from stillhouse.teachers import SignalCache

    cache = SignalCache(Path(folders[0]))
    if what == "verify":
        cache.verify()
    click.echo(cache.manifest.summary(cache.folder))
