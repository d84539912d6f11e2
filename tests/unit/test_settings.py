"""Settings: layers, origins, and everything misspelt refused in one go."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.settings import Settings, env_name, load


def test_each_layer_wins_over_the_one_below_and_the_origin_says_which(tmp_path: Path) -> None:
    weak, strong = tmp_path / "etc.toml", tmp_path / "user.toml"
    weak.write_text('port = 8001\nprofile = "a"\nmodel = "/a"\n')
    strong.write_text('port = 8002\nprofile = "b"\n')
    found = load(environ={"DS41_PORT": "8003"}, files=(weak, strong), flags={"profile": "c", "port": None})
    assert (found.settings.port, found.origin("port")) == (8003, "DS41_PORT")
    assert (found.settings.profile, found.origin("profile")) == ("c", "--profile")
    assert (found.settings.model, found.origin("model")) == (Path("/a"), str(weak))
    assert found.origin("dspark") == "default"


def test_a_misspelt_environment_name_is_refused_with_the_near_name() -> None:
    with pytest.raises(ConfigError, match="unknown environment variable DS41_PROT; did you mean DS41_PORT"):
        load(environ={"DS41_PROT": "8000"})


def test_all_problems_are_named_in_one_go(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(environ={"DS41_PORT": "80O0", "DS41_MODLE": "x"}, files=(file,))
    text = "\n".join(caught.value.detail)
    assert "unknown key prot" in text and "did you mean port" in text
    assert "DS41_MODLE; did you mean DS41_MODEL" in text
    assert "DS41_PORT=80O0" in text


@pytest.mark.parametrize("value", ["80O0", "8_000", "1e4", " 8000", "0", "70000", "-1", "8000 "])
def test_a_port_that_is_not_a_plain_number_in_range_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="DS41_PORT"):
        load(environ={"DS41_PORT": value})


@pytest.mark.parametrize("value", ["0-3", "0,1,2,2", "a,b", "0,,1", "0;1"])
def test_gpu_lists_that_are_not_distinct_indices_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="DS41_GPUS_A"):
        load(environ={"DS41_GPUS_A": value})


def test_gpu_lists_may_hold_blanks_after_commas() -> None:
    assert load(environ={"DS41_GPUS_A": "0, 1,2,3"}).settings.gpus_a == (0, 1, 2, 3)


def test_a_byte_order_mark_and_crlf_in_a_config_file_are_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbfport = 8005\r\n")
    assert load(environ={}, files=(file,)).settings.port == 8005


def test_an_empty_variable_counts_as_not_set() -> None:
    found = load(environ={"DS41_PORT": ""})
    assert found.settings.port is None and found.origin("port") == "default"


def test_the_seeds_names_are_kept() -> None:
    names = {env_name(field) for field in Settings.model_fields}
    assert {"DS41_MODEL", "DS41_PYTHON", "DS41_GPUS_A", "DS41_GPUS_C", "DS41_PORT", "DS41_DSPARK"} <= names


@given(st.dictionaries(st.text(st.characters(codec="ascii"), min_size=1, max_size=12), st.text(max_size=8), max_size=5))
def test_no_environment_makes_loading_crash(extra: dict[str, str]) -> None:
    environ = {f"DS41_{name.upper()}": value for name, value in extra.items()}
    try:
        load(environ=environ)
    except ConfigError as error:
        assert error.message
