"""Room for prompt_logprobs: whether, and for how long a prompt, an engine may be asked for them. Pure.

An engine needs memory for the logits of every position of the prompt over the whole vocabulary, beside what its own
profiler counted. One without that memory does not refuse the request, it dies of it: so nothing is sent to an engine
whose profile does not say that there is room.
"""

from __future__ import annotations

from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.exits import Exit
from ds41ctl.core.profile import Profile, option_value

USUAL_WINDOW = 512  # without a GPU, where no other length is stated

_FIX = (
    "in a copy of the profile: lower serve.gpu_memory_utilization (field and flag) or the context, and state the "
    "prompt it then has room for: bench.logprob_window = 512",
    "ds41ctl serve --profile COPY --replace   # --no-dspark also leaves the drafter's memory free",
)


class NoRoomError(Ds41Error):
    """Nothing says that the engine has room for prompt_logprobs: it was not asked, and nothing was judged."""

    code = Exit.INCONCLUSIVE


def window(profile: Profile, argv: tuple[str, ...] = ()) -> int:
    """Longest prompt, tokens, that the engine may be asked prompt_logprobs for. `argv`: how the running engine was
    started, when that is known.

    Raises NoRoomError when its profile states no room or none at all, or speaks of a smaller engine than the one that
    runs.
    """
    stated = profile.bench.logprob_window
    if stated is None and profile.hardware.gpus == 0:
        stated = USUAL_WINDOW  # logits in host memory: 512 x 129,280 x 4 bytes are 0.25 GiB
    if stated is None:
        raise NoRoomError(
            f"prompt_logprobs is not sent: profile {profile.name} does not say that its engine has room for it "
            "(bench.logprob_window expected, not set)",
            hints=_FIX,
        )
    if stated < 2:
        source = profile.source_of("bench.logprob_window")
        raise NoRoomError(
            f"prompt_logprobs is not sent: profile {profile.name} says that its engine has no room for it "
            f"(bench.logprob_window {stated}" + (f": {source})" if source else ")"),
            hints=_FIX,
        )
    larger = _larger(profile, argv)
    if larger:
        raise NoRoomError(
            f"prompt_logprobs is not sent: bench.logprob_window {stated} holds for profile {profile.name} as it is, "
            f"and the running engine {larger}",
            hints=("ds41ctl serve --replace   # as the profile is now", *_FIX[:1]),
        )
    return min(stated, profile.serve.max_model_len - 1)


def _larger(profile: Profile, argv: tuple[str, ...]) -> str:
    """How the running engine takes more memory than its profile says, '' when it does not."""
    serve = profile.serve
    for option, stated in (
        ("--gpu-memory-utilization", serve.gpu_memory_utilization),
        ("--max-model-len", serve.max_model_len),
    ):
        told = option_value(argv, option)
        try:
            if told is not None and stated is not None and float(told) > stated:
                return f"was started with {option} {told}, not {stated}"
        except ValueError:
            return f"was started with {option} {told}"
    return "has a drafter beside it" if not profile.drafter and profile.drafter_in(argv) else ""
