"""Set the graphics clock offset of GPUs, as root: what `sudo` runs for the clock lease, or a person by hand.

usage: python -m ds41ctl.adapters.offset MHZ UUID...

nvidia-smi has no option for it. No sudoers line of ours ever names this program: it lies in folders of the user, so the
line would allow everything. It runs where sudo asks for no password anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ds41ctl.adapters import nvml


def argv(mhz: int, uuids: Sequence[str]) -> list[str]:
    """The command that sets it."""
    return [sys.executable, "-P", "-m", "ds41ctl.adapters.offset", str(mhz), *uuids]


def main(words: Sequence[str]) -> int:
    """Exit 0 when every GPU has taken it, 1 when one has not (a line for each), 2 for a wrong call."""
    try:
        mhz, uuids = int(words[0]), words[1:]
    except (IndexError, ValueError):
        uuids = []
    if not uuids:
        print("usage: python -m ds41ctl.adapters.offset MHZ UUID...", file=sys.stderr)
        return 2
    driver = nvml.Nvml()
    faults = [(uuid, text) for uuid in uuids if (text := driver.set_offset(uuid, mhz))]
    for uuid, text in faults:
        print(f"{uuid}: {text}" if len(uuids) > 1 else text, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
