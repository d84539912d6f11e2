"""Room for prompt_logprobs: a request is sent only where a profile says that the engine survives it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import profiles
from ds41ctl.adapters.http import EngineClient
from ds41ctl.core import logprobs, reference
from ds41ctl.core.logprobs import NoRoomError, window
from ds41ctl.core.profile import Profile
from ds41ctl.steps import gate
from smoke import fidelity
from smoke.fidelity import Reference, Window
from tests.fakes import references
from tests.fakes.profiles import PROFILES, least_profile
from tests.fakes.sse_server import Request, Script, ScriptedServer, whole


def shipped(name: str) -> Profile:
    return profiles.read(profiles.find(name))


V100, CMP = shipped("v100-pp2tp4"), shipped("cmp170hx-tp4")


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("cpu-tiny", 3000), ("cpu-tiny-exl3", 512), ("cpu-tiny-tp2", 512), ("cmp170hx-tp4", 512)]
    + [(name, 512) for name in ("gpu-tiny", "gpu-tiny-tp2", "gpu-tiny-pp2")],
)
def test_a_profile_that_states_its_room_gives_the_window(name: str, tokens: int) -> None:
    found = shipped(name)
    assert window(found) == tokens == window(found, found.serve.argv)


def test_the_1m_engine_with_its_drafter_has_no_room_and_the_source_is_said() -> None:
    with pytest.raises(NoRoomError, match=r"has no room for it.*runs out of memory in the 1M DSpark") as caught:
        window(V100)
    assert caught.value.code == 3 and "logprob_window = 512" in caught.value.hints[0]


def test_a_gpu_profile_that_states_nothing_is_unknown_and_never_asked() -> None:
    silent = CMP.model_copy(update={"bench": CMP.bench.model_copy(update={"logprob_window": None})})
    with pytest.raises(NoRoomError, match="does not say that its engine has room"):
        window(silent)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--gpu-memory-utilization", "0.99"), "started with --gpu-memory-utilization 0.99, not 0.98"),
        (("--max-model-len=524288",), "started with --max-model-len 524288"),
        (("--speculative-config", "{}"), "a drafter beside it"),
    ],
)
def test_the_room_of_a_profile_is_not_that_of_a_larger_engine_that_runs(more: tuple[str, ...], what: str) -> None:
    with pytest.raises(NoRoomError, match=what):
        window(CMP, (*CMP.serve.argv, *more))
    smaller = ("--gpu-memory-utilization", "0.95")
    assert window(CMP, (*CMP.serve.argv, *smaller)) == 512


# nothing reaches the engine


class Fragile:
    """An engine that dies of prompt_logprobs: none may arrive."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def __call__(self, request: Request) -> Script:
        self.asked.append(request)
        if request.path == "/tokenize":
            return [whole({"tokens": [1] * 600})]
        return [whole({"error": {"message": "CUDA out of memory"}}, status=500)]


@pytest.fixture
def fragile() -> Iterator[tuple[Fragile, str]]:
    engine = Fragile()
    with ScriptedServer(engine) as server:
        yield engine, server.url


WINDOWS = Reference(
    schema=1, provenance={}, windows=(Window(set="x", ids=(1, 2, 3), logprobs=(-1.0, -1.0), top=((), ())),)
)


def test_no_way_to_ask_sends_anything_to_an_engine_without_room(fragile: tuple[Fragile, str]) -> None:
    engine, url = fragile
    client, known = EngineClient(url), references.made(references.prompt("p", 300, 1))
    quiet = lambda text: None  # noqa: E731
    for ask in (
        lambda: gate.ask(client, V100, known, quiet),
        lambda: fidelity.record(client, V100, {"x": "text " * 900}, {}, quiet),
        lambda: fidelity.again(client, V100, WINDOWS, quiet),
    ):
        with pytest.raises(NoRoomError):
            ask()
    assert engine.asked == []


def cli(*args: str) -> tuple[int, dict[str, Any]]:
    from ds41ctl.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*args, "--json"])
    return code, json.loads(out.getvalue())


def test_every_command_that_would_ask_ends_with_three_and_leaves_the_engine_alone(
    fragile: tuple[Fragile, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url = fragile
    monkeypatch.setenv("DS41_PROFILE", str(PROFILES / "v100-pp2tp4.toml"))
    monkeypatch.setenv("DS41_PORT", url.rpartition(":")[2])
    (tmp_path / "a.ref").write_bytes(reference.dump(references.made(references.prompt("p", 300, 1))))
    (tmp_path / "a.json").write_bytes(fidelity.dump(WINDOWS))
    for args in (
        ("gate", "compare", str(tmp_path / "a.ref")),
        ("gate", "record", "--engine", "--reference", str(tmp_path / "a.ref")),
        ("gate", "fidelity", "--lists", "0"),
        ("gate", "fidelity", str(tmp_path / "a.json")),
        ("smoke", "--record", str(tmp_path / "new.json")),
        ("smoke", "--fidelity", str(tmp_path / "a.json")),
    ):
        code, document = cli(*args)
        assert code == 3, (args, document)
        assert "prompt_logprobs is not sent" in document["error"]["message"] and document["error"]["hints"]
    assert engine.asked == [] and not (tmp_path / "new.json").exists()


def test_windows_longer_than_the_room_are_refused_before_the_first_copy(
    fragile: tuple[Fragile, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url = fragile
    monkeypatch.setenv("DS41_PROFILE", str(PROFILES / "cmp170hx-tp4.toml"))
    monkeypatch.setenv("DS41_PORT", url.rpartition(":")[2])
    long = Window(set="x", ids=tuple(range(1024)), logprobs=(-1.0,) * 1023, top=((),) * 1023)
    (tmp_path / "a.json").write_bytes(fidelity.dump(Reference(schema=1, provenance={}, windows=(long,))))
    code, document = cli("gate", "fidelity", str(tmp_path / "a.json"))
    assert code == 2 and "windows of 1024 tokens, this profile allows 512" in document["error"]["message"]
    code, document = cli("gate", "fidelity", "--window-tokens", "1024")
    assert code == 2 and document["error"]["hints"] == ["--window-tokens 512"] and engine.asked == []


def test_an_engine_with_room_is_asked(fragile: tuple[Fragile, str]) -> None:
    engine, url = fragile
    with pytest.raises(Exception, match="out of memory"):
        fidelity.record(EngineClient(url), least_profile(), {"x": "text " * 900}, {}, lambda text: None)
    assert [item.path for item in engine.asked] == ["/tokenize", "/v1/completions"]
    assert len(engine.asked[1].body["prompt"]) == 512 == logprobs.USUAL_WINDOW
