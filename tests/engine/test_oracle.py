"""The oracle against the real engine, upstream's own functions and the packed form; faults; kills; bad input."""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ds41_engine.backbone import Backbone, Block, EngramTable, MoE, top_k_mask
from ds41_engine.checkpoint import CheckpointError, decode_tensors
from ds41_engine.engram_hash import EngramHash
from ds41_engine.oracle import prompts as prompts_module
from ds41_engine.oracle import rounding, sequence
from ds41_engine.oracle.run import Oracle, Settings, read_config
from ds41_engine.oracle.shards import Entry
from ds41_engine.packed import PackedBatch
from ds41_engine.quant import decode_engram_rows
from ds41_engine.shape import IMAGE_TOKEN_ID, BackboneShape
from ds41_engine.token_map import compressed_token_map
from oracle_faults import FAULTS
from safetensors.torch import load_file
from tiny_checkpoint import VOCAB_SIZE, write_checkpoint, write_store
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ds41ctl.core import gate, packgen, profile, reference  # noqa: E402

PROMPTS = ROOT / "profiles" / "gate" / "prompts.jsonl"
TINY = profile.parse_profile((ROOT / "profiles" / "cpu-tiny.toml").read_text(), "cpu-tiny.toml")
AGREES = 2e-4
"""Largest difference of a log-probability between two fp32 arithmetics that make the same choices.

Derived: fp32 rounds by 6e-8; six layers leave 5e-7 of a hidden state uncertain (measured at the experts' scores), and
log-probabilities reach 31. So 1.6e-5 is expected. Measured on one AMD CPU: below 4e-5 with MKL's usual loops and its
plainest ones (``MKL_CBWR=COMPATIBLE``) in the engine, against both of them and torch's kernels for AVX-512, AVX2 and
neither in the oracle.
"""


