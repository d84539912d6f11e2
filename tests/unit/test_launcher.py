"""A launcher read without a shell says what bash says, or names what it did not read."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import preflight
from ds41ctl.adapters import profiles
from ds41ctl.core import launcher
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.finding import Status
from ds41ctl.core.launch import CACHE_VARIABLES, Launch, Machine, launch
from ds41ctl.core.layout import Dirs, layout
from ds41ctl.core.profile import Profile, parse_profile
from ds41ctl.core.settings import Settings
from ds41ctl.core.shellparse import decode, parse
from ds41ctl.core.shellread import Reader
from ds41ctl.core.shellvalues import marked
from tests.facts.replay import FACTS, machine

HERE = FACTS / "launchers"
SCRIPT, EXAMPLE = HERE / "serve_ds41.sh", HERE / "ds41.env.example"
DIRS = Dirs(data=Path("/d"), state=Path("/s"), cache=Path("/c"), runtime=Path("/r"), uid=1000)
BASH = shutil.which("bash") or "/bin/bash"
SPY = '#!/bin/sh\nfor a in "$@"; do printf "%s\\0" "$a"; done > "$SPY/argv"\nenv -0 > "$SPY/env"\n'


def read(script: str, env: str | None = None, env_name: str = "ds41.env", path: str = "/x/v100/serve.sh") -> Any:
    tree = profiles.tree(profiles.find("v100-pp2tp4"))
    given_env = None if env is None else (env, env_name)
    found = launcher.of_launcher((script, "serve.sh"), given_env, path, tree, "mine")
    return parse_profile(found.text, "mine.toml"), found


def started(profile: Profile, **chosen: Any) -> Launch:
    picked = layout(profile, Settings.model_validate(chosen), DIRS, may_mount=False)
    return launch(picked, Machine(), "/store")


def by_bash(tmp_path: Path, script: Path, *arguments: str, **env: str) -> tuple[list[str], dict[str, str]]:
    """What bash gives the engine: its arguments and the variables that this test's shell did not have."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in {
        "python": SPY,
        "tmux": '#!/bin/sh\n[ "$1" = new-session ] || exit 1\nfor last; do :; done\nexec bash -c "$last"\n',
        "curl": "#!/bin/sh\nexit 0\n",
        "sudo": "#!/bin/sh\nexit 1\n",
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    start = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "SPY": str(tmp_path), "LC_ALL": "C.UTF-8", **env}
    (tmp_path / "argv").unlink(missing_ok=True)
    done = subprocess.run([BASH, str(script), *arguments], env=start, cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "argv").exists(), done.stderr
    words = (tmp_path / "argv").read_text().split("\0")[:-1]
    seen = dict(item.split("=", 1) for item in (tmp_path / "env").read_text().split("\0") if item)
    return words, {
        key: text for key, text in seen.items() if start.get(key) != text and key not in ("_", "SHLVL", "PWD", "OLDPWD")
    }


# ---- the launcher of the seed's shape
@pytest.mark.parametrize("arguments", [(), ("--foreground",)], ids=["detached", "foreground"])
@pytest.mark.parametrize("dspark", ["1", "0"])
def test_an_imported_launcher_starts_what_bash_starts(tmp_path: Path, arguments: tuple[str, ...], dspark: str) -> None:
    folder = tmp_path / "checkout" / "v100"
    folder.mkdir(parents=True)
    script = folder / "serve_ds41.sh"
    script.write_text(SCRIPT.read_text())
    model, python = tmp_path / "a pack", tmp_path / "tools" / "python"
    model.mkdir()
    env = {"DS41_MODEL": str(model), "DS41_PYTHON": str(python), "DS41_PORT": "8123", "DS41_DSPARK": dspark}
    words, variables = by_bash(tmp_path, script, *arguments, **env, DS41_GPUS_A="0,1,2,3", DS41_GPUS_C="4,5,6,7")
    profile, found = read(script.read_text(), EXAMPLE.read_text(), "ds41.env.example", str(script))
    ours = started(profile, model=model, python=python, dspark=dspark)
    assert found.unread == [] and profile.serve.source == "imported" and profile.serve.dspark
    assert list(ours.argv) == [str(python), *words]
    kept = {"GLOO_SOCKET_IFNAME", "MAX_JOBS", "VLLM_NO_USAGE_STATS"}  # ours, and said to be
    assert all(any(f"{name}=" in text for text in found.changed) for name in kept)
    assert {key: text for key, text in ours.env.items() if key not in CACHE_VARIABLES | kept} == variables


