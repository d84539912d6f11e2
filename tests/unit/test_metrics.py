"""Metrics of the engine: by name, whatever the order of labels; unknown is None, never 0."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters.metrics import EngineMetrics, parse

PAGE = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="a",engine="0"} 1.0e+06
vllm:generation_tokens_total{engine="1",model_name="a"} 24
vllm:generation_tokens_created{engine="0",model_name="a"} 1.79e+09
vllm:num_requests_running{engine="0",model_name="a"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.75
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="a"} 3.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="a"} 1.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="a"} 10.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0"} 1.0
"""


def test_ranks_are_summed_and_the_fullest_cache_counts() -> None:
    found = parse(PAGE)
    assert found.generated == 1_000_024 and found.running == 2 and found.waiting == 1 and found.kv == 0.75
    assert found.ttft == (1.5, 10.0) and found.prefix_caching is True
    assert found.drafted is None and found.accepted is None and found.preemptions is None


def test_older_names_are_known() -> None:
    found = parse('vllm:gpu_cache_usage_perc{engine="0"} 0.5\nvllm:generation_tokens{engine="0"} 7\n')
    assert found.kv == 0.5 and found.generated == 7


def test_not_a_number_and_broken_lines_are_unknown_and_hide_nothing() -> None:
    found = parse(
        'vllm:kv_cache_usage_perc{engine="0"} NaN\n'
        'vllm:num_requests_waiting{engine="0" 3\n'
        "vllm:generation_tokens_total\n"
        'vllm:num_requests_running{engine="0"} 1\n'
    )
    assert found.kv is None and found.waiting is None and found.generated is None and found.running == 1


@given(st.text())
def test_any_page_is_read_without_a_crash(text: str) -> None:
    assert isinstance(parse(text), EngineMetrics)
    assert isinstance(parse(PAGE + text), EngineMetrics)
