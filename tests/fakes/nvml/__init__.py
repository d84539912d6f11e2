"""A fake NVIDIA driver: machines described in Python, played by a C library that the real nvidia-ml-py loads."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.c")
LIBRARY = "libnvidia-ml.so.1"
Values = dict[str, str | int]

# bus ids and NUMA nodes of the recorded 8x V100 (fixture v100-sxm2-32gb-8x_r580_nic0_tabs)
V100_BUSES = ("1A", "1B", "3D", "3E", "88", "89", "B2", "B3")
# NVLinks between pairs of that machine; every GPU has six
CUBE_MESH = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (0, 4): 2,
    (1, 2): 2,
    (1, 3): 1,
    (1, 5): 2,
    (2, 3): 2,
    (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
}
P2P_OK, P2P_CHIPSET, P2P_GPU, P2P_TOPOLOGY, P2P_REGKEY, P2P_NOT_SUPPORTED = range(6)


@dataclass
class Machine:
    """One machine: `system` keys as they stand, `gpus` one dictionary of fields a GPU."""

    system: Values = field(default_factory=dict)
    gpus: list[Values] = field(default_factory=list)

    def text(self) -> str:
        """The description that the stub reads."""
        lines = {"count": len(self.gpus), **self.system}
        for index, gpu in enumerate(self.gpus):
            lines |= {f"{index}.{key}": value for key, value in gpu.items()}
        return "".join(f"{key}={value}\n" for key, value in lines.items())

    def link(self, a: int, b: int, count: int) -> None:
        """Join two GPUs by `count` NVLinks, each on the next free port of both."""
        for _ in range(count):
            for one, other in ((a, b), (b, a)):
                port = sum(1 for key in self.gpus[one] if key.startswith("link"))
                self.gpus[one][f"link{port}"] = f"up gpu {self.gpus[other]['bus_id']}"

    def all(self, **values: str | int) -> Machine:
        """The same with fields of every GPU changed."""
        for gpu in self.gpus:
            gpu.update(values)
        return self


def v100_card(index: int, bus: str, *, mib: int = 32768) -> Values:
    """One Tesla V100-SXM2; clocks and power as the recorded card states them."""
    return {
        "name": f"Tesla V100-SXM2-{mib // 1024}GB",
        "uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000",
        "bus_id": f"00000000:{bus}:00.0",
        "memory_mib": mib,
        "memory_used_mib": 3,
        "capability": "7.0",
        "sm_mhz": 135,
        "sm_max_mhz": 1530,
        "memory_mhz": 877,
        "throttle": 1,
        "power_mw": 300000,
        "power_default_mw": 300000,
        "temperature": 34,
        "persistence": 1,
        "ecc": 1,
        "ecc_errors": 0,
        "compute_mode": 0,
        "display": 0,
        "pcie_gen": 3,
        "pcie_gen_max": 3,
        "pcie_width": 16,
        "pcie_width_max": 16,
    }


def v100(mesh: dict[tuple[int, int], int] | None = None, *, cards: int = 8, mib: int = 32768) -> Machine:
    """8x V100-SXM2 as the cube mesh of two quads, or as `mesh` says."""
    gpus = [v100_card(index, V100_BUSES[index], mib=mib) for index in range(cards)]
    machine = Machine(
        {"driver": "580.173.02", "cuda": 13000, "p2p0": 0, "p2p1": 0, "p2p2": 5, "p2p3": 0, "p2p4": 0}, gpus
    )
    for (a, b), count in (CUBE_MESH if mesh is None else mesh).items():
        if a < cards and b < cards:
            machine.link(a, b, count)
            machine.system |= {f"p2p2.{a}-{b}": 0, f"p2p2.{b}-{a}": 0}
    return machine


def v100_crossed() -> Machine:
    """The quads are {0,2,4,6} and {1,3,5,7}: a virtual machine that reordered its GPUs."""
    place = {0: 0, 1: 2, 2: 4, 3: 6, 4: 1, 5: 3, 6: 5, 7: 7}
    return v100({(min(place[a], place[b]), max(place[a], place[b])): n for (a, b), n in CUBE_MESH.items()})


def v100_link_down() -> Machine:
    """The only NVLink of 0-1 is down on both ends."""
    machine = v100()
    for one, other in ((0, 1), (1, 0)):
        port = next(k for k, v in machine.gpus[one].items() if str(v) == f"up gpu {machine.gpus[other]['bus_id']}")
        machine.gpus[one][port] = "down"
    machine.system |= {"p2p2.0-1": 5, "p2p2.1-0": 5}
    return machine


def h200_pair() -> Machine:
    """Two H200 behind an NVSwitch in a virtual machine (recorded): the remote end of every link is masked."""
    gpus: list[Values] = [
        {
            "name": "NVIDIA H200",
            "uuid": f"GPU-{str(index) * 8}-0000-0000-0000-000000000000",
            "bus_id": f"00000000:00:0{6 + index}.0",
            "memory_mib": 143771,
            "memory_used_mib": 615,
            "capability": "9.0",
            "sm_mhz": 345,
            "sm_max_mhz": 1980,
            "memory_mhz": 3201,
            "throttle": 1,
            "power_mw": 700000,
            "power_default_mw": 700000,
            "temperature": 30,
            "persistence": 1,
            "ecc": 1,
            "ecc_errors": 0,
            "mig": 0,
            "compute_mode": 0,
            "display": 0,
            "pcie_gen": 5,
            "pcie_gen_max": 5,
            "pcie_width": 16,
            "pcie_width_max": 16,
            **{f"link{link}": "up switch FFFFFFFF:FF:FF.0" for link in range(18)},
        }
        for index in range(2)
    ]
    return Machine({"driver": "580.159.04", "cuda": 13000, "p2p0": 0, "p2p1": 0, "p2p2": 0, "p2p3": 0, "p2p4": 5}, gpus)


def cmp(*, mib: tuple[int, ...] = (65536, 65536, 65536, 65536)) -> Machine:
    """4x CMP 170HX on PCIe with a driver that allows peer access."""
    gpus: list[Values] = [
        {
            "name": "NVIDIA CMP 170HX",
            "uuid": f"GPU-{index:08d}-1111-0000-0000-000000000000",
            "bus_id": f"00000000:0{1 + index}:00.0",
            "memory_mib": size,
            "memory_used_mib": 1,
            "capability": "8.0",
            "sm_mhz": 210,
            "sm_max_mhz": 1695,
            "memory_mhz": 1458,
            "throttle": 1,
            "power_mw": 250000,
            "power_default_mw": 250000,
            "power_min_mw": 100000,
            "power_max_mw": 250000,
            "offset": 0,
            "temperature": 41,
            "persistence": 1,
            "compute_mode": 0,
            "display": 0,
            "pcie_gen": 1,
            "pcie_gen_max": 2,
            "pcie_width": 16,
            "pcie_width_max": 16,
            "numa": 0,
        }
        for index, size in enumerate(mib)
    ]
    return Machine({"driver": "610.43.02", "cuda": 13020, "p2p0": 0, "p2p1": 0, "p2p2": 5, "p2p3": 5, "p2p4": 0}, gpus)


def build(folder: Path) -> Path | None:
    """Compile the stub into `folder`; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / LIBRARY
    argv = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(argv, check=True, timeout=60)
    return library


