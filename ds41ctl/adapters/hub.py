"""Hub: file lists, credentials and Xet streams. The only module that imports huggingface_hub and hf_xet."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from ds41ctl.adapters import download
from ds41ctl.adapters.download import Fault, Limits, Stream
from ds41ctl.core.errors import ConfigError, Ds41Error, IntegrityError, NetworkError
from ds41ctl.core.masking import mask_text
from ds41ctl.core.pins import PinnedFile, PinnedTree, check_paths
from ds41ctl.core.profile import Sha256

HUB = "https://huggingface.co"
# huggingface_hub reads these once, at import; its defaults of 10 s end multi-gigabyte requests on a busy line
TIMEOUTS = {"HF_HUB_DOWNLOAD_TIMEOUT": "120", "HF_HUB_ETAG_TIMEOUT": "30"}
_XET_TOKEN_SPARE_S = 60
# bytes that hf-xet keeps in memory: its defaults (1.6 GB, growing to 6.3 GB) would take it from an engine; and it
# reports nothing to anybody about what it does
XET_CONFIG = {
    "telemetry.enabled": False,
    "reconstruction.download_buffer_size": 64_000_000,
    "reconstruction.download_buffer_perfile_size": 16_000_000,
    "reconstruction.download_buffer_limit": 96_000_000,
    "reconstruction.min_prefetch_buffer": 32_000_000,
}


def _library() -> Any:
    for name, value in TIMEOUTS.items():
        found = os.environ.setdefault(name, value)
        if not found.isdecimal():
            raise ConfigError(f"{name}={found}: expected a whole number of seconds", hints=(f"unset {name}",))
    import huggingface_hub

    return huggingface_hub


class _Info(BaseModel):
    sha: str


class _Lfs(BaseModel):
    oid: Sha256
    size: int


class _TreeEntry(BaseModel):
    """One entry of the Hub's tree API; what is not needed is ignored."""

    type: str
    path: str
    oid: str = ""
    size: int = 0
    lfs: _Lfs | None = None
    xet_hash: str | None = Field(None, alias="xetHash")

    def pinned(self) -> PinnedFile:
        """The pin of this entry."""
        sha256, size = (self.lfs.oid, self.lfs.size) if self.lfs else ("", self.size)
        return PinnedFile(path=self.path, size=size, oid=self.oid, sha256=sha256, xet=self.xet_hash or "")


_TREE = TypeAdapter(list[_TreeEntry])


def _endpoint() -> str:
    """HF_ENDPOINT or the Hub itself. Raises ConfigError for anything that is no web address."""
    found = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        parts = urllib.parse.urlsplit(found)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # brackets or a port that are none
        good = False
    if not good or re.search(r"[\s\x00-\x1f]", found):
        raise ConfigError(
            f"HF_ENDPOINT={mask_text(os.environ['HF_ENDPOINT'])}: expected https://HOST or http://HOST:PORT",
            hints=("unset HF_ENDPOINT",),
        )
    return found


def _token() -> str | None:
    """The token of this environment. Raises ConfigError for one that no header can hold; it is never shown."""
    token: str | None = _library().get_token()
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(
            "the Hub token holds a blank or a character that no token has", hints=("export HF_TOKEN=hf_...",)
        )
    return token


