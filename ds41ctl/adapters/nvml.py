"""NVML: the only importer of pynvml, and only when asked. Never a CUDA context, never a traceback."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

from ds41ctl.core.facts import GpuFacts, GpuProcess, NvLink, P2pMatrix

# nvml.h
MAX_LINKS = 36
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_GPU = 0
CLOCK_GRAPHICS, PSTATE_0 = 0, 0
UNCORRECTED, VOLATILE = 1, 0
_REMOTE: dict[int, Literal["gpu", "npu", "switch"]] = {0: "gpu", 1: "npu", 2: "switch"}
_COMPUTE_MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
_PEER_CODES = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")  # the words of `nvidia-smi topo -p2p`
_CAPABILITIES = ("read", "write", "nvlink", "atomics", "pcie")  # NVML_P2P_CAPS_INDEX_* 0 to 4

ERROR_NOT_SUPPORTED, ERROR_NO_PERMISSION, ERROR_FUNCTION_NOT_FOUND, ERROR_GPU_LOST = 3, 4, 13, 15
ERROR_ARGUMENT_VERSION = 25
_NOTES = {
    2: "NVML refuses the value",
    3: "this GPU does not support it",
    4: "no permission to ask NVML",
    9: "the NVIDIA driver is not loaded",
    12: "the NVIDIA driver library (libnvidia-ml.so.1) is not installed",
    13: "the installed driver library is too old for this",
    15: "a GPU has fallen off the bus",
    18: "driver/library version mismatch: the loaded kernel module is older than the installed library",
}
Reason = Literal["", "not-asked", "no-library", "no-driver", "mismatch", "denied", "other"]
_REASONS: dict[int, Reason] = {4: "denied", 9: "no-driver", 12: "no-library", 18: "mismatch"}


@dataclass(frozen=True)
class Survey:
    """All GPUs in NVML's (PCI bus) order. `gpus` None: NVML could not be asked, `note` says why."""

    gpus: tuple[GpuFacts, ...] | None
    note: str = ""
    driver: str = ""
    reason: Reason = ""
    cuda: str = ""
    p2p: P2pMatrix | None = None


NOT_ASKED = Survey(None, "not asked: the profile uses no GPU", reason="not-asked")


@dataclass(frozen=True)
class Sample:
    """One reading of a GPU: SM clock in MHz, share of the last sample period in which it worked, event bits."""

    mhz: int
    busy_percent: int
    throttle: int = 0


@dataclass(frozen=True)
class ClockOffset:
    """Graphics clock offset of a GPU in performance state 0, MHz: now, and what it takes (None: not stated).

    `note`: why nothing is known, '' when `mhz` is.
    """

    mhz: int | None = None
    low: int | None = None
    high: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Values:
    """What of a GPU a lease sets beside its clock. None: not known. `gone`: the GPU does not answer at all."""

    power_w: float | None = None
    power_min_w: float | None = None
    power_max_w: float | None = None
    power_default_w: float | None = None
    offset: ClockOffset = ClockOffset()
    gone: bool = False


class GpuReader(Protocol):
    """Reads GPUs."""

    def survey(self) -> Survey:
        """Every GPU, whatever answers."""
        ...

    def samples(self, uuids: Sequence[str]) -> dict[str, Sample]:
        """SM clock and load now of each GPU that answers."""
        ...


class ClockControl(Protocol):
    """Sets what a lease holds. All return '' or what went wrong; success means only that the request was installed."""

    def lock(self, uuid: str, mhz: int) -> str:
        """Lock to exactly `mhz`."""
        ...

    def reset(self, uuid: str) -> str:
        """Back to the driver's own choice."""
        ...

    def set_power(self, uuid: str, watts: float) -> str:
        """Set the power limit."""
        ...

    def set_offset(self, uuid: str, mhz: int) -> str:
        """Set the graphics clock offset."""
        ...


