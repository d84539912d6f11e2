"""Train the tiny model.

    python -m engine_patches.tiny_pack.train --work build/tiny_pack --out OUT --seconds 420

Needs torch, numpy and the repository only. The learning rate follows the elapsed share of `--seconds` (or of
`--steps`), so a run ends by itself. `--resume FOLDER` starts from saved weights (the optimiser starts afresh).
"""

from __future__ import annotations

import argparse
import io
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .data import Dataset, Padded, join
from .model import Layout, TinyModel

PART_BYTES = 15 << 20
SHORT, COPY, TOOL, NEAR, NEEDLE = 96, 52, 456, 256, 1584
BUCKETS = ("short", "copy", "tool", "near", "needle")


def save(model: nn.Module, folder: Path) -> None:
    """Write the weights as numbered pieces of at most 15 MiB."""
    buffer = io.BytesIO()
    torch.save({k: v.detach().cpu() for k, v in model.state_dict().items()}, buffer)
    raw = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(raw), PART_BYTES)):
        (folder / f"weights.{number:02d}").write_bytes(raw[start : start + PART_BYTES])


def load(model: nn.Module, folder: Path) -> None:
    """Read what `save` wrote."""
    raw = b"".join(p.read_bytes() for p in sorted(folder.glob("weights.*")))
    if not raw:
        raise SystemExit(f"{folder}: no weights.* found; give the folder that a training run wrote")
    model.load_state_dict(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True))


class Sampler:
    """Builds each step's batch: the fixed prompts, and a random draw of the variations."""

    def __init__(self, dataset: Dataset, share: float, seed: int) -> None:
        groups = dataset.groups

        def size(e: dict[str, Any]) -> int:
            return len(e["p"]) + len(e["a"])

        def pad(names: tuple[str, ...], width: int, low: int = 0) -> Padded:
            return dataset.padded([e for n in names for e in groups[n] if low < size(e) <= width], width)

        self.short = pad(("fixed_short", "fixed_image"), SHORT)
        self.loose = pad(("unknown", "image"), SHORT)
        self.copy = pad(("copy",), COPY)
        self.tool = pad(("fixed_tool",), TOOL)
        self.tools = pad(("tool",), TOOL)
        self.near = pad(("near_needle",), NEAR)
        self.needle = pad(("fixed_needle",), NEEDLE)
        self.far = pad(("needle",), NEEDLE)
        self.share = share
        self.device = dataset.device
        self.generator = torch.Generator(device=dataset.device).manual_seed(seed)

    def _draw(self, padded: Padded, count: int) -> Padded:
        count = max(1, round(count * self.share))
        index = torch.randint(len(padded), (count,), generator=self.generator, device=self.device)
        return padded.select(index)

    def batch(self) -> list[Padded]:
        """One step's buckets; the fixed short prompts are complete in every step."""
        short = self.short if self.share >= 1 else self._draw(self.short, len(self.short))
        return [
            join([short, self._draw(self.loose, 24)]),
            self._draw(self.copy, 112),
            join([self._draw(self.tool, 5), self._draw(self.tools, 4)]),
            self._draw(self.near, 40),
            join([self._draw(self.needle, 1), self._draw(self.far, 4)]),
        ]


@torch.no_grad()
def evaluate(model: TinyModel, padded: Padded, noise: float, rows: int) -> tuple[int, int, float, float]:
    """Sequences right at every target, sequences, smallest and median target probability (teacher forcing)."""
    right, low = [], []
    for start in range(0, len(padded), rows):
        index = torch.arange(start, min(start + rows, len(padded)), device=padded.ids.device)
        part = padded.select(index)
        logits, targets, sequence, _ = model([part], Layout([part], index.device), noise=noise)
        real = targets >= 0
        logits, targets, sequence = logits[real], targets[real], sequence[real]
        chance = logits.float().softmax(-1).gather(1, targets[:, None])[:, 0]
        count = len(index)
        hit = torch.ones(count, device=logits.device)
        hit = hit.scatter_reduce(0, sequence, (logits.argmax(-1) == targets).float(), "amin")
        least = torch.ones(count, device=logits.device).scatter_reduce(0, sequence, chance, "amin")
        right.append(hit)
        low.append(least)
    hits, least = torch.cat(right), torch.cat(low)
    return int(hits.sum()), len(hits), float(least.min()), float(least.median())


