"""A scripted OpenAI-compatible server over real loopback sockets, and a fake engine behind it.

`ScriptedServer` sends exactly the bytes of a script, so any fault of a server or a network can be played:
pauses, resets, half events, other services. `FakeEngine` is a handler that answers like a healthy engine,
with quirks by intent (`copy`, `tool`, ...) for the unhealthy ones.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Any

from smoke.canaries import Canaries


class Act(Enum):
    """What a script does beside sending bytes (bytes) and pausing (float, seconds)."""

    RESET = "close with RST"
    HANG = "keep the connection open and say nothing"


Step = bytes | float | Act
Script = Sequence[Step]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


class ScriptedServer:
    """Serves one script a connection, chosen by `handler`. `requests` keeps what came in."""

    def __init__(self, handler: Callable[[Request], Script], port: int = 0) -> None:
        self.requests: list[Request] = []
        self._handler = handler
        self._stop = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in list(self._open):  # a client that connected and asks nothing
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            self._open.add(connection)
            try:
                request = _read_request(connection)
                if request is None:
                    return
                self.requests.append(request)
                self._play(connection, self._handler(request))
            except OSError:
                return  # the client hung up: its right
            finally:
                self._open.discard(connection)

    def _play(self, connection: socket.socket, script: Script) -> None:
        for step in script:
            if isinstance(step, bytes):
                connection.sendall(step)
            elif step is Act.RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            elif step is Act.HANG:
                self._until_closed(connection, 60.0)
                return
            elif isinstance(step, float) and self._until_closed(connection, step):
                return

    def _until_closed(self, connection: socket.socket, seconds: float) -> bool:
        """Wait, but no longer than the client or the test; True when either has ended."""
        waited = 0.0
        while waited < seconds and not self._stop.is_set():
            step = min(0.05, seconds - waited)
            readable, _, _ = select.select([connection], [], [], step)
            if readable and not connection.recv(4096):
                return True
            waited += step
        return self._stop.is_set()


def _read_request(connection: socket.socket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return None
        data += part
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers.get("content-length", "0"))
    while len(rest) < length:
        rest += connection.recv(65536)
    return Request(method, path, headers, json.loads(rest) if rest else {})


# replies as bytes


def whole(body: object, *, status: int = 200, content_type: str = "application/json", extra: str = "") -> bytes:
    """A complete HTTP reply. `body`: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n{extra}"
    return f"{head}\r\n".encode() + content


def stream_head(extra: str = "", *, version: str = "1.0") -> bytes:
    """Head of an event stream whose end is the end of the connection."""
    return f"HTTP/{version} 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n{extra}\r\n".encode()


def event(data: object) -> bytes:
    """One server-sent event. `data`: a text as it is, anything else as JSON."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n".encode()


DONE = event("[DONE]")
HTML = whole(b"<!DOCTYPE html><html><body>It works!</body></html>", content_type="text/html")


def chunked(*parts: bytes, end: bool = True) -> bytes:
    """Body in HTTP/1.1 chunks; without `end` the last one is missing."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return body + (b"0\r\n\r\n" if end else b"")


# a fake engine


@dataclass(frozen=True)
class Say:
    """One completion, before it is put on the wire."""

    content: str | None = ""
    reasoning: str = ""
    reasoning_field: str = "reasoning"
    calls: tuple[tuple[str, Any], ...] = ()
    finish: str = "stop"
    prompt_tokens: int = 20
    completion_tokens: int = 5
    usage: bool = True
    counts_along: bool = True
    pieces: int = 4
    pause: float = 0.0
    choices: bool = True


Quirk = Callable[[Say, Request], Say | Script]


