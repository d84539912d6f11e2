"""Fidelity: recording, comparing, and what an interval must say about a loss, a gain and noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters.http import EngineClient, HttpFault
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.finding import Status
from smoke import fidelity
from smoke.fidelity import Reference, Window
from tests.fakes.profiles import least_profile
from tests.fakes.sse_server import Request, Script, ScriptedServer, whole

PROFILE = least_profile()
EXACT = least_profile(restart_exact=True)


def logprob(token: int, place: int, shift: float = 0.0) -> float:
    return -1.0 - ((token * 31 + place * 17) % 97) / 50 - shift


class LogprobServer:
    """Tokens are characters; the log-probability of each is a function of it and its place, plus `shift`."""

    def __init__(self, shift: Callable[[int], float] = lambda token: 0.0) -> None:
        self.shift = shift
        self.longest = 0

    def __call__(self, request: Request) -> Script:
        body = request.body
        if request.path == "/tokenize":
            return [whole({"count": 1, "tokens": [ord(char) for char in body["prompt"]]})]
        ids = body["prompt"]
        self.longest = max(self.longest, len(ids))
        rows: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            own = logprob(token, place, self.shift(token))
            rows.append({str(token): {"logprob": own, "rank": 3}, "1": {"logprob": -0.7}, "2": {"logprob": -1.9}})
        return [whole({"choices": [{"prompt_logprobs": rows}]})]


def record(server: LogprobServer, texts: dict[str, str], windows: int = 4) -> Reference:
    with ScriptedServer(server) as running:
        return fidelity.record(
            EngineClient(running.url), PROFILE, texts, {"profile": "fake"}, lambda text: None, windows=windows
        )


TEXTS = {"prose": "The quick brown fox. " * 200, "code": "def f(x): return x + 1\n" * 200}


def test_a_record_keeps_tokens_numbers_and_where_it_came_from_to_the_bit() -> None:
    server = LogprobServer()
    found = record(server, TEXTS)
    assert [window.set for window in found.windows] == ["prose"] * 4 + ["code"] * 4
    assert server.longest == PROFILE.bench.logprob_window
    again = fidelity.parse(fidelity.dump(found), "x.json")
    assert again == found and fidelity.identical(found, again) == (8, 8)
    assert again.provenance == {"profile": "fake"}


def compare(shift: Callable[[int], float], profile: Any = PROFILE) -> dict[str, Any]:
    old = record(LogprobServer(), TEXTS)
    with ScriptedServer(LogprobServer(shift)) as running:
        new = fidelity.again(EngineClient(running.url), profile, old, lambda text: None)
    return {item.id: item for item in fidelity.judge(old, new, profile)}


def test_the_same_engine_is_the_same() -> None:
    found = compare(lambda token: 0.0, EXACT)
    assert {item.status for item in found.values()} == {Status.OK}
    assert "8 of 8 windows bit-identical" in found["fidelity.identical"].summary
    assert "+0.00% [+0.00%, +0.00%]" in found["fidelity.perplexity.all"].summary


def test_a_loss_beyond_the_limit_fails_in_the_set_that_has_it() -> None:
    found = compare(lambda token: 0.5 if chr(token) in "()=+:" else 0.0)
    assert found["fidelity.perplexity.code"].status is Status.FAIL
    assert found["fidelity.perplexity.prose"].status is Status.OK
    assert "beyond the noise" in found["fidelity.perplexity.code"].why


def test_a_gain_is_no_fault_and_is_counted() -> None:
    found = compare(lambda token: -0.02)
    assert found["fidelity.perplexity.all"].status is Status.OK
    assert (
        "8 better" in found["fidelity.perplexity.all"].summary and "-1.98%" in found["fidelity.perplexity.all"].summary
    )


def test_one_changed_bit_breaks_the_promise_of_a_restart_and_only_a_promise() -> None:
    def slightly(token: int) -> float:
        return 1e-12 if chr(token) == "q" else 0.0

    assert compare(slightly)["fidelity.identical"].status is Status.OK
    found = compare(slightly, EXACT)["fidelity.identical"]
    assert found.status is Status.FAIL and "4 of 8" in found.summary and found.fix


def windows_of(differences: list[float]) -> tuple[Reference, Reference]:
    def window(value: float) -> Window:
        return Window(set="x", ids=(1, 2), logprobs=(value,), top=(((2, value),),))

    old = [window(-2.0) for _ in differences]
    new = [window(-2.0 - difference) for difference in differences]
    return (
        Reference(schema=1, provenance={}, windows=tuple(old)),
        Reference(schema=1, provenance={}, windows=tuple(new)),
    )


def test_noise_is_unknown_not_a_loss() -> None:
    rng = random.Random(3)
    old, new = windows_of([0.02 + rng.gauss(0, 0.2) for _ in range(8)])
    found = fidelity.judge(old, new, PROFILE)[0]
    assert found.status in (Status.UNKNOWN, Status.OK) and not found.failed()


def test_the_interval_covers_the_true_change() -> None:
    rng = random.Random(5)
    hits = 0
    for _ in range(20):
        old, new = windows_of([0.03 + rng.gauss(0, 0.05) for _ in range(24)])
        change = fidelity.changes(old, new)[0].perplexity
        hits += change.low <= math.expm1(0.03) <= change.high
    assert hits >= 16


def test_divergence_is_zero_for_equal_and_grows_with_the_difference() -> None:
    def window(*top: tuple[int, float]) -> Window:
        return Window(set="x", ids=(1, 2), logprobs=(-1.0,), top=(top,))

    p = window((2, math.log(0.7)), (3, math.log(0.2)))
    assert fidelity.divergence(p, p) == [pytest.approx(0, abs=1e-9)]
    q = window((2, math.log(0.5)), (3, math.log(0.4)))
    exact = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.4)
    assert fidelity.divergence(p, q)[0] == pytest.approx(exact)
    unnamed = window((2, math.log(0.7)), (9, math.log(0.1)))
    assert fidelity.divergence(p, unnamed)[0] > 0.05


def test_windows_over_the_safe_length_are_refused_before_anything_is_sent() -> None:
    long = Window(set="x", ids=tuple(range(2000)), logprobs=(-1.0,) * 1999, top=((),) * 1999)
    reference = Reference(schema=1, provenance={}, windows=(long,))
    with pytest.raises(ConfigError, match="windows of 2000 tokens, this profile allows 512"):
        fidelity.again(EngineClient("http://127.0.0.1:9"), PROFILE, reference, lambda text: None)


def test_an_engine_without_prompt_logprobs_is_a_typed_fault() -> None:
    def handler(request: Request) -> Script:
        if request.path == "/tokenize":
            return [whole({"tokens": [1, 2, 3, 4]})]
        return [whole({"choices": [{"prompt_logprobs": None}]})]

    with ScriptedServer(handler) as running, pytest.raises(HttpFault, match="no prompt_logprobs for every token"):
        fidelity.record(EngineClient(running.url), PROFILE, {"x": "abc"}, {}, lambda text: None)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"schema": 1}', b'{"schema": 9, "provenance": {}, "windows": []}', b"\xff"]
)
def test_a_file_that_is_no_reference_gives_one_line(raw: bytes) -> None:
    with pytest.raises(ConfigError, match=r"x\.json") as caught:
        fidelity.parse(raw, "x.json")
    assert "\n" not in caught.value.message


def test_text_sets_are_the_files_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.txt file"):
        fidelity.texts_of(tmp_path)
    (tmp_path / "french.txt").write_text("Une lumière brille.")
    assert fidelity.texts_of(tmp_path) == {"french": "Une lumière brille."}
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"broken\.txt: not UTF-8"):
        fidelity.texts_of(tmp_path)


def test_the_built_in_sets_are_english_french_and_code_long_enough_for_the_seeds_windows_and_always_the_same() -> None:
    found = fidelity.builtin_texts(fidelity.SEED_WINDOWS * fidelity.SEED_WINDOW)
    assert list(found) == ["english", "french", "code"]
    for name, text in found.items():
        assert len(text) > 4 * 64 * 1024, f"{name}: 64 windows of 1,024 tokens of four characters"
    assert found == fidelity.builtin_texts(fidelity.SEED_WINDOWS * fidelity.SEED_WINDOW)
    for text, words in ((found["english"], " the "), (found["french"], " la "), (found["code"], "return ")):
        assert text.count(words) > 300
    windows = [found["french"][at : at + 4000] for at in range(0, 256_000, 4000)]
    assert len(set(windows)) == 64
    for broken in ("que une", "que on ", "si il", "{", "de le ", "à le "):
        assert broken not in found["french"], broken


def test_the_length_of_a_window_is_the_seeds_where_there_is_room_and_never_more_than_is_safe() -> None:
    roomy = least_profile(bench={"logprob_window": 1500})
    assert fidelity.window_size(roomy, None) == 1500 and fidelity.window_size(roomy, 1024) == 1024
    with pytest.raises(ConfigError, match="windows of 1024 tokens: fake has room for 512") as caught:
        fidelity.window_size(PROFILE, 1024)
    assert caught.value.hints == ("--window-tokens 512",)


def test_without_another_engine_perplexity_is_measured_by_set_and_not_judged() -> None:
    found = {item.id: item for item in fidelity.perplexities(record(LogprobServer(), TEXTS))}
    assert list(found) == [f"fidelity.perplexity.{name}" for name in ("all", "prose", "code")]
    assert "8 windows" in found["fidelity.perplexity.all"].found
    assert "nothing to compare with" in found["fidelity.perplexity.code"].summary


def restarted(shift: Callable[[int], float], profile: Any, differs: str = "") -> Any:
    first = record(LogprobServer(), TEXTS)
    with ScriptedServer(LogprobServer(shift)) as running:
        second = fidelity.again(EngineClient(running.url), profile, first, lambda text: None)
    return fidelity.restarted(first, second, profile, differs)


def test_a_restart_must_give_the_same_bits_where_the_profile_promises_them() -> None:
    def one_bit(token: int) -> float:
        return 1e-12 if chr(token) == "q" else 0.0

    same = restarted(lambda token: 0.0, EXACT)
    assert same.status is Status.OK and same.found.startswith("8 of 8 windows of up to 512 tokens bit-identical")
    changed = restarted(one_bit, EXACT)
    assert changed.status is Status.FAIL and changed.found.startswith("4 of 8") and changed.fix
    assert restarted(one_bit, PROFILE).status is Status.WARN, "not promised, and not to be overlooked"


def test_a_restart_that_started_something_else_proves_nothing() -> None:
    found = restarted(lambda token: 0.0, EXACT, "the command line")
    assert found.status is Status.UNKNOWN and "not started as before: the command line" in found.summary
