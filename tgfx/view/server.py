"""Serves the two files of a live view to the browser on this machine, and to nobody else."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from tgfx.errors import InputError
from tgfx.view.live import PAGE, STATE

LOOPBACK = "127.0.0.1"
_TYPES = {PAGE: "text/html; charset=utf-8", STATE: "application/json"}
_FILES = {"/": PAGE, f"/{PAGE}": PAGE, f"/{STATE}": STATE}


class LiveServer(ThreadingHTTPServer):
    """Bound to the loopback address; knows two paths."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        if not (folder / PAGE).is_file():
            raise InputError(
                "there is nothing to view",
                expected=f"a folder with {PAGE}, as tgfx.fit(..., live=folder) makes it",
                found=f"no {PAGE} in {folder}",
            )
        self.folder = folder
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise InputError(f"port {port} cannot be used", expected="a free port", found=str(error)) from error

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        # another site can make its name mean 127.0.0.1, but not what the browser says it asked for
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        name = _FILES.get(urlsplit(self.path).path)
        if host not in (LOOPBACK, "localhost"):
            return self._answer(403)
        if name is None:
            return self._answer(404)
        try:
            content = (self.server.folder / name).read_bytes()
        except FileNotFoundError:  # the first step has not been taken
            return self._answer(204 if name == STATE else 404)
        return self._answer(200, content, _TYPES[name])

    def _answer(self, code: int, content: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if content:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """A poll a second is nothing to report."""