@dataclass
class FakeEngine:
    """Handler of a ScriptedServer: answers `canaries` rightly unless a quirk for the intent says otherwise.

    Intents: health, models, metrics, tool-forced, stop, other-model,
    hello, arithmetic, thinking, tool, tool-stream, follow-up, copy, needle, image,
    no-image, decode, bad-request.
    """

    canaries: Canaries
    model: str = "deepseek-v4.1-flash"
    quirks: dict[str, Quirk] = field(default_factory=dict)
    token_s: float = 0.002
    generated: int = 0
    prompted: int = 0
    cached: int = 0
    image_limit: int = 64
    seen: set[str] = field(default_factory=set, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __call__(self, request: Request) -> Script:
        intent = self.intent(request)
        say = self.right(intent, request)
        said = self.quirks[intent](say, request) if intent in self.quirks else say
        if not isinstance(said, Say):
            return said
        if intent == "health":
            return [whole(b"")]
        if intent == "metrics":
            return [whole(self.metrics_page().encode(), content_type="text/plain")]
        if intent == "models":
            return [whole({"object": "list", "data": [{"id": self.model, "object": "model"}]})]
        if intent == "other-model":
            return [whole({"error": {"message": "The model does not exist."}}, status=404)]
        if intent == "bad-request":
            return [whole({"error": {"message": "max_tokens must be at least 1, got -1."}}, status=400)]
        with self.lock:
            self.generated += said.completion_tokens
            self.prompted += said.prompt_tokens
            text = json.dumps(request.body["messages"])
            self.cached += said.prompt_tokens if text in self.seen else 0
            self.seen.add(text)
        return self.stream(said) if request.body.get("stream") else [whole(self.body(said))]

    def metrics_page(self, **values: float) -> str:
        """/metrics as vLLM writes it; `values` replace or add rows (the part of the name after `vllm:`)."""
        rows = {
            "num_requests_running": 0.0,
            "num_requests_waiting": 0.0,
            "kv_cache_usage_perc": 0.0,
            "generation_tokens_total": float(self.generated),
            "prompt_tokens_total": float(self.prompted),
            "prompt_tokens_cached_total": float(self.cached),
            **values,
        }
        return "".join(f'vllm:{name}{{engine="0",model_name="{self.model}"}} {value}\n' for name, value in rows.items())

    def intent(self, request: Request) -> str:
        if request.path != "/v1/chat/completions":
            return request.path.removeprefix("/v1/").strip("/")
        body = request.body
        content = body["messages"][-1]["content"]
        if body["model"] != self.model:
            return "other-model"
        pictures = sum(part["type"] == "image_url" for part in content) if isinstance(content, list) else 0
        if (
            body["max_tokens"] < 1
            or body["temperature"] < 0
            or not isinstance(body.get("tools", []), list)
            or str(content).startswith("long long")
            or pictures > self.image_limit
        ):
            return "bad-request"
        if body.get("tool_choice"):
            return "tool-forced"
        if body.get("stop"):
            return "stop"
        if body["messages"][-1]["role"] == "tool":
            return "follow-up"
        if isinstance(content, list):
            return "image"
        if body.get("tools"):
            return "tool-stream" if body.get("stream") else "tool"
        if body.get("stream"):
            return "decode"
        if body.get("chat_template_kwargs", {}).get("thinking"):
            return "thinking"
        if self.canaries.arithmetic and content == self.canaries.arithmetic.prompt:
            return "arithmetic"
        if any(content == needle.message for needle in self.canaries.needle):
            return "needle"
        if any(content == image.question for image in self.canaries.images):
            return "no-image"
        return "hello" if content == self.canaries.hello.prompt else "copy"

    def right(self, intent: str, request: Request) -> Say:
        canaries, body = self.canaries, request.body
        match intent:
            case "arithmetic" if canaries.arithmetic:
                return Say(str(canaries.arithmetic.answer))
            case "thinking" if canaries.arithmetic:
                answer = canaries.arithmetic.answer
                return Say(str(answer), reasoning=f"17 * 20 = 340 and 17 * 3 = 51, so {answer}.")
            case "tool" | "tool-stream" | "tool-forced" if canaries.tool:
                call = (canaries.tool.name, json.dumps(canaries.tool.arguments))
                return Say(None, calls=(call,), finish="tool_calls", completion_tokens=24)
            case "follow-up" if canaries.tool and canaries.tool.follow_up:
                content = body["messages"][-1]["content"]
                parts = content if isinstance(content, list) else []
                return Say(f"It is {canaries.tool.follow_up.expect} now.", prompt_tokens=20 + _picture_tokens(parts))
            case "stop":
                whole_answer = "Hello! " * min(3, body["max_tokens"])
                return Say(whole_answer[: whole_answer.index(body["stop"][0])])
            case "copy" if canaries.copies:
                prompt = body["messages"][-1]["content"]
                pattern = re.escape(canaries.copies.template).replace(r"\{identifier\}", "(.+)")
                found = re.fullmatch(pattern, prompt)
                return Say(found.group(1) if found else "I do not know.")
            case "needle":
                text = body["messages"][-1]["content"]
                needle = next(item for item in canaries.needle if item.message == text)
                return Say(needle.answer, prompt_tokens=len(text) // 4)
            case "image":
                parts = body["messages"][-1]["content"]
                urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
                return Say(self._seen(urls[0]) if urls else "Nothing.", prompt_tokens=20 + _picture_tokens(parts))
            case "no-image":
                return Say("I do not see an image.")
            case "decode" | "hello":
                count = body["max_tokens"] if body.get("ignore_eos") else min(3, body["max_tokens"])
                finish = "length" if body.get("ignore_eos") or body["max_tokens"] < 3 else "stop"
                pace = {"pieces": count, "pause": self.token_s} if body.get("stream") else {}
                return Say("Hello! " * count, completion_tokens=count, finish=finish, **pace)
            case _:
                return Say()

    def _seen(self, url: str) -> str:
        png = base64.b64decode(url.partition(",")[2])
        return next((image.answer for image in self.canaries.images if image.png == png), "A plain square.")

    def body(self, say: Say) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": say.content}
        if say.reasoning:
            message[say.reasoning_field] = say.reasoning
        if say.calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(say.calls)
            ]
        choice = {"index": 0, "message": message, "finish_reason": say.finish}
        body: dict[str, Any] = {"model": self.model, "choices": [choice] if say.choices else []}
        if say.usage:
            body["usage"] = self._usage(say, say.completion_tokens)
        return body

    def stream(self, say: Say) -> list[Step]:
        steps: list[Step] = [stream_head(), self._chunk({"role": "assistant", "content": ""}, say, 0)]
        step = max(1, -(-say.completion_tokens // say.pieces))
        for i, piece in enumerate(_split(say.content or "", say.pieces)):
            if say.pause:
                steps.append(say.pause)
            steps.append(self._chunk({"content": piece}, say, min(say.completion_tokens, (i + 1) * step)))
        for index, (name, arguments) in enumerate(say.calls):
            first = {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": ""}}
            steps.append(self._chunk({"tool_calls": [first]}, say, 1))
            for piece in _split(arguments, 3):
                part = {"index": index, "function": {"arguments": piece}}
                steps.append(self._chunk({"tool_calls": [part]}, say, 2))
        if not say.choices:
            steps = steps[:1]
        else:
            last = {"index": 0, "delta": {}, "finish_reason": say.finish}
            steps.append(event({"model": self.model, "choices": [last]}))
        if say.usage:
            steps.append(event({"choices": [], "usage": self._usage(say, say.completion_tokens)}))
        return [*steps, DONE]

    def _chunk(self, delta: dict[str, Any], say: Say, tokens: int) -> bytes:
        data: dict[str, Any] = {
            "model": self.model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }
        if say.usage and say.counts_along:
            data["usage"] = self._usage(say, tokens)
        return event(data)

    @staticmethod
    def _usage(say: Say, completion: int) -> dict[str, int]:
        return {"prompt_tokens": say.prompt_tokens, "completion_tokens": completion}


def _picture_tokens(parts: Sequence[Mapping[str, Any]]) -> int:
    return 64 * sum(part["type"] == "image_url" for part in parts)


def but(**changes: Any) -> Quirk:
    """A quirk that changes fields of the right answer."""
    return lambda say, request: replace(say, **changes)


def instead(*script: Step) -> Quirk:
    """A quirk that plays a script instead of an answer."""
    return lambda say, request: list(script)


def _split(text: str, pieces: int) -> list[str]:
    size = max(1, -(-len(text) // pieces))
    return [text[i : i + size] for i in range(0, len(text), size)]
