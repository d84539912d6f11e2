"""Fidelity: what one engine thinks of fixed texts, against what another one thought of them.

Recording and comparing are separate: a reference is a file with its provenance, and a comparison sends the very token
ids of that file. Perplexity is compared window by window (paired), since texts differ far more than engines do.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds41ctl.adapters.http import EngineClient, Fault, HttpFault, Limits
from ds41ctl.core import logprobs
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile
from smoke import stats
from smoke import texts as texts_module
from smoke.prompts import CHARS_MAX

REFERENCE_SCHEMA = 1
TOP = 8  # best tokens kept of each position
WINDOWS = 16  # a text set; seed 004 used 64 of 1,024 tokens
SEED_WINDOWS, SEED_WINDOW = 64, 1024
LIMIT_S = 600.0  # one window

Progress = Callable[[str], None]


class Window(BaseModel):
    """One prompt: its token ids, the log-probability of each after the first, and the best few of each position."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    set: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of a token, nats."""
        return -statistics.fmean(self.logprobs)


class Reference(BaseModel):
    """A recorded run, with where it came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = Field(REFERENCE_SCHEMA, alias="schema")
    provenance: dict[str, str]
    windows: tuple[Window, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Change:
    """Change of perplexity on one text set: (new - old) / old with its 95 % interval over windows."""

    set: str
    windows: int
    tokens: int
    perplexity: stats.Interval
    better: int


def builtin_texts(tokens: int = WINDOWS * logprobs.USUAL_WINDOW) -> dict[str, str]:
    """Three text sets that need no file, of about `tokens` tokens or more: English and French sentences of a grammar,
    and this project's Python source."""
    return {name: make(round(tokens * CHARS_MAX / 2)) for name, make in texts_module.KINDS.items()}


def texts_of(folder: Traversable) -> dict[str, str]:
    """Text sets of a folder: each NAME.txt is one. Raises ConfigError when there is none, or one is not UTF-8."""
    found = {}
    for path in sorted(folder.iterdir(), key=lambda item: item.name):
        if path.name.endswith(".txt"):
            try:
                found[path.name.removesuffix(".txt")] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path.name}: not UTF-8 (byte {error.start})") from None
    if not found:
        raise ConfigError(f"{folder.name}: no .txt file, expected one a text set")
    return found


def record(
    client: EngineClient,
    profile: Profile,
    texts: Mapping[str, str],
    provenance: Mapping[str, str],
    progress: Progress,
    *,
    windows: int = WINDOWS,
    size: int | None = None,
    argv: tuple[str, ...] = (),
) -> Reference:
    """Ask the engine about the first `windows` windows of each text set, of `size` tokens each (None: the longest that
    is safe). `argv`: how it was started.

    Raises HttpFault, NoRoomError before anything is sent, ConfigError for windows over the limit.
    """
    size = window_size(profile, size, argv)
    found = []
    for name, text in texts.items():
        ids = _tokenize(client, profile, text, size * windows)
        chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
        chunks = [chunk for chunk in chunks[:windows] if len(chunk) == size] or [ids[:size]]
        if len(chunks[0]) < 2:
            raise ConfigError(f"text set {name}: expected at least 2 tokens, found {len(chunks[0])}")
        for number, chunk in enumerate(chunks):
            progress(f"{name}: window {number + 1} of {len(chunks)}")
            found.append(_ask(client, profile, name, chunk))
    return Reference(schema=REFERENCE_SCHEMA, provenance=dict(provenance), windows=tuple(found))


def window_size(profile: Profile, wanted: int | None, argv: tuple[str, ...] = ()) -> int:
    """Length of a window, tokens: `wanted`, or the longest that is safe. Raises NoRoomError, ConfigError."""
    most = min(logprobs.window(profile, argv), profile.serve.max_model_len - 8)
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"windows of {wanted} tokens: {profile.name} has room for {most} (bench.logprob_window)",
            hints=(f"--window-tokens {most}",),
        )
    return wanted or most


def require_room(profile: Profile, reference: Reference, argv: tuple[str, ...] = ()) -> None:
    """The windows of `reference` may be asked for. Raises NoRoomError, ConfigError for windows over the limit."""
    longest, allowed = max(len(window.ids) for window in reference.windows), logprobs.window(profile, argv)
    if longest > allowed:
        raise ConfigError(
            f"the reference has windows of {longest} tokens, this profile allows {allowed} "
            "(prompt_logprobs of long prompts run out of memory)",
            hints=("record it anew with this profile: ds41ctl smoke --record FILE",),
        )


