"""Answers: whole and streamed bodies give the same thing; other shapes give one clear fault."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters.http import Chunk, Fault, HttpFault
from smoke.answer import Answer, ToolCall, from_body, from_chunks


def chunk(delta: dict[str, Any] | None, *, finish: str | None = None, at: float = 1.0, **more: Any) -> Chunk:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return Chunk(at, {"model": "m", "choices": choices, **more})


def test_a_whole_body() -> None:
    message = {"content": None, "reasoning_content": "hm", "tool_calls": None}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    body = {"model": "m", "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    answer = from_body(body)
    assert (answer.content, answer.reasoning, answer.reasoning_field) == ("", "hm", "reasoning_content")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (7, 3, "stop")


@pytest.mark.parametrize("usage", [None, 5, {}, {"completion_tokens": "9"}, {"completion_tokens": -1}, [1]])
def test_a_usage_that_is_none_counts_as_none(usage: Any) -> None:
    assert from_body({"choices": [], "usage": usage}).completion_tokens is None


def test_no_choices() -> None:
    assert from_body({}) == Answer()
    assert from_body({"choices": []}).choices == 0
    assert from_chunks([chunk(None), chunk(None, usage={"completion_tokens": 0})]).choices == 0


@pytest.mark.parametrize(
    "body",
    [
        {"choices": {}},
        {"choices": [1]},
        {"choices": [{}]},
        {"choices": [{"message": {"content": ["x"]}}]},
        {"choices": [{"message": {"tool_calls": {}}}]},
        {"choices": [{"message": {"tool_calls": [{}]}}]},
        {"choices": [{"message": {"tool_calls": [{"function": {"name": 1}}]}}]},
        {"choices": [{"message": {"reasoning": 1}}]},
    ],
)
def test_another_shape_is_one_clear_fault(body: dict[str, Any]) -> None:
    with pytest.raises(HttpFault, match="expected") as caught:
        from_body(body)
    assert caught.value.kind is Fault.BAD_JSON


@pytest.mark.parametrize(
    "delta", [{"content": 1}, {"tool_calls": [1]}, {"tool_calls": [{"index": "a"}]}, {"tool_calls": 1}]
)
def test_another_shape_of_a_delta_too(delta: dict[str, Any]) -> None:
    with pytest.raises(HttpFault, match="expected"):
        from_chunks([chunk(delta)])


def test_a_stream_joins_and_keeps_times() -> None:
    answer = from_chunks(
        [
            chunk({"role": "assistant", "content": ""}, at=0.5, usage={"completion_tokens": 0}),
            chunk({"reasoning": "a"}, at=1.0, usage={"completion_tokens": 2}),
            chunk({"reasoning": "b", "content": None}, at=1.5),
            chunk({"content": "39"}, at=2.0),
            chunk({"content": "1"}, at=2.5),
            chunk({}, finish="stop", at=3.0),
            chunk(None, at=3.1, usage={"prompt_tokens": 4, "completion_tokens": 9}),
        ]
    )
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("ab", "391", "stop")
    assert (answer.first_s, answer.last_s, answer.final_s) == (1.0, 2.5, 3.0)
    assert (answer.first_tokens, answer.completion_tokens, answer.deltas) == (2, 9, 4)


def test_a_final_event_sent_twice_adds_nothing() -> None:
    last = chunk({"content": "!"}, finish="stop", at=2.0)
    answer = from_chunks([chunk({"content": "Hi"}), last, last])
    assert answer.content == "Hi!"
    assert (answer.finals, answer.final_s) == (2, 2.0)


@given(st.lists(st.integers(0, 40), max_size=8))
def test_arguments_join_whatever_their_cut(cuts: list[int]) -> None:
    arguments = '{"city": "Toronto", "unit": "°C"}'
    edges = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    pieces = [arguments[a:b] for a, b in itertools.pairwise(edges)]
    chunks = [chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]})]
    chunks += [chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}) for piece in pieces]
    answer = from_chunks([*chunks, chunk({}, finish="tool_calls")])
    assert answer.tool_calls == (ToolCall("f", arguments, "c"),)


def test_two_calls_keep_apart_and_in_order() -> None:
    deltas = [
        {"tool_calls": [{"index": 1, "function": {"name": "b", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"name": "a", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
    ]
    answer = from_chunks([chunk(delta) for delta in deltas])
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("a", "{}"), ("b", "{}")]
