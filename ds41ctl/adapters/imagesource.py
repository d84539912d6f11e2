"""The source of an image: one commit of a git repository, proven by its id, with patches that are pinned as well.

Objects are kept in a bare repository below the cache folder, so that a second build needs no network; every build gets
a fresh tree of its own. git names an object by the hash of its bytes and checks it when it arrives: a tree whose commit
has the pinned id is the pinned tree, wherever it came from.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Mapping
from pathlib import Path

from ds41ctl.adapters import distro, files, proc
from ds41ctl.adapters.enginevenv import Progress
from ds41ctl.core.errors import (
    DeniedError,
    Ds41Error,
    IntegrityError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    UnauthorisedError,
    UnsupportedError,
)
from ds41ctl.core.masking import mask_text
from ds41ctl.core.profile import BuildPatch, Engine

GIT_S = 600.0  # policy: a local git command; a fetch is bounded by its speed instead
_SLOW = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")  # policy: under 1 kB/s for a minute is a stall
# nothing of this user's git may run or change bytes here: hooks, templates, helpers that ask, line ends, monitors
_PLAIN = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "credential.helper="),
    *("-c", "core.autocrlf=false", "-c", "core.eol=lf", "-c", "submodule.recurse=false", "-c", "gc.auto=0"),
    *("-c", "protocol.file.allow=always", "-c", "advice.detachedHead=false"),
)
_KEPT = ("PATH", "HOME", "XDG_CONFIG_HOME", "SSL_CERT_FILE", "SSH_AUTH_SOCK", "TMPDIR", "GIT_SSL_CAINFO")
PROXIES = ("http_", "https_", "no_", "HTTP_", "HTTPS_", "NO_", "ALL_PROXY", "all_proxy")


def wanted_patches(engine: Engine) -> str:
    """One line for all patches of a profile: another line means another image."""
    return " ".join(f"{patch.repo}@{patch.revision}:{patch.path}:{patch.sha256}" for patch in engine.build_patches)


def tree(engine: Engine, repo: str, cache: Path, target: Path, environ: Mapping[str, str], progress: Progress) -> None:
    """Make `target` the tree of the pinned commit, fetched from `repo` where the cache lacks it, with the patches on.

    The folder around it is this build's own and made anew.

    Raises NotFoundError, NetworkError, UnauthorisedError, NoSpaceError or UnsupportedError with git's own last words,
    IntegrityError for another commit, a patch of another digest, or one that does not apply.
    """
    if shutil.which("git", path=environ.get("PATH")) is None:
        raise UnsupportedError("git is not installed", hints=(distro.install_line("git"),))
    git = _Git(environ, progress)
    store = git.have(cache, repo, engine.build_revision)
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir(parents=True)
    git.run("init", "-q", "--template=", str(target))
    git.run("-C", str(target), "fetch", "-q", "--depth", "1", "--no-tags", str(store), engine.build_revision)
    git.run("-C", str(target), "checkout", "-q", "--force", "--detach", engine.build_revision)
    head = git.run("-C", str(target), "rev-parse", "HEAD")
    if head != engine.build_revision:
        raise IntegrityError(f"{repo}: the tree is {head[:12]}, {engine.build_revision[:12]} is pinned")
    if (target / ".gitmodules").is_file():  # their commits are named by the tree
        git.run("-C", str(target), "remote", "add", "origin", repo)
        git.run("-C", str(target), *_SLOW, "submodule", "update", "-q", "--init", "--recursive", "--depth", "1")
    for patch in engine.build_patches:
        _apply(git, patch, git.have(cache, patch.repo, patch.revision), target, progress)


def _apply(git: _Git, patch: BuildPatch, store: Path, target: Path, progress: Progress) -> None:
    """Put what `patch.path` names on the tree, in the order of the names, each proven before it is used."""
    names = git.run("-C", str(store), "ls-tree", "-r", "-z", "--name-only", patch.revision).split("\0")
    found = sorted(name for name in names if name and fnmatch.fnmatchcase(name, patch.path))
    if not found:
        raise NotFoundError(f"no {patch.path} in {patch.repo} at {patch.revision[:12]}")
    for name in found:
        # this verb writes the very bytes into a file here; no attribute of the repository changes them
        file = target.parent / git.run(
            "--git-dir", str(store), "unpack-file", f"{patch.revision}:{name}", at=target.parent
        )
        now = files.file_sha256(file)
        if patch.sha256 and now != patch.sha256:
            raise IntegrityError(f"{patch.repo}: {name} has sha256 {now[:12]}, {patch.sha256[:12]} is pinned")
        progress(f"patch {name}", {})
        done = git.ask("-C", str(target), "apply", "--whitespace=nowarn", "-p1", str(file))
        if not done.ok:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[0]
            raise IntegrityError(f"{patch.repo}: {name} does not apply to the pinned source: {said[:200]}")


class _Git:
    """git without questions, hooks and this user's habits."""

    def __init__(self, environ: Mapping[str, str], progress: Progress) -> None:
        kept = {name: value for name, value in environ.items() if name in _KEPT or name.startswith(PROXIES)}
        self._env = kept | {
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "true",
            "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=15",
            "GIT_LFS_SKIP_SMUDGE": "1",
            "LC_ALL": "C",
        }
        self._progress = progress

    def ask(self, *words: str, at: Path | None = None) -> proc.Completed:
        """Run git to its end, in the folder `at`."""
        return proc.run(["git", *_PLAIN, *words], timeout=GIT_S, env=self._env, cwd=at)

    def run(self, *words: str, at: Path | None = None) -> str:
        """Its output. Raises Ds41Error with its last words."""
        done = self.ask(*words, at=at)
        if not done.ok:
            raise _error("git " + next((word for word in words if word in _VERBS), words[0]), done.stderr)
        return done.stdout.strip("\n")

    def have(self, cache: Path, repo: str, revision: str) -> Path:
        """A bare repository below `cache` that holds the commit, fetched from `repo` when it does not yet."""
        store = cache / f"{revision}.git"
        if store.is_dir() and self.ask("-C", str(store), "fsck", "--no-dangling", "--no-progress", revision).ok:
            return store
        new = store.with_name(store.name + files.PART_SUFFIX)
        shutil.rmtree(new, ignore_errors=True)
        new.parent.mkdir(parents=True, exist_ok=True)
        self._progress(f"{mask_text(repo)} at {revision[:12]}", {"note": True})
        self.run("init", "-q", "--bare", "--template=", str(new))
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            self._progress(mask_text(line.strip())[:100], {})

        ref = f"{revision}:refs/heads/pinned"
        words = ["-C", str(new), "fetch", "--depth", "1", "--no-tags", "--progress", "--no-recurse-submodules"]
        status = proc.stream(["git", *_PLAIN, *_SLOW, *words, "--", repo, ref], env=self._env, on_line=on_line)
        if status:
            raise _error(f"{mask_text(repo)}: {revision[:12]} cannot be fetched", "\n".join(lines))
        self.run("-C", str(new), "symbolic-ref", "HEAD", "refs/heads/pinned")
        shutil.rmtree(store, ignore_errors=True)
        new.rename(store)
        return store