@pytest.fixture(scope="module")
def tiny_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained pack, generated from its recipe."""
    recipe = packgen.load_recipe(ROOT / "profiles" / "packs" / "tiny-v41")
    folder = tmp_path_factory.mktemp("tiny-pack")
    for file in recipe.files:
        with (folder / file.name).open("wb") as out:
            out.writelines(packgen.generate(recipe, file.name))
    return folder


def lines(*trees: Mapping[str, Any]) -> str:
    return "".join(json.dumps(tree) + "\n" for tree in trees)


def builtin(*names: str) -> list[dict[str, Any]]:
    """Built-in prompts by set or name."""
    trees = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return [tree for tree in trees if tree["set"] in names or tree["name"] in names]


def load(pack: Path, file: Path) -> list[prompts_module.Prompt]:
    config = read_config(pack)
    tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
    return prompts_module.load(file, tokenizer, config["vision_config"], VOCAB_SIZE)


def run(
    pack: Path,
    prompts: list[prompts_module.Prompt],
    out: Path,
    kind: type[Oracle] = Oracle,
    work: Path | None = None,
    notify: Callable[[Mapping[str, Any]], None] = lambda event: None,
    **settings: Any,
) -> reference.Reference:
    kind(pack, prompts, Settings(**settings), work, notify).run(out)
    return reference.parse(out.read_bytes(), out.name)


# ---- against the engine


class Following(Oracle):
    """The oracle with the engine's choices of groups and experts, once it has found each as good as its own.

    A choice between two scores that differ by less than fp32 can tell falls either way with the order of a sum, that is
    with the CPU and its kernels, and the other group or expert moves a log-probability by up to 4e-3. Compared under
    the same choices no row needs an excuse, nor do the rows that read what such a row left in the cache.

    Attributes:
        choices: per prompt what ``engine_logprobs.Choices`` wrote down.
        others: (prompt, position) of every choice that the oracle would have made otherwise.
    """

    choices: list[dict[str, dict[int, torch.Tensor]]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.others: set[tuple[int, int]] = set()

    def follow(self, number: int, start: int, scores: torch.Tensor, own: torch.Tensor, theirs: torch.Tensor) -> None:
        """Both are masks ``[T, N]`` over what has ``scores``; each row of ``theirs`` must be as good a choice."""
        assert torch.equal(own.sum(1), theirs.sum(1))
        better = scores.masked_fill(~own | theirs, -math.inf).amax(1)
        worse = scores.masked_fill(~theirs | own, math.inf).amin(1)
        scale = scores.masked_fill(~own | scores.isinf(), 0).abs().amax(1)
        for row in (own != theirs).any(1).nonzero().flatten().tolist():
            assert better[row] - worse[row] < sequence.NEAR * scale[row], f"prompt {number} position {start + row}"
            self.others.add((number, start + row))

    def context(self, layer: int, number: int, shared: sequence.Shared) -> sequence.Sequence:
        made, oracle = super().context(layer, number, shared), self

        def choose(layer: int, start: int, scores: torch.Tensor) -> torch.Tensor:
            own = top_k_mask(scores, made.shape.index_topk)
            theirs = oracle.choices[number]["groups"][layer][start : start + scores.shape[0], : scores.shape[1]]
            oracle.follow(number, start, scores, own, theirs)
            return theirs

        made.choose = choose  # type: ignore[method-assign]
        return made

    def route(self, layer: int, ffn: MoE, rows: slice, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number = bisect.bisect_right(self.starts, rows.start) - 1
        start = rows.start - self.starts[number]
        chosen = self.choices[number]["experts"][layer][start : start + x.shape[0]]
        scores, ranking = ffn.ranking(x, self.is_image[rows])
        own, theirs = (
            torch.zeros_like(ranking, dtype=torch.bool).scatter(1, experts, True)
            for experts in (super().route(layer, ffn, rows, x)[0], chosen)
        )
        self.follow(number, start, ranking, own, theirs)
        return chosen, ffn.weigh(scores, chosen)


def test_engine_and_oracle_agree_on_the_trained_pack(tiny_pack: Path, tmp_path: Path) -> None:
    """Texts, a tool prompt, pictures, prompts around the window and a chunk, and beyond the indexer's top-k."""
    edges = [
        {"set": "edge", "name": str(size), "ids": [0] + [100 + i * 7919 % 2000 for i in range(size - 1)]}
        for size in (2, 127, 128, 129, 255, 257)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines(*builtin("chat", "tool", "image", "needle", "order_item_42", "search"), *edges))
    write_store(tmp_path / "store", tiny_pack)
    out = tmp_path / "engine.pt"
    script = Path(__file__).with_name("engine_logprobs.py")
    argv = [sys.executable, str(script), str(tiny_pack), str(tmp_path / "store"), str(file), str(out), "float32"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = torch.load(out)
    oracle = Following(tiny_pack, load(tiny_pack, file), Settings())
    oracle.choices = said
    oracle.run(tmp_path / "oracle.ref")
    known = reference.parse((tmp_path / "oracle.ref").read_bytes(), "oracle.ref")
    for number, (prompt, found) in enumerate(zip(known.prompts, said, strict=True)):
        for at, row in enumerate(found["rows"]):
            expected = prompt.row(at, known.k)
            difference = max(abs(expected[token] - row[token]) for token in row.keys() & expected.keys())
            assert difference <= AGREES, f"{prompt.set}/{prompt.name} row {at}: {difference}"
        others = {at for other, at in oracle.others if other == number}
        assert others <= prompt.fragile, f"{prompt.set}/{prompt.name}: toss-ups that a reference does not mark"
    longest = max(len(prompt.ids) for prompt in known.prompts)
    assert longest > 2 * 512, "nothing went beyond the indexer's top-k of the ratio-2 layers"


@pytest.mark.parametrize(
    ("scores", "hangs"),
    [
        ([3.0, 2.0, 1.0, 0.0], False),
        ([3.0, 1.0, 2.0, 2.0 - 2**-22], True),  # one step of fp32 apart
        ([3.0, 2.0, 2.0, 1.0], True),  # of two sums that round to one number either may be the larger
        ([3.0, 0.0, 0.0, 0.0], False),  # no head is open: zero in any order of summation
        ([0.0, -5.0, -2.0, -2.0], True),
        ([3.0, 2.0, -math.inf, -math.inf], False),
        ([3.0, -math.inf, -math.inf, -math.inf], False),
        ([math.inf, 3.0, 1.0, 1.0], False),  # the newest block is always taken
        ([math.inf, 1.0, 1.0, 0.5], True),
    ],
)
def test_a_choice_that_rounding_decides_is_a_toss_up(scores: list[float], hangs: bool) -> None:
    assert sequence.toss_ups(torch.tensor([scores]), 2).tolist() == [hangs]


def packed(checkpoint: Path) -> Callable[[list[int]], torch.Tensor]:
    """Log-probabilities ``[T, vocab]`` of one sequence by one masked attention over everything."""
    raw: dict[str, torch.Tensor] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        raw |= load_file(shard)
    shape = BackboneShape.from_config(json.loads((checkpoint / "config.json").read_text())["text_config"])
    values = {name: value.float() for name, value in decode_tensors(raw.items()) if ".engram.embed." not in name}
    backbone = Backbone(shape, 512)
    backbone.load_state_dict({name: values[name] for name in backbone.state_dict()})
    for layer in shape.engram_layer_ids:
        stem = f"layers.{layer}.engram.embed"
        table = EngramTable(decode_engram_rows(raw[f"{stem}.weight"], raw[f"{stem}.scale"]))
        backbone.block(layer).engram.lookup = table
    token_map = np.array(compressed_token_map(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))[0])
    hashing = EngramHash.build(shape, int(token_map[shape.engram_pad_token_id]))

    @torch.no_grad()
    def logprobs(ids: list[int]) -> torch.Tensor:
        batch = PackedBatch(shape, [len(ids)], backbone.rope)
        rows = torch.from_numpy(hashing.row_ids(token_map[ids], batch.positions.numpy()))
        nobody = torch.zeros(len(ids), dtype=torch.bool)
        hidden = backbone(values["embed.weight"][ids], batch.positions, batch, rows, ~nobody, nobody)
        logits = hidden @ values["head.weight"].t()
        return logits - logits.logsumexp(-1, keepdim=True)

    return logprobs


