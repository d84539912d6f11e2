"""Our load generator beside `vllm bench serve` and the engine's own metrics, on one engine, in one run.

    python -m tests.bench.loadgen --url http://127.0.0.1:8011 --engine-python "$(ds41ctl engine path)"

Both clients send requests of the same shape in turn, block by block, each text once. What the engine counted meanwhile
(tokens, time to first token, time between tokens) is the third opinion, and the common measure of the two. Figures of
one run are in tests/bench/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from ds41ctl.adapters import metrics
from ds41ctl.adapters.http import EngineClient
from ds41ctl.adapters.metrics import EngineMetrics
from smoke.load import Load
from smoke.prompts import Prompts

# runs in the engine's venv, one job a line; `vllm bench serve` calls this very function (its command line needs pandas
# for a data set). Its own summary leaves means out when it has no tokenizer.
PEER = """
import asyncio, json, sys
from vllm.benchmarks.serve import TaskType, benchmark
from vllm.benchmarks.datasets import SampleRequest
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    job = json.loads(line)
    requests = [SampleRequest(prompt=t, prompt_len=1, expected_output_len=job["tokens"], request_id=str(i))
                for i, t in enumerate(job["texts"])]
    result = asyncio.run(benchmark(
        task_type=TaskType.GENERATION, endpoint_type="openai-chat", api_url=job["url"] + "/v1/chat/completions",
        base_url=job["url"], model_id=job["model"], model_name=job["model"], tokenizer=None, input_requests=requests,
        logprobs=None, request_rate=float("inf"), burstiness=1.0, disable_tqdm=True, num_warmups=0, profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl"], selected_percentiles=[95.0], ignore_eos=True,
        goodput_config_dict={}, max_concurrency=job["streams"], lora_modules=None, extra_headers=None,
        extra_body={"temperature": 0}, ready_check_timeout_sec=0))
    mean = lambda values: sum(values) / len(values)
    print(json.dumps({"tokens": sum(result["output_lens"]), "ttft_s": mean(result["ttfts"]),
        "seconds": result["duration"],
        "tpot_s": mean([sum(i) / (n - 1) for i, n in zip(result["itls"], result["output_lens"])])}),
        file=answers, flush=True)
"""
FIGURES = ("tokens", "ttft_s", "tpot_s", "tps")


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


class Peer:
    """`vllm bench serve` in one process, so that importing it is not part of any block."""

    def __init__(self, python: str, url: str, model: str) -> None:
        self._fixed = {"url": url, "model": model}
        self._process = subprocess.Popen(
            [python, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def figures(self, texts: list[str], tokens: int, streams: int) -> Figures:
        """Its opinion of one block."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({**self._fixed, "texts": texts, "tokens": tokens, "streams": streams}) + "\n"
        )
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"vllm bench serve ended with status {self._process.wait()}")
        return Figures(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def engine(before: EngineMetrics, after: EngineMetrics, streams: int) -> Figures:
    """The engine's own opinion of what happened between two readings, `streams` requests at a time."""

    def change(name: str) -> tuple[float, float]:
        a, b = getattr(before, name), getattr(after, name)
        return b[0] - a[0], b[1] - a[1]

    (first, firsts), (between, gaps), (whole, _) = change("ttft"), change("inter_token"), change("request")
    made = (after.generated or 0) - (before.generated or 0)
    return Figures(made, first / firsts, between / gaps, whole / streams)


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
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=2600)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, default=1)
    args = parser.parse_args()
    prompts = Prompts(int(time.time()))
    text = prompts.filler(256)
    warm = asyncio.run(_warm(args.url, args.model, text))
    prompts.learn(text, warm)
    other = Peer(args.engine_python, args.url, args.model)
    other.figures([prompts.filler(64)], 8, 1)
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
                found = other.figures(texts, args.tokens, args.streams)
            rows[name].append((found, engine(before, read(args.url), args.streams)))
            print(f"round {number + 1} {name}: {found}", file=sys.stderr)
    other.close()
    print(f"{'client':<18} {'figure':<8} {'client':>10} {'engine':>10} {'client/engine':>14}")
    against: dict[str, list[float]] = {}
    for name, pairs in rows.items():
        for figure in FIGURES:
            mine = statistics.fmean(getattr(a, figure) for a, _ in pairs)
            theirs = statistics.fmean(getattr(b, figure) for _, b in pairs)
            against.setdefault(figure, []).append(mine / theirs)
            print(f"{name:<18} {figure:<8} {mine:>10.4g} {theirs:>10.4g} {mine / theirs:>14.4f}")
    # the engine's pace changes from block to block; measured against it, the clients can be compared with each other
    for figure, (a, b) in against.items():
        print(f"{'ours / vllm bench':<18} {figure:<8} {a / b:>36.4f}")
    print(f"our client used {statistics.fmean(share):.3f} of a core")


async def _warm(url: str, model: str, text: str) -> int:
    load = Load(url, model)
    try:
        return (await load.ask(text, 8)).answer.prompt_tokens or 0
    finally:
        await load.aclose()


if __name__ == "__main__":
    main()
