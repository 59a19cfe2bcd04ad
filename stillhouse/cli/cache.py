"""`stillhouse cache`: writes a teacher's signals to disk; verifies, merges, exports and imports such caches."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stillhouse.cli.arguments import configured, is_override, load, misused, quiet_libraries
from stillhouse.display import print_escaped

if TYPE_CHECKING:
    from stillhouse.signals import SignalCache
    from stillhouse.signals.signal_spec import SignalKind

FOLDER = click.Path(path_type=Path)
SIGNALS = ("hidden", "top_k", "sampled")


class _Group(click.Group):
    """Runs the command `write` if none is named: `stillhouse cache run.yaml` is `stillhouse cache write run.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
@configured
@click.option("--signal", type=click.Choice(SIGNALS), help="hidden: exact, at any temperature. "
              "top_k: the most likely ids. sampled: sampled ids. [default: hidden; with teacher.url, "
              "teacher.signal]")  # fmt: skip
@click.option("--top-k", type=click.IntRange(1), help="Ids per token of top_k, draws of sampled. [default: 64; 50]")
@click.option("--dtype", help="float32, bfloat16 or float16. [default: the teacher's; float32 for top_k]")
@click.option("--with-label", is_flag=True, help="top_k: the actual next token, too.")
@click.option("--packed", is_flag=True, help="top_k, sampled: ids and counts in as few bits as they need.")
def write(
    arguments: tuple[str, ...],
    signal: "SignalKind | None",
    top_k: int | None,
    dtype: str | None,
    with_label: bool,
    packed: bool,
    **flags: str | None,
) -> None:
    """Write a cache; the same command continues an interrupted one.

    CONFIG is the configuration of a run: its data, template, lengths and teacher. `--out` is the folder of the
    cache.

    \b
    stillhouse cache run.yaml --out caches/a --signal top_k --top-k 64
    stillhouse cache run.yaml --out caches/b --signal sampled --packed
    """
    if flags["out"] is None:
        raise misused("--out is missing: expected the folder of the cache")
    out = Path(flags["out"])
    arguments, flags = _with_student(arguments, flags)
    config = load(arguments, flags)
    from stillhouse.parallel import destroy_process_group, is_first
    from stillhouse.tools.write_cache import write_cache

    if config.teacher is not None and "signal" in config.teacher.source_kind.options:
        options = {"signal": signal, "top_k": top_k, "dtype": dtype}
        overrides = [f"teacher.{name}={value}" for name, value in options.items() if value is not None]
        config = load((*arguments, *overrides), flags)
        if with_label or (dtype is not None and config.teacher is not None and config.teacher.signal != "hidden"):
            raise misused("a served teacher sends no labels, and log-probabilities only in float32")
    kind = signal or "hidden"
    top_k = top_k or (50 if kind == "sampled" else 64)
    manifest = write_cache(config, out, kind, top_k=top_k, dtype=dtype, with_label=with_label, packed=packed)
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


@cache.command()
@click.argument("folder", type=FOLDER)
def info(folder: Path) -> None:
    """Show the content of a cache."""
    print_escaped(_opened(folder).manifest.summary(folder))


@cache.command()
@click.argument("folder", type=FOLDER)
def verify(folder: Path) -> None:
    """Compare every shard with its hash, and check all rows."""
    opened = _opened(folder)
    opened.verify()
    print_escaped(opened.manifest.summary(folder))


def _opened(folder: Path) -> "SignalCache":
    quiet_libraries()
    from stillhouse.signals import SignalCache

    return SignalCache(folder)


@cache.command()
@click.argument("folders", type=FOLDER, nargs=-1, required=True)
@click.option("--out", type=FOLDER, required=True, help="Folder of the new cache.")
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Merge caches of the same teacher and signal.

    \b
    stillhouse cache merge caches/a caches/b --out caches/c
    """
    quiet_libraries()
    from stillhouse.tools.merge_caches import merge_caches

    print_escaped(merge_caches(folders, out).summary(out))


@cache.command()
@click.argument("folder", type=FOLDER)
@click.argument("config", type=click.Path(exists=True, dir_okay=False))
@click.option("--to", type=click.Choice(["distillkit"]), required=True, help="distillkit: Parquet, from top_k.")
@click.option("--out", type=FOLDER, required=True, help="A new folder.")
def export(folder: Path, config: str, to: str, out: Path) -> None:
    """Write a cache in the format of another project.

    CONFIG is the configuration with which the cache was written, because the cache itself contains no tokens.

    \b
    stillhouse cache export caches/a run.yaml --to distillkit --out exported
    """
    run = load([config], {})
    from stillhouse.run.inputs import load_run_data
    from stillhouse.tools.export_cache import export_distillkit

    compression = export_distillkit(folder, lambda: load_run_data(run, {}), out)
    print_escaped(f"{out}: {compression.k} of {compression.d} ids per token in {compression.exact_dtype}")


@cache.command("import")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--from", "form", type=click.Choice(["distillkit", "speculators"]), required=True,
              help="distillkit: Parquet. speculators: hs_0.safetensors, …")  # fmt: skip
@click.option("--teacher", metavar="MODEL", required=True, help="The model that wrote them: hub id or folder.")
@click.option("--out", type=FOLDER, required=True, help="Folder of the new cache.")
@click.option("--compression", type=FOLDER, help="distillkit: its YAML. [default: compression_config.yaml of SOURCE]")
@click.option(
    "--temperature", type=float, default=1.0, show_default=True, help="distillkit: of the log-probabilities."
)
@click.option("--packed", is_flag=True, help="distillkit: ids in as few bits as they need.")
@click.option("--dtype", default="auto", show_default=True, help="The teacher's weights, to compare with.")
@click.option("--device", default="cpu", show_default=True, help="Where the teacher runs, to compare.")
def import_(
    source: Path,
    form: str,
    teacher: str,
    out: Path,
    compression: Path | None,
    packed: bool,
    temperature: float,
    **of_teacher: Any,
) -> None:
    """Write a cache from the files of another project.

    The teacher is run on a few documents; if the files disagree with the result, no cache is written.

    \b
    stillhouse cache import captured --from distillkit --teacher Qwen/Qwen3-8B --out caches/a
    stillhouse cache import captured --from speculators --teacher Qwen/Qwen3-8B --out caches/b
    """
    if form == "speculators" and (compression is not None or packed):
        raise misused("--compression and --packed are for --from distillkit")
    quiet_libraries()
    from stillhouse.config.yaml_text import read_yaml
    from stillhouse.signals.cache.formats.distillkit import CONFIGURATION, Compression
    from stillhouse.tools.import_cache import import_distillkit, import_speculators

    if form == "speculators":
        print_escaped(import_speculators(source, teacher, out, **of_teacher).summary(out))
        return
    path = compression or (source if source.is_dir() else source.parent) / CONFIGURATION
    if not path.is_file():
        raise misused(
            f"{path} is missing: expected DistillKit's compression configuration, which --compression names"
        )
    exact = Compression.of(read_yaml(path.read_text(encoding="utf-8"), str(path)), path)
    manifest = import_distillkit(source, exact, teacher, out, temperature=temperature, packed=packed, **of_teacher)
    print_escaped(manifest.summary(out))
