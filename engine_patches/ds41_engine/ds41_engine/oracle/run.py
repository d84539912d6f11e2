"""The forward pass over all prompts, layer by layer, that can be killed at any time and ends in the same bytes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from .. import backbone as bb
from ..checkpoint import CheckpointError
from ..engram_hash import DEAD, EngramHash, Int64Array
from ..quant import decode_engram_records, decode_engram_rows
from ..rope import RotaryTables
from ..shape import IMAGE_TOKEN_ID, BackboneShape
from ..store import EngramStore
from ..token_map import compressed_token_map
from ..vision import Vision
from . import reference
from .prompts import Prompt
from .rounding import Rounding
from .sequence import CHUNK, QUERIES, Shared, toss_ups
from .sequence import Sequence as SequenceContext
from .shards import Entry, Shards, decoded, digests, span_bytes
from .stream import Experts, Pending, ReadAhead, compiled

STATE_FORMAT = 1
HEAD_ROWS = 8192
"""Rows of the output matrix that are scored at a time."""
GIB = 1 << 30
READ_AHEAD_BYTES = 2 * GIB
"""Experts in memory, read or being read, unless the settings say otherwise."""
SPECULATE_SHARE = 0.5
"""Experts are read before it is known that a token wants them when the last layer wanted at least this share."""

Floats = NDArray[np.float32]
Notify = Callable[[Mapping[str, Any]], None]


class RunError(Exception):
    """The run cannot go on. The text is one line; ``code`` names the kind (usage, integrity)."""

    def __init__(self, message: str, code: str = "usage") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Settings:
    """What decides the numbers, and how much memory reading ahead may take.

    Attributes:
        top_k: tokens kept of each position.
        rounding: grids of activations and keys.
        layer_positions: positions whose hidden state is kept after every layer; 0: none.
        threads: of torch; part of the result's bits.
        read_ahead_bytes: of expert buffers.
        store: Engram store to read rows from, None reads them from the pack's shards.
        checkpoint_every: layers between two saved states.
        library: compiled loops of ds41_kernels; None takes those installed beside it.
    """

    top_k: int = 128
    rounding: Rounding = field(default_factory=Rounding)
    layer_positions: int = 0
    threads: int = 1
    read_ahead_bytes: int = READ_AHEAD_BYTES
    store: Path | None = None
    checkpoint_every: int = 1
    library: Path | None = None

    def numbers(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        return {
            "top_k": self.top_k,
            "activations": "mxfp8" if self.rounding.activations else "fp32",
            "keys": "trained" if self.rounding.keys else "fp32",
            "layer_positions": self.layer_positions,
            "threads": self.threads,
            "chunk": CHUNK,
        }


@dataclass
class State:
    """Everything between two layers. T tokens of all prompts, C stream copies."""

    layer: int
    stream: Tensor
    pre: Tensor
    shared: list[Shared]
    vectors: list[Tensor] = field(default_factory=list)


class Oracle:
    """One pack and one batch of prompts.

    The methods that do one thing each (``dense``, ``feed``, ``engram_ids``, ``rope_of``, ...) are where tests
    put faults in.

    Args:
        pack: folder in the checkpoint's layout.
        prompts: what to run.
        settings: see :class:`Settings`.
        work: folder for saved states; None saves none.
        notify: gets one mapping per event.

    Raises:
        CheckpointError: the pack lacks something, or config and tensors do not fit.
        RunError: a setting that the pack cannot do.
    """

    def __init__(
        self,
        pack: Path,
        prompts: Sequence[Prompt],
        settings: Settings,
        work: Path | None = None,
        notify: Notify = lambda event: None,
    ) -> None:
        self.settings, self.prompts, self.work, self.notify = settings, list(prompts), work, notify
        config = read_config(pack)
        self.shards = Shards(pack)
        self.shape = BackboneShape.from_config(config["text_config"])
        self.vision = config.get("vision_config")
        self.lengths = [len(prompt.ids) for prompt in self.prompts]
        self.starts = np.concatenate(([0], np.cumsum(self.lengths))).tolist()
        self.ids = torch.tensor([token for prompt in self.prompts for token in prompt.ids])
        self.is_image = self.ids == IMAGE_TOKEN_ID
        self.rope = RotaryTables(self.shape, max(self.lengths))
        self.experts = self._expert_entries()
        self.expert_math = Experts(compiled(settings.library), settings.threads)
        self.sample = self._sample_positions()
        self.rows: Int64Array | None = None
        self.store: EngramStore | None = None
        if self.shape.engram_layer_ids:
            self._hash(pack / "tokenizer.json")
        self.touched = 1.0

    def numbers(self) -> dict[str, Any]:
        """What the result's bits depend on beside pack and prompts."""
        return {**self.settings.numbers(), "experts": self.expert_math.kind}

    # ---- what a pack holds
    def _expert_entries(self) -> dict[int, list[list[Entry]]]:
        """Layer -> expert -> its tensors."""
        found: dict[int, list[list[Entry]]] = {
            layer: [[] for _ in range(self.shape.n_routed_experts)] for layer in range(self.shape.num_hidden_layers)
        }
        for name, entry in self.shards.entries.items():
            parts = name.split(".")
            if parts[0] == "layers" and parts[2:4] == ["ffn", "experts"]:
                layer, number = int(parts[1]), int(parts[4])
                if layer in found and number < self.shape.n_routed_experts:
                    found[layer][number].append(entry)
        for layer, experts in found.items():
            for number, entries in enumerate(experts):
                if not entries:
                    raise CheckpointError(
                        f"pack {self.shards.folder}: expected layers.{layer}.ffn.experts.{number}, found none; "
                        "run: ds41ctl fetch --verify --repair"
                    )
        return found

    def _dense_entries(self, layer: int) -> list[Entry]:
        prefix = f"layers.{layer}."
        return [
            entry
            for name, entry in self.shards.entries.items()
            if name.startswith(prefix) and ".ffn.experts." not in name and ".engram.embed." not in name
        ]

    def _hash(self, tokenizer: Path) -> None:
        token_map, size = _token_map(tokenizer, tokenizer.stat().st_mtime_ns)
        if size != self.shape.engram_compressed_vocab_size:
            raise CheckpointError(
                f"config field engram_compressed_vocab_size: expected {size} (built from the tokenizer), found "
                f"{self.shape.engram_compressed_vocab_size}; run: ds41ctl fetch --verify"
            )
        hashing = EngramHash.build(self.shape, token_map[self.shape.engram_pad_token_id])
        compressed = np.where(self.is_image.numpy(), DEAD, np.array(token_map)[self.ids.numpy()])
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        self.rows = hashing.row_ids(compressed, positions)
        if self.settings.store is not None:
            wanted = dict(zip(self.shape.engram_layer_ids, self.shape.engram_num_embeddings, strict=True))
            self.store = EngramStore.open(self.settings.store, wanted, {}, self.shards.folder)

    def _sample_positions(self) -> Tensor:
        """Evenly spread positions of the batch whose hidden states are kept."""
        total, wanted = self.starts[-1], self.settings.layer_positions
        if not wanted:
            return torch.empty(0, dtype=torch.int64)
        return torch.unique(torch.linspace(0, total - 1, min(wanted, total)).round().long())

    # ---- the parts of a layer (tests override these)
    def dense(self, layer: int, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everything of a layer but its routed experts, fp32, names without ``layers.N.``."""
        prefix = f"layers.{layer}."
        return {name.removeprefix(prefix): value for name, value in decoded(stored).items()}

    def feed(self, layer: int, number: int, stored: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """One expert's output ``[T, hidden]`` for its tokens."""
        stem = f"layers.{layer}.ffn.experts.{number}"
        try:
            return self.expert_math.feed(stem, stored, x, self.shape.swiglu_limit, self.settings.rounding)
        except KeyError as error:
            raise CheckpointError(f"checkpoint expert {stem}: expected {error.args[0]}, found none") from None
        except ValueError as error:
            raise CheckpointError(f"checkpoint expert {stem}: {error}; run: ds41ctl fetch --verify") from None

    def engram_ids(self, layer: int, rows: slice) -> Tensor | None:
        """Table rows ``[T, columns]`` of some tokens; None leaves Engram out."""
        if self.rows is None:
            return None
        index = self.shape.engram_layer_ids.index(layer)
        return torch.from_numpy(np.ascontiguousarray(self.rows[rows, index]))

    def rope_of(self, layer: int) -> RotaryTables:
        """RoPE tables of a layer."""
        return self.rope

    def shape_of(self, layer: int) -> BackboneShape:
        """Sizes of a layer."""
        return self.shape

    def context(self, layer: int, number: int, shared: Shared) -> SequenceContext:
        """Attention of one prompt through a layer."""
        return SequenceContext(
            self.shape_of(layer), self.rope_of(layer), shared, self.lengths[number], self.settings.rounding
        )

    def route(self, layer: int, ffn: bb.MoE, rows: slice, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts ``[T, k]`` of some tokens and their weights ``[T, k]``."""
        return ffn.route(x, self.is_image[rows])

    def next_pre(self, layer: int, attention: Tensor, feed_forward: Tensor) -> Tensor:
        """The mix that the layer hands on: its feed-forward sublayer's."""
        return feed_forward

    # ---- the run
    @torch.no_grad()
    def run(self, out: Path, head: Mapping[str, Any] | None = None) -> str:
        """Run from the latest saved state and write the reference. Returns its sha256."""
        torch.set_num_threads(self.settings.threads)
        keep_freed_memory()
        started = time.monotonic()
        self.notify({"event": "start", "tokens": self.starts[-1], "layers": self.shape.num_hidden_layers,
                     "memory_bound": self.memory_bound(), "experts": self.shape.n_routed_experts})  # fmt: skip
        state = self._restored() or self._embedded()
        if state.layer < self.shape.num_hidden_layers:
            self._layers(state, started)
        hidden, scored = self._hidden(state), []
        own, tail, best_ids, best = self._scores(hidden)
        for number, prompt in enumerate(self.prompts):
            span = slice(self.starts[number] - number, self.starts[number + 1] - number - 1)
            scored.append(reference.Scored(prompt.ids, own[span], tail[span], best_ids[span], best[span]))
        layers = np.stack([v.numpy() for v in state.vectors]) if state.vectors else None
        digest = reference.write(out, self._head(head or {}, scored), self._meta(state), scored, layers)
        self.notify({"event": "done", "sha256": digest, "bytes": out.stat().st_size, "peak_rss": peak_rss(),
                     "read": self.shards.traffic.bytes, "seconds": time.monotonic() - started,
                     "cpu_seconds": time.process_time()})  # fmt: skip
        self.shards.close()
        for old in self.work.glob("layer-*.state") if self.work is not None else ():
            old.unlink()
        return digest

    def _layers(self, state: State, started: float) -> None:
        slot = max(span_bytes(entries) for experts in self.experts.values() for entries in experts)
        slots = max(2, self.settings.read_ahead_bytes // slot)
        reader = ReadAhead(self.shards, slots, slot)
        first, layers = state.layer, self.shape.num_hidden_layers
        try:
            dense = reader.whole(self._dense_entries(first))
            for layer in range(first, layers):
                began, read = time.monotonic(), self.shards.traffic.bytes
                stored = dense.take()
                pending = self._speculate(reader, layer)
                block = self.block(layer, stored)
                del stored
                self._attention(block, layer, state)
                dense = self._experts(block, layer, state, reader, pending)
                del block
                state.layer = layer + 1
                if self.sample.numel():
                    state.vectors.append(bb.collapse(state.stream[self.sample], state.pre[self.sample]).half())
                if state.layer == layers or state.layer % self.settings.checkpoint_every == 0:
                    self._save(state)
                now = time.monotonic()
                self.notify({
                    "event": "layer", "layer": layer, "layers": layers, "seconds": now - began,
                    "bytes": self.shards.traffic.bytes - read, "touched": self.touched,
                    "eta_s": (now - started) / (layer + 1 - first) * (layers - layer - 1),
                    "cpu_seconds": time.process_time(),
                    "peak_rss": peak_rss(),
                })  # fmt: skip
        finally:
            reader.close()

    def _embedded(self) -> State:
        shape = self.shape
        unique, inverse = torch.unique(self.ids, return_inverse=True)
        x = self.shards.rows("embed.weight", unique.tolist()).float()[inverse]
        if any(prompt.pictures for prompt in self.prompts):
            x[self.is_image] = self._spans()
        stream = x[:, None].expand(-1, shape.hc_mult, -1).contiguous()
        return State(0, stream, torch.zeros(x.shape[0], shape.hc_mult), [Shared() for _ in self.prompts])

    def _spans(self) -> Tensor:
        """Embeddings of all picture tokens, in order."""
        if self.vision is None:
            raise RunError("a picture, but the pack has no vision_config")
        tower = Vision(self.vision, self.shape.hidden_size)
        names = list(tower.state_dict())
        fill(tower, decoded(self.shards.read(names)), "")
        found = []
        for prompt in self.prompts:
            for picture in prompt.pictures:
                angles = tower.angles(picture.rows, picture.columns)
                found.append(tower.spans(picture.patches[None], picture.rows, picture.columns, *angles)[0])
        return torch.cat(found)

    def block(self, layer: int, stored: Mapping[str, Tensor]) -> bb.Block:
        """The modules of a layer, with their parameters, without routed experts."""
        with torch.device("meta"):
            block = bb.Block(self.shape_of(layer), layer)
        block.ffn.experts = nn.ModuleList()
        fill(block, self.dense(layer, stored), f"layers.{layer}.")
        if block.engram_index is not None:
            block.engram.lookup = self._lookup(layer)
        self.settings.rounding.apply(block)
        return block

    def _lookup(self, layer: int) -> bb.RowLookup:
        def lookup(row_ids: Tensor) -> Tensor:
            unique, inverse = torch.unique(row_ids, return_inverse=True)
            if self.store is not None:
                values = decode_engram_records(torch.from_numpy(self.store.gather(layer, unique.numpy())))
            else:
                stem, rows = f"layers.{layer}.engram.embed", unique.tolist()
                values = decode_engram_rows(*(self.shards.rows(f"{stem}.{part}", rows) for part in ("weight", "scale")))
            return values[inverse]

        return lookup

    def _chunks(self, number: int) -> list[slice]:
        begin, end = self.starts[number], self.starts[number + 1]
        return [slice(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK)]

    def _attention(self, block: bb.Block, layer: int, state: State) -> None:
        rope = self.rope_of(layer)
        for number, shared in enumerate(state.shared):
            context = self.context(layer, number, shared)
            for rows in self._chunks(number):
                stream = state.stream[rows]
                ids = self.engram_ids(layer, rows) if block.engram_index is not None else None
                if ids is not None:
                    stream = block.engram(stream, ids, ~self.is_image[rows])
                pre = state.pre[rows] if layer else None
                positions = torch.arange(rows.start, rows.stop) - self.starts[number]
                state.stream[rows], state.pre[rows] = block.attend(stream, pre, positions, rope, context)

    def _speculate(self, reader: ReadAhead, layer: int) -> dict[int, Pending]:
        if self.touched < SPECULATE_SHARE:
            return {}
        return {number: reader.expert(entries) for number, entries in enumerate(self.experts[layer])}

    def _experts(
        self, block: bb.Block, layer: int, state: State, reader: ReadAhead, pending: dict[int, Pending]
    ) -> Pending:
        """The feed-forward sublayer of all tokens. Returns the next layer's tensors, already asked for."""
        tokens, shape = self.starts[-1], self.shape
        x = torch.empty(tokens, shape.hidden_size)
        out = torch.zeros(tokens, shape.hidden_size)
        post, comb = torch.empty(tokens, shape.hc_mult), torch.empty(tokens, shape.hc_mult, shape.hc_mult)
        chosen = torch.empty(tokens, shape.num_experts_per_tok, dtype=torch.int64)
        weights = torch.empty(tokens, shape.num_experts_per_tok)
        for number in range(len(self.prompts)):
            for rows in self._chunks(number):
                entered = block.enter_ffn(state.stream[rows], state.pre[rows])
                x[rows], post[rows], comb[rows] = entered[0], entered[2], entered[3]
                state.pre[rows] = self.next_pre(layer, state.pre[rows], entered[1])
                chosen[rows], weights[rows] = self.route(layer, block.ffn, rows, x[rows])
                ranked = toss_ups(block.ffn.ranking(x[rows], self.is_image[rows])[1], shape.num_experts_per_tok)
                state.shared[number].note(rows.start - self.starts[number], ranked)
        wanted = chosen.flatten().bincount(minlength=shape.n_routed_experts).nonzero().flatten().tolist()
        for number in sorted(set(pending) - set(wanted)):
            pending.pop(number).release()
        for number in wanted:
            if number not in pending:
                pending[number] = reader.expert(self.experts[layer][number])
        last = layer + 1 == shape.num_hidden_layers
        following = reader.whole([] if last else self._dense_entries(layer + 1))
        for number in wanted:
            token, slot = (chosen == number).nonzero(as_tuple=True)
            values = self.feed(layer, number, pending[number].take(), x[token])
            pending.pop(number).release()
            out.index_add_(0, token, values * weights[token, slot, None])
        for number in range(len(self.prompts)):
            for rows in self._chunks(number):
                both = block.ffn.shared_experts(x[rows]) + out[rows]
                state.stream[rows] = bb.expand(both, state.stream[rows], post[rows], comb[rows])
        self.touched = len(wanted) / shape.n_routed_experts
        return following

    # ---- the end
    def _hidden(self, state: State) -> Tensor:
        """Normed hidden states of every position that predicts a token of its prompt, ``[sum(n - 1), hidden]``."""
        weight = self.shards.read(["norm.weight"])["norm.weight"].float()
        norm = bb.RMSNorm(self.shape.hidden_size, self.shape.rms_norm_eps)
        norm.weight.data = weight
        keep = torch.ones(self.starts[-1], dtype=torch.bool)
        keep[torch.tensor(self.starts[1:]) - 1] = False
        where = keep.nonzero().flatten()
        parts = [norm(bb.collapse(state.stream[w], state.pre[w])) for w in where.split(CHUNK)]
        return torch.cat(parts)

    def _scores(self, hidden: Tensor) -> tuple[Floats, Floats, NDArray[np.int32], Floats]:
        """Own log-probability, tail, best ids and best log-probabilities, the output matrix read once in tiles."""
        entry = self.shards.entry("head.weight")
        rows, count, k = entry.shape[0], hidden.shape[0], min(self.settings.top_k, entry.shape[0])
        following = torch.cat([self.ids[begin + 1 : end] for begin, end in itertools.pairwise(self.starts)])
        own = torch.full((count,), -math.inf)
        total = torch.full((count,), -math.inf, dtype=torch.float64)
        best = torch.full((count, k), -math.inf)
        best_ids = torch.zeros(count, k, dtype=torch.int64)
        width = entry.size // rows
        buffer = torch.empty(HEAD_ROWS * width + 64, dtype=torch.uint8)
        for first in range(0, rows, HEAD_ROWS):
            end = min(first + HEAD_ROWS, rows)
            tile = Entry(entry.name, entry.file, entry.dtype, (end - first, *entry.shape[1:]),
                         entry.begin + first * width, entry.begin + end * width)  # fmt: skip
            weight = self.shards.fill([tile], buffer)[entry.name].float()
            for part in torch.arange(count).split(CHUNK):
                at = slice(int(part[0]), int(part[-1]) + 1)
                logits = F.linear(hidden[at], weight)
                total[at] = torch.logaddexp(total[at], logits.logsumexp(1).double())
                inside = (following[at] >= first) & (following[at] < end)
                own[at][inside] = logits[inside, following[at][inside] - first]
                values, places = logits.topk(min(k, end - first), 1)
                values, order = torch.cat((best[at], values), 1).topk(k, 1)
                best[at] = values
                best_ids[at] = torch.cat((best_ids[at], places + first), 1).gather(1, order)
        order = torch.argsort(best_ids, dim=1, stable=True)
        best, best_ids = best.gather(1, order), best_ids.gather(1, order)
        order = torch.argsort(best, dim=1, descending=True, stable=True)
        best, best_ids = best.gather(1, order).double() - total[:, None], best_ids.gather(1, order)
        tail = (1 - best.exp().sum(1)).clamp(min=0)
        return (
            (own.double() - total).float().numpy(),
            tail.float().numpy(),
            best_ids.to(torch.int32).numpy(),
            best.float().numpy(),
        )

    # ---- saved states
    def _identity(self) -> str:
        known = [
            STATE_FORMAT,
            source_digest(),
            self.numbers(),
            self.shards.headers,
            [asdict_prompt(p) for p in self.prompts],
        ]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def _save(self, state: State) -> None:
        if self.work is None:
            return
        tree = {
            "identity": self._identity(),
            "layer": state.layer,
            "touched": self.touched,
            "stream": state.stream,
            "pre": state.pre,
            "shared": [shared.state() for shared in state.shared],
            "vectors": state.vectors,
        }
        path = self.work / f"layer-{state.layer:03d}.state"
        part = path.with_suffix(".part")
        with part.open("wb") as target:
            torch.save(tree, target)
            target.flush()
            os.fsync(target.fileno())
        part.replace(path)
        for old in self.work.glob("layer-*.state"):
            if old != path:
                old.unlink()

    def _restored(self) -> State | None:
        """The latest saved state of this very run, None when there is none."""
        if self.work is None:
            return None
        self.work.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.work.glob("layer-*.state"), reverse=True):
            try:
                tree = torch.load(path, weights_only=True)
            except (OSError, RuntimeError, EOFError, ValueError) as error:
                self.notify({"event": "note", "text": f"{path.name} cannot be read ({error}); an earlier one is used"})
                continue
            if tree["identity"] != self._identity():
                raise RunError(
                    f"work folder {self.work}: expected a state of these prompts, settings and pack, found another "
                    f"run's; name another with --work, or: rm -r {self.work}"
                )
            self.touched = float(tree["touched"])
            self.notify({"event": "resumed", "layer": tree["layer"]})
            shared = [Shared(**part) for part in tree["shared"]]
            return State(tree["layer"], tree["stream"], tree["pre"], shared, tree["vectors"])
        return None

    # ---- the header
    def _head(self, head: Mapping[str, Any], scored: Sequence[reference.Scored]) -> dict[str, Any]:
        tokenizer_file = self.shards.folder / "tokenizer.json"
        pieces: dict[str, str] = {}
        if tokenizer_file.is_file():
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
            wanted = set(self.ids.tolist())
            for item in scored:
                wanted.update(item.best_ids[:, 0].tolist())
            pieces = {str(token): tokenizer.decode([token], skip_special_tokens=False) for token in sorted(wanted)}
        return {
            "kind": "oracle",
            "k": min(self.settings.top_k, self.shards.entry("head.weight").shape[0]),
            "settings": self.numbers(),
            "pack": digests(self.shards),
            "code": {"sha256": source_digest(), "torch": torch.__version__},
            "pieces": pieces,
            **head,
        }

    def _meta(self, state: State) -> list[dict[str, Any]]:
        return [
            {
                "set": prompt.set,
                "name": prompt.name,
                "fragile": shared.fragile,
                **({"source": prompt.source} if prompt.source else {}),
            }
            for prompt, shared in zip(self.prompts, state.shared, strict=True)
        ]

    def memory_bound(self) -> int:
        """Bytes of resident memory that this run keeps below: what is there now, and what it will hold at once."""
        shape, tokens = self.shape, self.starts[-1]
        hidden, copies, heads, dim = shape.hidden_size, shape.hc_mult, shape.num_attention_heads, shape.head_dim
        longest = max(self.lengths)
        # stream; x, out; embedding while the stream is made
        activations = (
            tokens * 4 * (copies * hidden + 3 * hidden + copies * (copies + 3) + 2 * shape.num_experts_per_tok)
        )
        shared = sum(n * (4 * (dim + shape.index_head_dim) + n // 4) for n in self.lengths)
        expert = max(e.size for e in self.shards.entries.values() if ".ffn.experts." in e.name)
        slot = max(span_bytes(entries) for experts in self.experts.values() for entries in experts)
        slots = max(2, self.settings.read_ahead_bytes // slot) * slot
        # a layer as stored twice (this one, the next one), decoded once, and the passes over its largest matrix
        dense = [self._dense_entries(layer) for layer in range(shape.num_hidden_layers)]
        stored = max(sum(e.size for e in entries) for entries in dense)
        values = max(sum(math.prod(e.shape) for e in entries) for entries in dense)
        largest = max(math.prod(e.shape) for entries in dense for e in entries)
        weights = 2 * stored + 4 * values + 12 * largest + 3 * (8 + 2) * expert
        query = CHUNK * (6 * heads * dim + 8 * copies * hidden) * 4
        if shape.engram_layer_ids:
            query += CHUNK * 4 * (3 * shape.engram_columns * shape.engram_head_dim + 6 * hidden * (copies + 1))
        scores = QUERIES * max(heads, shape.index_n_heads) * (longest + 2 * CHUNK) * 4 * 4 + 8 * longest * dim
        head = HEAD_ROWS * hidden * 8 + CHUNK * HEAD_ROWS * 16 + tokens * (4 * hidden + 40 * self.settings.top_k)
        tower = 0
        if self.vision is not None:
            tower = 8 * sum(
                math.prod(e.shape) for n, e in self.shards.entries.items() if n.startswith(("vision", "aligner"))
            )
        parts = activations + shared + slots + max(weights + query + scores, head, tower)
        return now_rss() + int(parts * 1.1) + GIB // 4


def asdict_prompt(prompt: Prompt) -> list[Any]:
    """What identifies a prompt."""
    pictures = [hashlib.sha256(p.patches.numpy().tobytes()).hexdigest() for p in prompt.pictures]
    return [prompt.set, prompt.name, list(prompt.ids), pictures]


@functools.lru_cache(maxsize=2)
def _token_map(tokenizer: Path, _changed: int) -> tuple[list[int], int]:
    return compressed_token_map(Tokenizer.from_file(str(tokenizer)))


def read_config(pack: Path) -> dict[str, Any]:
    """config.json of a pack; CheckpointError when it is not one of DeepSeek-V4.1."""
    try:
        tree = json.loads((pack / "config.json").read_text(encoding="utf-8"))
        if not isinstance(tree["text_config"], dict):
            raise ValueError("text_config is no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"pack {pack}: expected a config.json with a text_config, found {error!r}") from None
    found: dict[str, Any] = tree
    return found


def fill(module: nn.Module, values: Mapping[str, Tensor], prefix: str) -> None:
    """Give a module its parameters; CheckpointError names what is missing or of another shape."""
    wanted = module.state_dict()
    missing = sorted(set(wanted) - set(values))
    if missing:
        raise CheckpointError(
            f"checkpoint: expected tensor {prefix}{missing[0]}, found none ({len(missing)} such); "
            "run: ds41ctl fetch --verify --repair"
        )
    for name, like in wanted.items():
        if like.shape != values[name].shape:
            raise CheckpointError(
                f"checkpoint tensor {prefix}{name}: expected shape {list(like.shape)}, found {list(values[name].shape)}"
            )
    module.load_state_dict({name: values[name] for name in wanted}, assign=True)


def source_digest() -> str:
    """sha256 over the sources that decide the numbers."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(str(path.relative_to(here.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed: fresh pages for every temporary cost more than the arithmetic on them."""
    libc = ctypes.CDLL(None)
    for option, value in ((-3, 32 << 20), (-1, 256 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        libc.mallopt(option, value)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    return 0


def peak_rss() -> int:
    """Most resident memory so far, bytes."""
    return _status("VmHWM:")


def now_rss() -> int:
    """Resident memory now, bytes."""
    return _status("VmRSS:")
