"""A loopback Hub with the real Hub's API: model info, tree, resolve, LFS redirect to another host, Range, Xet token.

Faults are scripted: each says which requests it meets and what happens to them. `log` keeps every request with the
bytes that were sent for it. The real huggingface_hub client works against it (tests/contract/test_hub.py).
`python -m tests.fakes.hub FOLDER [STORE]` serves a folder as `owner/repo` for benchmarks, from a Xet store too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

REVISION = "0123456789abcdef0123456789abcdef01234567"
LFS_FROM = 1000  # bytes: files of this size and more are LFS files, as *.safetensors are on the Hub
PAGE = 50  # entries a page of the tree


@dataclass
class Entry:
    """One request as it was answered."""

    stage: str
    method: str
    path: str
    range: str
    status: int = 0
    sent: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """What happens to the first `times` requests of `stage` (api, tree, resolve, cdn, token) whose path holds `path`.

    `status`: answer that. `cut`: send so many bytes of the body and reset. `stall`: send `cut` bytes, then nothing for
    so many seconds. `drip`: bytes a second. `html`: a login page. `change`: rewrite the answer's body. `hold`: called
    before the answer begins, which it may keep waiting.
    `skip`: let so many matching requests pass first.
    """

    stage: str
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    stall: float = 0.0
    drip: int = 0
    delay: float = 0.0
    hold: Callable[[], object] | None = None
    html: bool = False
    no_ranges: bool = False
    no_if_range: bool = False  # the range is sent although its If-Range names another ETag
    location: str = ""
    change: Callable[[bytes], bytes] | None = None

    def wait(self) -> None:
        """What comes before the answer."""
        time.sleep(self.delay)
        if self.hold is not None:
            self.hold()


@dataclass
class Remote:
    """One file of a fake repository. `data` in memory or `file` on disk."""

    size: int
    sha256: str
    oid: str
    lfs: bool
    data: bytes = b""
    file: Path | None = None
    xet: str = ""


def git_oid(data: bytes) -> str:
    """Blob id of `data`."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """The LFS pointer that git keeps instead of the content."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