def test_what_the_launcher_says_goes_into_the_fields_that_judge_it() -> None:
    profile, found = read(SCRIPT.read_text(), EXAMPLE.read_text(), "ds41.env.example")
    serve = profile.serve
    assert (serve.max_model_len, serve.max_num_seqs, serve.max_num_batched_tokens) == (1 << 20, 2, 1024)
    assert (serve.gpu_memory_utilization, serve.tensor_parallel_size, serve.pipeline_parallel_size) == (0.943, 4, 2)
    assert (serve.cudagraph_mode, serve.spec_tokens, serve.pipeline_cut, serve.port) == ("PIECEWISE", 5, 20, 8123)
    assert profile.smoke.image_limit == 64 and serve.dspark_env == {"VLLM_DS41_DRAFT_TAP_SCALE": "0.0625"}
    assert (
        serve.env["VLLM_DS41_KV_FORMAT"] == "fp4 packed" and serve.env["CUDA_VISIBLE_DEVICES"] == "${gpus_a},${gpus_c}"
    )
    assert found.assignments == 36 and found.options == 17
    ours = profiles.read(profiles.find("v100-pp2tp4"))
    assert (profile.hardware, profile.model, profile.engine, profile.engram) == (
        ours.hardware,
        ours.model,
        ours.engine,
        ours.engram,
    )
    assert serve.required_markers == ours.serve.required_markers
    assert "sha256" in profile.source_of("serve.max_num_seqs") and "VLLM_DS41" not in " ".join(profile.lacks)


def test_an_environment_file_of_ones_own_sets_pack_quads_port_and_drafter() -> None:
    text = "export DS41_MODEL=/data/franken\nDS41_GPUS_A=0,2,4,6\nDS41_GPUS_C=1,3,5,7\nDS41_PORT=8200\nDS41_DSPARK=0\n"
    profile, _ = read(SCRIPT.read_text(), text)
    assert profile.model.dir == "/data/franken" and profile.serve.port == 8200 and not profile.serve.dspark
    assert profile.hardware.gpu_groups == {"a": (0, 2, 4, 6), "c": (1, 3, 5, 7)}
    with pytest.raises(ConfigError, match="DS41_PORT=80O0"):
        read(SCRIPT.read_text(), "DS41_PORT=80O0\n")


def test_without_the_environment_file_the_line_that_sources_it_is_named() -> None:
    profile, found = read(SCRIPT.read_text())
    assert profile.serve.source == "partial" and profile.serve.port == 8011
    assert len(found.unread) == 1 and found.unread[0].startswith('line 34: source "$ROOT/ds41.env": another file')
    assert any("line 34" in text for text in profile.lacks)


# ---- generated scripts, bash as the judge
ODD = "ab1 '\"\\$`*?[]{},~#=&;|()<>!\n\tü:%/-"
VALUES = st.text(alphabet=ODD, max_size=6)
NAMES = st.sampled_from(["A", "B", "C"])


def in_double(text: str) -> str:
    return "".join("\\" + mark if mark in '$`"\\' else mark for mark in text)


def in_braces(text: str) -> str:
    return in_double(text.replace("}", "").replace("'", ""))


@st.composite
def quoted(draw: st.DrawFn) -> str:
    """A value in one of the ways to write it."""
    text, way = draw(VALUES), draw(st.sampled_from(["single", "double", "ansi", "bare", "mixed"]))
    single = "'" + text.replace("'", "'\\''") + "'"
    if way == "double":
        return f'"{in_double(text)}"'
    if way == "ansi":
        return "$'" + "".join({"\n": "\\n", "\t": "\\t", "'": "\\'", "\\": "\\\\"}.get(m, m) for m in text) + "'"
    if way == "bare" and text and "\n" not in text:
        return "".join("\\" + mark for mark in text)
    return single + '"x"' if way == "mixed" else single


