"""A loopback release page as GitHub's: assets redirect to signed storage at another host name, which knows ranges.

It is also a package index (`index`) of the wheels it is given, for what the engine's wheel depends on. Faults are
scripted; `log` keeps every request as (what, path, range), and `sent` the bytes of the bodies.
"""

from __future__ import annotations

import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class FakeRelease:
    """Serves `assets` (name -> bytes) below `url`, and `packages` (wheels by project) below `index`."""

    def __init__(self) -> None:
        self.assets: dict[str, bytes] = {}
        self.packages: dict[str, Path] = {}
        self.cuts: list[int] = []  # bytes after which the next answers of the storage break
        self.ranges = True
        self.log: list[tuple[str, str, str]] = []
        self.sent = 0
        self.signed = 0
        release = self

        class Handler(_Handler):
            owner = release

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that hangs up is what the tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        port = self._server.server_port
        self.url = f"http://127.0.0.1:{port}/owner/engine/releases/download/tag-1"
        self.storage = f"http://localhost:{port}/storage"
        self.index = f"http://127.0.0.1:{port}/simple"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def add(self, *paths: Path) -> None:
        """Files of the release."""
        self.assets |= {path.name: path.read_bytes() for path in paths}

    def add_packages(self, *paths: Path) -> None:
        """Wheels of the index."""
        self.packages |= {path.name: path for path in paths}

    def asked(self, what: str) -> list[str]:
        """Paths of the requests of a kind (asset, storage, index)."""
        return [path for kind, path, _ in self.log if kind == what]


@contextmanager
def serving() -> Iterator[FakeRelease]:
    """A release while the block runs."""
    made = FakeRelease()
    try:
        yield made
    finally:
        made.close()


class _Handler(BaseHTTPRequestHandler):
    owner: FakeRelease
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        owner, path = self.owner, urllib.parse.urlsplit(self.path).path
        base = urllib.parse.urlsplit(owner.url).path
        wanted = self.headers.get("Range", "")
        name = urllib.parse.unquote(path.rpartition("/")[2])
        if path.startswith(base + "/"):
            owner.log.append(("asset", self.path, wanted))
            if name not in owner.assets:
                self._send(404, b"Not Found", {})
                return
            assert "Authorization" not in self.headers
            owner.signed += 1
            target = f"{owner.storage}/{urllib.parse.quote(name)}?signature={owner.signed}"
            self._send(302, b"", {"Location": target})
        elif path.startswith("/storage/"):
            owner.log.append(("storage", self.path, wanted))
            self._body(owner.assets[name], wanted)
        elif path.startswith("/simple/"):
            owner.log.append(("index", self.path, wanted))
            self._index(path)
        else:
            self._send(404, b"no such page", {})

    def _index(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if len(parts) == 3:
            found = self.owner.packages.get(urllib.parse.unquote(parts[2]))
            self._send(200 if found else 404, found.read_bytes() if found else b"", {})
            return
        project = parts[1]
        names = [name for name in self.owner.packages if name.split("-")[0].replace("_", "-") == project]
        links = "".join(f'<a href="{urllib.parse.quote(name)}">{name}</a>' for name in names)
        self._send(200 if names else 404, f"<html><body>{links}</body></html>".encode(), {"Content-Type": "text/html"})

    def _body(self, data: bytes, wanted: str) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted) if self.owner.ranges else None
        headers = {"ETag": '"1"', "Content-Type": "application/octet-stream"}
        if match is None:
            self._send(200, data, headers)
            return
        begin, end = int(match[1]), min(int(match[2] or len(data)) + 1, len(data))
        cut = self.owner.cuts.pop(0) if self.owner.cuts and end - begin > 1 else None
        self._send(206, data[begin:end], {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}, cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        part = body if cut is None else body[:cut]
        self.wfile.write(part)
        self.owner.sent += len(part)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_WR)
