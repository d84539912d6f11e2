"""NVML: the only importer of pynvml, and only when asked. Reads, never a CUDA context, never a traceback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ds41ctl.core.facts import GpuFacts


class Library(Protocol):
    """The part of pynvml that is used; tests give a fake."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str | bytes: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any, /) -> str | bytes: ...
    def nvmlDeviceGetUUID(self, handle: Any, /) -> str | bytes: ...
    def nvmlDeviceGetPciInfo(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, /) -> tuple[int, int]: ...


Reason = Literal["", "not-asked", "no-library", "no-driver", "mismatch", "denied", "other"]


@dataclass(frozen=True)
class Survey:
    """All GPUs in NVML's (PCI bus) order. `gpus` None: NVML could not be asked, `note` says why."""

    gpus: tuple[GpuFacts, ...] | None
    note: str = ""
    driver: str = ""
    reason: Reason = ""


# nvml.h return codes
_NOTES = {
    4: "no permission to ask NVML",
    9: "the NVIDIA driver is not loaded",
    12: "the NVIDIA driver library (libnvidia-ml.so.1) is not installed",
    15: "a GPU has fallen off the bus",
    18: "driver/library version mismatch: the loaded kernel module is older than the installed library",
}
_REASONS: dict[int, Reason] = {4: "denied", 9: "no-driver", 12: "no-library", 18: "mismatch"}
NOT_ASKED = Survey(None, "not asked: the profile uses no GPU", reason="not-asked")


def survey(library: Library | None = None) -> Survey:
    """Ask NVML which GPUs there are. Never raises: what went wrong is in `note`."""
    if library is None:
        try:
            import pynvml  # only profiles with GPUs pay for it
        except ImportError as error:
            return Survey(None, f"nvidia-ml-py cannot be imported: {error}", reason="other")
        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return _failed(error)
    except OSError as error:  # a broken library file
        return Survey(None, f"the NVIDIA driver library cannot be loaded: {error}", reason="no-library")
    try:
        driver = _decoded(library.nvmlSystemGetDriverVersion())
        found = [_gpu(library, index) for index in range(library.nvmlDeviceGetCount())]
    except library.NVMLError as error:
        return _failed(error)
    finally:
        _shut_down(library)
    notes = [item for item in found if isinstance(item, str)]
    return Survey(tuple(item for item in found if isinstance(item, GpuFacts)), "; ".join(notes), driver)


def _gpu(library: Library, index: int) -> GpuFacts | str:
    """One GPU, or what keeps it from answering (a lost GPU is counted by the driver and answers nothing)."""
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        name = _decoded(library.nvmlDeviceGetName(handle))
    except library.NVMLError as error:
        return f"GPU {index}: {_note(error)}"
    fields: dict[str, Any] = {"index": index, "name": name}
    try:
        fields["uuid"] = _decoded(library.nvmlDeviceGetUUID(handle))
        fields["bus_id"] = _decoded(library.nvmlDeviceGetPciInfo(handle).busId)
        fields["memory_total_mib"] = int(library.nvmlDeviceGetMemoryInfo(handle).total) >> 20
        fields["compute_capability"] = "{}.{}".format(*library.nvmlDeviceGetCudaComputeCapability(handle))
    except library.NVMLError:
        pass  # the fields asked so far stand, the others stay unmeasured
    return GpuFacts(**fields)


def _shut_down(library: Library) -> None:
    try:
        library.nvmlShutdown()
    except library.NVMLError:
        return


def _failed(error: Exception) -> Survey:
    return Survey(None, _note(error), reason=_REASONS.get(getattr(error, "value", -1), "other"))


def _note(error: Exception) -> str:
    return _NOTES.get(getattr(error, "value", -1), f"NVML: {error}")


def _decoded(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text
