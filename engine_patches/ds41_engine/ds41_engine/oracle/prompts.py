"""Prompts from a JSON Lines file: text, token ids, or a conversation in the model's own encoding, with pictures.

One object a line::

    {"set": "code", "name": "sort", "text": "def sort(", "bos": true}
    {"set": "chat", "messages": [{"role": "user", "content": "..."}], "thinking": false, "tools": [...]}
    {"set": "ids", "ids": [0, 17, 4]}

A content part ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`` is a picture; a ``file:``
URL names a file beside the JSON Lines file.
"""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from tokenizers import Tokenizer

from ..shape import IMAGE_TOKEN_ID
from .pictures import Picture, prepare

PLACEHOLDER = "<｜deepseek_image｜>"
BOS_ID = 0
KEYS = frozenset(("set", "name", "text", "bos", "messages", "tools", "thinking", "reasoning_effort", "ids"))


class PromptError(Exception):
    """A prompt cannot be used. The text is one line."""


@dataclass(frozen=True)
class Prompt:
    """One sequence: its token ids, every position of a picture's span :data:`IMAGE_TOKEN_ID`.

    ``source`` is what an engine can be asked instead of ids: the conversation with pictures as data URLs; None when
    the ids say everything.
    """

    set: str
    name: str
    ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    source: Mapping[str, Any] | None = None