def test_sequences_agree_with_one_packed_attention(checkpoint: Path, tmp_path: Path) -> None:
    """Window 48, top-k 32, candidate blocks and both ratios, with lengths around a chunk and a group's border."""
    sizes = (2, 33, 65, 131, 256, 301)
    file = tmp_path / "p.jsonl"
    draw = np.random.default_rng(3)
    file.write_text(lines(*({"ids": [0, *draw.integers(3, 40, size - 1).tolist()]} for size in sizes)))
    found = run(checkpoint, load(checkpoint, file), tmp_path / "o.ref")
    logprobs, compared = packed(checkpoint), 0
    for prompt in found.prompts:
        expected = logprobs(prompt.ids.tolist())
        # random weights: one choice that falls the other way changes every row after it
        steady = min(prompt.fragile, default=len(prompt.own))
        compared += steady
        for at in range(steady):
            row = prompt.row(at, found.k)
            assert max(abs(value - float(expected[at, token])) for token, value in row.items()) < AGREES
    assert compared > 600


# ---- against upstream's own functions


def test_token_map_is_upstreams(tiny_pack: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    ours = compressed_token_map(Tokenizer.from_file(str(tiny_pack / "tokenizer.json")))
    assert ours == build_compressed_token_map(AutoTokenizer.from_pretrained(tiny_pack))


@pytest.mark.parametrize("size", [(168, 168), (50, 40), (1000, 30), (20, 900), (333, 517), (2000, 1500), (137, 136)])
@pytest.mark.parametrize("widest", [None, 3.0])
def test_pictures_are_cut_as_upstream_cuts_them(size: tuple[int, int], widest: float | None) -> None:
    from ds41_engine.oracle.pictures import prepare
    from PIL import Image
    from vllm.models.deepseek_v41.common.mm_preprocess import load_image, num_image_tokens

    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    config = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 18496}
    patches, rows, columns, token_rows, token_columns = load_image(
        image, patch_size=14, downsample_ratio=3, max_n_token=64, min_pixels=18496, max_wh_ratio=widest
    )
    found = prepare(image, {**config, "max_wh_ratio": widest})
    assert (found.rows, found.columns, found.token_rows, found.token_columns) == (
        rows,
        columns,
        token_rows,
        token_columns,
    )
    assert found.tokens == num_image_tokens(token_rows, token_columns)
    assert torch.equal(found.patches, patches.float().flatten(1))


