"""Faults to seed: each is the oracle with one thing wrong, as a broken engine, kernel or pack would have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from ds41_engine.oracle.run import Oracle
from ds41_engine.rope import RotaryTables
from ds41_engine.shape import BackboneShape
from torch import Tensor

EXPERT = (2, 0)
"""Layer and number of the expert whose scale is wrong."""


class EngramMissing(Oracle):
    """The tables were never filled."""

    def engram_ids(self, layer: int, rows: slice) -> Tensor | None:
        return None


class EngramRowsOffByOne(Oracle):
    """Every lookup reads the row after its own."""

    def engram_ids(self, layer: int, rows: slice) -> Tensor | None:
        ids = super().engram_ids(layer, rows)
        assert ids is not None
        return (ids + 1) % self.shape.engram_num_embeddings[self.shape.engram_layer_ids.index(layer)]


class ExpertScaleHalved(Oracle):
    """One matrix of one expert has its scale's exponent off by one."""

    def feed(self, layer: int, number: int, stored: Mapping[str, Tensor], x: Tensor) -> Tensor:
        stem = f"layers.{layer}.ffn.experts.{number}.w2.scale"
        if (layer, number) == EXPERT:
            stored = {**stored, stem: stored[stem] - 1}
        return super().feed(layer, number, stored, x)


class RopeOfTheWrongKind(Oracle):
    """The window layers rotate with the compressed layers' base, and the other way round."""

    def rope_of(self, layer: int) -> RotaryTables:
        made = RotaryTables.__new__(RotaryTables)
        torch.nn.Module.__init__(made)
        made.window, made.compressed = self.rope.compressed, self.rope.window
        return made


class SinkIgnored(Oracle):
    """Attention without its sink logits."""

    def dense(self, layer: int, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = super().dense(layer, stored)
        values["attn.attn_sink"] = torch.full_like(values["attn.attn_sink"], -1e30)
        return values


class TopKHalved(Oracle):
    """The indexer keeps 256 groups instead of 512."""

    def shape_of(self, layer: int) -> BackboneShape:
        return dataclasses.replace(self.shape, index_topk=self.shape.index_topk // 2)


class GateBiasIgnored(Oracle):
    """Experts are chosen by their bare scores."""

    def dense(self, layer: int, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = super().dense(layer, stored)
        for name in ("ffn.gate.bias", "ffn.gate.bias_vl"):
            values[name] = torch.zeros_like(values[name])
        return values


class LastPreMixWrong(Oracle):
    """The last layer hands on its attention sublayer's mix instead of its feed-forward sublayer's."""

    def next_pre(self, layer: int, attention: Tensor, feed_forward: Tensor) -> Tensor:
        return attention if layer + 1 == self.shape.num_hidden_layers else feed_forward


FAULTS: dict[str, type[Oracle]] = {
    "Engram missing": EngramMissing,
    "Engram rows off by one": EngramRowsOffByOne,
    "one expert's scale halved": ExpertScaleHalved,
    "RoPE base of the wrong layer kind": RopeOfTheWrongKind,
    "sink ignored": SinkIgnored,
    "top-k 256 instead of 512": TopKHalved,
    "gate bias ignored": GateBiasIgnored,
    "last layer's pre-mix wrong": LastPreMixWrong,
}