def again(
    client: EngineClient,
    profile: Profile,
    reference: Reference,
    progress: Progress,
    *,
    argv: tuple[str, ...] = (),
) -> Reference:
    """Ask another engine about the windows of `reference`. `argv`: how it was started.

    Raises HttpFault, NoRoomError before anything is sent, ConfigError for windows over the limit.
    """
    require_room(profile, reference, argv)
    found = []
    for number, window in enumerate(reference.windows):
        progress(f"window {number + 1} of {len(reference.windows)} ({window.set})")
        found.append(_ask(client, profile, window.set, list(window.ids)))
    return Reference(schema=REFERENCE_SCHEMA, provenance={}, windows=tuple(found))


def _tokenize(client: EngineClient, profile: Profile, text: str, wanted: int) -> list[int]:
    body = {"model": profile.model.served_name, "prompt": text[: wanted * 12], "add_special_tokens": False}
    tree = client.post_json("/tokenize", body, Limits(total_s=120)).ok_json()
    ids = tree.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(item, int) for item in ids):
        raise HttpFault(Fault.BAD_JSON, "/tokenize gives no list of token ids", status=200)
    return ids[:wanted]


def _ask(client: EngineClient, profile: Profile, name: str, ids: list[int]) -> Window:
    body = {
        "model": profile.model.served_name,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP,
    }
    tree = client.post_json("/v1/completions", body, Limits(total_s=LIMIT_S)).ok_json()
    try:
        rows = tree["choices"][0]["prompt_logprobs"][1:]
        logprobs = tuple(float(row[str(token)]["logprob"]) for row, token in zip(rows, ids[1:], strict=True))
        top = tuple(_best(row) for row in rows)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        text = f"no prompt_logprobs for every token ({type(error).__name__}: {error})"
        raise HttpFault(Fault.BAD_JSON, text, status=200) from None
    return Window(set=name, ids=tuple(ids), logprobs=logprobs, top=top)


def _best(row: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    ordered = sorted(((int(token), float(item["logprob"])) for token, item in row.items()), key=lambda x: -x[1])
    return tuple(ordered[:TOP])


# comparing: pure


def dump(reference: Reference) -> bytes:
    """A reference as a file's content; numbers keep every bit."""
    return (json.dumps(reference.model_dump(mode="json", by_alias=True)) + "\n").encode()


def parse(raw: bytes, where: str) -> Reference:
    """Reference of a file's content. Raises ConfigError."""
    try:
        found = Reference.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:3])
        raise ConfigError(f"{where}: not a fidelity reference: {place}: {first['msg']}") from None
    if found.schema_version != REFERENCE_SCHEMA:
        raise ConfigError(f"{where}: schema {found.schema_version}, this version reads {REFERENCE_SCHEMA}")
    return found


def changes(old: Reference, new: Reference) -> list[Change]:
    """Change of perplexity of each text set, and of all together first."""
    pairs = list(zip(old.windows, new.windows, strict=True))
    sets = list(dict.fromkeys(window.set for window in old.windows))
    found = []
    for name in ["all", *sets] if len(sets) > 1 else sets:
        chosen = [(a, b) for a, b in pairs if name in ("all", a.set)]
        differences = [b.nll - a.nll for a, b in chosen]
        mean = stats.mean_difference(differences)
        found.append(
            Change(
                set=name,
                windows=len(chosen),
                tokens=sum(len(a.logprobs) for a, _ in chosen),
                perplexity=stats.Interval(*(math.expm1(x) for x in (mean.value, mean.low, mean.high))),
                better=sum(difference < 0 for difference in differences),
            )
        )
    return found


def divergence(old: Window, new: Window) -> list[float]:
    """KL(old || new) of each position, nats, at least: over the tokens `old` kept, and one bucket for all others.

    A token that `new` did not name is no likelier than the least one it named.
    """
    return [_kl(dict(a), dict(b)) for a, b in zip(old.top, new.top, strict=True)]


def _kl(old: Mapping[int, float], new: Mapping[int, float]) -> float:
    floor = min(new.values(), default=-30.0)
    total = kept_old = kept_new = 0.0
    for token, logprob in old.items():
        p, q_log = math.exp(logprob), min(new.get(token, floor), 0.0)
        total += p * (logprob - q_log)
        kept_old += p
        kept_new += math.exp(q_log)
    rest_old, rest_new = max(1 - kept_old, 1e-12), max(1 - kept_new, 1e-12)
    return max(0.0, total + rest_old * (math.log(rest_old) - math.log(rest_new)))


def identical(old: Reference, new: Reference) -> tuple[int, int]:
    """(windows whose log-probabilities are equal bit for bit, windows)."""
    same = sum(a.logprobs == b.logprobs for a, b in zip(old.windows, new.windows, strict=True))
    return same, len(old.windows)


def perplexities(reference: Reference) -> list[Finding]:
    """What the engine thinks of each text set, and of all together first: a measurement, nothing is judged."""
    found = []
    for name, windows in _sets(reference):
        mean = statistics.fmean(window.nll for window in windows)
        tokens = sum(len(window.logprobs) for window in windows)
        text = f"{math.exp(mean):.4g} over {len(windows)} windows, {tokens} tokens; measured, nothing to compare with"
        found.append(Finding(id=f"fidelity.perplexity.{name}", status=Status.OK, summary=text, found=text))
    return found


