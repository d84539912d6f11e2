"""The command line: one document with --json on every path, exit codes as documented, nothing heavy at start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds41ctl import cli as entry
from ds41ctl.adapters import profiles
from ds41ctl.cli import main
from ds41ctl.cli.app import COMMANDS
from ds41ctl.cli.output import Output, clean
from ds41ctl.core.exits import MEANING, Exit

ROOT = Path(__file__).parents[2]
HEAVY = ("huggingface_hub", "httpx2", "libtmux", "pynvml", "rich.live", "torch", "vllm", "hf_xet")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *args, "--json")
    tree: dict[str, Any] = json.loads(out)
    assert tree["schema"] == 1 and tree["exit_code"] == code and tree["ok"] == (code == 0)
    assert "\x1b" not in out
    return tree


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["profile", "list"], ["serve", "--help"]])
def test_light_commands_import_nothing_heavy(args: list[str], isolated: Path) -> None:
    code = (
        "import sys\nfrom ds41ctl.cli import main\nmain(sys.argv[1:])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[]", done.stderr


def test_help_lists_every_command_whole(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name, (_, text) in COMMANDS.items():
        assert name in out and text in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_json(capsys: pytest.CaptureFixture[str], name: str) -> None:
    from typer.main import get_command

    from ds41ctl.cli.app import root

    group = get_command(root)
    _, command, _ = group.resolve_command(group.make_context("ds41ctl", [name]), [name])  # type: ignore[attr-defined]
    leaves = list(getattr(command, "commands", {"": command}).values())
    assert leaves
    for leaf in leaves:
        assert any("--json" in parameter.opts for parameter in leaf.params), f"{name} {leaf.name}"
        assert leaf.help, f"{name} {leaf.name}"


BAD: list[tuple[list[str], int, str]] = [
    (["sreve"], 2, "no command 'sreve'; did you mean serve?"),
    (["serve", "--prot", "1"], 2, "--prot"),
    (["serve", "--port", "70000"], 2, "70000"),
    (["serve", "--profile", "v100-pp2tp"], 10, "no profile 'v100-pp2tp'; did you mean v100-pp2tp4?"),
    (["serve", "--profile", "/nowhere/x.toml"], 10, "no profile file /nowhere/x.toml"),
    (["preflight", "--only", "net.prot"], 2, "net.port"),
    (["preflight", "--facts", "/nowhere"], 10, "/nowhere"),
    (["smoke", "--only", "smoke.cpoy", "--profile", "cpu-tiny"], 2, "smoke.copy"),
    (["smoke", "--level", "huge"], 2, "quick, full, thorough"),
    (["status"], 10, ""),
    (["logs"], 10, "no log of cpu-tiny"),
    (["report"], 10, "no run 'latest'"),
    (["report", "../x"], 10, "no run '../x'"),
    (["engram", "status"], 10, "no Engram store"),
    (["engram", "verify"], 10, "no Engram store"),
    (["engine", "verify"], 10, "no engine"),
    (["engine", "install", "--profile", "v100-pp2tp4", "--wheels", "/nowhere"], 10, "no folder /nowhere"),
    (["up", "--profile", "v100-pp2tp4", "--wheels", "/nowhere"], 10, "no folder /nowhere"),
    (
        ["up", "--profile", "v100-pp2tp4", "--wheels", "ftp://host/x"],
        2,
        "expected a folder, or an address of http, https",
    ),
    (["up", "--profile", "v100-pp2tp4", "--accept-sums", "12ab"], 2, "64 digits of a sha256"),
    (["up", "--profile", "v100-pp2tp4", "--checkout", "https://host/x"], 2, "not built from a repository"),
    (["up", "--profile", "cmp170hx-tp4", "--wheels", "https://host/x"], 2, "is a container"),
    (["up", "--profile", "cmp170hx-tp4", "--checkout", "/nowhere"], 10, "no folder /nowhere"),
    (["up", "--profile", "cmp170hx-tp4", "--checkout", "ext::sh -c x://"], 10, "no folder ext::sh"),
    (["up", "--accept-sums", "0" * 64], 2, "there is nothing to accept"),
    (["up", "--wheels", "https://host/x"], 2, "come from an index"),
    (["engine", "install", "--accept-sums", "0" * 64], 2, "there is nothing to accept"),
    (["fetch", "--verify", "--profile", "v100-pp2tp4"], 12, "its file lists were never fetched"),
    (["fetch", "--verify", "--repair"], 2, "choose one"),
    (["fetch", "--quick"], 2, "--quick goes with --verify"),
    (["pack", "graft"], 4, "has no graft"),
    (["pack", "inspect"], 10, "no pack in"),
    (["profile", "show", "nothing"], 10, "no profile 'nothing'"),
]


@pytest.mark.parametrize(("args", "code", "text"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_input_is_one_line_with_the_documented_code_in_both_modes(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, text: str
) -> None:
    found, _, err = run(capsys, *args)
    assert found == code, err
    assert text in err and "Traceback" not in err
    tree = document(capsys, *args)
    assert tree["exit_code"] == code
    if text:
        assert text in tree["error"]["message"] and "\n" not in tree["error"]["message"]
        assert err.startswith("error: ") or "error: " in err


def test_a_misspelt_variable_stops_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS41_PROT", "1")
    for args in (["status"], ["up"], ["profile", "list"], ["config"]):
        if args == ["profile", "list"]:
            continue  # looks at files only
        code, _, err = run(capsys, *args)
        assert code == 2 and "DS41_PROT; did you mean DS41_PORT?" in err


def test_a_broken_config_file_names_the_file(capsys: pytest.CaptureFixture[str], isolated: Path) -> None:
    folder = isolated / "config" / "ds41ctl"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("port = ")
    code, _, err = run(capsys, "config")
    assert code == 2 and str(folder / "config.toml") in err


def test_a_users_broken_profile_does_not_hide_the_others(capsys: pytest.CaptureFixture[str], isolated: Path) -> None:
    folder = isolated / "config" / "ds41ctl" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("schema = 1\n")
    code, out, _ = run(capsys, "profile", "list")
    assert code == 0 and "cpu-tiny" in out and "mine" in out


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], isolated: Path) -> None:
    for command in ("up", "serve"):
        for name in profiles.names():
            code, out, _ = run(capsys, command, "--profile", name, "--dry-run")
            assert code == 0 and "nothing is touched" in out
            tree = document(capsys, command, "--profile", name, "--dry-run")
            assert tree["data"]["argv"] and tree["data"]["digest"]
    assert list(isolated.iterdir()) == []


def test_the_plan_names_what_will_be_set_on_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    def clocks(name: str) -> list[str]:
        steps = document(capsys, "serve", "--profile", name, "--dry-run")["data"]["steps"]
        return [step["what"] for step in steps if step["step"] == "clocks"]

    power = "set the power limit to 200 W, set the clock offset to +200 MHz, until the engine ends"
    assert clocks("cmp170hx-tp4") == [power]
    assert clocks("v100-pp2tp4") == ["lock SM clocks at 1530 MHz, governor performance, until the engine ends"]
    assert clocks("cpu-tiny") == []


def test_flags_win_over_variables_and_config_shows_origins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS41_PORT", "8100")
    rows = {row["setting"]: row for row in document(capsys, "config")["data"]["settings"]}
    assert rows["port"]["value"] == 8100 and rows["port"]["origin"] == "DS41_PORT"
    argv = document(capsys, "serve", "--dry-run", "--port", "8200")["data"]["argv"]
    assert argv[argv.index("--port") + 1] == "8200"


def test_an_unexpected_exception_is_an_internal_error_of_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[str]:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(profiles, "paths", broken)
    code, _, err = run(capsys, "profile", "list")
    assert code == 70 and err.splitlines()[0].startswith("error: internal error: RuntimeError: two at test_cli.py:")
    assert "DS41_DEBUG=1" in err


@pytest.mark.parametrize(("raised", "code"), [
    (KeyboardInterrupt(), 130), (PermissionError(13, "no", "/x"), 77), (MemoryError(), 15),
])  # fmt: skip
def test_what_the_system_raises_has_its_exit_code(raised: BaseException, code: int) -> None:
    assert entry._judge(raised)[0] == code


def test_a_reader_that_goes_away_is_no_failure() -> None:
    argv = [sys.executable, "-m", "ds41ctl", "profile", "schema"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(30) == 0


def test_every_command_a_message_names_exists() -> None:
    named = set()
    for folder in ("ds41ctl", "preflight", "smoke"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"[\"`(]ds41ctl ([a-z]+)", path.read_text()))
    assert named and named <= set(COMMANDS), named - set(COMMANDS)


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANING) == set(Exit)


def test_control_characters_of_remote_text_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_mode=False).line("a\x1b[31mb\x07\r\x9bc")
    assert capsys.readouterr().out == "a?[31mb???c\n"
    assert clean("plain\ttext\n") == "plain\ttext\n"


def test_without_tmux_up_stops_at_preflight_with_the_install_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run(capsys, "up")
    assert code == 4 and "host.tmux" in err and "tmux" in err.split("hint:")[1]


def test_facts_replay_and_redact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tree = document(capsys, "facts", "--redact")
    assert tree["data"]["hostname"] in ("", "HOST") and "/root" not in json.dumps(tree["data"])
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(tree))
    replayed = document(capsys, "preflight", "--facts", str(file))
    assert {item["status"] for item in replayed["data"]["findings"]} <= {"ok", "warn", "skip", "unknown", "fail"}
    file.write_text('{"schema_version": 1}')
    assert document(capsys, "preflight", "--facts", str(file))["exit_code"] == 2
