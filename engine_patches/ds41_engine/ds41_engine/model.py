"""The vLLM model class: DeepSeek-V4.1 with vision on the CPU platform, V1 runner.

Upstream's config, tokenizer, processor, vision tower, parsers, scheduler and prefix cache are used as they are; only
the text backbone (:mod:`ds41_engine.backbone`), its row cache and the loading of weights are ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoTokenizer
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.distributed.utils import get_pp_indices
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.models.vision import is_vit_use_data_parallel
from vllm.models.deepseek_v4.common.vision import DeepseekV4Aligner, DeepseekV4ViT
from vllm.models.deepseek_v41.common.engram import build_compressed_token_map
from vllm.models.deepseek_v41.common.mm_preprocess import (
    DeepseekV4VLDummyInputsBuilder,
    DeepseekV4VLMultiModalProcessor,
    DeepseekV4VLProcessingInfo,
)
from vllm.models.deepseek_v41.nvidia.vl_model import DeepseekV41ForCausalLM
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from .backbone import ROW_TILE, Backbone, Linear, RowLookup, collapse
from .checkpoint import CheckpointError, load
from .cpu_platform import make_stage_buffers, show_prompts
from .engram_hash import DEAD, EngramHash, Int64Array
from .engram_rows import EngramRows
from .exl3_config import Exl3Config
from .exl3_experts import Exl3Experts, Kernel, census, check_codebook, divert
from .hash_ahead import HashAhead
from .paged import PagedBatch, RequestRows, row_width
from .shape import IMAGE_TOKEN_ID, BackboneShape
from .store import EngramStore, StoreError

STORE_ENV = "DS41_ENGRAM_STORE"
UNFILLED_ENV = "DS41_ENGRAM_UNFILLED"
THREADS_ENV = "DS41_ENGRAM_THREADS"
REPORT_EVERY_S = 60.0
"""How often a busy engine says what its gather has done so far."""

# vLLM configures only loggers below "vllm".
logger = init_logger("vllm.ds41_engine")


class EngineRefused(RuntimeError):
    """The engine will not start. The text is one line and was logged with the prefix ``ds41: ``."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn a known fault into one findable log line and :class:`EngineRefused`, which ends the process."""
    try:
        yield
    except (CheckpointError, StoreError, ValueError) as error:
        line = " ".join(str(error).split())
        logger.error("ds41: %s", line)
        raise EngineRefused(f"ds41: {line}") from None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class RowCacheMetadata:
    """What a forward pass must know about its requests; per batch."""

    query_start: list[int]
    lengths: list[int]
    block_table: Tensor
    block_size: int

    def requests(self) -> list[RequestRows]:
        rows = []
        for number, length in enumerate(self.lengths):
            begin, end = self.query_start[number], self.query_start[number + 1]
            if end > begin:
                positions = torch.arange(length)
                blocks = self.block_table[number, positions // self.block_size].long()
                rows.append(RequestRows(begin, end, length, blocks * self.block_size + positions % self.block_size))
        return rows


class RowCacheMetadataBuilder(AttentionMetadataBuilder[RowCacheMetadata]):
    """Builds :class:`RowCacheMetadata` from what the runner knows."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RowCacheMetadata:
        return RowCacheMetadata(
            query_start=common_attn_metadata.query_start_loc_cpu.tolist(),
            lengths=common_attn_metadata.seq_lens.tolist(),
            block_table=common_attn_metadata.block_table_tensor,
            block_size=self.kv_cache_spec.block_size,
        )


class RowCacheBackend(AttentionBackend):
    """Tells vLLM how to page the row cache; the attention itself is in :mod:`ds41_engine.paged`."""

    @staticmethod
    def get_name() -> str:
        return "DS41_ROW_CACHE"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[RowCacheMetadataBuilder]:
        return RowCacheMetadataBuilder

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the row cache has no attention implementation of vLLM's kind")

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []


class RowCache(nn.Module, AttentionLayerBase):
    """The paged rows of one layer, registered with vLLM under ``prefix``."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, width: int) -> None:
        super().__init__()
        self.width = width
        self.prefix = prefix
        self.kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowCacheBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width,
            dtype=torch.float32,
        )

    def rows(self) -> Tensor:
        """``[slots, width]`` view."""
        return self.kv_cache.view(-1, self.width)


