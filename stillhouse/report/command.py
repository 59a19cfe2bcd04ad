"""`stillhouse report`: writes the report page of one or several runs, or serves it during the run."""

from pathlib import Path

import click

from stillhouse.cli.arguments import misused
from stillhouse.display import print_escaped

RUN_DIR = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("run_dirs", type=RUN_DIR, nargs=-1, required=True, metavar="RUN_DIR")
@click.option(
    "--compare", type=RUN_DIR, multiple=True, metavar="RUN_DIR...",
    help="Other runs to draw into the same curves; their configurations' differences are a table.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="File to write instead of RUN_DIR/report.html, or RUN_DIR/compare.html with --compare.",
)  # fmt: skip
@click.option("--watch", is_flag=True, help="Serve the page on 127.0.0.1 and renew it while the run goes on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port for --watch; 0 for a free one.")
def report(run_dirs: tuple[Path, ...], compare: tuple[Path, ...], out: Path | None, watch: bool, port: int) -> None:
    """Write a run's report.

    Writes one self-contained HTML page into RUN_DIR and prints its path.

    \b
    stillhouse report runs/a
    stillhouse report runs/a --watch
    stillhouse report runs/a --compare runs/b runs/c --out compared.html
    """
    if len(run_dirs) > 1 and not compare:
        raise misused(f"got {len(run_dirs)} runs, expected one; --compare draws several into one page")
    if watch and out is not None:
        raise misused("--watch writes no file, so that --out has no effect; leave one of them out")
    if port and not watch:
        raise misused("--port has an effect only with --watch")
    others = [*compare, *run_dirs[1:]]
    if watch:
        from stillhouse.report.watch import watch as serve_report

        serve_report(run_dirs[0], others, port, lambda url: print_escaped(f"{url} (Ctrl-C ends it)"))
        return
    from stillhouse.report.page import write_report

    print_escaped(write_report(run_dirs[0], others, out))