class Nvml:
    """GpuReader and ClockControl by nvidia-ml-py. The library is loaded by the first question."""

    def __init__(self, library: Any = None) -> None:
        self._given = library

    def survey(self) -> Survey:
        """Ask NVML which GPUs there are. Never raises: what went wrong is in `note`."""
        with self._session() as (library, failed):
            if library is None:
                return failed
            try:
                driver = _decoded(library.nvmlSystemGetDriverVersion())
                count = int(library.nvmlDeviceGetCount())
            except library.NVMLError as error:
                return _failed(error)
            found = [_gpu(library, index) for index in range(count)]
            notes = [item for item in found if isinstance(item, str)]
            cuda = _ask(library, "nvmlSystemGetCudaDriverVersion")
            return Survey(
                tuple(item for item in found if isinstance(item, GpuFacts)),
                "; ".join(notes),
                driver,
                cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else "",
                p2p=_peers(library, count),
            )

    def samples(self, uuids: Sequence[str]) -> dict[str, Sample]:
        """SM clock and load now of each GPU that answers."""
        found: dict[str, Sample] = {}
        with self._session() as (library, _):
            if library is None:
                return found
            for uuid in uuids:
                try:
                    handle = library.nvmlDeviceGetHandleByUUID(uuid)
                    mhz = int(library.nvmlDeviceGetClockInfo(handle, CLOCK_SM))
                    busy = int(library.nvmlDeviceGetUtilizationRates(handle).gpu)
                except library.NVMLError:
                    continue
                found[uuid] = Sample(mhz, busy, _throttle(library, handle) or 0)
        return found

    def lock(self, uuid: str, mhz: int) -> str:
        """Lock one GPU's SM clock (Volta and newer, root)."""
        return self._set(uuid, lambda library, handle: library.nvmlDeviceSetGpuLockedClocks(handle, mhz, mhz))

    def reset(self, uuid: str) -> str:
        """Undo a lock. A GPU that is gone holds none."""
        text = self._set(uuid, lambda library, handle: library.nvmlDeviceResetGpuLockedClocks(handle))
        return "" if text == _NOTES[ERROR_GPU_LOST] else text

    def set_power(self, uuid: str, watts: float) -> str:
        """Set one GPU's power limit (root); the card's own range bounds it."""
        milliwatts = round(watts * 1000)
        return self._set(uuid, lambda library, handle: library.nvmlDeviceSetPowerManagementLimit(handle, milliwatts))

    def set_offset(self, uuid: str, mhz: int) -> str:
        """Set one GPU's graphics clock offset in performance state 0 (root), and see that it is there."""

        def work(library: Any, handle: Any) -> None:
            _set_offset(library, handle, mhz)

        if text := self._set(uuid, work):
            return text
        found = self.values([uuid])[uuid].offset
        return "" if found.mhz == mhz else f"NVML took {mhz:+d} MHz, and reads {found.note or found.mhz}"

    def values(self, uuids: Sequence[str]) -> dict[str, Values]:
        """Power limit and clock offset of each GPU now; asks for no right."""
        with self._session() as (library, failed):
            if library is None:
                return dict.fromkeys(uuids, Values(offset=ClockOffset(note=failed.note)))
            found: dict[str, Values] = {}
            for uuid in uuids:
                try:
                    handle = library.nvmlDeviceGetHandleByUUID(uuid)
                except library.NVMLError as error:
                    gone = getattr(error, "value", -1) == ERROR_GPU_LOST
                    found[uuid] = Values(offset=ClockOffset(note=_note(error)), gone=gone)
                    continue
                low, high = _power_range(library, handle)
                limit = _watts(_ask(library, "nvmlDeviceGetPowerManagementLimit", handle))
                default = _watts(_ask(library, "nvmlDeviceGetPowerManagementDefaultLimit", handle))
                found[uuid] = Values(limit, low, high, default, _clock_offset(library, handle))
            return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the library and the driver open; what is asked meanwhile is answered without a start."""
        with self._session():
            yield

    def _set(self, uuid: str, work: Callable[[Any, Any], None]) -> str:
        with self._session() as (library, failed):
            if library is None:
                return failed.note
            try:
                work(library, library.nvmlDeviceGetHandleByUUID(uuid))
            except (library.NVMLError, AttributeError) as error:  # the latter: a binding that has no such function
                return "no permission" if getattr(error, "value", -1) == ERROR_NO_PERMISSION else _note(error)
            return ""

    @contextmanager
    def _session(self) -> Iterator[tuple[Any, Survey]]:
        """(library, -) between its init and shutdown, or (None, why not)."""
        library = self._given
        if library is None:
            loaded = _load()
            if isinstance(loaded, Survey):
                yield None, loaded
                return
            library = loaded
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            yield None, _failed(error)
            return
        except OSError as error:  # a broken library file
            yield None, Survey(None, f"the NVIDIA driver library cannot be loaded: {error}", reason="no-library")
            return
        try:
            yield library, NOT_ASKED
        finally:
            _ask(library, "nvmlShutdown")


def used_mib() -> tuple[int, ...]:
    """Memory in use on each GPU, MiB; () when NVML cannot be asked. A start watches it grow."""
    found = survey().gpus or ()
    return tuple(
        gpu.memory_total_mib - gpu.memory_free_mib
        for gpu in found
        if gpu.memory_total_mib is not None and gpu.memory_free_mib is not None
    )


def survey(library: Any = None) -> Survey:
    """All GPUs of this machine."""
    return Nvml(library).survey()


def _load() -> ModuleType | Survey:
    try:
        import pynvml  # only profiles with GPUs pay for it
    except ImportError as error:
        return Survey(None, f"nvidia-ml-py cannot be imported: {error}", reason="other")
    module: ModuleType = pynvml
    return module


def _ask(library: Any, function: str, *arguments: Any) -> Any:
    """The answer, or None when this GPU, driver or binding has none."""
    try:
        return getattr(library, function)(*arguments)
    except (library.NVMLError, AttributeError, TypeError, ValueError):
        return None


def _gpu(library: Any, index: int) -> GpuFacts | str:
    """One GPU, or what keeps it from answering (a lost GPU is counted by the driver and answers nothing)."""
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        name = _decoded(library.nvmlDeviceGetName(handle))
    except library.NVMLError as error:
        return f"GPU {index}: {_note(error)}"

    def ask(function: str, *arguments: Any) -> Any:
        return _ask(library, f"nvmlDeviceGet{function}", handle, *arguments)

    memory, pci = ask("MemoryInfo"), ask("PciInfo")
    capability = ask("CudaComputeCapability")
    memory_clocks = ask("SupportedMemoryClocks")
    supported = ask("SupportedGraphicsClocks", max(memory_clocks)) if memory_clocks else None
    power_min, power_max = _power_range(library, handle)
    offset = _clock_offset(library, handle)
    mode = ask("ComputeMode")
    return GpuFacts(
        index=index,
        name=name,
        uuid=_decoded(ask("UUID") or ""),
        bus_id=_decoded(pci.busId) if pci is not None else "",
        memory_total_mib=int(memory.total) >> 20 if memory is not None else None,
        memory_free_mib=int(memory.free) >> 20 if hasattr(memory, "free") else None,
        compute_capability="{}.{}".format(*capability) if capability else "",
        processes=_processes(ask("ComputeRunningProcesses")),
        sm_mhz=ask("ClockInfo", CLOCK_SM),
        sm_max_mhz=ask("MaxClockInfo", CLOCK_SM),
        sm_supported_mhz=tuple(sorted(supported)) if supported is not None else None,
        memory_mhz=ask("ClockInfo", CLOCK_MEMORY),
        throttle=_throttle(library, handle),
        power_limit_w=_watts(ask("PowerManagementLimit")),
        power_default_w=_watts(ask("PowerManagementDefaultLimit")),
        power_min_w=power_min,
        power_max_w=power_max,
        offset_mhz=offset.mhz,
        offset_min_mhz=offset.low,
        offset_max_mhz=offset.high,
        offset_note=offset.note,
        temperature_c=ask("Temperature", TEMPERATURE_GPU),
        persistence=_flag(ask("PersistenceMode")),
        ecc=_switch(library, "nvmlDeviceGetEccMode", handle),
        ecc_uncorrected=ask("TotalEccErrors", UNCORRECTED, VOLATILE),
        mig=_switch(library, "nvmlDeviceGetMigMode", handle),
        compute_mode=_COMPUTE_MODES[mode] if mode is not None and 0 <= mode < len(_COMPUTE_MODES) else "",
        display_active=_flag(ask("DisplayActive")),
        pcie_gen=ask("CurrPcieLinkGeneration"),
        pcie_gen_max=ask("MaxPcieLinkGeneration"),
        pcie_width=ask("CurrPcieLinkWidth"),
        pcie_width_max=ask("MaxPcieLinkWidth"),
        nvlinks=_links(library, handle),
        numa_node=ask("NumaNodeId"),
    )


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _watts(milliwatts: Any) -> float | None:
    return milliwatts / 1000 if isinstance(milliwatts, int) else None


def _power_range(library: Any, handle: Any) -> tuple[float | None, float | None]:
    found = _ask(library, "nvmlDeviceGetPowerManagementLimitConstraints", handle)
    return (_watts(found[0]), _watts(found[1])) if found is not None else (None, None)


def _clock_offset(library: Any, handle: Any) -> ClockOffset:
    """The graphics clock offset: by performance state (drivers from 555), else by the one function before it."""
    try:
        info = _offsets(library, handle, "nvmlDeviceGetClockOffsets", 0)
        return ClockOffset(info.clockOffsetMHz, info.minClockOffsetMHz, info.maxClockOffsetMHz)
    except (library.NVMLError, AttributeError) as error:
        first = error
    try:
        mhz = int(library.nvmlDeviceGetGpcClkVfOffset(handle))
    except (library.NVMLError, AttributeError) as error:
        return ClockOffset(note=_note(_telling(first, error)))
    found = _ask(library, "nvmlDeviceGetGpcClkMinMaxVfOffset", handle)
    return ClockOffset(mhz, found[0] if found else None, found[1] if found else None)


def _set_offset(library: Any, handle: Any, mhz: int) -> None:
    """Raises the library's NVMLError, of the way that says more when neither is to be had."""
    try:
        _offsets(library, handle, "nvmlDeviceSetClockOffsets", mhz)
        return
    except (library.NVMLError, AttributeError) as error:
        if getattr(error, "value", ERROR_FUNCTION_NOT_FOUND) not in _ASK_THE_OLD_WAY:
            raise
        first = error
    try:
        library.nvmlDeviceSetGpcClkVfOffset(handle, mhz)
    except (library.NVMLError, AttributeError) as error:
        raise _telling(first, error) from None