def load(path: Path, tokenizer: Tokenizer, vision: Mapping[str, Any] | None, vocab_size: int) -> list[Prompt]:
    """All prompts of a file, in its order; a plain text file is one prompt.

    Raises:
        PromptError: not readable, a bad line (with its number), or nothing in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompts {path}: cannot be read: {error}") from None
    if path.suffix not in (".jsonl", ".json"):
        return [_prompt({"set": path.stem, "text": text}, 1, path, tokenizer, vision, vocab_size)]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            tree = json.loads(line)
        except ValueError as error:
            raise PromptError(f"{path.name} line {number}: not JSON: {error}") from None
        if not isinstance(tree, dict):
            raise PromptError(f"{path.name} line {number}: expected an object, found {type(tree).__name__}")
        found.append(_prompt(tree, number, path, tokenizer, vision, vocab_size))
    if not found:
        raise PromptError(f"prompts {path}: expected at least one line, found none")
    return found


def _prompt(
    tree: dict[str, Any], number: int, path: Path, tokenizer: Tokenizer, vision: Mapping[str, Any] | None, vocab: int
) -> Prompt:
    where = f"{path.name} line {number}"
    unknown = sorted(set(tree) - KEYS)
    if unknown:
        raise PromptError(f"{where}: unknown key {unknown[0]}; known are {', '.join(sorted(KEYS))}")
    kinds = [key for key in ("text", "messages", "ids") if key in tree]
    if len(kinds) != 1:
        raise PromptError(f"{where}: expected one of text, messages and ids, found {' and '.join(kinds) or 'none'}")
    pictures: list[Picture] = []
    source: dict[str, Any] | None = None
    try:
        if kinds[0] == "ids":
            ids = [int(token) for token in tree["ids"]]
        elif kinds[0] == "text":
            ids = [BOS_ID] if tree.get("bos", True) else []
            ids += tokenizer.encode(str(tree["text"]), add_special_tokens=False).ids
        else:
            messages, raw = _with_pictures(tree["messages"], path.parent, where)
            if raw and vision is None:
                raise PromptError(f"{where}: a picture, but the pack has no vision_config")
            pictures = [prepare(image, vision or {}) for image in raw]
            text = encode(messages, tree.get("tools"), bool(tree.get("thinking")), tree.get("reasoning_effort"))
            ids = _expand(tokenizer.encode(text, add_special_tokens=False).ids, pictures, where)
            if pictures:
                source = {key: tree[key] for key in ("tools", "thinking", "reasoning_effort") if key in tree}
                source["messages"] = messages
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PromptError(f"{where}: {type(error).__name__}: {error}") from None
    if len(ids) < 2:
        raise PromptError(f"{where}: expected at least 2 tokens, found {len(ids)}")
    bad = [token for token in ids if not 0 <= token < vocab]
    if bad:
        raise PromptError(f"{where}: expected token ids below {vocab}, found {bad[0]}")
    if ids.count(IMAGE_TOKEN_ID) != sum(picture.tokens for picture in pictures):
        raise PromptError(f"{where}: picture tokens without their picture; give the conversation, not its ids")
    name = str(tree.get("name") or f"line {number}")
    return Prompt(str(tree.get("set") or "all"), name, tuple(ids), tuple(pictures), source)


def _with_pictures(messages: Any, folder: Path, where: str) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """The conversation with every picture as a data URL, and the pictures in their order."""
    found: list[Image.Image] = []
    made = copy.deepcopy(list(messages))
    for message in made:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if part.get("type") != "image_url":
                continue
            url = str(part["image_url"]["url"])
            if url.startswith("file:"):
                name = url.removeprefix("file:")
                try:
                    data = (folder / name).read_bytes()
                except OSError as error:
                    raise PromptError(f"{where}: picture {name}: {error.strerror}") from None
                url = "data:image/png;base64," + base64.b64encode(data).decode()
                part["image_url"] = {"url": url}
            try:
                data = base64.b64decode(url.partition(";base64,")[2], validate=True)
                image = Image.open(io.BytesIO(data))
                image.load()
            except (UnidentifiedImageError, binascii.Error, OSError) as error:
                raise PromptError(f"{where}: a picture that cannot be read: {error}") from None
            found.append(image)
    return made, found


def _expand(ids: Sequence[int], pictures: Sequence[Picture], where: str) -> list[int]:
    found: list[int] = []
    waiting = iter(pictures)
    for token in ids:
        if token != IMAGE_TOKEN_ID:
            found.append(token)
            continue
        picture = next(waiting, None)
        if picture is None:
            raise PromptError(f"{where}: {PLACEHOLDER} in a text; pictures are content parts")
        found += [token] * picture.tokens
    if next(waiting, None) is not None:
        raise PromptError(f"{where}: a picture in a message whose content the encoding leaves out")
    return found


@cache
def _encoder() -> Callable[..., str]:
    """``encode_messages`` of the model's own prompt encoder, from the engine's files and without importing vLLM."""
    package = importlib.util.find_spec("vllm")
    places = list(package.submodule_search_locations or ()) if package is not None else []
    for place in places:
        path = Path(place) / "tokenizers" / "deepseek_v41_encoding.py"
        spec = importlib.util.spec_from_file_location("ds41_v41_encoding", path) if path.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found: Callable[..., str] = module.encode_messages
            return found
    raise PromptError(
        "a conversation needs the model's encoder (vllm/tokenizers/deepseek_v41_encoding.py), and there is none; "
        "use the engine's Python, or give ids or text"
    )


def encode(messages: Sequence[Mapping[str, Any]], tools: Any, thinking: bool, effort: Any = None) -> str:
    """A conversation as the prompt text that the server makes of it; content parts are joined by an empty line."""
    made: list[dict[str, Any]] = []
    for message in messages:
        item = dict(message)
        if "reasoning" in item:
            item["reasoning_content"] = item["reasoning"]
        if isinstance(item.get("content"), list):
            parts = (p.get("text", "") if p.get("type") == "text" else PLACEHOLDER for p in item["content"])
            item["content"] = "\n\n".join(parts)
        made.append(item)
    if tools:
        system = next((item for item in made if item["role"] == "system"), None)
        if system is None:
            system = {"role": "system", "content": ""}
            made.insert(0, system)
        system["tools"] = tools
    return _encoder()(
        made, thinking_mode="thinking" if thinking else "chat", drop_thinking=True, reasoning_effort=effort or "high"
    )


def digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over sets, names, ids and pictures."""
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(json.dumps([prompt.set, prompt.name, prompt.ids]).encode())
        for picture in prompt.pictures:
            found.update(picture.patches.numpy().tobytes())
    return found.hexdigest()
