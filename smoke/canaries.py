"""Canaries: questions with known answers. Trained ones come with a pack; a real model gets random ones."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds41ctl.core.errors import ConfigError
from smoke.png import digit_square

_FILE = "canaries.json"
_CHARS_PER_TOKEN = 5  # above the usual 4.5 of English text, so that a prompt ends up longer than asked, not shorter


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # packs may say more than this version reads


class Arithmetic(_Model):
    """A question whose answer is one number. `thinking`: the model can also be asked to think about it."""

    prompt: str
    answer: int
    thinking: bool = True


class FollowUp(_Model):
    """The tool's result, and a text that the sentence about it must contain."""

    result: str
    expect: str = Field(min_length=1)


class Tool(_Model):
    """A question that needs one call of `name` with exactly `arguments`; `tools` as the API takes them."""

    prompt: str
    tools: tuple[dict[str, Any], ...] = Field(min_length=1)
    name: str
    arguments: dict[str, Any]
    follow_up: FollowUp | None = None


class Copies(_Model):
    """Identifiers to copy, one request each; `template` holds {identifier}."""

    template: str = Field(pattern=r"\{identifier\}")
    identifiers: tuple[str, ...] = Field(min_length=1)

    def prompt(self, identifier: str) -> str:
        """The request for one identifier."""
        return self.template.replace("{identifier}", identifier)


class Image(_Model):
    """A picture, a question about it, and words only who sees it can say. `png`: the file's content."""

    file: str
    question: str
    answer: str = Field(min_length=1)
    png: bytes = Field(b"", repr=False)


class Needle(_Model):
    """A fact in a long document. `prompt`, when given, is the whole user message."""

    document: str = ""
    question: str = ""
    answer: str = Field(min_length=1)
    prompt: str = ""

    @property
    def message(self) -> str:
        """The user message: the document, then the question."""
        return self.prompt or f"{self.document}\n\n{self.question}"


class Hello(_Model):
    """A harmless request. `answer` is a text its reply contains, '' when any will do."""

    prompt: str
    answer: str = ""


class Canaries(_Model):
    """All questions for one model; a part that is None cannot be asked of it."""

    hello: Hello
    arithmetic: Arithmetic | None = None
    tool: Tool | None = None
    copies: Copies | None = Field(None, alias="copy")
    images: tuple[Image, ...] = ()
    needle: tuple[Needle, ...] = ()


def load(folder: Traversable) -> Canaries:
    """Canaries of a pack's folder (canaries.json beside its PNG and text files).

    Raises ConfigError naming the file, what was expected and what was found.
    """
    where = f"{folder.name}/{_FILE}"
    tree = _parse(_read(folder, _FILE, where), where)
    try:
        canaries = Canaries.model_validate(tree)
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"{where}: {lines[0]}", detail=lines[1:]) from None
    images = tuple(image.model_copy(update={"png": _png(folder, image.file, where)}) for image in canaries.images)
    needle = tuple(
        item.model_copy(update={"document": _read(folder, item.document, where).decode("utf-8", "replace")})
        if item.document.endswith(".txt") and "\n" not in item.document
        else item
        for item in canaries.needle
    )
    return canaries.model_copy(update={"images": images, "needle": needle})


def _parse(raw: bytes, where: str) -> Mapping[str, Any]:
    try:
        tree = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: expected an object, found {type(tree).__name__}")
    return tree


def _read(folder: Traversable, name: str, where: str) -> bytes:
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"{where}: {name!r} is not a file name inside the pack")
    try:
        return folder.joinpath(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {name} cannot be read: {error.strerror or error}") from None


def _png(folder: Traversable, name: str, where: str) -> bytes:
    content = _read(folder, name, where)
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ConfigError(f"{where}: {name} is not a PNG file")
    return content


_WORDS = (
    "kv",
    "cache",
    "dtype",
    "block",
    "table",
    "rope",
    "theta",
    "expert",
    "scale",
    "hidden",
    "state",
    "token",
    "index",
    "shard",
    "layer",
    "engram",
    "hash",
    "row",
    "prefill",
    "decode",
    "slot",
    "quant",
    "group",
    "norm",
    "gate",
    "router",
    "sinkhorn",
    "drafter",
    "window",
    "mask",
    "logit",
    "head",
    "rank",
    "stage",
)
_SENTENCES = (
    "The archive keeps a short note for every day of the long voyage.",
    "Grain was weighed in the morning and written down before noon.",
    "The harbour master counted the ships and signed the ledger twice.",
    "A light wind came from the west, and the crew mended the sails.",
    "Nothing of importance was reported from the northern lighthouse.",
    "The clerk copied the letter and put the original back on its shelf.",
)
_COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (210, 30, 30),
    "green": (20, 150, 50),
    "blue": (30, 60, 210),
    "yellow": (235, 205, 20),
}