def _sets(reference: Reference) -> list[tuple[str, list[Window]]]:
    names = list(dict.fromkeys(window.set for window in reference.windows))
    wanted = ["all", *names] if len(names) > 1 else names
    return [(name, [window for window in reference.windows if name in ("all", window.set)]) for name in wanted]


def restarted(first: Reference, second: Reference, profile: Profile, same_start: str) -> Finding:
    """Finding of the same windows before and after a restart. `same_start`: '' when the engine was started again just
    as it had been, else what differs."""
    test = "fidelity.restart"
    same, count = identical(first, second)
    longest = max(len(window.ids) for window in first.windows)
    found = f"{same} of {count} windows of up to {longest} tokens bit-identical after the restart"
    expected = f"prompt log-probabilities of all {count} windows bit-identical"
    fix = ("ds41ctl engine verify", "ds41ctl engram verify --full", "ds41ctl fetch --verify")
    why = "the same engine and pack give other numbers after a restart: another kernel, table or card"
    if same_start:
        reason = f"{found}, but it was not started as before: {same_start}"
        return Finding(
            id=test, status=Status.UNKNOWN, summary=reason, expected=expected, found=found, why=why, fix=fix[:1]
        )
    if same == count:
        return Finding(id=test, status=Status.OK, summary=found, expected=expected, found=found)
    promised = profile.smoke.restart_exact
    note = found if promised else f"{found}; the profile does not promise it (smoke.restart_exact)"
    status = Status.FAIL if promised else Status.WARN
    return Finding(id=test, status=status, summary=note, expected=expected, found=found, why=why, fix=fix)


def judge(old: Reference, new: Reference, profile: Profile) -> list[Finding]:
    """Findings of a comparison: perplexity of each set, divergence, and bit-identity where the profile promises it."""
    worst = profile.smoke.perplexity_change_max
    findings = [_perplexity(item, worst) for item in changes(old, new)]
    kl = [value for a, b in zip(old.windows, new.windows, strict=True) for value in divergence(a, b)]
    text = f"mean {statistics.fmean(kl):.5f}, p99 {stats.quantile(kl, 0.99):.4f}, largest {max(kl):.4f} nats (at least)"
    limit = profile.smoke.kl_max
    if limit is not None and statistics.fmean(kl) > limit:
        findings.append(
            Finding(
                id="fidelity.divergence",
                status=Status.FAIL,
                summary=text,
                expected=f"mean at most {limit:g} nats",
                found=text,
                why="the distributions differ more than this profile's build does from the oracle",
                fix=("ds41ctl fetch --verify", "ds41ctl engine verify"),
            )
        )
    else:
        findings.append(Finding(id="fidelity.divergence", status=Status.OK, summary=text, found=text))
    same, count = identical(old, new)
    found = f"{same} of {count} windows bit-identical"
    if same == count or not profile.smoke.restart_exact:
        note = found if same == count else f"{found}; the profile does not promise it"
        findings.append(Finding(id="fidelity.identical", status=Status.OK, summary=note, found=found))
    else:
        findings.append(
            Finding(
                id="fidelity.identical",
                status=Status.FAIL,
                summary=found,
                expected=f"all {count}, as the profile promises",
                found=found,
                why="the same engine and pack give other numbers after a restart: another kernel, table or card",
                fix=("ds41ctl engine verify", "ds41ctl engram verify --full", "ds41ctl fetch --verify"),
            )
        )
    return findings


def _perplexity(item: Change, worst: float) -> Finding:
    name = f"fidelity.perplexity.{item.set}"
    shown = f"{item.perplexity.value:+.2%} [{item.perplexity.low:+.2%}, {item.perplexity.high:+.2%}]"
    found = f"{shown} over {item.windows} windows, {item.tokens} tokens, {item.better} better"
    expected = f"at most {worst:+.1%} against the reference"
    if item.perplexity.low > worst:
        status, why = Status.FAIL, "this pack or engine is worse than the reference, beyond the noise of the texts"
    elif item.perplexity.low > 0 and item.perplexity.value > worst / 10:
        status, why = Status.WARN, "a small loss, but a real one"
    elif item.perplexity.high > worst and item.perplexity.value > worst:
        status, why = Status.UNKNOWN, "too few windows to tell a loss from noise"
    else:
        return Finding(id=name, status=Status.OK, summary=found, expected=expected, found=found)
    fix = ("ds41ctl fetch --verify", "ds41ctl engram verify --full", "more windows: --windows 64")
    return Finding(id=name, status=status, summary=found, expected=expected, found=found, why=why, fix=fix)