class FakeHub:
    """Serves repositories on two ports: `url` is the Hub, the other one the store that LFS files redirect to."""

    def __init__(self, *, token: str = "", revision: str = REVISION, tls: ssl.SSLContext | None = None) -> None:
        self.token, self.revision, self.tls = token, revision, tls
        self.repos: dict[str, dict[str, Remote]] = {}
        self.revisions: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.log: list[Entry] = []
        self.xet_endpoint = ""
        self.ranges_from_cdn = True
        self._lock = threading.Lock()
        self._servers = [self._server("hub"), self._server("cdn")]
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._servers[0].server_port}"
        # another host name, so that credentials must not follow
        self.cdn = f"{scheme}://localhost:{self._servers[1].server_port}"

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repo: str, files: Mapping[str, bytes | Path], *, revision: str = "") -> None:
        """Make or extend a repository."""
        found = self.repos.setdefault(repo, {})
        self.revisions[repo] = revision or self.revision
        for name, content in files.items():
            if isinstance(content, Path):
                with content.open("rb") as source:
                    sha256 = hashlib.file_digest(source, "sha256").hexdigest()
                size = content.stat().st_size
                found[name] = Remote(size, sha256, git_oid(pointer(sha256, size)), True, file=content)
                continue
            sha256, size = hashlib.sha256(content).hexdigest(), len(content)
            lfs = size >= LFS_FROM or name.endswith(".safetensors")
            oid = git_oid(pointer(sha256, size)) if lfs else git_oid(content)
            found[name] = Remote(size, sha256, oid, lfs, data=content)

    def add_sparse(self, repo: str, files: Mapping[str, Path], *, revision: str = "") -> None:
        """Files whose digests are made up: for those of many gigabytes that are holes, of which nobody asks much."""
        found = self.repos.setdefault(repo, {})
        self.revisions[repo] = revision or self.revision
        for name, path in files.items():
            sha256, size = hashlib.sha256(f"{repo} {name}".encode()).hexdigest(), path.stat().st_size
            found[name] = Remote(size, sha256, git_oid(pointer(sha256, size)), True, file=path)

    def store_in_xet(self, repo: str, store: Path, names: Sequence[str] = ()) -> None:
        """Put files of a repository (default: all LFS files) into a Xet store of hf-xet's own; state their hashes."""
        import hf_xet

        store.mkdir(exist_ok=True)
        self.xet_endpoint = f"local://{store}"
        for name, item in self.repos[repo].items():
            if not item.lfs or (names and name not in names):
                continue
            with hf_xet.XetSession().new_upload_commit(endpoint=self.xet_endpoint) as commit:
                upload = commit.start_upload_file(str(item.file)) if item.file else commit.start_upload_bytes(item.data)
            item.xet = upload.result().xet_info.hash

    def sent(self, path: str) -> int:
        """Body bytes sent so far for requests of a path."""
        with self._lock:
            return sum(entry.sent for entry in self.log if entry.path.endswith(path))

    def requests(self, stage: str, path: str = "") -> list[Entry]:
        """Requests of a stage whose path holds `path`."""
        with self._lock:
            return [entry for entry in self.log if entry.stage == stage and path in entry.path]

    def fault(self, entry: Entry) -> Fault | None:
        """The fault this request meets, counted down."""
        with self._lock:
            self.log.append(entry)
            for fault in self.faults:
                if fault.stage == entry.stage and fault.path in entry.path and fault.times > 0:
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def _server(self, role: str) -> ThreadingHTTPServer:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub, Handler.role = hub, role
        server = _Server(("127.0.0.1", 0), Handler)
        if self.tls is not None:  # the handshake is the handler's, so that a client that refuses us blocks nobody
            server.socket = self.tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    role: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            self._route()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if self.role == "cdn":
            repo, _, name = path.removeprefix("/").partition("//")
            self._file("cdn", repo, name, {})
            return
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            self._json("api", match[1], match[2], lambda repo: self._info(repo, match[1]))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._json("tree", match[1], match[2], self._tree)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/xet-read-token/([^/]+)", path):
            self._json("token", match[1], match[2], self._token)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        else:
            self._send(404, {}, b"no such page")

    # ---- API

    def _entry(self, stage: str) -> Entry:
        return Entry(
            stage,
            self.command,
            self.path,
            self.headers.get("Range", ""),
            headers={name.lower(): value for name, value in self.headers.items()},
        )

    def _refused(self, entry: Entry, repo: str, revision: str) -> bool:
        """Answer what a scripted fault or the Hub's own rules refuse."""
        fault = self.hub.fault(entry)
        self.active = fault
        if fault is not None:
            fault.wait()
            if fault.html:
                self._send(200, {"Content-Type": "text/html"}, b"<html>please log in</html>", entry)
                return True
            if fault.location:
                self._send(302, {"Location": fault.location}, b"", entry)
                return True
            if fault.status:
                self._send(fault.status, fault.headers, b'{"error": "scripted"}', entry)
                return True
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, {"X-Error-Code": "GatedRepo"}, b"{}", entry)
            return True
        if repo not in self.hub.repos:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}', entry)
            return True
        if revision != self.hub.revisions[repo]:
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}', entry)
            return True
        return False

    def _json(self, stage: str, repo: str, revision: str, make: Callable[[str], tuple[Any, dict[str, str]]]) -> None:
        entry = self._entry(stage)
        if self._refused(entry, repo, revision):
            return
        tree, headers = make(repo)
        body = json.dumps(tree).encode()
        if self.active is not None and self.active.change is not None:
            body = self.active.change(body)
        self._send(200, {"Content-Type": "application/json", **headers}, body, entry)

    def _info(self, repo: str, name: str) -> tuple[Any, dict[str, str]]:
        siblings = [{"rfilename": path} for path in self.hub.repos[repo]]
        info = {"_id": "1", "id": name, "modelId": name, "sha": self.hub.revisions[repo], "siblings": siblings}
        return {**info, "private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}, {}

    def _tree(self, repo: str) -> tuple[Any, dict[str, str]]:
        entries: list[dict[str, Any]] = []
        folders = set()
        for path, item in self.hub.repos[repo].items():
            folders |= {str(parent) for parent in Path(path).parents} - {"."}
            entry: dict[str, Any] = {"type": "file", "oid": item.oid, "size": item.size, "path": path}
            if item.lfs:
                size = len(pointer(item.sha256, item.size))
                entry["lfs"] = {"oid": item.sha256, "size": item.size, "pointerSize": size}
            if item.xet:
                entry["xetHash"] = item.xet
            entries.append(entry)
        entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)]
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + PAGE < len(entries):
            base = urllib.parse.urlsplit(self.path).path
            headers["Link"] = f'<{self.hub.url}{base}?recursive=True&cursor={start + PAGE}>; rel="next"'
        return entries[start : start + PAGE], headers

    def _token(self, repo: str) -> tuple[Any, dict[str, str]]:
        expires = int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": self.hub.xet_endpoint,
            "X-Xet-Access-Token": "xet-token",
            "X-Xet-Token-Expiration": str(expires),
        }
        return {"accessToken": "xet-token", "casUrl": self.hub.xet_endpoint, "exp": expires}, headers

    # ---- files

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        entry = self._entry("resolve")
        if self._refused(entry, repo, revision):
            return
        item = self.hub.repos[repo].get(name)
        if item is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b'{"error": "Entry not found"}', entry)
            return
        headers = {"X-Repo-Commit": revision}
        if item.lfs:
            headers |= {"X-Linked-Etag": f'"{item.sha256}"', "X-Linked-Size": str(item.size)}
            headers |= {"ETag": f'"{item.sha256}"'}
            if item.xet:
                route = f"{self.hub.url}/api/models/{repo}/xet-read-token/{revision}"
                headers |= {"X-Xet-Hash": item.xet, "X-Xet-Refresh-Route": route}
            if self.active is not None:
                headers |= self.active.headers
            target = f"{self.hub.cdn}/{repo}//{urllib.parse.quote(name)}?signature=1"
            self._send(302, {**headers, "Location": target}, b"", entry)
            return
        self._body(entry, item, {**headers, "ETag": f'"{item.oid}"'})

    def _file(self, stage: str, repo: str, name: str, headers: dict[str, str]) -> None:
        entry = self._entry(stage)
        fault = self.hub.fault(entry)
        self.active = fault
        if fault is not None:
            fault.wait()
            if fault.html:
                self._send(200, {"Content-Type": "text/html"}, b"<html>please log in</html>" * 80, entry)
                return
            if fault.location:
                self._send(302, {"Location": fault.location}, b"", entry)
                return
            if fault.status:
                self._send(fault.status, fault.headers, b"scripted", entry)
                return
        item = self.hub.repos[repo][name]
        self._body(entry, item, {**headers, "ETag": f'"{item.sha256}"', "Accept-Ranges": "bytes"})

    def _body(self, entry: Entry, item: Remote, headers: dict[str, str]) -> None:
        fault = self.active or Fault("")
        begin, end, status = 0, item.size, 200
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        current = self.headers.get("If-Range") in (None, fault.headers.get("ETag", headers.get("ETag")))
        current = current or fault.no_if_range
        if match and current and not fault.no_ranges:
            begin, end = int(match[1]), min(int(match[2] or item.size - 1) + 1, item.size)
            if begin >= item.size:
                self._send(416, {"Content-Range": f"bytes */{item.size}"}, b"", entry)
                return
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{item.size}"
        headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(end - begin), **fault.headers}
        entry.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if item.file is not None and self.active is None:
            self._sendfile(entry, item.file, begin, end)
            return
        data = item.data[begin:end] if item.file is None else item.file.read_bytes()[begin:end]
        if fault.change is not None:
            data = fault.change(data)
        self._scripted(entry, data, fault)

    def _sendfile(self, entry: Entry, path: Path, begin: int, end: int) -> None:
        self.wfile.flush()
        with path.open("rb") as source:
            while begin < end:
                count = os.sendfile(self.connection.fileno(), source.fileno(), begin, min(end - begin, 1 << 20))
                begin += count
                entry.sent += count

    def _scripted(self, entry: Entry, data: bytes, fault: Fault) -> None:
        stop = len(data) if fault.cut is None else min(fault.cut, len(data))
        step = fault.drip or 1 << 16
        for at in range(0, stop, step):
            piece = data[at : min(at + step, stop)]
            self.wfile.write(piece)
            entry.sent += len(piece)
            if fault.drip:
                time.sleep(1)
        if fault.stall:
            time.sleep(fault.stall)
        if fault.cut is not None:
            self.close_connection = True
            time.sleep(0.05)  # a reset throws away what the client has not read yet
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, entry: Entry | None = None) -> None:
        if entry is not None:
            entry.status, entry.sent = status, len(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def serve(folder: Path, store: Path | None = None) -> None:
    """Serve a folder until killed, its files put into a Xet `store`; the first line of stdout is the URL."""
    hub = FakeHub()
    hub.add("owner/repo", {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()})
    if store is not None:
        hub.store_in_xet("owner/repo", store)
    print(hub.url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(*map(Path, sys.argv[1:]))