def generate(
    seed: int,
    *,
    copies: int = 20,
    needle_tokens: int = 1300,
    needle_lengths: Sequence[int] = (),
    needle_depths: Sequence[float] = (0.2, 0.7),
    images: int = 2,
) -> Canaries:
    """Canaries for a real model, fresh for every seed, so that none can have been learnt or cached.

    `copies` identifiers with underscores, digits and mixed case; `images` pictures that differ in colour or digit;
    needles at `needle_depths` (0 start, 1 end) of about `needle_tokens` tokens (none when 0), and of each of
    `needle_lengths` after them.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    names: dict[str, None] = {}
    while len(names) < copies:
        names[random_identifier(rng)] = None
    lengths = [tokens for tokens in (needle_tokens, *needle_lengths) if needle_tokens and tokens]
    needles = tuple(_needle(rng, tokens, depth) for tokens in lengths for depth in needle_depths)
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city"}},
                "required": ["city"],
            },
        },
    }
    return Canaries(
        hello=Hello(prompt="Tell a long story about a lighthouse keeper and a storm."),
        arithmetic=Arithmetic(prompt="What is 17 * 23? Answer with just the number.", answer=391),
        tool=Tool(
            prompt="What is the weather in Toronto?",
            tools=(tool,),
            name="get_weather",
            arguments={"city": "Toronto"},
            follow_up=FollowUp(result='{"city": "Toronto", "temperature_c": 17, "sky": "cloudy"}', expect="17"),
        ),
        copy=Copies(
            template="Copy this identifier exactly and write nothing else: {identifier}",
            identifiers=tuple(names),
        ),
        images=_images(rng, images),
        needle=needles,
    )


def random_identifier(rng: random.Random) -> str:
    """An identifier such as `kv_Cache_7f3_dtype`: at least two underscores, a digit, both cases."""
    first, middle, last = rng.sample(_WORDS, 3)
    alphabet = string.ascii_lowercase + string.digits
    code = rng.choice(string.digits) + "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 3)))
    parts = [first, middle.capitalize(), code, last]
    tail = parts[1:]
    rng.shuffle(tail)
    return "_".join([first, *tail])


def _needle(rng: random.Random, tokens: int, depth: float) -> Needle:
    code = f"{rng.randint(100_000, 999_999)}"
    sentences: list[str] = []
    size = 0
    while size < tokens * _CHARS_PER_TOKEN:
        sentences.append(rng.choice(_SENTENCES))
        size += len(sentences[-1]) + 1
    sentences.insert(int(len(sentences) * depth), f"The code of the iron door is {code}.")
    return Needle(
        document=" ".join(sentences),
        question="What is the code of the iron door? Answer with just the code.",
        answer=code,
    )


def _images(rng: random.Random, count: int) -> tuple[Image, ...]:
    pairs = [(colour, digit) for colour in sorted(_COLOURS) for digit in range(1, 10)]
    rng.shuffle(pairs)
    # the first ones differ in colour and in digit, so that one guess cannot be right twice
    chosen: list[tuple[str, int]] = []
    for colour, digit in pairs:
        seen = chosen[-(len(_COLOURS) - 1) :]
        if len(chosen) < count and all(colour != c for c, _ in seen) and all(digit != d for _, d in chosen):
            chosen.append((colour, digit))
    question = "Which colour is the square and which digit is on it? Answer with the colour and the digit."
    return tuple(
        Image(
            file=f"{colour}-{digit}.png",
            question=question,
            answer=f"{colour} {digit}",
            png=digit_square(_COLOURS[colour], digit),
        )
        for colour, digit in chosen
    )