def test_conversations_are_encoded_as_the_server_does(tiny_pack: Path, tmp_path: Path) -> None:
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    upstream = DeepseekV41Tokenizer.from_pretrained(tiny_pack)
    trees = [
        *builtin("chat", "tool"),
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "thinking": True,
            "reasoning_effort": "max",
        },
    ]
    file = tmp_path / "p.jsonl"
    file.write_text(lines(*trees))
    for tree, prompt in zip(trees, load(tiny_pack, file), strict=True):
        more = {key: tree[key] for key in ("tools", "reasoning_effort") if key in tree}
        expected = upstream.apply_chat_template(tree["messages"], thinking=bool(tree.get("thinking")), **more)
        assert list(prompt.ids) == expected


# ---- rounding


def test_fp4_rounds_to_nearest_and_ties_to_even() -> None:
    x = torch.tensor([0.24, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 9.0, -0.75, -5.0])
    expected = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -1.0, -4.0])
    assert torch.equal(rounding.e2m1(x), expected)


@pytest.mark.parametrize(
    ("grid", "width", "worst"),
    # half a step between the two largest values, and the rounding of NVFP4's scale
    [(rounding.mxfp8, 32, 2**-4), (rounding.mxfp4, 32, 0.2), (rounding.nvfp4, 16, 0.2)],
)
def test_a_grid_is_near_and_rounding_twice_changes_nothing(
    grid: Callable[[torch.Tensor], torch.Tensor], width: int, worst: float
) -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-0.5, 3, 50)[:, None]
    once = grid(x)
    assert torch.equal(grid(once), once)
    largest = x.abs().unflatten(-1, (-1, width)).amax(-1, keepdim=True)
    assert float(((once - x).abs().unflatten(-1, (-1, width)) / largest).max()) <= worst
    assert torch.equal(grid(torch.zeros(2, 32)), torch.zeros(2, 32))


def test_mxfp8_scale_is_the_smallest_power_of_two_that_fits() -> None:
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0] = 448.0, 449.0
    x[:, 1] = 1.0 + 2**-4  # one eighth apart at scale 1: rounds to even
    assert rounding.mxfp8(x)[0].tolist()[:2] == [448.0, 1.0]
    assert rounding.mxfp8(x)[1, 0].item() == 448.0


# ---- faults


