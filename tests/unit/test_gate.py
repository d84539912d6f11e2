"""The gate's statistics: a distance of zero is zero, a known one is found, and what cannot be said is not said."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters.http import EngineClient, HttpFault
from ds41ctl.core import gate, reference
from ds41ctl.core.errors import ConfigError, IntegrityError
from ds41ctl.core.gate import Verdict
from ds41ctl.core.gatehtml import page, ranking
from ds41ctl.core.reference import Reference
from ds41ctl.steps import gate as steps
from tests.fakes import references as fake
from tests.fakes.profiles import least_profile
from tests.fakes.sse_server import Request, Script, ScriptedServer, whole

PROFILE = least_profile()


def louder(amount: float, every: int = 1) -> Callable[[int, int], float]:
    """A shift of one token's logit at every n-th row."""
    return lambda row, token: amount if token == 3 and row % every == 0 else 0.0


def test_divergence_of_known_distributions() -> None:
    p, q = {0: math.log(0.5), 1: math.log(0.25)}, {0: math.log(0.25), 1: math.log(0.5)}
    kl, covered = gate.divergence(p, q)
    assert kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2)) and covered == pytest.approx(0.75)
    assert gate.divergence(p, p) == (0.0, pytest.approx(0.75))


def test_a_token_that_one_side_does_not_know_goes_to_the_rest() -> None:
    p = {0: math.log(0.6), 1: math.log(0.3)}
    q = {0: math.log(0.6)}
    kl, covered = gate.divergence(p, q)
    assert kl == pytest.approx(0.0) and covered == pytest.approx(0.6)