@st.composite
def words(draw: st.DrawFn) -> str:
    """One argument whose meaning needs no running shell."""
    name, other, text = draw(NAMES), draw(NAMES), draw(quoted())
    inner = in_braces(draw(VALUES))
    return draw(
        st.sampled_from(
            [
                text,
                f'"${name}"',
                f'"${{{name}}}-${other}"',
                f"--x={text}",
                f'"${{{name}:-{inner}}}"',
                f'"${{{name}:+{inner}${other}}}"',
                f'"${{{name}-{inner}}}"',
                '"${LIST[@]}"',
                '"pre${LIST[@]}post"',
                '"${LIST[*]}"',
                '${LIST[@]+"${LIST[@]}"}',
                '"${LIST[@]:1:0}"' if False else '"${#LIST[@]}"',
                '"$#"',
                '"$@"',
                '"${1:-none}"',
                f'"${{#{name}}}"',
                f"\"${{{name}%'{draw(st.sampled_from(['a', 'b*', '1', ' ']))}'}}\"",
                f'"${{{name}##*a}}"',
                f'"${{{name}//a/x y}}"',
                f'"${{{name}^^}}"' if False else f'"${{{name}/b/}}"',
                f"\"$(printf '%s' {text})\"",
                f'"$(printf %s "${name}")"',
                '"$(dirname "/a b/c/d")"',
                "$((1 + 2 * ${#LIST[@]}))",
            ]
        )
    )


def statements(depth: int = 2) -> st.SearchStrategy[str]:
    """A line or a compound command; it always has a status that only its text decides."""
    pattern = st.one_of(quoted(), st.sampled_from(["*", "a*", "?", "*1", "[ab]*"]))
    plain = st.one_of(
        st.builds("{}={}".format, NAMES, words().filter(lambda word: not word.startswith("${LIST"))),
        st.builds("{}+={}".format, NAMES, quoted()),
        st.builds("export {}={}".format, NAMES, quoted()),
        st.builds("export {}".format, NAMES),
        st.builds(': "${{{}:={}}}"'.format, NAMES, VALUES.map(in_braces)),
        st.builds("LIST+=({})".format, st.lists(words(), max_size=3).map(" ".join)),
        st.builds("LIST=({} # comment ' here\n {})".format, words(), words()),
        st.builds("set -- {}".format, st.lists(words(), max_size=3).map(" ".join)),
        st.just("LIST=()"),
        st.just("printf '%s\\n' \"$A\" >/dev/null # it's"),
        st.just("cat <<'END' >/dev/null\nA=1 \" '\nEND"),
    )
    if depth == 0:
        return plain
    inner = st.lists(statements(depth - 1), min_size=1, max_size=3).map("\n".join)
    test = st.one_of(
        st.builds('[[ "${}" == {} ]]'.format, NAMES, pattern),
        st.builds('[[ -n "${}" && ${} != {} ]]'.format, NAMES, NAMES, quoted()),
        st.builds("[[ -z ${} || ! ( -n $A ) ]]".format, NAMES),
        st.builds('[ "${}" = {} ]'.format, NAMES, quoted()),
        st.builds("(( ${{#LIST[@]}} {} {} ))".format, st.sampled_from(["<", "==", ">=", "!="]), st.integers(0, 3)),
        st.builds("[[ $# -gt {} ]]".format, st.integers(0, 2)),
        st.sampled_from(["true", "false", "! true", ":"]),
    )
    return st.one_of(
        plain,
        st.builds("if {}; then\n{}\nelif {}; then\n{}\nelse\n{}\nfi".format, test, inner, test, inner, inner),
        st.builds("{} && {}\n".format, test, plain),
        st.builds("{} || {{\n{}\n}}".format, test, inner),
        st.builds(
            'case "${}" in\n {}) {}\n;;\n ({} | {})\n{}\n;; esac'.format, NAMES, pattern, inner, pattern, pattern, inner
        ),
        st.builds('for x in {}; do\nLIST+=("$x")\n{}\ndone'.format, st.lists(words(), max_size=2).map(" ".join), plain),
        st.builds("f() {{\nlocal A={} x\n{}\n}}\nf {} {}".format, quoted(), inner, words(), quoted()),
        st.builds("(\n{}\n)".format, inner),
        st.just('while [[ $# -gt 0 ]]; do LIST+=("$1"); shift; done'),
    )