_VERBS = ("init", "fetch", "checkout", "rev-parse", "remote", "submodule", "ls-tree", "unpack-file", "symbolic-ref")
# what git says (LC_ALL=C) -> what it means for whoever waits for the source
_MEANS: tuple[tuple[tuple[str, ...], type[Ds41Error]], ...] = (
    (("No space left", "Disk quota exceeded"), NoSpaceError),
    (("dubious ownership",), DeniedError),
    (("not our ref", "couldn't find remote ref", "does not appear to be a git repository"), NotFoundError),
    (("repository not found", "Repository not found", "does not exist", "not found: did you run"), NotFoundError),
    (("could not read Username", "Authentication failed", "Permission denied", "terminal prompts"), UnauthorisedError),
    (("unable to access", "Could not resolve", "Connection", "early EOF", "RPC failed", "hung up"), NetworkError),
)


def _error(what: str, text: str) -> Ds41Error:
    lines = [mask_text(line.strip()) for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines[-1:] or ["no reason given"]
    kind = next((kind for words, kind in _MEANS if any(word in text for word in words)), UnsupportedError)
    hints = ("--checkout FOLDER|URL   # another repository that holds the commit",)
    return kind(f"{what}: {told[0][:200]}", detail=lines[-8:] if lines[1:] else (), hints=hints)


def build_argv(script: Path) -> list[str]:
    """How a build script is run: by the interpreter its first line names, whatever its mode and mount."""
    try:
        first = script.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except IndexError:
        first = ""
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    return [*(words or ["sh"]), str(script)]


def build_environment(environ: Mapping[str, str], image: str) -> dict[str, str]:
    """What a build may see of this shell, and the name the image shall have."""
    names = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR")
    kept = {
        name: value
        for name, value in environ.items()
        if name in names or name.startswith(("DOCKER_", "BUILDKIT_", "BUILDAH_", "CONTAINER", *PROXIES))
    }
    return kept | {"IMAGE": image}
