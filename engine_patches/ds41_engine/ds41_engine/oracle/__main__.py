"""``python -m ds41_engine.oracle``: run the oracle; events are JSON lines on stdout, the last one says how it ended."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXITS = {"usage": 2, "integrity": 12, "memory": 15}


def main() -> int:
    """Command line entry. Exit codes: 0 done, 2 usage, 12 the pack is damaged, 15 not enough memory."""
    parser = argparse.ArgumentParser(prog="ds41_engine.oracle", description=__doc__)
    parser.add_argument("--pack", type=Path, required=True, help="folder in the checkpoint's layout")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON Lines, or one plain text")
    parser.add_argument("--out", type=Path, required=True, help="reference file to write")
    parser.add_argument("--work", type=Path, help="folder for saved states: a killed run goes on from there")
    parser.add_argument("--top-k", type=int, default=128, help="tokens kept of each position")
    parser.add_argument("--activations", choices=("fp32", "mxfp8"), default="fp32")
    parser.add_argument("--keys", choices=("fp32", "trained"), default="fp32")
    parser.add_argument("--layer-positions", type=int, default=0, help="positions whose hidden states are kept")
    parser.add_argument("--read-ahead-gib", type=float, default=2.0, help="memory for experts read ahead")
    parser.add_argument("--checkpoint-every", type=int, default=1, help="layers between two saved states")
    parser.add_argument("--store", type=Path, help="Engram store; default: rows from the pack's shards")
    parser.add_argument("--kernels", type=Path, help="compiled library of ds41_kernels")
    parser.add_argument("--threads", type=int, default=0, help="0: OMP_NUM_THREADS, else all cores")
    args = parser.parse_args()
    if args.top_k < 1 or args.checkpoint_every < 1 or args.layer_positions < 0 or args.read_ahead_gib <= 0:
        parser.error("--top-k and --checkpoint-every are at least 1, --read-ahead-gib is above 0")
    try:
        return _run(args)
    except MemoryError:
        return _failed("memory", "not enough memory; fewer or shorter prompts, or a smaller --read-ahead-gib")


def _run(args: argparse.Namespace) -> int:
    from tokenizers import Tokenizer

    from ..checkpoint import CheckpointError
    from ..store import StoreError
    from . import prompts as prompts_module
    from .rounding import Rounding
    from .run import Oracle, RunError, Settings, read_config

    threads = args.threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    settings = Settings(
        top_k=args.top_k,
        rounding=Rounding(activations=args.activations == "mxfp8", keys=args.keys == "trained"),
        layer_positions=args.layer_positions,
        threads=threads,
        read_ahead_bytes=int(args.read_ahead_gib * (1 << 30)),
        store=args.store,
        checkpoint_every=args.checkpoint_every,
        library=args.kernels,
    )
    try:
        config = read_config(args.pack)
        tokenizer = Tokenizer.from_file(str(args.pack / "tokenizer.json"))
        vocab_size = int(config["text_config"]["vocab_size"])
        prompts = prompts_module.load(args.prompts, tokenizer, config.get("vision_config"), vocab_size)
        oracle = Oracle(args.pack, prompts, settings, args.work, _say)
        oracle.run(args.out, {"prompts_sha256": prompts_module.digest(prompts)})
    except (CheckpointError, StoreError) as error:
        return _failed("integrity", str(error))
    except (prompts_module.PromptError, RunError, ValueError) as error:
        return _failed(getattr(error, "code", "usage"), str(error))
    except OSError as error:
        return _failed("usage", f"{error.filename or args.out}: {error.strerror}")
    return 0


def _say(event: Mapping[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def _failed(code: str, message: str) -> int:
    _say({"event": "error", "code": code, "message": " ".join(message.split())})
    return EXITS.get(code, 2)


if __name__ == "__main__":
    sys.exit(main())