def check_supported(vllm_config: VllmConfig) -> None:
    """Raise ValueError (one line) for what the CPU model does not do."""
    parallel = vllm_config.parallel_config
    multimodal = vllm_config.model_config.multimodal_config
    mode = multimodal.mm_encoder_tp_mode if multimodal is not None else "data"
    if parallel.tensor_parallel_size != 1 and mode != "data":
        raise ValueError(
            f"--mm-encoder-tp-mode: expected data with --tensor-parallel-size {parallel.tensor_parallel_size} on CPU "
            f"(every rank has the whole vision tower), found {mode}; add --mm-encoder-tp-mode data"
        )
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "--speculative-config: expected none on CPU (no drafter), found one; start the engine without it"
        )
    if vllm_config.use_v2_model_runner:
        raise ValueError("model runner: expected V1 on CPU, found V2; set VLLM_USE_V2_MODEL_RUNNER=0")
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"--kv-cache-dtype: expected auto (fp32 rows) on CPU, found {dtype}; leave it out")


class TextModel(Backbone):
    """The backbone with embedding, head, row cache and Engram; parameter names are the checkpoint's."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        model_config = vllm_config.model_config
        shape = BackboneShape.from_config(model_config.hf_config)
        self.stage = get_pp_group()
        local = range(*get_pp_indices(shape.num_hidden_layers, self.stage.rank_in_group, self.stage.world_size))
        shape.check_stage(local)
        super().__init__(shape, model_config.max_model_len + ROW_TILE, local)
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.head = Linear(shape.hidden_size, shape.vocab_size)
        self.exl3: dict[int, Exl3Experts] = {}
        self.exl3_codebook = ""
        if isinstance(vllm_config.quant_config, Exl3Config):
            self.exl3_codebook = vllm_config.quant_config.codebook
            for layer in self.local:
                self.exl3[layer] = Exl3Experts(shape, layer)
                self.block(layer).ffn.replace_experts(self.exl3[layer])
        width = row_width(shape)
        self.caches = {layer: RowCache(vllm_config, f"{prefix}.layers.{layer}.attn", width) for layer in local}
        self.engram_layers = tuple(layer for layer in shape.engram_layer_ids if layer in local)
        self.hash: EngramHash | None = None
        self.rows: EngramRows | None = None
        self.ahead = HashAhead(self._hash_rows)
        self.prompts: Callable[[int], NDArray[np.int32]] | None = None
        self._chunk = vllm_config.scheduler_config.max_num_batched_tokens
        self._reported_at = time.monotonic()
        if self.engram_layers:
            self.hash = self._build_hash(model_config)
            self._open_tables(self.hash, Path(model_config.model))

    def _build_hash(self, model_config: Any) -> EngramHash:
        tokenizer = AutoTokenizer.from_pretrained(
            model_config.tokenizer, trust_remote_code=model_config.trust_remote_code, revision=model_config.revision
        )
        token_map, size = build_compressed_token_map(tokenizer)
        if size != self.shape.engram_compressed_vocab_size:
            raise ValueError(
                f"config field engram_compressed_vocab_size: expected {size} (built from the tokenizer), found "
                f"{self.shape.engram_compressed_vocab_size}; config.json and tokenizer.json are not of one checkpoint, "
                "run: ds41ctl fetch --verify"
            )
        self.token_map = torch.tensor(token_map, dtype=torch.int64)
        logger.info(
            "Built engram token map (%d -> %d ids) for layers %s", len(token_map), size, self.shape.engram_layer_ids
        )
        return EngramHash.build(self.shape, token_map[self.shape.engram_pad_token_id])

    def _open_tables(self, hashing: EngramHash, pack: Path) -> None:
        """Give every Engram layer its rows: from the store, or zeros when the diagnostic switch is on."""
        shape = self.shape
        if unfilled():
            logger.warning(
                "ds41: WARNING: %s=1: Engram tables are left UNFILLED (all zero), as when their tensors are missing. "
                "For diagnosis only; copies and names will come out wrong",
                UNFILLED_ENV,
            )
            for layer in self.engram_layers:
                self.block(layer).engram.lookup = _zero_lookup(shape.engram_head_dim)
            return
        folder = os.environ.get(STORE_ENV)
        if not folder:
            raise StoreError(f"{STORE_ENV}: expected the Engram store's folder, found none; run: ds41ctl engram build")
        samples = {}
        for index, layer in enumerate(shape.engram_layer_ids):
            first = hashing.offsets[index]
            samples[layer] = [*first.tolist(), *(first + hashing.primes[index].reshape(-1) - 1).tolist()]
        rows = dict(zip(shape.engram_layer_ids, shape.engram_num_embeddings, strict=True))
        rows = {layer: rows[layer] for layer in self.engram_layers}
        store = EngramStore.open(Path(folder), rows, samples, pack)
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.rows = EngramRows(store, hashing, rank, ranks, _gather_columns)
        try:
            store.use_kernels(gather_threads(), worker=rank)
        except StoreError as error:
            logger.warning("ds41: Engram rows are gathered by numpy: %s", error)
        for layer in self.engram_layers:
            self.block(layer).engram.lookup = self.rows.lookup(layer)
            proven = self.rows.prove(layer, pack)
            logger.info(
                "ds41: Engram store layer %d: %d rows x 264 B mapped read-only from %s", layer, rows[layer], folder
            )
            logger.info(
                "ds41: Engram layer %d: rank %d of %d reads rows [%d, %d) columns [%d, %d), %d rows proven",
                layer, rank, ranks, *self.rows.span(layer), self.rows.first, self.rows.end, proven,
            )  # fmt: skip
        logger.info("ds41: Engram gather: %s; store: %s", store.how, store.manifest.page_kind)

    def use_exl3_kernel(self) -> None:
        """Build the EXL3 experts from what was loaded, prove the kernel on their formats and log what serves them."""
        if not self.exl3:
            return
        kernel = Kernel(torch.get_num_threads())
        if kernel.problem:
            logger.warning("ds41: EXL3 experts are computed by numpy: %s", kernel.problem)
        for experts in self.exl3.values():
            experts.finish()
        check_codebook(self.exl3.values(), self.exl3_codebook)
        kernel.check({kind for experts in self.exl3.values() for kind in experts.kinds()})
        for experts in self.exl3.values():
            experts.use(kernel)
        logger.info("ds41: EXL3 experts: %s, by %s", census(self.exl3.values()), kernel.how)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embed.weight)

    def engram_rows(self, batch: PagedBatch, token_ids: Tensor) -> Tensor | None:
        """Table rows ``[T, layers, columns]`` of the batch's tokens."""
        if self.hash is None:
            return None
        depth = self.shape.engram_max_ngram_size - 1
        ids, positions, wanted = batch.lookback(token_ids, depth)
        lengths = [request.length - max(0, request.first - depth) for request in batch.requests]
        found = torch.from_numpy(self.ahead.rows(ids.numpy(), positions.numpy(), lengths))[wanted]
        self.ahead.expect(self._coming(batch.requests, depth))
        # padding rows read the first row of each of their sub-tables: every id stays in its own rank's range
        padding = torch.from_numpy(self.hash.offsets)[None].expand(token_ids.shape[0] - found.shape[0], -1, -1)
        rows = torch.cat((found, padding))
        if self.rows is not None:
            self.rows.start(rows.numpy(), self.shape.engram_layer_ids)
        return rows

    def _hash_rows(self, ids: Int64Array, positions: Int64Array) -> Int64Array:
        """Row ids ``[T, layers, columns]`` of token ids ``[T]`` at their positions."""
        if self.hash is None:
            raise ValueError("a stage without Engram layers hashes nothing")
        tokens = torch.from_numpy(ids)
        compressed = torch.where(tokens == IMAGE_TOKEN_ID, DEAD, self.token_map[tokens])
        return self.hash.row_ids(compressed.numpy(), positions)

    def _coming(self, requests: Sequence[RequestRows], depth: int) -> Iterator[tuple[int, Int64Array]]:
        """Next chunk of every prompt that this batch does not finish, with its predecessors: (position, token ids)."""
        if self.prompts is None:
            return
        left = self._chunk
        for number, request in enumerate(requests):
            prompt = self.prompts(number)
            end = min(len(prompt), request.length + left)
            if request.length < end:
                left -= end - request.length
                start = max(0, request.length - depth)
                yield start, prompt[start:end].astype(np.int64)

    def run(
        self, token_ids: Tensor, positions: Tensor, embeddings: Tensor | None, received: IntermediateTensors | None
    ) -> Tensor | IntermediateTensors:
        """Hidden states ``[T, hidden]`` fp32 of one batch, or what the next pipeline stage goes on with.

        ``embeddings`` are the first stage's input, ``received`` every other one's. The profile run, which has no
        requests, gives zeros.
        """
        total = token_ids.shape[0] if embeddings is None else embeddings.shape[0]
        metadata = get_forward_context().attn_metadata
        requests: list[RequestRows] = []
        if isinstance(metadata, dict):
            requests = cast(RowCacheMetadata, metadata[self.caches[self.local.start].prefix]).requests()
        count = max((request.end for request in requests), default=0)
        if not count:
            return torch.zeros(total, self.shape.hidden_size) if self.stage.is_last_rank else self.empty(total)
        padding = -count % ROW_TILE
        token_ids = F.pad(token_ids[:count].long(), (0, padding))
        positions = F.pad(positions[:count].long(), (0, padding))
        pre: Tensor | None = None
        if received is None:
            if embeddings is None:
                raise ValueError("the first pipeline stage: expected embeddings, found none")
            x = F.pad(embeddings[:count].float(), (0, 0, 0, padding))
            stream = x[:, None].expand(-1, self.shape.hc_mult, -1)
        else:
            stream = F.pad(received["stream"][:count], (0, 0, 0, padding)).unflatten(1, (self.shape.hc_mult, -1))
            pre = F.pad(received["pre"][:count], (0, 0, 0, padding))
        nothing = torch.tensor([])
        caches = [
            self.caches[layer].rows() if layer in self.caches else nothing
            for layer in range(self.shape.num_hidden_layers)
        ]
        batch = PagedBatch(self.shape, self.rope, requests, caches, positions, self.local.start)
        is_image = token_ids == IMAGE_TOKEN_ID
        rows = self.engram_rows(batch, token_ids)
        stream, pre = self.run_layers(stream, pre, positions, batch, rows, ~is_image, is_image)
        self._report()
        if not self.stage.is_last_rank:
            if pre is None:
                raise ValueError("a pipeline stage: expected at least one layer, found none")
            sent = {"stream": stream.flatten(1)[:count], "pre": pre[:count]}
            return IntermediateTensors({key: F.pad(v, (0, 0, 0, total - count)) for key, v in sent.items()})
        hidden: Tensor = self.norm(collapse(stream, pre))
        return F.pad(hidden[:count], (0, 0, 0, total - count))

    def _report(self) -> None:
        """Log the gather's counters once in a while."""
        now = time.monotonic()
        if self.rows is None or now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        found = self.rows.store.counters()
        if found:
            logger.info(
                "ds41: Engram counters: rank %d, %d rows in %d calls, %.2f GB/s, %.0f %% on huge pages, "
                "%d of %d tokens hashed ahead",
                self.rows.rank, found["rows"], found["calls"], found["gb_per_s"], 100 * self.rows.store.huge_share(),
                self.ahead.hits, self.ahead.tokens,
            )  # fmt: skip

    def empty(self, rows: int) -> IntermediateTensors:
        """Zeros of the shapes that stages exchange: ``stream [T, C * hidden]`` and ``pre [T, C]``, fp32."""
        copies = self.shape.hc_mult
        return IntermediateTensors(
            {"stream": torch.zeros(rows, copies * self.shape.hidden_size), "pre": torch.zeros(rows, copies)}
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """``[N, hidden]`` -> ``[N, vocab]`` fp32."""
        count = hidden.shape[0]
        scores: Tensor = self.head(F.pad(hidden, (0, 0, 0, -count % ROW_TILE)))
        return scores[:count]


def unfilled() -> bool:
    """True when the diagnostic switch asks for all-zero Engram tables."""
    value = os.environ.get(UNFILLED_ENV, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{UNFILLED_ENV}: expected 0 or 1, found {value!r}; unset it")
    return value == "1"


def gather_threads() -> int:
    """Threads of this process that gather Engram rows: the switch's, else torch's own count."""
    value = os.environ.get(THREADS_ENV, "")
    if value and not (value.isdecimal() and 1 <= int(value) <= 64):
        raise ValueError(f"{THREADS_ENV}: expected 1 to 64, found {value!r}; unset it")
    return int(value) if value else torch.get_num_threads()


def _gather_columns(mine: Tensor) -> Tensor:
    """``[T, columns, n]`` of every tensor-parallel rank, side by side."""
    gathered: Tensor = tensor_model_parallel_all_gather(mine, dim=1)
    return gathered


def _zero_lookup(width: int) -> RowLookup:
    def lookup(row_ids: Tensor) -> Tensor:
        return torch.zeros(*row_ids.shape, width)

    return lookup


def _contiguous_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # The CPU's packed matrix product refuses the transposed view that the aligner passes.
    return (args[0].contiguous(), *args[1:])


@MULTIMODAL_REGISTRY.register_processor(
    DeepseekV4VLMultiModalProcessor,
    info=DeepseekV4VLProcessingInfo,
    dummy_inputs=DeepseekV4VLDummyInputsBuilder,
)
class DeepseekV41CPUForCausalLM(DeepseekV41ForCausalLM):
    """Upstream's multimodal wrapper around :class:`TextModel`."""

    language_model: TextModel  # type: ignore[assignment]  # upstream's is its own GPU class

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        with _refusing():
            check_supported(vllm_config)
        _use_power_of_two_threads()
        model_config = vllm_config.model_config
        config = cast(DeepseekV41Config, model_config.hf_config)
        self.config = config
        self.multimodal_config = model_config.multimodal_config
        with self._mark_tower_model(vllm_config, {"image"}):
            self.use_data_parallel = is_vit_use_data_parallel(config.vision_n_heads)
            self.vision = DeepseekV4ViT(config)  # type: ignore[no-untyped-call]
            aligner = DeepseekV4Aligner(config)  # type: ignore[no-untyped-call]
            aligner.w1.register_forward_pre_hook(_contiguous_input)
            self.aligner = aligner
            for name in ("image_start", "image_end", "image_newline"):
                setattr(self, name, nn.Parameter(torch.empty(config.hidden_size, dtype=torch.float32)))
            dtype = cast(torch.dtype, model_config.dtype)
            self.vision.to(dtype=dtype)
            self.aligner.to(dtype=dtype)
        with self._mark_language_model(vllm_config), _default_dtype(torch.float32), _refusing():
            self.language_model = TextModel(vllm_config, f"{prefix}.language_model" if prefix else "language_model")
        # Ours loads by checkpoint name; nothing is to be mapped.
        self.hf_to_vllm_mapper = WeightsMapper()
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        show_prompts(CPUModelRunner)
        if not self.language_model.stage.is_first_rank:
            make_stage_buffers(CPUModelRunner)
        self.make_empty_intermediate_tensors = self._empty_intermediate_tensors  # type: ignore[assignment]

    def _empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """What a stage receives, in our own fp32 whatever the model's dtype is."""
        return self.language_model.empty(batch_size)

    @staticmethod
    def get_model_state_cls() -> Any:
        raise NotImplementedError("the V2 model runner is not supported on CPU")

    @property
    def token_lookback_depth(self) -> int:
        """0: the row cache keeps the token ids itself."""
        return 0

    @property
    def decoder_replay_layers(self) -> None:
        return None

    def forward(  # type: ignore[override]  # upstream's own signature breaks its protocol the same way
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        lookback_token_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | IntermediateTensors:
        """Hidden states ``[T, hidden]``; T may include padding, whose rows come out as zeros."""
        if inputs_embeds is None and intermediate_tensors is None:
            inputs_embeds = self.language_model.embed_input_ids(input_ids)
        return self.language_model.run(input_ids, positions, inputs_embeds, intermediate_tensors)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.language_model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill every parameter; the load fails with one line when a tensor is missing (see :mod:`checkpoint`)."""
        names = {name: name.removeprefix("language_model.") for name, _ in self.named_parameters()}
        parameters = {names[name]: parameter for name, parameter in self.named_parameters()}
        tables = []
        if not unfilled():
            for layer in self.language_model.shape.engram_layer_ids:
                tables += [f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"]
        with _refusing():
            filled = load(parameters, tables, divert(self.language_model.exl3, weights))
            self.language_model.use_exl3_kernel()
        for layer in self.language_model.local:
            self.language_model.block(layer).ffn.freeze()
        return {name for name, checkpoint_name in names.items() if checkpoint_name in filled}

    def process_weights_after_loading(self) -> None:
        """Nothing to do: :meth:`load_weights` leaves final values."""


def _use_power_of_two_threads() -> None:
    """Round torch's thread count down to a power of two.

    torch splits large elementwise work evenly over threads; with such a count the parts stay multiples of the vector
    width, so no element's bits depend on the batch (see ``ROW_TILE``). vLLM's CPU worker has bound its threads already
    and replaces ``torch.set_num_threads`` by a warning; using fewer of the bound threads is harmless.
    """
    threads = torch.get_num_threads()
    if threads & (threads - 1):
        torch._C.set_num_threads(1 << (threads.bit_length() - 1))
