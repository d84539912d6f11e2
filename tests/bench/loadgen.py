"""Our load generator beside `vllm bench serve` and the engine's own metrics, on one engine, in one run.

    python -m tests.bench.loadgen --url http://127.0.0.1:8011 --engine-python "$(ds41ctl engine path)"

Both clients send requests of the same shape in turn, each text once. What the engine counted meanwhile (tokens, time
to first token, time between tokens) is the third opinion. Figures of one run are in tests/bench/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ds41ctl.adapters import metrics
from ds41ctl.adapters.http import EngineClient
from ds41ctl.adapters.metrics import EngineMetrics
from smoke.load import Load
from smoke.prompts import Prompts

# runs in the engine's venv: `vllm bench serve` calls this very function; its command line needs pandas for a data set
PEER = """
import asyncio, json, sys
from vllm.benchmarks.serve import TaskType, benchmark
from vllm.benchmarks.datasets import SampleRequest
job = json.load(open(sys.argv[1]))
requests = [SampleRequest(prompt=t, prompt_len=1, expected_output_len=job["tokens"], request_id=str(i))
            for i, t in enumerate(job["texts"])]
result = asyncio.run(benchmark(
    task_type=TaskType.GENERATION, endpoint_type="openai-chat", api_url=job["url"] + "/v1/chat/completions",
    base_url=job["url"], model_id=job["model"], model_name=job["model"], tokenizer=None, input_requests=requests,
    logprobs=None, request_rate=float("inf"), burstiness=1.0, disable_tqdm=True, num_warmups=0, profile=False,
    selected_percentile_metrics=["ttft", "tpot", "itl"], selected_percentiles=[95.0], ignore_eos=True,
    goodput_config_dict={}, max_concurrency=job["streams"], lora_modules=None, extra_headers=None,
    extra_body={"temperature": 0}, ready_check_timeout_sec=0))
mean = lambda values: sum(values) / len(values)  # its summary leaves these out when it has no tokenizer
json.dump({"tokens": sum(result["output_lens"]), "ttft_s": mean(result["ttfts"]), "seconds": result["duration"],
           "tpot_s": mean([sum(i) / (n - 1) for i, n in zip(result["itls"], result["output_lens"])])},
          open(sys.argv[2], "w"))
"""


@dataclass(frozen=True)
class Figures:
    """One client's opinion of one block of requests."""

    tokens: float
    ttft_s: float
    tpot_s: float
    seconds: float

    @property
    def tps(self) -> float:
        """Output tokens a second over the whole block."""
        return self.tokens / self.seconds


async def ours(url: str, model: str, texts: list[str], tokens: int, streams: int) -> tuple[Figures, float]:
    """(our figures, CPU seconds of the client)."""
    load = Load(url, model)
    gate = asyncio.Semaphore(streams)
    cpu, began = time.process_time(), time.monotonic()

    async def one(text: str):  # type: ignore[no-untyped-def]
        async with gate:
            return await load.ask(text, tokens, ignore_eos=True)

    readings = await asyncio.gather(*(one(text) for text in texts))
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    await load.aclose()
    bad = [item.outcome for item in readings if item.outcome != "ok"]
    if bad:
        sys.exit(f"requests failed: {bad}")
    per_token = [
        ((item.answer.final_s or 0) - (item.ttft_s or 0)) / ((item.answer.completion_tokens or 0) - 1)
        for item in readings
    ]
    return Figures(
        sum(item.answer.completion_tokens or 0 for item in readings),
        statistics.fmean(item.ttft_s or 0 for item in readings),
        statistics.fmean(per_token),
        seconds,
    ), used


def peer(python: str, url: str, model: str, texts: list[str], tokens: int, streams: int) -> Figures:
    """Figures of `vllm bench serve`."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps({"url": url, "model": model, "texts": texts, "tokens": tokens, "streams": streams}))
        done = subprocess.run([python, "-c", PEER, str(job), str(result)], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"vllm bench serve failed: {done.stderr.strip().splitlines()[-1:]}")
        return Figures(**json.loads(result.read_text()))


def engine(before: EngineMetrics, after: EngineMetrics, seconds: float) -> Figures:
    """The engine's own opinion of what happened between two readings."""

    def mean(name: str) -> float:
        a, b = getattr(before, name), getattr(after, name)
        return float((b[0] - a[0]) / (b[1] - a[1]))

    return Figures((after.generated or 0) - (before.generated or 0), mean("ttft"), mean("inter_token"), seconds)


def read(url: str) -> EngineMetrics:
    """The engine's metrics once it is at rest."""
    for _ in range(50):
        found = metrics.parse(EngineClient(url).get("/metrics").body.decode())
        if not found.running:
            break
        time.sleep(0.1)
    return found


def main() -> None:
    """Run the blocks in turn and print what the three say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--model", default="deepseek-v4.1-flash")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=800)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1)
    args = parser.parse_args()
    prompts = Prompts(int(time.time()))
    text = prompts.filler(256)
    warm = asyncio.run(_warm(args.url, args.model, text))
    prompts.learn(text, warm)
    rows: dict[str, list[tuple[Figures, Figures]]] = {"ours": [], "vllm bench serve": []}
    share = []
    for number in range(args.rounds):
        for name in ("ours", "vllm bench serve") if number % 2 == 0 else ("vllm bench serve", "ours"):
            texts = [prompts.filler(args.prompt) for _ in range(args.requests)]
            before = read(args.url)
            if name == "ours":
                found, used = asyncio.run(ours(args.url, args.model, texts, args.tokens, args.streams))
                share.append(used / found.seconds)
            else:
                found = peer(args.engine_python, args.url, args.model, texts, args.tokens, args.streams)
            rows[name].append((found, engine(before, read(args.url), found.seconds)))
    print(f"{'client':<18} {'figure':<8} {'client':>10} {'engine':>10} {'client/engine':>14}")
    for name, pairs in rows.items():
        for field in ("tokens", "ttft_s", "tpot_s", "tps"):
            mine = statistics.fmean(getattr(a, field) for a, _ in pairs)
            theirs = statistics.fmean(getattr(b, field) for _, b in pairs)
            print(f"{name:<18} {field:<8} {mine:>10.4g} {theirs:>10.4g} {mine / theirs:>14.4f}")
    print(f"our client used {statistics.fmean(share):.3f} of a core")


async def _warm(url: str, model: str, text: str) -> int:
    load = Load(url, model)
    try:
        return (await load.ask(text, 8)).answer.prompt_tokens or 0
    finally:
        await load.aclose()


if __name__ == "__main__":
    main()