@pytest.fixture(scope="module")
def fault_prompts(tiny_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> list[prompts_module.Prompt]:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    file.write_text(lines(*builtin("chat", "tool", "image", "order_item_42", "kv_cache_dtype", "search")))
    return load(tiny_pack, file)


def test_every_seeded_fault_is_above_the_threshold_and_they_are_ranked(
    tiny_pack: Path, fault_prompts: list[prompts_module.Prompt], tmp_path: Path
) -> None:
    known = run(tiny_pack, fault_prompts, tmp_path / "clean.ref", layer_positions=16)
    threshold = TINY.gate.kl_max
    assert threshold is not None
    compared = {
        name: gate.compare(
            known, run(tiny_pack, fault_prompts, tmp_path / "f.ref", kind, layer_positions=16), threshold
        )
        for name, kind in FAULTS.items()
    }
    for name, found in compared.items():
        assert found.verdict is gate.Verdict.DIFFERENT, name
        assert found.overall.kl.low > threshold, name
        assert min(found.cosines) < 0.99999, name
    ranked = [item.name for item in gate.rank(compared)]
    assert ranked[0] in ("one expert's scale halved", "top-k 256 instead of 512")
    assert set(ranked[-2:]) == {"Engram missing", "Engram rows off by one"}
    clean = gate.compare(known, run(tiny_pack, fault_prompts, tmp_path / "again.ref", layer_positions=16), threshold)
    assert clean.verdict is gate.Verdict.SAME and clean.overall.kl.mean == 0.0 and min(clean.cosines) > 0.9999


def test_rounding_as_trained_is_a_small_step_of_its_own(
    tiny_pack: Path, fault_prompts: list[prompts_module.Prompt], tmp_path: Path
) -> None:
    """The two emulations change the numbers, in different ways, and less than a missing Engram does."""
    known = run(tiny_pack, fault_prompts, tmp_path / "fp32.ref")
    found = {
        name: gate.compare(known, run(tiny_pack, fault_prompts, tmp_path / "r.ref", rounding=grid), None).overall.kl
        for name, grid in (
            ("activations", rounding.Rounding(activations=True)),
            ("keys", rounding.Rounding(keys=True)),
        )
    }
    assert 1e-4 < found["keys"].mean < 0.2 and 1e-4 < found["activations"].mean < 0.2
    assert found["keys"].mean != found["activations"].mean


# ---- EXL3


@pytest.fixture(scope="module")
def exl3_packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random model in MXFP4, with the experts of two layers in 3 bits, and with those in 2 bits."""
    import ds41_kernels
    from ds41_engine.oracle.shards import Shards, decoded
    from ds41_kernels import exl3
    from ds41_kernels.exl3 import encode
    from safetensors.torch import save_file

    try:
        library = ds41_kernels.load()
    except ds41_kernels.Unavailable as error:
        pytest.skip(f"EXL3 weights are encoded by the compiled library: {error}")
    base = tmp_path_factory.mktemp("packs")
    write_checkpoint(base / "mxfp4", hidden_size=128, moe_intermediate_size=128, n_routed_experts=2)
    shards = Shards(base / "mxfp4")
    index = json.loads((base / "mxfp4" / "model.safetensors.index.json").read_text())
    packs = {"mxfp4": base / "mxfp4"}
    made: dict[str, torch.Tensor] = {}
    for name, bits in (("3 bits in layers 2 and 3", 3), ("2 bits in layers 2 and 3", 2)):
        folder = base / name.replace(" ", "-")
        folder.mkdir()
        random = np.random.default_rng(5)
        for stem in (f"layers.{n}.ffn.experts.{e}.{m}" for n in (2, 3) for e in range(2) for m in ("w1", "w3", "w2")):
            value = decoded(shards.read([f"{stem}.weight", f"{stem}.scale"]))[f"{stem}.weight"]
            linear = encode.quantise(library, value.t().double().numpy(), exl3.Rate(2 * bits), random)
            tensors = linear.tensors(stem).items()
            made |= {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in tensors}
        first = "model-00001-of-00003.safetensors"
        gone = ("layers.2.ffn.experts.", "layers.3.ffn.experts.")
        kept = {k: v for k, v in load_file(base / "mxfp4" / first).items() if not k.startswith(gone)}
        save_file({**kept, **made}, folder / first)
        weight_map = {k: v for k, v in index["weight_map"].items() if not k.startswith(gone)}
        weight_map |= dict.fromkeys(made, first)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for path in (base / "mxfp4").iterdir():
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        packs[name] = folder
    shards.close()
    return packs


def test_packs_of_fewer_bits_are_ranked_behind(exl3_packs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    draw = np.random.default_rng(7)
    file.write_text(lines(*({"ids": [0, *draw.integers(3, 200, 199).tolist()]} for _ in range(2))))
    said = {
        name: run(folder, load(folder, file), tmp_path / "r.ref", layer_positions=8)
        for name, folder in exl3_packs.items()
    }
    known = said.pop("mxfp4")
    ranked = gate.rank({name: gate.compare(known, other, None) for name, other in said.items()})
    assert [item.name for item in ranked] == ["3 bits in layers 2 and 3", "2 bits in layers 2 and 3"]
    assert ranked[1].behind.low > 0
    assert ranked[0].comparison.overall.kl.mean > 1e-4


def test_an_exl3_expert_is_the_matrix_that_the_format_defines() -> None:
    from ds41_engine.oracle.stream import exl3_matrices

    exl3 = pytest.importorskip("ds41_kernels.exl3")
    rates = (exl3.Rate(4), exl3.Rate(6), exl3.Rate(10))
    expert = exl3.random_expert(np.random.default_rng(1), 256, 128, rates)
    tensors: dict[str, torch.Tensor] = {}
    for matrix in ("w1", "w3", "w2"):
        linear = getattr(expert, matrix)
        tensors |= {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in linear.tensors(f"e.{matrix}").items()}
    for found, linear in zip(exl3_matrices("e", tensors), (expert.w1, expert.w3, expert.w2), strict=True):
        exact = torch.from_numpy(linear.reconstruct()).t()
        assert float((found - exact).norm() / exact.norm()) < 1e-6


# ---- killed and resumed


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs."""


def small_prompts(checkpoint: Path, tmp_path: Path) -> Path:
    file = tmp_path / "p.jsonl"
    file.write_text(lines(*({"ids": [0, *range(3, 3 + size)]} for size in (30, 90))))
    return file


def test_a_run_stopped_after_any_layer_ends_in_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    prompts = load(checkpoint, small_prompts(checkpoint, tmp_path))
    run(checkpoint, prompts, tmp_path / "whole.ref", layer_positions=8)
    whole = (tmp_path / "whole.ref").read_bytes()
    for stop in range(7):
        work, out, resumed = tmp_path / f"work-{stop}", tmp_path / f"{stop}.ref", []

        def die(event: Mapping[str, Any], stop: int = stop) -> None:
            if event["event"] == "layer" and event["layer"] == stop:
                raise Killed

        with pytest.raises(Killed):
            run(checkpoint, prompts, out, work=work, notify=die, layer_positions=8)
        run(checkpoint, prompts, out, work=work, notify=resumed.append, layer_positions=8)
        assert {"event": "resumed", "layer": stop + 1} in resumed
        assert out.read_bytes() == whole
        assert not list(work.glob("*.state")), "states of a finished run are removed"


def test_a_process_killed_in_the_middle_goes_on_and_keeps_below_its_bound(checkpoint: Path, tmp_path: Path) -> None:
    file, out, work = small_prompts(checkpoint, tmp_path), tmp_path / "k.ref", tmp_path / "work"
    argv = [sys.executable, "-m", "ds41_engine.oracle", "--pack", str(checkpoint), "--prompts", str(file)]
    argv += ["--out", str(out), "--work", str(work), "--threads", "1", "--read-ahead-gib", "0.05"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if json.loads(line)["event"] == "layer" and json.loads(line)["layer"] == 2:
                running.send_signal(signal.SIGKILL)
                break
    assert running.returncode == -signal.SIGKILL and not out.exists()
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=900, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and events[-1]["event"] == "done"
    assert any(event["event"] == "resumed" and event["layer"] >= 3 for event in events)
    assert events[-1]["peak_rss"] <= events[0]["memory_bound"]
    # in a process of its own as well: after the engines of other tests this one may round differently
    whole = tmp_path / "whole.ref"
    argv[argv.index(str(out))], argv[argv.index(str(work))] = str(whole), str(tmp_path / "work-whole")
    assert subprocess.run(argv, env=env, capture_output=True, timeout=900, check=False).returncode == 0
    found, wanted = (reference.parse(path.read_bytes(), path.name).prompts for path in (out, whole))
    assert found and found == wanted


def test_a_cut_state_is_left_behind_and_a_foreign_one_refused(checkpoint: Path, tmp_path: Path) -> None:
    prompts, work, out = load(checkpoint, small_prompts(checkpoint, tmp_path)), tmp_path / "work", tmp_path / "r.ref"

    def die(event: Mapping[str, Any]) -> None:
        if event["event"] == "layer" and event["layer"] == 3:
            raise Killed

    with pytest.raises(Killed):
        run(checkpoint, prompts, out, work=work, notify=die)
    with pytest.raises(Exception, match="another run's"):
        run(checkpoint, prompts[:1], out, work=work)
    (state,) = work.glob("layer-*.state")
    state.write_bytes(state.read_bytes()[:1000])
    events: list[Mapping[str, Any]] = []
    run(checkpoint, prompts, out, work=work, notify=events.append)
    assert any("cannot be read" in str(event.get("text")) for event in events)
    assert not any(event["event"] == "resumed" for event in events)


def test_the_real_model_fits_a_host_with_64_gib_by_the_bound_that_runs_keep() -> None:
    """Headers of DeepSeek-V4.1-Flash-1017 for the heaviest kinds of layer, 10,000 tokens in prompts of 2,000."""
    from test_mathematics import real_shape

    from tests.bench.oracle import WIDTH, tensors_of

    shape = real_shape()
    entries: dict[str, Entry] = {}
    for layer in (0, 1, 14, 20):
        with torch.device("meta"):
            block = Block(dataclasses.replace(shape, n_routed_experts=2, num_experts_per_tok=1), layer)
        for name, value in block.state_dict().items():
            for stored, dtype, extent in tensors_of(f"layers.{layer}.{name}", tuple(value.shape)):
                size = math.prod(extent) * WIDTH[dtype]
                entries[stored] = Entry(stored, f"{layer}.safetensors", dtype, extent, 0, size)
    made = Oracle.__new__(Oracle)
    made.shape, made.lengths, made.starts, made.vision = shape, [2000] * 5, [0, 10_000], None
    made.settings = Settings()
    made.shards = SimpleNamespace(entries=entries)  # type: ignore[assignment]
    made.experts = {}
    for layer in range(shape.num_hidden_layers):
        like = f"layers.{layer if layer in (0, 1, 14, 20) else 20}.ffn.experts.0."
        made.experts[layer] = [[entry for name, entry in entries.items() if name.startswith(like)]]
    made._dense_entries = lambda layer: (
        [  # type: ignore[method-assign]
            entry for name, entry in entries.items() if name.startswith(f"layers.{layer}.") and ".experts." not in name
        ]
        or [next(iter(entries.values()))]
    )
    assert 5 << 30 < made.memory_bound() < 32 << 30


# ---- bad input


def test_experts_nobody_asked_for_are_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wide", n_routed_experts=64)
    file = tmp_path / "p.jsonl"
    file.write_text(lines({"ids": [0, 5, 6]}))
    events: list[Mapping[str, Any]] = []
    run(tmp_path / "wide", load(tmp_path / "wide", file), tmp_path / "r.ref", notify=events.append)
    touched = [event["touched"] for event in events if event["event"] == "layer"]
    assert max(touched) <= 6 / 64
    later = [event["bytes"] for event in events if event["event"] == "layer"][2:]
    assert max(later) < events[-1]["read"] / 2


def test_a_missing_tensor_is_named(checkpoint: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    for path in checkpoint.iterdir():
        (pack / path.name).symlink_to(path)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    del index["weight_map"]["layers.4.attn.wkv.scale"]
    (pack / "model.safetensors.index.json").unlink()
    (pack / "model.safetensors.index.json").write_text(json.dumps(index))
    prompts = load(checkpoint, small_prompts(checkpoint, tmp_path))
    with pytest.raises(CheckpointError, match=r"layers.4.attn.wkv.weight: expected its .scale"):
        run(pack, prompts, tmp_path / "r.ref")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least one line"),
        ("{", "line 1: not JSON"),
        ('{"text": "a", "ids": [1, 2]}', "text and ids"),
        ('{"txt": "a"}', "unknown key txt"),
        ('{"ids": [1]}', "at least 2 tokens"),
        ('{"ids": [1, 999999]}', "token ids below"),
        (f'{{"ids": [1, {IMAGE_TOKEN_ID}]}}', "without their picture"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:no"}}]}]}',
            "no:",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}', "picture"),
        ('{"messages": 3}', "line 1: TypeError"),
    ],
)
def test_bad_prompts_are_refused_in_one_line(checkpoint: Path, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(prompts_module.PromptError, match=said) as refused:
        load(checkpoint, file)
    assert "\n" not in str(refused.value)