_ASK_THE_OLD_WAY = (ERROR_NOT_SUPPORTED, ERROR_FUNCTION_NOT_FOUND, ERROR_ARGUMENT_VERSION)


def _offsets(library: Any, handle: Any, function: str, mhz: int) -> Any:
    """Call one of the two functions of nvmlClockOffset_t. The binding's own wrappers drop the status they return, so
    that a refusal would read as success and as an offset of 0: the function itself is asked."""
    info = library.c_nvmlClockOffset_t()
    info.version = library.nvmlClockOffset_v1
    info.type, info.pstate, info.clockOffsetMHz = CLOCK_GRAPHICS, PSTATE_0, mhz
    status = library._nvmlGetFunctionPointer(function)(handle, ctypes.byref(info))
    if status:
        raise library.NVMLError(status)
    return info


def _telling(first: Exception, second: Exception) -> Exception:
    """Of two refusals the one that is about this GPU and not about this driver's age."""
    missing = getattr(first, "value", ERROR_FUNCTION_NOT_FOUND) in (ERROR_FUNCTION_NOT_FOUND, ERROR_ARGUMENT_VERSION)
    return second if missing else first


def _throttle(library: Any, handle: Any) -> int | None:
    """Clock event bits; drivers before 535 know them as throttle reasons only."""
    for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        bits = _ask(library, function, handle)
        if isinstance(bits, int):
            return bits
    return None