def _flag(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


@dataclass
class Hub:
    """A Hub or a mirror of it, as the HF_* conventions of this environment say.

    `xet` says whether big files come from Xet storage; a mirror usually has none.
    """

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool
    xet: bool
    limits: Limits = field(default_factory=Limits)
    note: Callable[[str], None] = field(default=lambda text: None, repr=False)  # told of every wait for the file list

    @classmethod
    def of_environment(cls, *, xet: bool | None = None, limits: Limits | None = None) -> Hub:
        """HF_ENDPOINT, HF_TOKEN (or the token file in HF_HOME), HF_HUB_OFFLINE, HF_HUB_DISABLE_XET.

        `xet` None: on for the Hub itself, off for a mirror. Raises ConfigError for what cannot be meant.
        """
        endpoint = _endpoint()
        wanted = endpoint == HUB and not _flag("HF_HUB_DISABLE_XET") if xet is None else xet
        return cls(endpoint, _token(), _flag("HF_HUB_OFFLINE"), wanted, limits or Limits())

    @property
    def name(self) -> str:
        """The endpoint's host, for messages."""
        return urllib.parse.urlsplit(self.endpoint).netloc.rpartition("@")[2]

    def demand_online(self, what: str) -> None:
        """Raise NetworkError when this environment forbids the network."""
        if self.offline:
            raise NetworkError(f"HF_HUB_OFFLINE is set: {what} cannot be fetched", hints=("unset HF_HUB_OFFLINE",))

    def url(self, repo: str, revision: str, path: str) -> str:
        """Where a file is downloaded."""
        return f"{self.endpoint}/{repo}/resolve/{revision}/{urllib.parse.quote(path)}"

    def tree(self, repo: str, revision: str) -> PinnedTree:
        """Every file of a repository at one commit.

        Raises IntegrityError when the server answers with another commit or with unsafe paths, NotFoundError,
        UnauthorisedError, NetworkError.
        """
        what = f"{repo}@{revision[:12]}"
        self.demand_online(f"the file list of {repo}")
        client = download.Client(self.endpoint, self.token, self.limits, self.note)
        try:
            _, body = client.patiently(f"{self.endpoint}/api/models/{repo}/revision/{revision}", what)
            found = _Info.model_validate_json(body)
            if found.sha != revision:
                raise IntegrityError(f"{what}: the server answers with commit {found.sha}")
            entries: list[_TreeEntry] = []
            url = f"{self.endpoint}/api/models/{repo}/tree/{revision}?recursive=true&expand=false"
            while url:
                headers, body = client.patiently(url, what)
                entries += _TREE.validate_json(body)
                url = self._next_page(headers.get("link", ""))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise NetworkError(
                f"{what}: {self.name} does not answer as a Hub does ({where or 'document'}: {problem['msg']})"
            ) from None
        finally:
            client.close()
        tree = PinnedTree(repo=repo, revision=revision, files=tuple(e.pinned() for e in entries if e.type == "file"))
        check_paths(tree)
        return tree

    def _next_page(self, link: str) -> str:
        match = re.search(r'<([^>]+)>;\s*rel="next"', link)
        if match is None:
            return ""
        # a mirror may name the Hub itself in its links: the page is asked from the mirror
        return str(urllib.parse.urljoin(self.endpoint + "/", match[1].replace(HUB, self.endpoint, 1)))

    def xet_store(self, client: download.Client, repo: str, revision: str) -> XetStore:
        """The Xet storage behind a repository; nothing is asked yet."""
        return XetStore(self, client, repo, revision)


class XetStore:
    """The Xet storage behind a repository: one session for all, one token until it is nearly spent."""

    def __init__(self, hub: Hub, client: download.Client, repo: str, revision: str) -> None:
        self._hub, self._client = hub, client
        self._token_url = f"{hub.endpoint}/api/models/{repo}/xet-read-token/{revision}"
        self._lock = threading.Lock()
        self._session: Any = None
        self._access: dict[str, Any] = {}

    def file(self, xet_hash: str, size: int, what: str) -> XetFile:
        """One file of the store."""
        return XetFile(self, xet_hash, size, what)

    def group(self) -> Any:
        """A new stream group. Raises Fault when the Hub gives no usable token."""
        import hf_xet

        with self._lock:
            if self._session is None:
                self._session = hf_xet.XetSession(hf_xet.XetConfig().with_config(XET_CONFIG))
            if self._access.get("token_expiry_unix_secs", 0) <= time.time() + _XET_TOKEN_SPARE_S:
                self._access = self._token()
            refresh = {"Authorization": f"Bearer {self._hub.token}"} if self._hub.token else {}
            return self._session.new_download_stream_group(
                **self._access, token_refresh_url=self._token_url, token_refresh_headers=refresh
            )

    def _token(self) -> dict[str, Any]:
        headers, _ = self._client.get(self._token_url, "the Xet token")
        try:
            return {
                "endpoint": headers["x-xet-cas-url"],
                "token": headers["x-xet-access-token"],
                "token_expiry_unix_secs": int(headers["x-xet-token-expiration"]),
            }
        except (KeyError, ValueError):
            raise Fault(f"{self._hub.name} gives no usable Xet token") from None


class XetFile:
    """One file in Xet storage, with a stream group of its own.

    A stream that somebody waits for cannot be cancelled by itself (the library refuses: "Already borrowed"), its
    group can: that drops all streams of this file, and the next one opens a new group.
    """

    label = "xet"

    def __init__(self, store: XetStore, xet_hash: str, size: int, what: str) -> None:
        self._store, self._hash, self._size, self._what = store, xet_hash, size, what
        self._lock = threading.Lock()
        self._group: Any = None

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[Stream]:
        """Bytes [begin, end). Raises Fault whatever goes wrong in the library."""
        import hf_xet

        try:
            with self._lock:
                if self._group is None:
                    self._group = self._store.group()
                group = self._group
            stream = group.download_stream(hf_xet.XetFileInfo(self._hash, self._size), start=begin, end=end)
        except Ds41Error:
            raise
        except Exception as error:
            self.abort()
            raise Fault(f"{self._what}: Xet: {_first_line(error)}") from None
        try:
            yield _XetBody(self, stream, end - begin, self._what)
        finally:
            with contextlib.suppress(Exception):
                stream.cancel()

    def abort(self) -> None:
        """End every stream of this file."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):
                group.abort()


class _XetBody:
    def __init__(self, file: XetFile, stream: Any, length: int, what: str) -> None:
        self._file, self._stream, self._left, self._what = file, stream, length, what

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._stream:
                piece = chunk if len(chunk) <= self._left else chunk[: self._left]
                self._left -= len(piece)
                yield piece
        except Exception as error:
            raise Fault(f"{self._what}: Xet: {_first_line(error)}") from None
        if self._left:
            raise Fault(f"{self._what}: Xet: the stream ended {self._left} bytes early")

    def cancel(self) -> None:
        """End the streams of this file: a reader that waits gets an error or the end."""
        self._file.abort()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