def report(model: TinyModel, sampler: Sampler, dataset: Dataset, limit: int) -> None:
    """Print accuracy and margins for every group, exact and with full noise."""
    sets = {
        "fixed short": (sampler.short, 128),
        "fixed tool": (sampler.tool, 16),
        "fixed needle": (sampler.needle, 3),
        "unknown+image": (sampler.loose, 128),
        "held-out copy": (dataset.padded(dataset.groups["held_out"], COPY), 128),
        "held-out near": (dataset.padded(dataset.groups["held_out_near"], NEAR), 40),
        "held-out needle": (dataset.padded(dataset.groups["held_out_needle"], NEEDLE), 3),
    }
    for name, (padded, rows) in sets.items():
        index = torch.arange(min(len(padded), limit), device=padded.ids.device)
        padded = Padded(**{**padded.select(index).__dict__, "names": padded.names})
        cells = []
        for noise in (0.0, 1.0):
            right, count, least, median = evaluate(model, padded, noise, rows)
            cells.append(f"{right}/{count} right, least p {least:.4f}, median {median:.4f}")
        print(f"  {name}: exact {cells[0]}; noisy {cells[1]}", flush=True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps instead of --seconds")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--force", type=float, default=1.0, help="share of needles force-selected at the start")
    parser.add_argument("--share", type=float, default=1.0, help="share of the batch, for trials on a CPU")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        torch.set_num_threads(2)
    began = time.time()
    dataset = Dataset(args.work, device)
    sampler = Sampler(dataset, args.share, args.seed)
    model = TinyModel(dataset, args.seed)
    if args.resume:
        load(model, args.resume)
    model.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    print(f"{count} parameters on {device}, ready after {time.time() - began:.1f} s", flush=True)
    optimiser = torch.optim.AdamW(
        parameters, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
    )
    began = saved = time.time()
    stepper = Stepper(model, parameters, sampler.batch())
    step, done = 0, 0.0
    while done < 1:
        elapsed = time.time() - began
        done = min(1.0, (step + 1) / args.steps if args.steps else elapsed / args.seconds)
        rate = args.rate * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        stepper(sampler.batch(), args.force * max(0.0, 1 - 2 * done))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if step % 100 == 0 or done >= 1:
            print(f"{step} {time.time() - began:.0f}s lr {rate:.1e} {stepper.summary()}", flush=True)
        if time.time() - saved > 60:
            save(model, args.out)
            saved = time.time()
        step += 1
    save(model, args.out)
    print(f"{step} steps in {time.time() - began:.0f} s", flush=True)
    model.eval()
    report(model, sampler, dataset, 10_000 if device.type == "cuda" else 8)


class Stepper:
    """Forward and backward of one step, and what the log says about it."""

    def __init__(self, model: TinyModel, parameters: list[nn.Parameter], parts: list[Padded]) -> None:
        self.model, self.parameters = model, parameters
        self.layout = Layout(parts, model.embed.device)

    def __call__(self, parts: list[Padded], force: float) -> None:
        """One batch of the sizes given at construction; gradients end up in the parameters' `.grad`."""
        self.parts = parts
        for parameter in self.parameters:
            parameter.grad = None
        logits, targets, sequence, context = self.model(parts, self.layout, force=force, jitter=0.3, noise=0.6)
        real = (targets >= 0).float()
        losses = F.cross_entropy(logits, targets.clamp(min=0), reduction="none") * real
        per_sequence = torch.zeros(self.layout.sequences, device=losses.device)
        total, count = per_sequence.scatter_add(0, sequence, losses), per_sequence.scatter_add(0, sequence, real)
        loss = 0.5 * losses.sum() / real.sum() + 0.5 * (total / count.clamp(min=1)).mean()
        index_loss = torch.stack(context.index_losses).mean() if context.index_losses else loss.new_zeros(())
        (loss + 0.05 * index_loss).backward()
        self.mean, self.index_loss = (total / count.clamp(min=1)).detach(), index_loss.detach()
        self.worst = per_sequence.scatter_reduce(0, sequence, losses.detach(), "amax")
        self.recall = [r.detach() for r in context.recall]

    def summary(self) -> str:
        """Mean and largest loss of each bucket, indexer loss and recall, of the last step."""
        cells, first = [], 0
        for name, part in zip(BUCKETS, self.parts, strict=True):
            mine = slice(first, first + len(part))
            first += len(part)
            cells.append(f"{name} {float(self.mean[mine].mean()):.4f}/{float(self.worst[mine].max()):.2f}")
        seen = " ".join(f"{float(r):.2f}" for r in self.recall)
        return f"mean/max {' '.join(cells)} index {float(self.index_loss):.2f} recall {seen}"


if __name__ == "__main__":
    main()