@dataclass
class Driver:
    """A playing machine: what to put in a child's environment, and what was done to it."""

    library: Path
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """Variables that make a child process see this machine."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library.parent),
            "FAKE_NVML_MACHINE": str(self.folder / "machine"),
            "FAKE_NVML_STATE": str(self.folder),
        }

    def play(self, machine: Machine) -> None:
        """Become `machine`; locks that are in place stay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "machine").write_text(machine.text())

    def locks(self) -> dict[int, int]:
        """GPU -> MHz of every lock that is in place now."""
        found = {}
        for path in self.folder.glob("gpu*.lock"):
            with_text = path.read_text() if path.exists() else ""
            if with_text.strip():
                found[int(path.stem[3:])] = int(with_text)
        return found

    def values(self, what: str) -> dict[int, int]:
        """GPU -> what a setter has left: `power` in mW, `offset` in MHz."""
        found = {int(path.stem[3:]): path.read_text() for path in sorted(self.folder.glob(f"gpu*.{what}"))}
        return {gpu: int(text) for gpu, text in found.items() if text.strip()}

    def forget(self) -> None:
        """What a reboot or a new load of the driver does: nothing that was set is left."""
        for what in ("lock", "power", "offset"):
            for path in self.folder.glob(f"gpu*.{what}"):
                path.unlink()

    def calls(self) -> list[str]:
        """Every setter call so far, `lock 0 1530` or `reset 0 0`."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []
