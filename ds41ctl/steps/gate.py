"""gate: record what a pack says by the oracle, ask the running engine the same, compare."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds41ctl.adapters import files
from ds41ctl.adapters.http import EngineClient, Fault, HttpFault, Limits
from ds41ctl.adapters.oracle import OracleRun, run
from ds41ctl.core import logprobs
from ds41ctl.core import reference as reference_module
from ds41ctl.core.errors import NotFoundError
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import Profile, option_value
from ds41ctl.core.reference import Reference, Scores
from ds41ctl.steps.runner import Progress

DEFAULT_LOGPROBS = 20  # vLLM's --max-logprobs when it is not given
ASK_S = 600.0  # one prompt
IMAGE_TOKEN = 129264  # the checkpoint's image_token_id


def builtin_prompts() -> Path:
    """Prompts that travel with the package."""
    return Path(str(importlib.resources.files("profiles").joinpath("gate", "prompts.jsonl")))


def default_path(layout: Layout) -> Path:
    """Where a profile's reference lies."""
    return layout.dirs.state / "gate" / f"{layout.name}.ref"


def read(path: Path) -> Reference:
    """A reference file. Raises NotFoundError, IntegrityError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no reference {path}", hints=("ds41ctl gate record",)) from None
    except OSError as error:
        raise files.os_error(error, f"reading {path}") from None
    return reference_module.parse(raw, path.name)


class Record:
    """Run the oracle over a pack."""

    name = "oracle"

    def __init__(self, layout: Layout, wanted: OracleRun) -> None:
        self.layout, self.wanted = layout, wanted
        self.result: Mapping[str, Any] = {}
        self.memory_bound = 0

    def do(self, progress: Progress) -> None:
        """Run it, reporting each layer with the time that is left."""

        def on_event(event: Mapping[str, Any]) -> None:
            kind = event["event"]
            if kind == "start":
                self.memory_bound = int(event["memory_bound"])
                text = (
                    f"{event['tokens']} tokens, {event['layers']} layers, at most {_gib(self.memory_bound)} of memory"
                )
                progress(text, {"note": True})
            elif kind == "resumed":
                progress(f"goes on after layer {event['layer'] - 1}", {"note": True})
            elif kind == "note":
                progress(str(event["text"]), {"note": True})
            elif kind == "layer":
                rate = event["bytes"] / 2**20 / max(event["seconds"], 1e-9)
                progress(
                    f"layer {event['layer'] + 1} of {event['layers']}, {rate:,.0f} MiB/s, {event['touched']:.0%} of "
                    f"the experts, {_gib(event['peak_rss'])}, {event['eta_s']:,.0f} s left",
                    {},
                )

        self.result = run(self.layout, self.wanted, on_event)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def ask(
    client: EngineClient,
    profile: Profile,
    reference: Reference,
    progress: Callable[[str], None],
    *,
    argv: tuple[str, ...] = (),
) -> tuple[Reference, list[int], list[str]]:
    """Ask the running engine about the prompts of `reference`, each cut to the window that is safe for it. `argv`: how
    it was started.

    Returns what it said, the numbers of the prompts it was asked, and why others were left out. Raises HttpFault, and
    NoRoomError before anything is sent.
    """
    window = logprobs.window(profile, argv)
    k = min(int(option_value(profile.serve.argv, "--max-logprobs") or DEFAULT_LOGPROBS), reference.k)
    found: list[Scores] = []
    chosen, left_out = [], []
    pieces: dict[str, str] = {}
    for number, prompt in enumerate(reference.prompts):
        progress(f"{prompt.set}/{prompt.name}, {len(prompt.ids)} tokens ({number + 1} of {len(reference.prompts)})")
        if prompt.source is not None and len(prompt.ids) > window:
            left_out.append(
                f"{prompt.set}/{prompt.name}: {len(prompt.ids)} tokens with a picture, the window is {window}"
            )
            continue
        if prompt.source is None and IMAGE_TOKEN in prompt.ids:
            left_out.append(f"{prompt.set}/{prompt.name}: picture tokens without their picture")
            continue
        ids = list(prompt.ids[:window])
        rows = _ask(client, profile, prompt, ids, k, pieces)
        found.append(reference_module.scores(prompt.set, prompt.name, ids, rows, k))
        chosen.append(number)
    head = {"kind": "engine", "k": k, "settings": {"profile": profile.name, "window": window}, "pieces": pieces}
    return Reference(head, tuple(found)), chosen, left_out


def _ask(
    client: EngineClient, profile: Profile, prompt: Scores, ids: list[int], k: int, pieces: dict[str, str]
) -> list[dict[int, float]]:
    body: dict[str, Any] = {
        "model": profile.model.served_name,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": k,
        "return_token_ids": True,
    }
    if prompt.source is None:
        tree = client.post_json("/v1/completions", {**body, "prompt": ids}, Limits(total_s=ASK_S)).ok_json()
    else:
        body["messages"] = prompt.source["messages"]
        body["chat_template_kwargs"] = {"thinking": bool(prompt.source.get("thinking"))}
        body["add_generation_prompt"] = False
        for name in ("tools", "reasoning_effort"):
            if name in prompt.source:
                body[name] = prompt.source[name]
        tree = client.post_json("/v1/chat/completions", body, Limits(total_s=ASK_S)).ok_json()
    try:
        first = tree["choices"][0]
        seen = tree.get("prompt_token_ids") or first.get("prompt_token_ids") or ids
        rows = (tree.get("prompt_logprobs") or first.get("prompt_logprobs"))[1:]
        if list(seen) != ids:
            text = f"prompt {prompt.name}: the engine made other tokens of it ({len(seen)} instead of {len(ids)})"
            raise HttpFault(Fault.BAD_JSON, text, status=200)
        found = []
        for row, token in zip(rows, ids[1:], strict=True):
            known = {int(name): min(float(item["logprob"]), 0.0) for name, item in row.items()}
            if token not in known:
                raise KeyError(token)
            pieces.update({name: str(item.get("decoded_token") or "") for name, item in row.items()})
            found.append(known)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        text = f"prompt {prompt.name}: no prompt_logprobs for every token ({type(error).__name__}: {error})"
        raise HttpFault(Fault.BAD_JSON, text, status=200) from None
    return found


def write(path: Path, reference: Reference) -> str:
    """Publish a reference that the engine made. Returns the file's sha256."""
    return files.publish(path, [reference_module.dump(reference)])


def with_prompts_of(reference: Reference, path: Path) -> Path:
    """Write the prompts of a reference as JSON Lines, for running another pack over the very same ones."""
    lines = []
    for prompt in reference.prompts:
        tree: dict[str, Any] = {"set": prompt.set, "name": prompt.name}
        tree |= dict(prompt.source) if prompt.source is not None else {"ids": list(prompt.ids)}
        lines.append(json.dumps(tree, ensure_ascii=False) + "\n")
    files.publish(path, [line.encode() for line in lines])
    return path


def settings_of(reference: Reference, wanted: OracleRun) -> OracleRun:
    """`wanted` with the numbers that the reference was made with, so that only the packs differ."""
    known = reference.head.get("settings", {})
    return replace(
        wanted,
        top_k=int(known.get("top_k", wanted.top_k)),
        activations=str(known.get("activations", wanted.activations)),
        keys=str(known.get("keys", wanted.keys)),
        layer_positions=int(known.get("layer_positions", wanted.layer_positions)),
    )
