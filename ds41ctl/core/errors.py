"""Errors: every failure a user can meet says what, expected, found and fix, and has one exit code."""

from __future__ import annotations

from collections.abc import Sequence

from ds41ctl.core.exits import Exit


class Ds41Error(Exception):
    """A failure with one clear line and the commands that help.

    `message` is one line; `hints` are paste-ready commands or short advice, in order; `detail` is evidence of
    several lines (log tail, list of processes) that follows the message.
    """

    code: Exit = Exit.INTERNAL
    retryable: bool = False

    def __init__(self, message: str, *, hints: Sequence[str] = (), detail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)
        self.detail = tuple(detail)


class ConfigError(Ds41Error):
    """Unknown key, wrong type, misspelt name."""

    code = Exit.USAGE


class UnsupportedError(Ds41Error):
    """The machine cannot do it, or a tool or resource (such as the port) is missing."""

    code = Exit.UNSUPPORTED


class NotFoundError(Ds41Error):
    """Profile, pack, store, engine or run is not there."""

    code = Exit.NOT_FOUND


class LockedError(Ds41Error):
    """Another run holds the lock."""

    code = Exit.LOCKED


class IntegrityError(Ds41Error):
    """Bytes differ from what was pinned."""

    code = Exit.INTEGRITY


class NetworkError(Ds41Error):
    """Network trouble; trying again may help."""

    code = Exit.NETWORK
    retryable = True


class UnauthorisedError(Ds41Error):
    """Credentials are missing or refused."""

    code = Exit.UNAUTHORISED


class NoSpaceError(Ds41Error):
    """A filesystem or the memory is too small."""

    code = Exit.NO_SPACE


class EngineDiedError(Ds41Error):
    """The engine process ended, or never became ready."""

    code = Exit.ENGINE_DIED


class AlreadyRunningError(Ds41Error):
    """An engine already runs."""

    code = Exit.ALREADY_RUNNING


class DeniedError(Ds41Error):
    """The operating system said no."""

    code = Exit.PERMISSION


class FindingsError(Ds41Error):
    """Something was checked and found wrong (for example `stop` left an orphan)."""

    code = Exit.FINDINGS


class DetachedError(Ds41Error):
    """Interrupted while waiting for something that goes on without us."""

    code = Exit.SIGINT
