"""Exit codes: one documented meaning each, the same for every command."""

from enum import IntEnum


class Exit(IntEnum):
    """Process exit codes (README has the table; a test keeps the two equal)."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    INCONCLUSIVE = 3
    UNSUPPORTED = 4
    NOT_FOUND = 10
    LOCKED = 11
    INTEGRITY = 12
    NETWORK = 13
    UNAUTHORISED = 14
    NO_SPACE = 15
    ENGINE_DIED = 16
    ALREADY_RUNNING = 17
    INTERNAL = 70
    PERMISSION = 77
    SIGINT = 130
    SIGTERM = 143


MEANING: dict[Exit, str] = {
    Exit.OK: "done, or every check passed",
    Exit.FINDINGS: "a check, a smoke test or `stop` found something wrong",
    Exit.USAGE: "usage or bad configuration: unknown key, wrong value, misspelt DS41_ name",
    Exit.INCONCLUSIVE: "could not judge (time ran out, nothing to compare with)",
    Exit.UNSUPPORTED: "this machine is not supported, or a tool or the port it needs is missing",
    Exit.NOT_FOUND: "profile, pack, store, engine or run not found",
    Exit.LOCKED: "another ds41ctl run holds the lock",
    Exit.INTEGRITY: "bytes differ from their pin (pack, store, engine)",
    Exit.NETWORK: "network or Hub unavailable; trying again may help",
    Exit.UNAUTHORISED: "not authorised, or the repository is gated",
    Exit.NO_SPACE: "no space on a filesystem, or not enough memory",
    Exit.ENGINE_DIED: "the engine died or never became ready",
    Exit.ALREADY_RUNNING: "an engine is already running",
    Exit.INTERNAL: "a bug in ds41ctl (DS41_DEBUG=1 shows the traceback)",
    Exit.PERMISSION: "permission denied",
    Exit.SIGINT: "interrupted (Ctrl-C)",
    Exit.SIGTERM: "terminated",
}
