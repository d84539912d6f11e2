"""A launcher read without a shell says what bash says, or names what it did not read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import preflight
from ds41ctl.adapters import enginevenv, profiles
from ds41ctl.cli import main
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
    return in_double(re.sub(r"[}'(]", "", text))


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
                f'"$(printf %q {text})"',
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
        st.builds('g() {{\nB+={}\nLIST+=("$A")\n}}\nA={} g'.format, quoted(), quoted()),
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
    "i=0; LIST+=($((i++)) $((i += 2)) $i); (( i = 7 )); B=$i",
    "ref() { local -n L=$1; L+=(byref); }; ref LIST",
    'printf -v "LIST[1]" x',
    "unset 'LIST[0]'",
    'LIST=("${LIST[@]:1}" "${@:0}")',
    'LIST+=("${A@Q}")',
    'N=A; declare "$N=5"; printf -v "$N" 6; unset "$N"',
    "exec {fd}>/dev/null",
    'g() { export A=q; LIST+=("$A"); }; A=z g',
    "f() { [[ -f /nowhere ]] || return 0; LIST+=(late); }; f",
    "for x in 1 2; do [[ -f /nowhere ]] || break; LIST+=($x); done",
    "IFS=$'\\n\\t'",
    "(exit 1) || LIST+=(after)",
]


@pytest.mark.parametrize("line", UNREADABLE)
def test_each_of_these_alone_is_read_as_bash_does_it_or_named(tmp_path: Path, line: str) -> None:
    script = "\n".join(["A=1 B= C='c d'", "LIST=(x 'y z')", line, 'exec "$PY" -m vllm.x "${LIST[@]}" "$A" "$B"', ""])
    compare(tmp_path, script, all_read=False)


QUOTED = "printf -v A %q $'\\a\\b\\e\\f\\n\\r\\t\\v\\001\\177 \\\\x\\'y'"


@settings(max_examples=60)
@given(lines=st.lists(st.one_of(statements(1), st.sampled_from(UNREADABLE)), max_size=6), end=ENDS)
@example(lines=[QUOTED], end='exec "$PY" -m vllm.x "$A"')
def test_what_is_not_read_is_never_guessed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str
) -> None:
    script = "\n".join(["A=1 B= C='c d'", "LIST=()", *lines, end, ""])
    compare(Path(tmp_path_factory.getbasetemp()), script, all_read=False)


# ---- what a launcher may look like
ENGINE = (
    '\nexec "$DS41_PYTHON" -m vllm.entrypoints.openai.api_server --model "$DS41_MODEL" --port "$DS41_PORT"'
    ' --max-num-seqs 2 --max-model-len 4096 --host 127.0.0.1 "${ARGS[@]}"\n'
)


def argv_of(script: str, **chosen: Any) -> tuple[list[str], Any, Profile]:
    profile, found = read(script, "DS41_PORT=8200\n")
    return list(started(profile, **chosen).argv), found, profile


# (what stands in the script, what the report says of it)
NAMED = [
    ("ARGS=()\nexport MAX_JOBS=$(nproc)", "line 2: $(nproc): a command's output (nproc is run) (MAX_JOBS)"),
    ("ARGS=()\nexport VLLM_DS41_X=$((RANDOM % 2))", "line 2: $((RANDOM % 2)): arithmetic that is not computed here"),
    ("ARGS=(--swap-space $(free -g))", "line 1: $(free -g): a command's output (free is run)"),
    ("ARGS=(--x *.json)", "line 1: *.json: a pattern of file names"),
    ('ARGS=(--x "$HOME/y")', "line 1: $HOME: known only to the shell that runs"),
    ('ARGS=(--x "$NOWHERE")', "line 1: $NOWHERE: NOWHERE is set neither here nor in the environment file"),
    ("ARGS=()\nsource /etc/default/ds41", "line 2: source /etc/default/ds41: another file, which may set anything"),
    ("ARGS=()\ncat > run.sh <<E\nexec x\nE", "line 2: cat > run.sh <<E: a file written from a here-document"),
    ("ARGS=()\nif [[ -d /data ]]; then\nARGS+=(--swap-space 4)\nfi", "ARGS depends on it: `--swap-space 4` or nothing"),
    ("ARGS=()\nread -r X\n[[ $X == y ]] && export VLLM_DS41_X=1", "VLLM_DS41_X depends on it: nothing or `1`"),
    ("ARGS=(--x <(echo 1))", "line 1: <(echo 1): a process substitution"),
    ('ARGS=(--x "${!DS41_X}")', "an expansion that is not read here"),
    (
        'ARGS=()\nwhile read -r knob; do ARGS+=("$knob"); done < knobs',
        'line 2: while read -r knob; do ARGS+=("$knob"); done: ARGS depends on it',
    ),
]


@pytest.mark.parametrize(("lines", "said"), NAMED, ids=[row[1] for row in NAMED])
def test_what_cannot_be_read_is_named_and_left_out(lines: str, said: str) -> None:
    argv, found, profile = argv_of(lines + ENGINE)
    assert [text for text in found.unread if said in text], found.unread
    assert profile.serve.source == "partial" and any(said in text for text in profile.lacks)
    assert argv[-4:] == ["--max-model-len", "4096", "--host", "127.0.0.1"] and "\0" not in found.text
    assert "MAX_JOBS" not in found.text.split("[serve.env]")[1] or 'MAX_JOBS = "16"' in found.text


READ = [
    ("ARGS=()\n[[ -d $DS41_MODEL ]] || { echo no pack; exit 1; }\nnvidia-smi -L | grep -q V100 || exit 1", []),
    ("usage() { cat <<E\nit's\nE\n}\nARGS=(--seed 1)", ["--seed", "1"]),
    ("ARGS=(); add() { ARGS+=(\"$@\"); }\nadd --a 'b c'; add --d", ["--a", "b c", "--d"]),
    ('join() { local IFS=,; echo "$*"; }\nARGS=(--gpus "$(join 0 1)")', ["--gpus", "0,1"]),
    ('ARGS=(--json \'{"a": "$x"}\')', ["--json", '{"a": "$x"}']),
    ('A=1 B=$A; ARGS=(--n "$((A + 1))" --b=$B)', ["--n", "2", "--b=1"]),
    ("case ${DS41_MODE:-fast} in slow) ARGS=(--slow);; f*) ARGS=(--fast) ;; esac", ["--fast"]),
]


@pytest.mark.parametrize(("lines", "end"), READ)
def test_a_launchers_own_checks_and_helpers_hinder_nothing(lines: str, end: list[str]) -> None:
    argv, found, profile = argv_of(lines + ENGINE)
    assert found.unread == [] and profile.serve.source == "imported"
    assert argv[argv.index("127.0.0.1") + 1 :] == end


@pytest.mark.parametrize(
    "start",
    [
        'numactl --interleave=all "$PY" -m vllm.x',
        'numactl --interleave=all env VLLM_DS41_A=1 "$PY" -m vllm.x',
        'tmux -L ds41 new-session -d -s x -- numactl --interleave=all "$PY" -m vllm.x',
        'tmux new -d -s x; tmux send-keys -t x "numactl --interleave=all $PY -m vllm.x --model $DS41_MODEL" C-m; exit',
        '[[ "${1:-}" == --foreground ]] || exec tmux new-session -d "$0 --foreground"\nnumactl -i all "$PY" -m vllm.x',
        "nohup bash -c 'exec numactl --interleave=all $DS41_PYTHON -m vllm.x --model $DS41_MODEL' &\nexit",
    ],
)
def test_the_ways_to_start_are_seen_through(start: str) -> None:
    script = f'PY="$DS41_PYTHON"\nexport DS41_MODEL DS41_PYTHON\n{start} --model "$DS41_MODEL"\n'
    argv, found, profile = argv_of(script, python="/e/python", model="/m")
    assert argv[:7] == ["numactl", "--interleave=all", "/e/python", "-m", "vllm.x", "--model", "/m"], argv
    assert profile.serve.numa == "interleave" and "${python}" in found.text


def test_the_machines_paths_keys_and_open_addresses_do_not_go_into_a_profile() -> None:
    script = (
        "export VLLM_API_KEY=sk-verysecretvalue HF_TOKEN=hf_abcdefghijkl VLLM_CACHE_ROOT=/home/me/.cache\n"
        "export VLLM_DS41_A=1 DSV41_ENGRAM_ZERO=1 LD_PRELOAD=/x.so VLLM_DS41_CHUNK_TOKENS=1024\n"
        "/home/me/venv/bin/vllm serve /home/me/pack --host 0.0.0.0 --port 9000 --api-key sk-verysecretvalue"
        " --trust-remote-code --hf-token hf_abcdefghijkl --tokenizer /home/me/pack --max-model-len 1M\n"
    )
    profile, found = read(script)
    assert profile.serve.env["VLLM_DS41_A"] == "1" and profile.serve.env["VLLM_DS41_CHUNK_TOKENS"] == "1024"
    for gone in ("verysecret", "hf_abc", "--hf-token", "/home/me", "0.0.0.0", "trust-remote", "ENGRAM_ZERO=", "x.so"):
        assert gone not in " ".join((*profile.serve.argv, *profile.serve.env, *profile.serve.env.values())), gone
    assert "verysecret" not in found.text + " ".join(found.changed) and profile.serve.port == 9000
    assert profile.serve.max_model_len == 1 << 20
    assert " ".join(started(profile, python="/e/python", model="/m").argv) == (
        "/e/python -m vllm.entrypoints.cli.main serve /m --host 127.0.0.1 --port 9000 --tokenizer /m"
        " --max-model-len 1048576"
    )
    said = " ".join((*found.changed, *found.unmapped))
    assert all(
        name in said for name in ("DS41_API_KEY_FILE", "0.0.0.0", "VLLM_CACHE_ROOT", "LD_PRELOAD", "DSV41_ENGRAM_ZERO")
    )


def test_an_address_the_launcher_leaves_to_the_engine_is_loopback_here() -> None:
    profile, found = read("vllm serve /m\n")
    assert profile.serve.argv[-4:] == ("--host", "${host}", "--port", "${port}")
    assert any("--host is added" in text for text in found.changed)


def test_a_pack_and_an_address_that_are_not_known_are_placeholders_all_the_same() -> None:
    profile, found = read('timeout 9 vllm serve "$NOWHERE" --host "$(hostname)" --port="$P" --tokenizer "$NOWHERE"\n')
    line = "timeout 9 ${python} -m vllm.entrypoints.cli.main serve ${model} --host ${host} --port=${port}"
    assert " ".join(profile.serve.argv) == line + " --tokenizer ${model}"
    assert found.unread == [] and any("$NOWHERE is ${model}" in text for text in found.changed)


def test_a_drafter_in_the_middle_of_the_line_moves_to_its_end_and_that_is_said() -> None:
    script = 'S=(); [[ "${DS41_DSPARK:-0}" == 1 ]] && S=(--speculative-config \'{"num_speculative_tokens": 5}\')\n'
    profile, found = read(script + 'vllm serve "$DS41_MODEL" "${S[@]}" --seed 1\n')
    assert profile.serve.dspark_argv == ("--speculative-config", '{"num_speculative_tokens": 5}')
    assert not profile.serve.dspark and profile.serve.spec_tokens == 5
    assert any("stands at the end" in text for text in found.changed)


# ---- no shell script at all
BROKEN = [
    ("A='x\nB=1\n", 1, "a quote ' that does not end"),
    ('A=1\nB="x\n', 2, 'a quote " that does not end'),
    ("if true; then\necho\n", 1, "no fi"),
    ("A=(1 2\nB=3\n", 1, "the list of A is never closed"),
    ("echo $(date\n", 1, "a $( that is never closed"),
    ("cat <<E\nfoo\n", 1, "a here-document that does not end: E expected"),
    ("echo }\n}\n", 2, "} without its beginning"),
    ("A=${B:-x\n", 1, "a ${ that is never closed"),
    ("fi\n", 1, "fi without its beginning"),
    ("a && \n", 1, "a command is missing"),
    ("(" * 5000, 1, "nested too deep"),
]


@pytest.mark.parametrize(("text", "line", "said"), BROKEN, ids=[row[2] for row in BROKEN])
def test_what_is_no_shell_is_one_line_with_its_number(text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert "\n" not in caught.value.message and said in caught.value.message
    assert f"serve.sh: line {line}" in caught.value.message or "nested" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello\n", "no line of it that can be followed starts an engine"),
        ("while true; do :; done\n", "without an end"),
        ("f() { f; }; f\n", "functions call each other"),
        ("vllm serve /m --max-num-seqs two\n", "--max-num-seqs is 'two'"),
        ("vllm serve /m --gpu-memory-utilization much\n", "cannot be read"),
    ],
)
def test_a_script_that_is_no_launcher_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(text)


@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"\x7fELF\x00\x01", "a binary file"), (b"a\n\xff\n", "line 2: no UTF-8"), (b"#" * (1 << 20) + b"x", "at most")],
)
def test_a_file_that_is_no_text_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode(raw, "x.sh")


def test_windows_line_ends_and_a_mark_are_said_and_read() -> None:
    text, remarks = decode(b"\xef\xbb\xbf" + SCRIPT.read_bytes().replace(b"\n", b"\r\n"), "x.sh")
    assert text == SCRIPT.read_text() and len(remarks) == 2


@settings(max_examples=200)
@given(st.data())
def test_any_text_ends_in_a_profile_or_in_one_error(data: st.DataObject) -> None:
    whole = SCRIPT.read_text()
    at = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(at, min(len(whole), at + 40)))
    piece = data.draw(st.text(alphabet="ab'\"$(){}[];&|<>\\`\n #=!*~", max_size=8))
    try:
        read(whole[:at] + piece + whole[end:], EXAMPLE.read_text(), "ds41.env.example")
    except ConfigError as error:
        assert "\n" not in error.message


# ---- preflight asks where the line comes from
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("inferred", Status.WARN),
        ("partial", Status.WARN),
        ("", Status.UNKNOWN),
        ("imported", Status.OK),
        ("published", Status.OK),
    ],
)
def test_a_command_line_that_nobody_vouches_for_is_never_ok(source: str, status: Status) -> None:
    ours = profiles.read(profiles.find("v100-pp2tp4"))
    chosen = ours.model_copy(update={"serve": ours.serve.model_copy(update={"source": source})})
    (finding,) = preflight.run(chosen, machine("v100-8x-serving-ready"), only=("serve.source",))
    assert finding.status is status and (status is Status.OK or finding.fix)


def test_the_shipped_profiles_say_where_their_lines_come_from_and_v100_how_to_get_its_own() -> None:
    found = {name: profiles.read(path) for name, path in profiles.paths().items()}
    named = {name: profile.serve.source for name, profile in found.items() if profile.state != "measured"}
    assert named == {"v100-pp2tp4": "inferred", "cmp170hx-tp4": "published"}
    (finding,) = preflight.run(found["v100-pp2tp4"], machine("v100-8x-serving-ready"), only=("serve.source",))
    checkout = "https://github.com/philbert440/deepseek-v4.1-v100"
    assert finding.fix == (
        f"git clone --branch ds41-vision-20261025b --depth 1 {checkout}",
        "ds41ctl profile import --base v100-pp2tp4 --launcher deepseek-v4.1-v100/v100/serve_ds41.sh"
        " --env deepseek-v4.1-v100/v100/ds41.env.example",
    )


def test_the_engines_own_list_of_variables_is_asked_which_knobs_there_are(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "python3.12" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    picked = layout(
        profiles.read(profiles.find("v100-pp2tp4")),
        Settings.model_validate({"python": tmp_path / "bin" / "python"}),
        DIRS,
        may_mount=False,
    )
    assert enginevenv.inspect(picked).knobs == ()
    (package / "envs.py").write_text(
        '{"VLLM_DS41_B": lambda: os.getenv("VLLM_DS41_B"), "VLLM_DS41_A2": 1, "VLLM_X": 2}'
    )
    known = enginevenv.inspect(picked)
    assert known.knobs == ("VLLM_DS41_A2", "VLLM_DS41_B")
    facts = machine("v100-8x-serving-ready").model_copy(update={"engine": known})
    (finding,) = preflight.run(picked.profile, facts, only=("serve.knobs",))
    assert (
        finding.status is Status.WARN and "VLLM_DS41_A2, VLLM_DS41_B" in finding.found and "git clone" in finding.fix[0]
    )


# ---- the command
def cli(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(("profile", "import", *args))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_writes_the_profile_and_its_exit_code_says_whether_all_was_read(
    capsys: pytest.CaptureFixture[str], isolated: Path
) -> None:
    code, out, err = cli(capsys, "--launcher", str(SCRIPT), "--env", str(EXAMPLE))
    assert code == 0 and "read 36 assignments, 17 options; nothing was left unread" in out, err
    profile = profiles.read(profiles.find("v100-mine"))
    assert profile.serve.source == "imported"
    assert cli(capsys, "--launcher", str(SCRIPT))[0] == 2  # it exists, and is not written over
    code, out, _ = cli(capsys, "--launcher", str(SCRIPT), "--name", "half", "--json")
    tree = json.loads(out)
    assert code == 3 and not tree["ok"] and tree["data"]["name"] == "half"
    assert len(tree["data"]["not_read"]) == 1 and "line 34" in tree["data"]["not_read"][0]
    assert profiles.read(profiles.find("half")).serve.source == "partial"
    # a profile that was imported can be laid under another import
    assert cli(capsys, "--launcher", str(SCRIPT), "--env", str(EXAMPLE), "--base", "half", "--name", "full")[0] == 0
    full = profiles.read(profiles.find("full"))
    assert full.serve.source == "imported" and (full.lacks, full.title) == (profile.lacks, profile.title)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--launcher", "/nowhere.sh"), 10, "no file /nowhere.sh"),
        (("--launcher", "{script}", "--env", "/nowhere"), 10, "no file /nowhere"),
        (("--launcher", "{script}", "--base", "v100-pp2tp"), 10, "did you mean v100-pp2tp4?"),
        (("--launcher", "{script}", "--base", "cmp170hx-tp4"), 2, "its engine is no venv"),
        (("--launcher", "{script}", "--name", "A B"), 2, "profile name 'A B'"),
        (("--launcher", "{script}", "x.json"), 2, "one of them"),
        (("--env", "{script}"), 2, "--env goes with --launcher"),
        (("--launcher", "{broken}"), 2, "broken.sh: line 2: a quote ' that does not end"),
        (("--launcher", "{script}", "--env", "{broken}"), 2, "broken.sh: line 2: a quote ' that does not end"),
    ],
)
def test_bad_input_of_the_command_is_one_line(
    capsys: pytest.CaptureFixture[str], isolated: Path, tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    broken = tmp_path / "broken.sh"
    broken.write_text("A=1\nB='\n")
    found, _, err = cli(capsys, *(item.format(script=SCRIPT, broken=broken) for item in args))
    assert found == code and said in err and err.startswith("error: ") and "Traceback" not in err
    assert not profiles.user_folder().exists()
