"""Prompt log-probabilities and choices of the real engine in a process of its own: pack, store and prompts in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

TOP = 20


class Choices:
    """What the engine chose for the one prompt that it is computing, written down as it goes.

    Attributes:
        groups: index source layer -> bool ``[tokens, groups]``, which compressed groups each token attends to.
        experts: layer -> int64 ``[tokens, k]``, the experts of each token.
    """

    def __init__(self) -> None:
        self.groups: dict[int, torch.Tensor] = {}
        self.experts: dict[int, torch.Tensor] = {}

    def watch(self) -> None:
        """See every choice from now on; what is chosen does not change."""
        from ds41_engine.backbone import MoE
        from ds41_engine.paged import PagedBatch

        attend, select, route = PagedBatch.attend, PagedBatch._select, MoE.route
        at: tuple[int, int] = (0, 0)

        def watched_attend(batch: Any, layer: Any, *args: Any) -> Any:
            nonlocal at
            at = layer.layer_id, batch.rows
            return attend(batch, layer, *args)

        def watched_select(batch: Any, layer: Any, *args: Any) -> None:
            select(batch, layer, *args)
            ((request, mask),) = zip(batch.requests, batch._selected, strict=True)
            known = self.groups.get(layer.layer_id, mask[:0])
            assert known.shape[0] == request.first, "one prompt at a time, each from its first token on"
            wider = torch.nn.functional.pad(known, (0, mask.shape[1] - known.shape[1]))
            self.groups[layer.layer_id] = torch.cat((wider, mask))

        def watched_route(ffn: Any, *args: Any) -> Any:
            chosen, weights = route(ffn, *args)
            layer, rows = at
            known = self.experts.get(layer, chosen[:0])
            self.experts[layer] = torch.cat((known, chosen[:rows]))
            return chosen, weights

        PagedBatch.attend, PagedBatch._select, MoE.route = watched_attend, watched_select, watched_route

    def take(self) -> dict[str, dict[int, torch.Tensor]]:
        """What was chosen since the last call."""
        taken = {"groups": dict(self.groups), "experts": dict(self.experts)}
        self.groups.clear()
        self.experts.clear()
        return taken


def main() -> None:
    """Arguments: pack, store, prompts (JSON Lines of the oracle), output file, dtype.

    The output is a list of one mapping per prompt: ``rows`` (per token but the first: id -> log-probability), and the
    two of :class:`Choices`.
    """
    pack, store, prompts_file, out, dtype = sys.argv[1:6]
    os.environ["DS41_ENGRAM_STORE"] = store
    from ds41_engine import register
    from ds41_engine.oracle import prompts as prompts_module
    from ds41_engine.shape import IMAGE_TOKEN_ID
    from tokenizers import Tokenizer

    register()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    # the text model computes in fp32 whatever the dtype; the vision tower and the embeddings it makes follow it, and
    # vLLM refuses float32 for FP8 checkpoints because its GPU kernels do
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.bfloat16, torch.half, torch.float32])
    config = json.loads((Path(pack) / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(Path(pack) / "tokenizer.json"))
    prompts = prompts_module.load(Path(prompts_file), tokenizer, config["vision_config"], 129280)
    engine = LLM(
        model=pack,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=2,
        max_num_batched_tokens=256,
        max_logprobs=TOP,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    found: list[dict[str, Any]] = []
    choices = Choices()
    choices.watch()
    for prompt in prompts:
        asked: Any = {"prompt_token_ids": list(prompt.ids)}
        if prompt.pictures:
            ids: list[int] = []
            for token in prompt.ids:
                if token != IMAGE_TOKEN_ID or not ids or ids[-1] != IMAGE_TOKEN_ID:
                    ids.append(token)
            asked = {"prompt_token_ids": ids, "multi_modal_data": {"image": _images(prompt.source)}}
        output = engine.generate([asked], sampling, use_tqdm=False)[0]
        assert tuple(output.prompt_token_ids) == prompt.ids, "the engine expanded the prompt differently"
        rows = [{token: entry.logprob for token, entry in row.items()} for row in output.prompt_logprobs[1:]]
        found.append({"rows": rows, **choices.take()})
    torch.save(found, Path(out))


def _images(source: Any) -> list[Any]:
    import base64
    import io

    from PIL import Image

    urls = [
        part["image_url"]["url"]
        for message in source["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


if __name__ == "__main__":
    main()
