"""Answer: what one chat completion said, the same whether it came whole or streamed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds41ctl.adapters.http import Chunk, Fault, HttpFault

REASONING_FIELDS = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments` is what the server sent: a JSON text by the protocol, judged elsewhere."""

    name: str
    arguments: Any
    id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion. Token counts are the server's `usage`, None when it sent none.

    `first_s`, `last_s`: seconds from sending to the first and last event that said something (streams only).
    `first_tokens`: tokens up to that first event, when the server counts along. `final_s`: seconds to the
    event with the finish_reason.
    `deltas`: how many such events; `finals`: how many times a finish_reason came. `marks`: each such event's time and
    the tokens so far (streams; None without a count). `cached_tokens`: prompt tokens that the prefix cache served.
    """

    choices: int = 0
    content: str = ""
    reasoning: str = ""
    reasoning_field: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str = ""
    first_s: float | None = None
    last_s: float | None = None
    final_s: float | None = None
    first_tokens: int | None = None
    deltas: int = 0
    finals: int = 0
    cached_tokens: int | None = None
    marks: tuple[tuple[float, int | None], ...] = ()

    @property
    def silent(self) -> bool:
        """True when nothing at all was said."""
        return not (self.content or self.reasoning or self.tool_calls)


def from_body(body: Mapping[str, Any]) -> Answer:
    """Answer of a whole chat completion. Raises HttpFault BAD_JSON when it has another shape."""
    choices = _list(body.get("choices"), "choices")
    prompt_tokens, completion_tokens = _usage(body)
    if not choices:
        return Answer(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=_cached(body))
    choice = _mapping(choices[0], "choices[0]")
    message = _mapping(choice.get("message"), "choices[0].message")
    reasoning, reasoning_field = _reasoning(message, "choices[0].message")
    calls = [_call(item, f"tool_calls[{i}]") for i, item in enumerate(_list(message.get("tool_calls"), "tool_calls"))]
    finish = choice.get("finish_reason")
    return Answer(
        choices=len(choices),
        content=_text(message.get("content"), "content"),
        reasoning=reasoning,
        reasoning_field=reasoning_field,
        tool_calls=tuple(calls),
        finish_reason=finish if isinstance(finish, str) else None,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        model=_text(body.get("model"), "model"),
        finals=1 if isinstance(finish, str) else 0,
        cached_tokens=_cached(body),
    )


def from_chunks(chunks: Iterable[Chunk]) -> Answer:
    """Answer assembled from a stream; what follows the first finish_reason is not added to it.

    Raises HttpFault: what the stream raises, or BAD_JSON when an event has another shape.
    """
    assembly = Assembly()
    for chunk in chunks:
        assembly.add(chunk)
    return assembly.answer()


class Assembly:
    """An answer while its events come in: `add` each, `answer` at any time."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._field = ""
        self._calls: dict[int, dict[str, str]] = {}
        self._finish: str | None = None
        self._usage: tuple[int | None, int | None] = (None, None)
        self._model = ""
        self._marks: list[tuple[float, int | None]] = []
        self._cached: int | None = None
        self._choices = 0
        self._finals = 0
        self._final_s: float | None = None
        self._first_tokens: int | None = None

    @property
    def deltas(self) -> int:
        """Events so far that said something."""
        return len(self._marks)

    def add(self, chunk: Chunk) -> None:
        """Take one event in. Raises HttpFault BAD_JSON when it has another shape."""
        data = chunk.data
        self._model = self._model or _text(data.get("model"), "model")
        usage = _usage(data)
        if usage != (None, None):
            self._usage = usage
            self._cached = _cached(data)
        choices = _list(data.get("choices"), "choices")
        if not choices:
            return
        self._choices = 1
        choice = _mapping(choices[0], "choices[0]")
        if self._finish is None and self._delta(_mapping(choice.get("delta") or {}, "choices[0].delta")):
            if not self._marks:
                self._first_tokens = usage[1]
            self._marks.append((chunk.at, usage[1]))
        finish = choice.get("finish_reason")
        if isinstance(finish, str):
            self._finals += 1
            if self._finish is None:
                self._finish, self._final_s = finish, chunk.at

    def _delta(self, delta: Mapping[str, Any]) -> bool:
        """Add one delta; True when it said something."""
        content = _text(delta.get("content"), "delta.content")
        reasoning, name = _reasoning(delta, "delta")
        self._field = self._field or name
        self._content.append(content)
        self._reasoning.append(reasoning)
        said = bool(content or reasoning)
        for position, raw in enumerate(_list(delta.get("tool_calls"), "delta.tool_calls")):
            item = _mapping(raw, "delta.tool_calls[]")
            index = item.get("index", position)
            if not isinstance(index, int):
                raise _shape("delta.tool_calls[].index", "a number", index)
            call = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
            function = _mapping(item.get("function") or {}, "delta.tool_calls[].function")
            call["id"] = call["id"] or _text(item.get("id"), "delta.tool_calls[].id")
            call["name"] += _text(function.get("name"), "delta.tool_calls[].function.name")
            call["arguments"] += _text(function.get("arguments"), "delta.tool_calls[].function.arguments")
            said = True
        return said

    def answer(self) -> Answer:
        """What was said so far."""
        calls = tuple(ToolCall(c["name"], c["arguments"], c["id"]) for _, c in sorted(self._calls.items()))
        return Answer(
            choices=self._choices,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            reasoning_field=self._field,
            tool_calls=calls,
            finish_reason=self._finish,
            prompt_tokens=self._usage[0],
            completion_tokens=self._usage[1],
            model=self._model,
            first_s=self._marks[0][0] if self._marks else None,
            last_s=self._marks[-1][0] if self._marks else None,
            final_s=self._final_s,
            first_tokens=self._first_tokens,
            deltas=len(self._marks),
            finals=self._finals,
            cached_tokens=self._cached,
            marks=tuple(self._marks),
        )


def _shape(where: str, expected: str, found: Any) -> HttpFault:
    return HttpFault(Fault.BAD_JSON, f"{where}: expected {expected}, found {type(found).__name__}", status=200)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _shape(where, "an object", value)
    return value


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _shape(where, "a list", value)
    return value


def _text(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _shape(where, "a text", value)
    return value


def _reasoning(message: Mapping[str, Any], where: str) -> tuple[str, str]:
    for name in REASONING_FIELDS:
        text = _text(message.get(name), f"{where}.{name}")
        if text:
            return text, name
    return "", ""


def _call(item: Any, where: str) -> ToolCall:
    call = _mapping(item, where)
    function = _mapping(call.get("function"), f"{where}.function")
    name = _text(function.get("name"), f"{where}.function.name")
    return ToolCall(name, function.get("arguments"), _text(call.get("id"), f"{where}.id"))


def _usage(body: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return None, None
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    prompt, completion = (n if isinstance(n, int) and not isinstance(n, bool) and n >= 0 else None for n in counts)
    return prompt, completion


def _cached(body: Mapping[str, Any]) -> int | None:
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    count = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None
