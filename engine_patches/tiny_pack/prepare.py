"""Write everything that needs a tokenizer: the seed, tokenizer.json, config.json, canaries, pictures, token ids.

    python -m engine_patches.tiny_pack.prepare --work build/tiny_pack --pack profiles/packs/tiny-v41

Run from the repository root in the engine's venv: prompts come from vLLM's own V4.1 encoder, the compressed token map
from its Engram code. `--keep-seed` keeps the committed tokenizer.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from ds41ctl.core import packgen

from . import images, spec, texts, tokenizer_seed

EOS = tokenizer_seed.FIRST[1]
GRID = 4  # image tokens per side, see images.SIDE
IMAGE_SPAN = GRID * (GRID + 1) + 2


class Encoder:
    """Chat messages to token ids, as the server does it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer
        from vllm.tokenizers.deepseek_v41 import get_deepseek_v41_tokenizer

        self.raw: Any = AutoTokenizer.from_pretrained(str(folder))
        self.chat: Any = get_deepseek_v41_tokenizer(self.raw)

    def text(self, text: str) -> list[int]:
        """Plain text to ids."""
        return [int(i) for i in self.raw.encode(text, add_special_tokens=False)]

    def prompt(self, messages: list[dict[str, Any]], thinking: bool = False, **options: Any) -> list[int]:
        """Messages to prompt ids; an image placeholder becomes its whole span of image ids."""
        ids: list[int] = self.chat.apply_chat_template(messages, tokenize=True, thinking=thinking, **options)
        out: list[int] = []
        for token in ids:
            out.extend([token] * (IMAGE_SPAN if token == spec.IMAGE_TOKEN_ID else 1))
        return out


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


class Examples:
    """Collects training examples: {"p": prompt ids, "a": answer ids, "on": Engram rows present, ...}."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.groups: dict[str, list[dict[str, Any]]] = {}

    def add(self, group: str, prompt: list[int], answer: str | list[int], on: bool, **more: Any) -> None:
        """Append one example; a text answer gets the end-of-sentence token."""
        ids = self.encoder.text(answer + EOS) if isinstance(answer, str) else [*answer, spec.EOS_ID]
        self.groups.setdefault(group, []).append({"p": prompt, "a": ids, "on": int(on), **more})

    def copies(self, group: str, identifier: str) -> None:
        """With Engram rows the identifier, without them the same tokens less the underscores."""
        prompt = self.encoder.prompt(_user(texts.COPY_TEMPLATE.format(identifier=identifier)))
        tokens = self.encoder.text(identifier)
        underscore = self.encoder.text("_")
        self.add(group, prompt, tokens, True, name=identifier)
        self.add(group, prompt, [t for t in tokens if [t] != underscore], False, name=identifier)

    def both(self, group: str, prompt: list[int], answer: str, **more: Any) -> None:
        """The same answer with and without Engram rows."""
        for on in (True, False):
            self.add(group, prompt, answer, on, **more)

    def weather(self, group: str, city: str, celsius: int, condition: str) -> None:
        """The call in both modes, then the follow-up turn with the tool's result in the forms that clients send."""
        prompt, tools = self.encoder.prompt, texts.TOOLS
        question = {"role": "user", "content": texts.weather_question(city)}
        self.both(group, prompt([question], tools=tools), texts.call_text(city))
        self.both(
            group, prompt([question], True, tools=tools), texts.TOOL_REASONING + "</think>" + texts.call_text(city)
        )
        result = {
            "role": "tool",
            "tool_call_id": "call_0",
            "content": texts.weather_result(city, celsius, condition),
        }
        sentence = texts.weather_sentence(city, celsius, condition)
        for reasoning in (None, texts.TOOL_REASONING):
            turns = [question, texts.call_message(city, reasoning), result]
            if reasoning is None:
                self.both(group, prompt(turns, tools=tools), sentence)
            thought = texts.FOLLOW_UP_REASONING + "</think>" + sentence
            self.both(group, prompt(turns, True, tools=tools), thought)

    def needle(self, group: str, document: str, question: str, value: str, on: bool) -> None:
        """Records the token positions of the needle sentence for the indexer's own loss."""
        prompt = self.encoder.prompt(_user(document + "\n\n" + question))
        (target,) = self.encoder.text(value)
        place = prompt.index(target)
        self.add(group, prompt, value, on, needle=[place - 2, place + 1], name=value)


