"""`stillhouse report`: writes the report page of one or several runs, or serves it on this machine during the run.

A served page requests a newer version every two seconds and replaces its content. The server answers only requests
for 127.0.0.1 or localhost. Otherwise a web page could read the report through a host name that it resolves to
127.0.0.1 (DNS rebinding).
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from stillhouse.cli.arguments import misused
from stillhouse.display import escaped, print_escaped

RUN_DIR = click.Path(exists=True, file_okay=False, path_type=Path)
ADDRESS = "127.0.0.1"


@click.command()
@click.argument("run_dirs", type=RUN_DIR, nargs=-1, required=True, metavar="RUN_DIR")
@click.option(
    "--compare", type=RUN_DIR, multiple=True, metavar="RUN_DIR...",
    help="Other runs to draw into the same charts. A table shows how the configurations differ.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="File to write instead of RUN_DIR/report.html, or RUN_DIR/compare.html with --compare.",
)  # fmt: skip
@click.option("--watch", is_flag=True, help="Serve the page on 127.0.0.1 and update it during the run.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port for --watch; 0: a free port.")
@click.option("--label", default="", hidden=True)  # text that other commands print before the path
def report(
    run_dirs: tuple[Path, ...], *, compare: tuple[Path, ...], out: Path | None, watch: bool, port: int, label: str
) -> None:
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
        raise misused("--watch writes no file, so --out has no effect with it; leave one of the two options out")
    if port and not watch:
        raise misused("--port has an effect only with --watch")
    others = [*compare, *run_dirs[1:]]
    if watch:
        with ReportServer(run_dirs[0], others, port) as server:
            print_escaped(f"{server.url} (Ctrl-C ends it)")
            server.serve_forever()
        return
    from stillhouse.report.page import write_report

    print_escaped(f"{label}{write_report(run_dirs[0], others, out)}")


class ReportServer(ThreadingHTTPServer):
    """Serves the current page of some runs at `/` on the loopback address. port: 0 chooses a free port.

    Raises the ValueErrors of `read_runs`, and ValueError if the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, run_dir: Path, compare: Sequence[Path] = (), port: int = 0):
        self._paths = [Path(run_dir), *map(Path, compare)]
        self._version, self._page = "", b""
        self.current()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"--port: {port} on {ADDRESS} cannot be used: {error}; choose another, or 0") from error
        self.url = f"http://{ADDRESS}:{self.server_port}/"

    def current(self) -> tuple[str, bytes]:
        """Return the version and the page. The page is rendered again only if a file has changed.

        Raises ValueError if a file is malformed. A later call may succeed, because the run may be replacing the file.
        """
        from stillhouse.report.page import read_runs, render
        from stillhouse.report.run_files import METRICS, OPTIONAL_FILES

        files = []
        for path in (folder / name for folder in self._paths for name in (METRICS, *OPTIONAL_FILES)):
            with suppress(FileNotFoundError):
                state = path.stat()
                files.append((str(path), state.st_size, state.st_mtime_ns))
        version = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
        if version != self._version:
            page = render(read_runs(self._paths), watching=True)
            self._page = page.encode("utf-8", errors="xmlcharrefreplace")
            self._version = version
        return self._version, self._page


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return self._answer(HTTPStatus.FORBIDDEN, b"This report is for this machine only.", "text/plain")
        if self.path != "/":
            return self._answer(HTTPStatus.NOT_FOUND, b"There is only one page, at /.", "text/plain")
        try:
            version, page = self.server.current()
        except ValueError as error:
            text = escaped(str(error)).encode("utf-8", errors="replace")
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, text, "text/plain; charset=utf-8")
        if self.headers.get("If-None-Match") == f'"{version}"':
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", "text/html; charset=utf-8", version)
        return self._answer(HTTPStatus.OK, page, "text/html; charset=utf-8", version)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, version: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version is not None:
            self.send_header("ETag", f'"{version}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing, because the page sends a request every two seconds."""
