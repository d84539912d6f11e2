"""Training examples as padded tensors on the training device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import images, spec, tokenizer_seed
from .mathematics import engram_hash, shape

FIELDS = ("ids", "targets", "rows", "keep", "span", "picture", "needle", "length")
PICTURES = [(colour, digit) for colour in images.COLOURS for digit in range(10)]


def trained_ids() -> list[int]:
    """Vocabulary ids with rows of their own, ascending; all other ids share one filler row."""
    return sorted({*range(spec.BASE_VOCAB), *tokenizer_seed.SPECIAL, *tokenizer_seed.PLAIN})


@dataclass(frozen=True)
class Padded:
    """N examples padded to S tokens. `ids` are rows of the compact vocabulary.

    targets: id that the position must predict, -1 elsewhere. rows: Engram rows [N, S, layers, columns] int32.
    keep: Engram gate open. span: place in the image span, -1 for text. picture: index into PICTURES, 0 when unused.
    needle: first and last token of the sentence's end to find, -1 when there is none. length: real length.
    answer: the most target tokens that any example may have.
    """

    ids: Tensor
    targets: Tensor
    rows: Tensor
    keep: Tensor
    span: Tensor
    picture: Tensor
    needle: Tensor
    length: Tensor
    names: tuple[str, ...]
    answer: int

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def select(self, index: Tensor) -> Padded:
        """The examples with these numbers."""
        return Padded(**{f: getattr(self, f)[index] for f in FIELDS}, names=(), answer=self.answer)


def join(parts: list[Padded]) -> Padded:
    """Several padded sets of one width as one."""
    return Padded(
        **{f: torch.cat([getattr(p, f) for p in parts]) for f in FIELDS},
        names=tuple(n for p in parts for n in p.names),
        answer=max(p.answer for p in parts),
    )


class Dataset:
    """examples.json of the prepare step."""

    def __init__(self, work: Path, device: torch.device) -> None:
        self.device = device
        self.config: dict[str, Any] = json.loads((work / "config.json").read_text())
        self.groups: dict[str, list[dict[str, Any]]] = json.loads((work / "examples.json").read_text())
        self.token_map = np.array(json.loads((work / "token_map.json").read_text()), dtype=np.int64)
        self.shape = shape.BackboneShape.from_config(self.config["text_config"])
        self.hash = engram_hash.EngramHash.build(self.shape, int(self.token_map[self.shape.engram_pad_token_id]))
        self.vocabulary = trained_ids()
        self.compact = np.full(spec.VOCAB_SIZE, len(self.vocabulary), dtype=np.int64)
        self.compact[self.vocabulary] = np.arange(len(self.vocabulary))

    def padded(self, examples: list[dict[str, Any]], width: int) -> Padded:
        """Pad examples on the right to `width` tokens; what follows an example never matters to a causal model."""
        count = len(examples)
        ids = np.full((count, width), spec.EOS_ID, dtype=np.int64)
        targets = np.full((count, width), -1, dtype=np.int64)
        keep = np.zeros((count, width), dtype=bool)
        span = np.full((count, width), -1, dtype=np.int64)
        picture = np.zeros(count, dtype=np.int64)
        needle = np.full((count, 2), -1, dtype=np.int64)
        length = np.zeros(count, dtype=np.int64)
        for n, example in enumerate(examples):
            prompt, answer = example["p"], example["a"]
            size = length[n] = len(prompt) + len(answer)
            ids[n, :size] = prompt + answer
            targets[n, len(prompt) - 1 : size - 1] = self.compact[answer]
            image = ids[n] == spec.IMAGE_TOKEN_ID
            keep[n] = bool(example["on"]) & ~image
            span[n, image] = np.arange(image.sum())
            if "image" in example:
                picture[n] = PICTURES.index(tuple(example["image"]))
            if "needle" in example:
                needle[n] = example["needle"]
        values = np.where(ids == spec.IMAGE_TOKEN_ID, engram_hash.DEAD, self.token_map[ids])
        positions = np.tile(np.arange(width), count)
        rows = self.hash.row_ids(values.reshape(-1), positions).astype(np.int32)
        rows = rows.reshape(count, width, *rows.shape[1:])

        def put(array: Any) -> Tensor:
            return torch.from_numpy(array).to(self.device)

        return Padded(
            put(self.compact[ids]),
            put(targets),
            put(rows),
            put(keep),
            put(span),
            put(picture),
            put(needle),
            put(length),
            tuple(e.get("name", "") for e in examples),
            max(len(e["a"]) for e in examples),
        )
