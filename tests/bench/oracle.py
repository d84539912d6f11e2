"""The oracle on a synthetic pack of 40 layers: speed against the disk's own, memory against its bound, kills.

    ENGINE_PYTHON -m tests.bench.oracle FOLDER [--tokens 64] [--kills 3]

(ENGINE_PYTHON: ds41ctl engine path; FOLDER on the disk that is meant, with room for the pack.) The pack is removed at
the end. Its layers have the real kinds (window, ratio 2, ratio 1, index sources) at hidden 1024 with 96 experts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [str(ROOT / "engine_patches" / "ds41_engine"), str(ROOT / "kernels" / "ds41_kernels")]
sys.path[:0] = SOURCES

from ds41_engine.backbone import Block  # noqa: E402
from ds41_engine.quant import TensorFormat, tensor_format  # noqa: E402
from ds41_engine.shape import BackboneShape  # noqa: E402
from ds41_kernels import compile  # noqa: E402

LAYERS, HIDDEN, INNER, EXPERTS, VOCABULARY = 40, 1024, 1024, 96, 4096
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 256, "o_lora_rank": 128, "o_groups": 8,
    "sliding_window": 128, "rms_norm_eps": 1e-20, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20, "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 8, "index_head_dim": 128,
    "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": INNER,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [], "engram_num_embeddings": [],
}  # fmt: skip
WIDTH = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


def tensors_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of a parameter as the checkpoint stores it."""
    kind, stem = tensor_format(name), name.removesuffix(".weight")
    if kind is TensorFormat.FP8_BLOCK:
        return [(name, "F8_E4M3", shape), (f"{stem}.scale", "F8_E8M0", (shape[0] // 32, shape[1] // 32))]
    if kind is TensorFormat.MXFP4:
        return [(name, "I8", (shape[0], shape[1] // 2)), (f"{stem}.scale", "F8_E8M0", (shape[0], shape[1] // 32))]
    return [(name, "F32" if kind is TensorFormat.F32 else "BF16", shape)]


def content(name: str, dtype: str, size: int) -> bytes:
    """Random bytes that are harmless numbers of about the right size."""
    if dtype == "I8":
        return os.urandom(size)
    if dtype == "F8_E8M0":
        return bytes([119 if ".experts." in name else 116]) * size
    if dtype == "F8_E4M3":
        return bytes(byte & 0xB7 for byte in os.urandom(1 << 12)) * -(-size // (1 << 12))
    count = size // WIDTH[dtype]
    spread = 1.0 if "norm" in name else 0.03
    values = torch.ones(count) if "norm" in name else torch.randn(count) * spread
    return bytes((values if dtype == "F32" else values.bfloat16()).view(torch.uint8).numpy().tobytes())


def write_shard(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """A safetensors file, written as it is made."""
    header, at = {}, 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for name, dtype, shape in tensors:
            size = math.prod(shape) * WIDTH[dtype]
            out.write(memoryview(content(name, dtype, size))[:size])
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_pack(folder: Path, layers: int) -> int:
    """The pack; returns its bytes."""
    folder.mkdir(parents=True)
    text = {**TEXT, "num_hidden_layers": layers}
    shape = BackboneShape.from_config(text)
    (folder / "config.json").write_text(json.dumps({"text_config": text, "quantization_config": {}}))
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(VOCABULARY)}, "unk_token": "0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    weight_map = {}
    outside = [("embed.weight", "BF16", (VOCABULARY, HIDDEN)), ("head.weight", "BF16", (VOCABULARY, HIDDEN))]
    for layer in range(-1, layers):
        file = f"model-{layer + 2:05d}-of-{layers + 1:05d}.safetensors"
        tensors: list[tuple[str, str, tuple[int, ...]]] = [*outside, ("norm.weight", "BF16", (HIDDEN,))]
        if layer >= 0:
            with torch.device("meta"):
                block = Block(shape, layer)
            tensors = [
                item
                for name, value in block.state_dict().items()
                for item in tensors_of(f"layers.{layer}.{name}", tuple(value.shape))
            ]
        write_shard(folder / file, tensors)
        weight_map |= dict.fromkeys((name for name, _, _ in tensors), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def disk(folder: Path) -> float:
    """MB/s of reading every shard once, as the oracle reads, and doing nothing with it."""
    forget(folder)
    buffer, done, started = bytearray(8 << 20), 0, time.monotonic()
    for path in sorted(folder.glob("*.safetensors")):
        fd, at = os.open(path, os.O_RDONLY), 0
        while count := os.preadv(fd, [buffer], at):
            at += count
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        done += at
    return done / 1e6 / (time.monotonic() - started)


def oracle(
    folder: Path, prompts: Path, out: Path, work: Path, threads: int, library: Path, kill_after: int | None = None
) -> list[Any]:
    """Run it, killed after a layer when one is given; its events."""
    argv = [sys.executable, "-m", "ds41_engine.oracle", "--pack", str(folder), "--prompts", str(prompts)]
    argv += ["--out", str(out), "--work", str(work), "--threads", str(threads), "--read-ahead-gib", "0.25"]
    argv += ["--layer-positions", "16", *(["--kernels", str(library)] if library.is_file() else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), "OMP_NUM_THREADS": str(threads)}
    events = []
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            events.append(json.loads(line))
            if kill_after is not None and events[-1].get("layer") == kill_after and events[-1]["event"] == "layer":
                running.send_signal(signal.SIGKILL)
                break
    if kill_after is None and running.returncode:
        raise SystemExit(f"the oracle ended with {running.returncode}: {events[-1:]}")
    return events


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    pack = args.folder / "pack"
    shutil.rmtree(args.folder, ignore_errors=True)
    try:
        size = write_pack(pack, args.layers)
        print(f"pack: {args.layers} layers, {size / 1e9:.2f} GB", flush=True)
        library = args.folder / compile.LIBRARY
        print(f"compiled loops: {compile.compile_library(library) or 'yes'}")
        prompts = args.folder / "prompts.jsonl"
        ids = [[(n * 7919 + p) % VOCABULARY for n in range(args.tokens // 2)] for p in range(2)]
        prompts.write_text("".join(json.dumps({"ids": line}) + "\n" for line in ids))
        before = disk(pack)
        forget(pack)
        events = oracle(pack, prompts, args.folder / "whole.ref", args.folder / "work", args.threads, library)
        after = disk(pack)
        layers, start, end = [e for e in events if e["event"] == "layer"], events[0], events[-1]
        rate = sum(e["bytes"] for e in layers) / 1e6 / sum(e["seconds"] for e in layers)
        print(f"disk alone: {before:.0f} MB/s before, {after:.0f} MB/s after")
        print(f"streaming: {rate:.0f} MB/s ({2 * rate / (before + after):.0%}), {end['read'] / 1e9:.2f} GB read")
        cpu = (layers[-1]["cpu_seconds"] - layers[0]["cpu_seconds"]) or 1e-9
        streamed = sum(e["bytes"] for e in layers[1:]) / 1e6
        print(f"processor time: {streamed / cpu:.0f} MB of pack a second of one core")
        print(f"memory: peak {end['peak_rss'] / 2**30:.2f} GiB, bound {start['memory_bound'] / 2**30:.2f} GiB")
        out, work = args.folder / "killed.ref", args.folder / "killed"
        for number in range(args.kills):
            layer = (number + 1) * args.layers // (args.kills + 1)
            oracle(pack, prompts, out, work, args.threads, library, kill_after=layer)
            print(f"killed after layer {layer}: {sorted(p.name for p in work.glob('*.state'))}", flush=True)
        oracle(pack, prompts, out, work, args.threads, library)
        same = out.read_bytes() == (args.folder / "whole.ref").read_bytes()
        print(f"killed {args.kills} times and resumed: {'the same bytes' if same else 'OTHER BYTES'}")
        if not same or end["peak_rss"] > start["memory_bound"]:
            raise SystemExit(1)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
