"""Train the small byte-level BPE and write the tokenizer seed (needs the `tokenizers` package)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import spec, texts

# Ids and texts of the real vocabulary that the V4.1 encoding, parsers and processor look up by name.
FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
SPECIAL = {
    128_799: "<｜noise｜>",
    128_800: "<｜fim▁hole｜>",
    128_801: "<｜fim▁begin｜>",
    128_802: "<｜fim▁end｜>",
    128_803: "<｜User｜>",
    128_804: "<｜Assistant｜>",
    128_805: "<｜System｜>",
    128_806: "<｜latest_reminder｜>",
    128_810: "<｜action｜>",
    128_811: "<｜query｜>",
    128_812: "<｜authority｜>",
    128_813: "<｜domain｜>",
    128_814: "<｜title｜>",
    128_815: "<｜read_url｜>",
    spec.IMAGE_TOKEN_ID: "<｜deepseek_image｜>",
}
PLAIN = {128_797: "<think>", 128_798: "</think>", 128_816: "｜DSML｜"}


def train_seed(extra: list[str]) -> dict[str, Any]:
    """Return the tokenizer seed for `ds41ctl.core.packgen.tokenizer_json`.

    Digits and underscores are tokens of their own, and a space after a colon is one too: what follows "word is: " or
    "Copy exactly: " is then the same token in the prompt and at the start of an answer.
    """
    pre = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("_", "isolated"),
            pre_tokenizers.Split(Regex("(?<=:) "), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.BASE_VOCAB,
        special_tokens=list(FIRST),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts.tokenizer_corpus(), *extra], trainer)
    document = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = document["model"]["vocab"]
    base = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    return {
        "vocab_size": spec.VOCAB_SIZE,
        "base": base,
        "merges": document["model"]["merges"],
        "special": {str(i): t for i, t in [*enumerate(FIRST), *sorted(SPECIAL.items())]},
        "plain": {str(i): t for i, t in sorted(PLAIN.items())},
        "pre_tokenizer": document["pre_tokenizer"],
        "decoder": document["decoder"],
    }


def write_seed(path: Path, seed: dict[str, Any]) -> None:
    """Write the seed as one compact JSON file."""
    path.write_text(json.dumps(seed, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