@given(st.lists(st.floats(-8, 8), min_size=4, max_size=12), st.lists(st.floats(-8, 8), min_size=4, max_size=12))
def test_lumping_tokens_together_never_adds_divergence(a: list[float], b: list[float]) -> None:
    size = min(len(a), len(b))
    p, q = fake.logprobs(a[:size]), fake.logprobs(b[:size])
    exact = sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))
    whole, _ = gate.divergence(dict(enumerate(p)), dict(enumerate(q)))
    part, _ = gate.divergence(dict(enumerate(p[: size // 2])), dict(enumerate(q[: size // 2])))
    assert whole == pytest.approx(exact, abs=1e-6)
    assert -1e-9 <= part <= exact + 1e-6


def test_the_same_numbers_are_the_same_model() -> None:
    known = fake.made(fake.prompt("a", 200, 1), fake.prompt("b", 50, 2, set="code"))
    found = gate.compare(known, known, 0.01)
    assert found.verdict is Verdict.SAME and found.overall.kl.mean == 0.0 and found.overall.agreement == 1.0
    assert [item.name for item in found.sets] == ["prose", "code"]
    assert [item.name for item in found.ranges] == ["0-127", "128-511"]
    assert sum(item.rows for item in found.ranges) == found.overall.rows == 248


def test_a_shift_is_found_above_the_threshold_and_its_rows_are_named() -> None:
    known = fake.made(fake.prompt("a", 300, 1))
    other = fake.made(fake.prompt("a", 300, 1, louder(4.0, every=50)))
    found = gate.compare(known, other, 0.0002)
    assert found.verdict is Verdict.DIFFERENT
    assert {item.position for item in found.largest[:6]} == {0, 50, 100, 150, 200, 250}
    assert found.overall.kl.low < found.overall.kl.mean < found.overall.kl.high


def test_an_interval_that_reaches_over_the_threshold_is_not_judged() -> None:
    known = fake.made(fake.prompt("a", 300, 1))
    other = fake.made(fake.prompt("a", 300, 1, louder(4.0, every=150)))
    mean = gate.compare(known, other, 1.0).overall.kl.mean
    found = gate.compare(known, other, mean * 1.05)
    assert found.verdict is Verdict.UNKNOWN and "more text is needed" in found.reasons[0]


def test_too_few_rows_no_threshold_or_unknown_tokens_are_not_judged() -> None:
    small = fake.made(fake.prompt("a", 60, 1))
    assert "at least 100" in gate.compare(small, small, 0.1).reasons[0]
    large = fake.made(fake.prompt("a", 200, 1))
    found = gate.compare(large, large, None)
    assert found.verdict is Verdict.UNKNOWN and "gate.kl_max" in found.reasons[0]
    thin = fake.made(fake.prompt("a", 200, 1, k=1), k=1)
    found = gate.compare(thin, thin, 0.1)
    assert found.verdict is Verdict.UNKNOWN and "probability" in found.reasons[0]


def test_a_lower_bound_above_the_threshold_is_a_difference_whatever_is_unknown() -> None:
    known = fake.made(fake.prompt("a", 200, 1, k=1), k=1)
    other = fake.made(fake.prompt("a", 200, 1, lambda row, token: 5.0 * (token % 3), k=1), k=1)
    assert gate.compare(known, other, 1e-4).verdict is Verdict.DIFFERENT


def test_other_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="same tokens"):
        gate.compare(fake.made(fake.prompt("a", 200, 1)), fake.made(fake.prompt("a", 200, 2)), 0.1)


def test_intervals_are_the_same_each_time_and_narrow_with_more_text() -> None:
    def width(tokens: int) -> float:
        known, other = (fake.made(fake.prompt("a", tokens, 1, s)) for s in (louder(0.0), louder(1.0)))
        kl = gate.compare(known, other, None).overall.kl
        assert kl == gate.compare(known, other, None).overall.kl
        return (kl.high - kl.low) / kl.mean

    assert width(4000) < width(400)


def test_layers_are_compared_where_both_sides_have_them() -> None:
    a = fake.made(fake.prompt("a", 200, 1), layers=fake.hidden(6, 4, 32, 1))
    b = fake.made(fake.prompt("a", 200, 1), layers=fake.hidden(6, 4, 32, 1, noise=0.1))
    cosines = gate.compare(a, b, None).cosines
    assert cosines[0] == pytest.approx(1.0) and cosines[5] < cosines[1] < 1.0
    assert gate.compare(a, dataclasses.replace(b, layers=None), None).cosines == ()


def test_packs_are_ranked_by_their_distance() -> None:
    known = fake.made(fake.prompt("a", 300, 1))
    compared = {
        name: gate.compare(known, fake.made(fake.prompt("a", 300, 1, louder(size))), 0.05)
        for name, size in (("two bits", 2.0), ("five bits", 0.1), ("three bits", 0.7))
    }
    ranked = gate.rank(compared)
    assert [item.name for item in ranked] == ["five bits", "three bits", "two bits"]
    assert ranked[0].behind.mean == 0.0 and ranked[1].behind.low > 0
    assert "five bits" in ranking(ranked, "packs", [])


def test_the_page_holds_plots_and_nothing_of_the_text_is_markup() -> None:
    prompt = dataclasses.replace(fake.prompt("<b>&", 200, 1), set="<script>")
    found = gate.compare(fake.made(prompt), fake.made(prompt), 0.1, ["left <out>"])
    text = page(found, "gate: cpu-tiny", [("reference", "x & y")])
    assert text.count("<svg") == 3 and "<script>" not in text and "&lt;script&gt;" in text
    assert "left &lt;out&gt;" in text and "http://" not in text.replace("http://www.w3.org", "")


# ---- files


def test_a_reference_survives_being_written_and_read() -> None:
    known = fake.made(fake.prompt("a", 60, 1), fake.prompt("b", 30, 2, set="code"))
    raw = reference.dump(known)
    assert raw == reference.dump(known)
    again = reference.parse(raw, "x.ref")
    assert again.prompts == known.prompts and again.k == 8 and again.kind == "oracle"
    assert again.piece(3) == "t3 " and again.piece(30) == "<30>"


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty"])
def test_a_damaged_reference_is_refused_in_one_line(damage: str) -> None:
    raw = bytearray(reference.dump(fake.made(fake.prompt("a", 60, 1))))
    if damage == "cut":
        raw = raw[:-40]
    elif damage == "flip":
        raw[len(raw) // 2] ^= 1
    elif damage == "other":
        raw = bytearray(b"DS41REF9") + raw[8:]
    else:
        raw = bytearray()
    with pytest.raises(IntegrityError) as refused:
        reference.parse(bytes(raw), "x.ref")
    assert refused.value.message.startswith("x.ref: ") and "\n" not in refused.value.message


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_crash(tail: bytes) -> None:
    body = reference.MAGIC + tail
    with pytest.raises(IntegrityError):
        reference.parse(body + hashlib.sha256(body).digest(), "x.ref")


def test_a_prompt_can_be_cut_to_its_first_tokens() -> None:
    whole = fake.prompt("a", 60, 1)
    cut = whole.head(20, 8)
    assert len(cut.ids) == 20 and len(cut.own) == 19 and cut.row(5, 8) == whole.row(5, 8)


# ---- asking the engine


class Engine:
    """Answers prompt_logprobs from a reference's own numbers."""

    def __init__(self, known: Reference, shift: float = 0.0, other_tokens: bool = False) -> None:
        self.known, self.shift, self.other_tokens = known, shift, other_tokens
        self.longest = 0

    def __call__(self, request: Request) -> Script:
        ids = request.body.get("prompt")
        if ids is None:  # a conversation with a picture
            ids = list(next(p for p in self.known.prompts if p.source is not None).ids)
        self.longest = max(self.longest, len(ids))
        prompt = next(p for p in self.known.prompts if list(p.ids[: len(ids)]) == ids)
        rows: list[Any] = [None]
        for at in range(len(ids) - 1):
            row = prompt.row(at, self.known.k)
            rows.append({str(token): {"logprob": value, "decoded_token": "x"} for token, value in row.items()})
        seen = ids[:-1] if self.other_tokens else ids
        return [whole({"choices": [{"prompt_logprobs": rows, "prompt_token_ids": seen}]})]


def ask(known: Reference, engine: Engine) -> tuple[Reference, list[int], list[str]]:
    with ScriptedServer(engine) as running:
        return steps.ask(EngineClient(running.url), PROFILE, known, lambda text: None)


def test_the_engine_is_asked_within_the_profiles_window_and_compared_with_the_cut_reference() -> None:
    known = fake.made(fake.prompt("long", 700, 1), fake.prompt("short", 90, 2))
    engine = Engine(known)
    said, chosen, left_out = ask(known, engine)
    assert engine.longest == PROFILE.bench.logprob_window == 512 and chosen == [0, 1] and not left_out
    found = gate.compare(gate.same_prompts(known, chosen, said.prompts), said, 0.01)
    assert found.verdict is Verdict.SAME and found.overall.rows == 511 + 89 and found.overall.kl.mean < 1e-6


def test_a_picture_beyond_the_window_and_one_without_its_source_are_left_out_with_the_reason() -> None:
    source = {"messages": [{"role": "user", "content": "x"}]}
    long = dataclasses.replace(fake.prompt("long", 600, 1), source=source)
    bare = fake.prompt("bare", 50, 2)
    bare.ids[3] = steps.IMAGE_TOKEN
    fine = dataclasses.replace(fake.prompt("fine", 40, 3), source=source)
    said, chosen, left_out = ask(fake.made(fine, long, bare), Engine(fake.made(fine)))
    assert chosen == [0] and len(said.prompts) == 1
    assert ["the window is 512" in left_out[0], "without their picture" in left_out[1]] == [True, True]


def test_an_engine_that_makes_other_tokens_of_a_prompt_is_refused() -> None:
    known = fake.made(fake.prompt("a", 40, 1))
    with pytest.raises(HttpFault, match="other tokens"):
        ask(known, Engine(known, other_tokens=True))


# ---- the command


def cli(*args: str) -> tuple[int, dict[str, Any]]:
    from ds41ctl.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*args, "--json"])
    return code, json.loads(out.getvalue())


@pytest.mark.parametrize(
    ("shift", "threshold", "code"), [(0.0, "0.01", 0), (3.0, "0.01", 1), (0.0, None, 0), (3.0, None, 1)]
)
def test_compare_of_two_references_ends_with_its_verdict(
    tmp_path: Path, shift: float, threshold: str | None, code: int
) -> None:
    for name, size in (("a", 0.0), ("b", shift)):
        (tmp_path / f"{name}.ref").write_bytes(reference.dump(fake.made(fake.prompt("p", 300, 1, louder(size)))))
    more = ("--threshold", threshold) if threshold else ()
    page_file = tmp_path / "g.html"
    found, document = cli(
        "gate", "compare", str(tmp_path / "a.ref"), str(tmp_path / "b.ref"), *more, "--html", str(page_file)
    )
    assert found == code and document["exit_code"] == code
    assert document["data"]["verdict"] == ("different" if code else "same")
    assert document["data"]["threshold"] == (0.01 if threshold else 0.0001)
    assert bool(document["data"]["threshold_source"]) is (threshold is None)
    assert "<svg" in page_file.read_text()


def test_what_cannot_be_judged_ends_with_three_and_what_is_not_there_with_ten(tmp_path: Path) -> None:
    path = tmp_path / "a.ref"
    path.write_bytes(reference.dump(fake.made(fake.prompt("p", 50, 1))))
    code, document = cli("gate", "compare", str(path), str(path))
    assert code == 3 and "at least 100" in document["data"]["reasons"][0]
    assert cli("gate", "compare", str(tmp_path / "no.ref"), str(path))[0] == 10
    path.write_bytes(path.read_bytes()[:-1])
    assert cli("gate", "compare", str(path), str(path))[0] == 12


def test_packs_takes_references_and_ranks_them(tmp_path: Path) -> None:
    for name, size in (("official", 0.0), ("three", 0.7), ("two", 2.0)):
        (tmp_path / f"{name}.ref").write_bytes(reference.dump(fake.made(fake.prompt("p", 300, 1, louder(size)))))
    code, document = cli(
        "gate", "packs", str(tmp_path / "two.ref"), str(tmp_path / "three.ref"),
        "--reference", str(tmp_path / "official.ref"),
    )  # fmt: skip
    assert code == 0
    assert [Path(item["pack"]).stem for item in document["data"]["ranking"]] == ["three", "two"]


def test_record_without_an_engine_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS41_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("DS41_STATE_DIR", str(tmp_path / "state"))
    code, document = cli("gate", "record")
    assert code == 10 and "ds41ctl engine install" in document["error"]["hints"]


def test_the_builtin_prompts_hold_every_kind_of_text() -> None:
    trees = [json.loads(line) for line in steps.builtin_prompts().read_text().splitlines()]
    assert {tree["set"] for tree in trees} == {"chat", "tool", "copy", "prose", "code", "image", "long"}
    assert len({(tree["set"], tree["name"]) for tree in trees}) == len(trees)


def test_the_prompts_of_a_reference_come_out_as_they_went_in(tmp_path: Path) -> None:
    source = {"messages": [{"role": "user", "content": "hello"}], "thinking": True}
    known = fake.made(fake.prompt("a", 40, 1), dataclasses.replace(fake.prompt("b", 40, 2), source=source))
    found = [json.loads(line) for line in steps.with_prompts_of(known, tmp_path / "p.jsonl").read_text().splitlines()]
    assert found[0]["ids"] == known.prompts[0].ids.tolist() and "ids" not in found[1]
    assert found[1]["messages"] == source["messages"] and found[1]["thinking"] is True
