"""What the engine in a container stand-in answers once its tables are read: the canaries of a recipe, all rightly;
without its tables everything but copies, as the fault in the field does.

`python -m tests.fakes.contained PORT RECIPE filled|empty`
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

from ds41ctl.adapters.pack import recipe_folder
from smoke import canaries
from tests.fakes.sse_server import FakeEngine, Request, Say, Script, ScriptedServer, whole


def dropped(say: Say, request: Request) -> Say:
    """Without its rows the model drops the separators."""
    return replace(say, content=(say.content or "").replace("_", "").replace("-", ""))


def main(port: int, recipe: str, filled: bool) -> None:
    """Answer until somebody ends this process."""
    engine = FakeEngine(canaries.load(recipe_folder(recipe)), quirks={} if filled else {"copy": dropped})

    def answer(request: Request) -> Script:
        if request.path == "/v1/completions":
            return [whole({"usage": {"completion_tokens": 1}, "choices": [{"text": "1"}]})]
        return engine(request)

    with ScriptedServer(answer, port):
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "filled")