ENDS = st.sampled_from(
    [
        'exec "$PY" -m vllm.x "${LIST[@]}" "$A" "$B" "$C"',
        'Z="$A" exec env W="$B" nohup "$PY" -u -m vllm.x "${LIST[@]}"',
        'CMD=("$PY" -m vllm.x "${LIST[@]}")\n"${CMD[@]}" 2>&1 | cat',
        'go() { exec "$PY" -m vllm.x "$@"; }\ngo "$A" "${LIST[@]}"',
        'tmux new-session -d -s x "$(printf \'%q \' "$PY" -m vllm.x "${LIST[@]}")"',
        'bash -c "exec $PY -m vllm.x ${#LIST[@]} \'\\$A\' \\"\\${A:-}\\""',
    ]
)


def by_reader(script: str, python: str) -> tuple[Reader, list[str], dict[str, str]]:
    reader = Reader("serve.sh", {}, {"PY": python})
    reader.run(parse(script, "serve.sh"))
    start = reader.starts[0]
    return reader, start.argv, {key: text for key, text in start.env.items() if key != "PY"}


def compare(folder: Path, script: str, *, all_read: bool) -> None:
    python = folder / "tools" / "python"
    reader, argv, env = by_reader(script, str(python))
    whole = not reader.unread and not any(marked(item) for item in (*argv, *env.values())) and len(reader.starts) == 1
    assert whole or not all_read, [str(item) for item in reader.unread]
    if whole:
        path = folder / "serve.sh"
        path.write_text(script)
        told, variables = by_bash(folder, path, PY=str(python))
        assert [*argv[argv.index(str(python)) + 1 :]] == told and env == variables, script


@settings(max_examples=60)
@given(lines=st.lists(statements(), max_size=8), end=ENDS)
@example(lines=['A="x  y"', 'LIST+=("$A" "${A:-"q r"}" "${A:+\'s}\'}")'], end='exec "$PY" -m vllm.x "${LIST[@]}"')
def test_what_is_read_is_what_bash_does(tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str) -> None:
    script = "\n".join(["A=1 B= C='c d'", "LIST=()", *lines, end, ""])
    compare(Path(tmp_path_factory.getbasetemp()), script, all_read=True)


UNREADABLE = [
    "A=$(nproc)",
    'A="$HOME/x"',
    "A=~/x",
    "LIST+=(*.txt $A {a,b} ~)",
    "LIST+=($A ${LIST[*]})",
    "read -r A < /dev/null",
    '[[ -f /nowhere ]] && LIST+=(--maybe "$B")',
    "if command -v ls >/dev/null; then B=yes; else B=no; fi",
    "[[ $A =~ ^[0-9]+$ ]] && export B=number",
    'while read -r C; do LIST+=("$C"); done < /dev/null',
    "for ((i = 0; i < 2; i++)); do LIST+=(x); done",
    "mapfile -t LIST < <(echo a)",
    "(( A++ ))",
    "A=$(( RANDOM % 2 ))",
    "declare -A MAP=([a]=1)",
    "LIST[0]=q",
    'A="${A^^}" B="${B:1:2}" C="${!A}"',
    'eval "A=$(echo 2)"',
    "IFS=, && LIST+=($A)",
    "export A B",
    "source /dev/null",
    "shopt -s extglob; [[ $A == @(1|2) ]] && B=ext",
    "A=`echo hi`",
    "(exit 1) || LIST+=(after)",
]


@settings(max_examples=60)
@given(lines=st.lists(st.one_of(statements(1), st.sampled_from(UNREADABLE)), max_size=6), end=ENDS)
def test_what_is_not_read_is_never_guessed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str
) -> None:
    script = "\n".join(["A=1 B= C='c d'", "LIST=()", *lines, end, ""])
    compare(Path(tmp_path_factory.getbasetemp()), script, all_read=False)
