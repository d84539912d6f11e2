"""The judges: what they must accept, what they must reject, and the cause they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoke.answer import Answer, ToolCall
from smoke.judge import (
    Copy,
    decode_rate,
    judge_copies,
    judge_copy,
    judge_follow_up,
    judge_images,
    judge_number,
    judge_repeats,
    judge_thinking,
    judge_tool,
    leaked_markup,
    loops,
    says_number,
    says_words,
    unusable,
    without_fence,
)

PROMPT = "What is 17 * 23? Answer with just the number."
TORONTO = {"city": "Toronto"}


@pytest.mark.parametrize(
    "text",
    [
        "391",
        "391.",
        "**391**",
        "17 * 23 = 391",
        " 391\n",
        "`391`",
        "$391$",
        "391 (17 × 23)",
        "The answer is 391!",
        "391.0",
        "17*20 + 17*3 = 340 + 51 = 391",
        "It is not 390 but 391.",
        "- 391",
    ],
)
def test_391_is_accepted(text: str) -> None:
    assert says_number(text, 391, PROMPT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3910",
        "1391",
        "39 1",
        "not 391",
        "The answer is not **391**",
        "it isn't equal to 391",
        "≠ 391",
        "391.5",
        "391.5x",
        "-391",
        "−391",
        "1,391",
        "391,000",
        "391e2",
        "391%",
        "x391",
        "391, no: 392",
        "17 * 23",
        "three hundred",
    ],
)
def test_not_391_is_rejected(text: str) -> None:
    assert not says_number(text, 391, PROMPT)


def test_a_large_number_may_have_separators() -> None:
    assert says_number("it is 1,234,567.", 1234567)


@given(st.integers(1, 10**9), st.integers(0, 9))
def test_a_number_with_one_more_digit_is_another_number(number: int, digit: int) -> None:
    assert says_number(f"= {number}.", number)
    assert not says_number(f"{number}{digit}", number)
    assert not says_number(f"{digit or 1}{number}", number)


IDENTIFIER = st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,8}(_[A-Za-z0-9]{1,8}){1,4}", fullmatch=True)


@given(IDENTIFIER, st.sampled_from(["{}", "```\n{}\n```", "```text\r\n{}\r\n```", "`{}`", "{}  \r\n", "\n{}\n"]))
def test_a_copy_in_a_fence_or_with_other_line_ends_is_exact(identifier: str, wrap: str) -> None:
    assert judge_copy(identifier, wrap.replace("{}", identifier)) is Copy.EXACT


@given(IDENTIFIER, st.data())
def test_a_copy_that_lost_an_underscore_is_never_exact(identifier: str, data: st.DataObject) -> None:
    at = data.draw(st.sampled_from([i for i, char in enumerate(identifier) if char == "_"]))
    for filler in ("", " "):
        assert judge_copy(identifier, identifier[:at] + filler + identifier[at + 1 :]) is Copy.UNDERSCORES


@given(IDENTIFIER, st.text(max_size=40))
def test_only_the_identifier_itself_is_exact(identifier: str, text: str) -> None:
    assert (judge_copy(identifier, text) is Copy.EXACT) == (without_fence(text) == identifier)


@given(st.text(max_size=200))
def test_judges_of_text_never_crash_and_fences_come_off_once(text: str) -> None:
    says_number(text, 391, text)
    says_words(text, text)
    leaked_markup(text)
    loops(text)
    assert "\r" not in without_fence(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("kv_cache_dtype", Copy.EXACT),
        (r"kv\_cache\_dtype", Copy.ESCAPED),
        ("kvcachedtype", Copy.UNDERSCORES),
        ("kv cache dtype", Copy.UNDERSCORES),
        ("kv_cache_dtyp", Copy.WRONG),
        ("KV_CACHE_DTYPE", Copy.WRONG),
        ("kv_cache_dtype kv_cache_dtype", Copy.WRONG),
        ("1. kv_cache_dtype", Copy.WRONG),
        ("", Copy.WRONG),
        ("x" * 100_000, Copy.WRONG),
    ],
)
def test_how_a_copy_came_back(text: str, kind: Copy) -> None:
    assert judge_copy("kv_cache_dtype", text) is kind


def test_lost_underscores_name_the_engram_with_score_and_example() -> None:
    names = [f"kv_cache_{i}" for i in range(20)]
    texts = [name if i < 13 else name.replace("_", "") for i, name in enumerate(names)]
    verdict = judge_copies(names, texts)
    assert not verdict.ok
    assert verdict.found == "13/20 exact; `kv_cache_13` came back as `kvcache13`"
    assert "the Engram tables are not (or wrongly) loaded" in verdict.why
    assert verdict.fix[0] == "ds41ctl engram verify"


def test_the_example_is_a_lost_underscore_even_behind_other_mistakes() -> None:
    verdict = judge_copies(["a_b_1", "c_d_2", "e_f_3"], [r"a\_b\_1", "zzz", "ef3"])
    assert "`e_f_3` came back as `ef3`" in verdict.found


def test_escaped_underscores_do_not_accuse_the_engram() -> None:
    verdict = judge_copies(["a_b"], [r"a\_b"])
    assert not verdict.ok and "Engram is not the cause" in verdict.why


@pytest.mark.parametrize(
    "text",
    [
        "<｜DSML｜ calls>\n",
        "</｜DSML｜ invoke>",
        "x <｜Assistant｜> y",
        "</think>391",
        "<think>",
        "<｜end▁of▁sentence｜>",
        '<｜DSML｜ parameter name="city" string="true">Toronto',
    ],
)
def test_markup_in_content_is_seen(text: str) -> None:
    assert leaked_markup(text)
    verdict = unusable(Answer(choices=1, content=text, finish_reason="stop"), max_tokens=9)
    assert verdict is not None and "parser" in verdict.why


@pytest.mark.parametrize("text", ["I think so", "a < b | c > d", "<b>bold</b>", "a｜b", "DSML is a format"])
def test_ordinary_text_is_no_markup(text: str) -> None:
    assert not leaked_markup(text)


@pytest.mark.parametrize("text", ["the " * 400, "a" * 8000, "abc def\n" * 100, ("x y z " + "the cat sat " * 300)])
def test_loops_are_seen(text: str) -> None:
    assert loops(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the the the",
        "\n".join(f"| {i} | {i * i} | row {i % 7} |" for i in range(400)),
        "-" * 300,
        "|---|---|---|\n" + "\n".join(f"| {i} | ok | {i / 7:.3f} |" for i in range(200)),
    ],
)
def test_tables_and_short_texts_are_no_loops(text: str) -> None:
    assert not loops(text)


def tool_answer(*calls: ToolCall, finish: str = "tool_calls", content: str = "") -> Answer:
    return Answer(choices=1, content=content, tool_calls=calls, finish_reason=finish)


@pytest.mark.parametrize("arguments", ['{"city": "Toronto"}', '{"city":"Toronto"}', ' {\n"city" : "Toronto"}'])
def test_the_right_call_is_accepted_however_spaced(arguments: str) -> None:
    assert judge_tool(tool_answer(ToolCall("get_weather", arguments)), "get_weather", TORONTO).ok


GOOD_CALL = ToolCall("get_weather", '{"city": "Toronto"}')


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (tool_answer(ToolCall("get_weather", "{}")), "get_weather({})"),
        (tool_answer(ToolCall("get_weather", '{"city": "Tor')), "not JSON"),
        (tool_answer(ToolCall("get_weather", "")), "not JSON"),
        (tool_answer(ToolCall("get_weather", "[" * 9000)), "not JSON"),
        (tool_answer(ToolCall("get_weather", '{"city":["Toronto"]}')), '["Toronto"]'),
        (tool_answer(ToolCall("get_weather", '"Toronto"')), "Toronto"),
        (tool_answer(ToolCall("get_weather", '{"city": "toronto"}')), "toronto"),
        (tool_answer(ToolCall("get_weather", '{"city": "Toronto", "unit": "C"}')), "unit"),
        (tool_answer(ToolCall("get_weather", {"city": "Toronto"})), "a JSON dict, not a text"),
        (tool_answer(ToolCall("get_weather", None)), "NoneType"),
        (tool_answer(ToolCall("getWeather", '{"city": "Toronto"}')), "getWeather"),
        (tool_answer(GOOD_CALL, GOOD_CALL), "2 calls"),
        (tool_answer(GOOD_CALL, finish="stop"), "finish_reason stop"),
        (tool_answer(finish="stop", content="It is sunny."), "no call; content `It is sunny.`"),
        (tool_answer(finish="tool_calls"), "without a call"),
    ],
)
def test_wrong_calls_are_rejected_with_what_was_found(answer: Answer, found: str) -> None:
    verdict = judge_tool(answer, "get_weather", TORONTO)
    assert not verdict.ok
    assert found in verdict.found
    assert verdict.why and verdict.fix


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_taken_from_either_field_and_named(name: str) -> None:
    answer = Answer(choices=1, content="391", reasoning="17*20...", reasoning_field=name)
    verdict = judge_thinking(answer, 391, PROMPT)
    assert verdict.ok and f"`{name}`" in verdict.found


def test_reasoning_in_the_content_is_a_parser_fault() -> None:
    verdict = judge_thinking(Answer(choices=1, content="391"), 391, PROMPT)
    assert not verdict.ok and "reasoning parser" in verdict.why


def test_an_answer_that_went_to_reasoning_is_a_parser_fault() -> None:
    verdict = judge_number(Answer(choices=1, reasoning="391"), 391, PROMPT)
    assert not verdict.ok and "reasoning parser" in verdict.why


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(), "no choices"),
        (Answer(choices=1, finish_reason="stop", completion_tokens=0), "an empty answer (0 tokens"),
        (Answer(choices=1, content="abc", finish_reason="length", completion_tokens=9), "cut by max_tokens 9"),
        (Answer(choices=1, reasoning="abc", finish_reason="length"), "in the reasoning"),
        (Answer(choices=1, content="the " * 400, finish_reason="length"), "an endless loop"),
        (Answer(choices=1, reasoning="the " * 400, finish_reason="length"), "an endless loop"),
    ],
)
def test_unusable_answers_say_why(answer: Answer, found: str) -> None:
    verdict = unusable(answer, max_tokens=9)
    assert verdict is not None and not verdict.ok
    assert found in verdict.found
    assert verdict.why and verdict.fix


def test_a_usable_answer_passes() -> None:
    assert unusable(Answer(choices=1, content="391", finish_reason="stop"), max_tokens=9) is None


def test_follow_up() -> None:
    assert judge_follow_up(Answer(choices=1, content="It is 21 Degrees."), "21 degrees").ok
    assert not judge_follow_up(Answer(choices=1, content="I do not know."), "21 degrees").ok
    again = judge_follow_up(Answer(choices=1, content="21 degrees", tool_calls=(GOOD_CALL,)), "21 degrees")
    assert not again.ok and "another call" in again.found


def picture(content: str, tokens: int | None = 84) -> Answer:
    return Answer(choices=1, content=content, prompt_tokens=tokens)


NO_PICTURE = Answer(choices=1, content="I see no image.", prompt_tokens=12)
WORDS = ("red 7", "green 3")


def test_pictures_told_apart() -> None:
    assert judge_images([picture("Red, 7."), picture("A green square: 3")], WORDS, NO_PICTURE).ok


@pytest.mark.parametrize(
    ("answers", "without", "why"),
    [
        ([picture("red 7", 12), picture("green 3", 12)], NO_PICTURE, "drops the picture"),
        ([picture("red 7"), picture("red 7")], NO_PICTURE, "not told apart"),
        ([picture("blue 7"), picture("green 3")], NO_PICTURE, "changed"),
        ([picture("red 77"), picture("green 3")], NO_PICTURE, "changed"),
        ([picture("I cannot see an image"), picture("green 3")], NO_PICTURE, "changed"),
        ([picture("red 7"), picture("green 3")], picture("red 7", 12), "does not need the picture"),
    ],
)
def test_pictures_not_seen(answers: list[Answer], without: Answer, why: str) -> None:
    verdict = judge_images(answers, WORDS, without)
    assert not verdict.ok and why in verdict.why


def test_repeats() -> None:
    said = [Answer(choices=1, content=text) for text in ("Hello!", "Hello!", "Hello!")]
    assert judge_repeats(said).ok
    verdict = judge_repeats([*said, Answer(choices=1, content="Help")])
    assert not verdict.ok and "2 different answers of 4, from character 4 on" in verdict.found
    shorter = judge_repeats([*said, Answer(choices=1, content="Hello")])
    assert "from character 6 on" in shorter.found


def stream_of(total: int | None, first: float | None, final: float | None, first_tokens: int | None) -> Answer:
    return Answer(
        choices=1, completion_tokens=total, first_s=first, final_s=final, first_tokens=first_tokens, deltas=10
    )


def test_the_rate_counts_tokens_not_events() -> None:
    rate, basis = decode_rate(stream_of(36, 1.0, 2.0, 1))  # 10 events, as a drafter sends them
    assert rate == pytest.approx(35.0)
    assert basis == "35 tokens in 1.00 s"
    assert decode_rate(stream_of(36, 1.0, 2.0, 6))[0] == pytest.approx(30.0)
    assert decode_rate(stream_of(36, 1.0, 2.0, None))[0] == pytest.approx(35.0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stream_of(None, 1.0, 2.0, None), "no usage"),
        (stream_of(20, None, 2.0, None), "nothing was streamed"),
        (stream_of(20, 1.0, None, None), "nothing was streamed"),
        (stream_of(20, 1.0, 1.05, 1), "too few to measure"),
        (stream_of(1, 1.0, 2.0, 1), "too few to measure"),
    ],
)
def test_no_rate_without_a_base(answer: Answer, reason: str) -> None:
    rate, basis = decode_rate(answer)
    assert rate is None and reason in basis