def _switch(library: Any, function: str, handle: Any) -> bool | None:
    """The current state of a (current, pending) switch; a card without it has it off."""
    try:
        current, _ = getattr(library, function)(handle)
    except library.NVMLError as error:
        return False if getattr(error, "value", -1) in (ERROR_NOT_SUPPORTED, ERROR_FUNCTION_NOT_FOUND) else None
    except (AttributeError, TypeError, ValueError):
        return None
    return bool(current)


def _processes(found: Any) -> tuple[GpuProcess, ...] | None:
    if found is None:
        return None
    return tuple(
        GpuProcess(
            pid=int(item.pid),
            used_mib=int(item.usedGpuMemory) >> 20 if getattr(item, "usedGpuMemory", None) is not None else None,
        )
        for item in found
    )


def _links(library: Any, handle: Any) -> tuple[NvLink, ...] | None:
    """All NVLink ports, up or down. A card without NVLink says `not supported` or `invalid argument` at once."""
    found: list[NvLink] = []
    for link in range(MAX_LINKS):
        try:
            up = bool(library.nvmlDeviceGetNvLinkState(handle, link))
        except library.NVMLError as error:
            if getattr(error, "value", -1) in (2, ERROR_NOT_SUPPORTED):
                break
            return None
        except AttributeError:
            return None
        remote = _ask(library, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link) if up else None
        kind = _ask(library, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) if up else None
        found.append(
            NvLink(
                link=link,
                up=up,
                remote_type=_REMOTE.get(kind, "unknown") if kind is not None else "",
                remote_bus_id=_decoded(remote.busId) if remote is not None else "",
            )
        )
    return tuple(found)


def _peers(library: Any, count: int) -> P2pMatrix | None:
    """Peer status of every ordered pair. The binding's constant for READ is a tuple by mistake, so numbers it is."""
    handles = [_ask(library, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]

    def code(a: int, b: int, capability: int) -> str:
        if a == b:
            return "X"
        if handles[a] is None or handles[b] is None:
            return "U"
        status = _ask(library, "nvmlDeviceGetP2PStatus", handles[a], handles[b], capability)
        return _PEER_CODES[status] if isinstance(status, int) and 0 <= status < len(_PEER_CODES) else "U"

    if count < 2 or not hasattr(library, "nvmlDeviceGetP2PStatus"):
        return P2pMatrix() if count < 2 else None
    return P2pMatrix(
        **{
            name: tuple(" ".join(code(a, b, capability) for b in range(count)) for a in range(count))
            for capability, name in enumerate(_CAPABILITIES)
        }
    )


def _failed(error: Exception) -> Survey:
    return Survey(None, _note(error), reason=_REASONS.get(getattr(error, "value", -1), "other"))


def _note(error: Exception) -> str:
    return _NOTES.get(getattr(error, "value", -1), f"NVML: {error}")


def _decoded(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text