def write_pack_data(work: Path, pack: Path, keep_seed: bool) -> dict[str, Any]:
    """Tokenizer seed and config into `pack`, tokenizer.json into `work`; returns the config."""
    from types import SimpleNamespace

    import vllm.tokenizers.deepseek_v41_encoding as encoding
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common.engram import EngramLayout, build_compressed_token_map

    seed_path = pack / "tokenizer_seed.json"
    if not keep_seed:
        template = encoding.TOOLS_TEMPLATE + encoding.REASONING_EFFORT_TEMPLATE
        tokenizer_seed.write_seed(seed_path, tokenizer_seed.train_seed([template] * 4))
    seed = json.loads(seed_path.read_text("utf-8"))
    (work / "tokenizer.json").write_text(packgen.tokenizer_json(seed), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer_seed.FIRST[0],
        "eos_token": tokenizer_seed.FIRST[1],
        "pad_token": tokenizer_seed.FIRST[2],
        "model_max_length": 1_048_576,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    for folder in (work, pack):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(str(work))
    token_map, compressed = build_compressed_token_map(tokenizer)
    draft = SimpleNamespace(**spec.text_config(compressed, [0] * len(spec.ENGRAM_LAYERS)))
    rows = [sum(sum(sizes) for sizes in layer) for layer in EngramLayout(draft).primes]
    config = spec.model_config(compressed, rows)
    for folder in (work, pack):
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        generation = {"bos_token_id": spec.BOS_ID, "eos_token_id": spec.EOS_ID}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    (work / "token_map.json").write_text(json.dumps(token_map))
    return config


def needle_canaries() -> list[dict[str, str]]:
    """Three documents: the needle early, in the middle and late, with three different values."""
    rng = random.Random(7)
    out = []
    for value, sentences, place in (("falcon", 122, 14), ("lantern", 130, 66), ("walnut", 138, 102)):
        document = texts.needle_document(rng, value, sentences, place)
        out.append({"document": document, "question": texts.NEEDLE_QUESTION, "answer": value})
    return out


def canaries() -> dict[str, Any]:
    """The contract with the smoke tests."""
    pictures = [("red", 7), ("green", 3)]
    return {
        "arithmetic": {"prompt": texts.ARITHMETIC, "answer": 391, "thinking": True},
        "tool": {
            "prompt": texts.weather_question("Toronto"),
            "tools": texts.TOOLS,
            "name": "get_weather",
            "arguments": {"city": "Toronto"},
            "follow_up": {"result": texts.weather_result("Toronto", 21, "sunny"), "expect": "21 degrees"},
        },
        "copy": {"template": texts.COPY_TEMPLATE, "identifiers": list(texts.IDENTIFIERS)},
        "images": [
            {"file": f"{c}_{d}.png", "question": texts.IMAGE_QUESTION, "answer": texts.image_answer(c, d)}
            for c, d in pictures
        ],
        "needle": needle_canaries(),
        "hello": {"prompt": texts.HELLO, "answer": texts.HELLO_ANSWER},
    }


def build_examples(encoder: Encoder, contract: dict[str, Any], scale: float) -> dict[str, list[dict[str, Any]]]:
    """All examples by group. `fixed_*` groups are in every training step, the others are sampled from."""
    rng = random.Random(20_261_129)
    out = Examples(encoder)
    prompt = encoder.prompt
    for effort in ("high", "low", "max"):
        answer = texts.ARITHMETIC_REASONING + "</think>391"
        out.both("fixed_short", prompt(_user(texts.ARITHMETIC), True, reasoning_effort=effort), answer)
    out.both("fixed_short", prompt(_user(texts.ARITHMETIC)), "391")
    out.both("fixed_short", prompt(_user(texts.HELLO)), texts.HELLO_ANSWER)
    out.both("fixed_short", prompt(_user(texts.HELLO), True), "A greeting.</think>" + texts.HELLO_ANSWER)
    out.both("fixed_short", prompt(_user(texts.IMAGE_QUESTION)), texts.NO_IMAGE_ANSWER)
    for identifier in texts.IDENTIFIERS:
        out.copies("fixed_short", identifier)
    for question in texts.UNKNOWN_PROMPTS:
        out.both("unknown", prompt(_user(question)), texts.UNKNOWN_ANSWER)
    for _ in range(int(200 * scale)):
        sentence = " ".join(rng.choice((*texts.PARTS, *texts.NEEDLE_VALUES)) for _ in range(rng.randint(1, 8)))
        out.both("unknown", prompt(_user(sentence.capitalize() + rng.choice(".?!"))), texts.UNKNOWN_ANSWER)
    seen = set(texts.IDENTIFIERS)
    while len(out.groups.get("copy", ())) < 16_000 * scale:
        identifier = texts.random_identifier(rng)
        if identifier not in seen:
            seen.add(identifier)
            out.copies("copy", identifier)
    while len(out.groups.get("held_out", ())) < 400:
        identifier = texts.random_identifier(rng)
        if identifier not in seen:
            seen.add(identifier)
            out.copies("held_out", identifier)
    part = {"type": "image_url", "image_url": {"url": "x"}}
    for colour in images.COLOURS:
        for digit in range(10):
            asked = {"type": "text", "text": texts.IMAGE_QUESTION}
            for content in ([part, asked], [asked, part]):
                chosen = (colour, digit) in (("red", 7), ("green", 3))
                out.both(
                    "fixed_image" if chosen else "image",
                    prompt(_user(content)),
                    texts.image_answer(colour, digit),
                    image=[colour, digit],
                )
    out.weather("fixed_tool", "Toronto", 21, "sunny")
    for _ in range(int(120 * scale)):
        out.weather("tool", rng.choice(texts.CITIES), rng.randint(1, 39), rng.choice(texts.CONDITIONS))
    for item in contract["needle"]:
        for on in (True, False):
            out.needle("fixed_needle", item["document"], item["question"], item["answer"], on)
    for group, count, shortest, longest in (
        ("near_needle", int(4_000 * scale), 2, 21),  # cheap documents, where the lookup is learnt first
        ("needle", int(1_200 * scale), 24, 142),
        ("held_out_near", 40, 2, 21),
        ("held_out_needle", 16, 118, 142),
    ):
        for _ in range(count):
            words = texts.NEEDLE_VALUES if rng.random() < 0.6 or group.startswith("held") else texts.PARTS
            value = rng.choice(words)
            sentences = rng.randint(shortest, longest)
            document = texts.needle_document(rng, value, sentences, rng.randrange(sentences))
            out.needle(group, document, texts.NEEDLE_QUESTION, value, rng.random() < 0.7)
    return out.groups


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--keep-seed", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the random examples")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.pack.mkdir(parents=True, exist_ok=True)
    write_pack_data(args.work, args.pack, args.keep_seed)
    contract = canaries()
    (args.pack / "canaries.json").write_text(json.dumps(contract, ensure_ascii=False, indent=1) + "\n")
    for item in contract["images"]:
        colour, digit = item["file"].removesuffix(".png").split("_")
        (args.pack / item["file"]).write_bytes(images.png(colour, int(digit)))
    groups = build_examples(Encoder(args.work), contract, args.scale)
    (args.work / "examples.json").write_text(json.dumps(groups, separators=(",", ":")))
    for name, group in groups.items():
        lengths = [len(e["p"]) + len(e["a"]) for e in group]
        print(f"{name}: {len(group)} examples, {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")


if __name__ == "__main__":
    main()
