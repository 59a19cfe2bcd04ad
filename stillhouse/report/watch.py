"""`stillhouse report --watch`: serves a run's report on this machine during the run.

Every two seconds, the page requests a newer version and replaces its content, but keeps smoothing, scales, zoom and
scroll position. The server answers only requests for 127.0.0.1 or localhost. Otherwise a page of another origin could
read the report through its own host name (DNS rebinding).
"""

import hashlib
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from stillhouse.display import escaped
from stillhouse.report.page import read_runs, render
from stillhouse.report.run_files import METRICS, OPTIONAL_FILES

ADDRESS = "127.0.0.1"


class WatchedReport:
    """The current page of some runs. The constructor raises the ValueErrors of `read_runs`."""

    def __init__(self, run_dir: Path, compare: Sequence[Path] = ()):
        self._paths = [Path(run_dir), *map(Path, compare)]
        self._version, self._page = "", b""
        self.current()

    def current(self) -> tuple[str, bytes]:
        """Return the version and the page. The page is rendered again only if a file has changed.

        Raises ValueError if a file is malformed. A later call may succeed, because the run may be replacing the file.
        """
        version = self._stamp()
        if version != self._version:
            page = render(read_runs(self._paths), watching=True)
            self._page = page.encode("utf-8", errors="xmlcharrefreplace")
            self._version = version
        return self._version, self._page

    def _stamp(self) -> str:
        files = []
        for path in (folder / name for folder in self._paths for name in (METRICS, *OPTIONAL_FILES)):
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            files.append((str(path), state.st_size, state.st_mtime_ns))
        return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


class ReportServer(ThreadingHTTPServer):
    """Serves the page at `/` on the loopback address. port: 0 chooses a free port."""

    daemon_threads = True

    def __init__(self, report: WatchedReport, port: int = 0):
        self.report = report
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


def watch(run_dir: Path, compare: Sequence[Path], port: int, announce: Callable[[str], object]) -> None:
    """Serve the page until the process gets a signal. announce: called with the address.

    Raises ValueError if the folder contains no run or the port is taken.
    """
    report = WatchedReport(run_dir, compare)
    try:
        server = ReportServer(report, port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port: {port} on {ADDRESS} cannot be used: {error}; choose another, or 0") from error
    with server:
        announce(server.url)
        server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, b"This report is for this machine only.", "text/plain")
        elif self.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"There is only one page, at /.", "text/plain")
        else:
            self._page()

    def _page(self) -> None:
        try:
            version, page = self.server.report.current()
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
