"""GPU kernels compiled with NVRTC from PyPI wheels: no CUDA toolkit, no nvcc, no host compiler.

Standard library only. :func:`build` compiles the sources in ``cuda/`` for one target, keeps the result in a cache keyed
by sources, flags and compiler, and refuses an image whose registers, spills or shared memory exceed :data:`LIMITS`.
The same sources compile with ``nvcc`` 12.8 (see kernels/README.md).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCE_DIR = Path(__file__).parent / "cuda"
SOURCES = ("exl3_decode.cu", "exl3_prefill.cu")
HEADERS = ("exl3_format.cuh", "exl3_moe.cuh", "exl3_stages.cuh")

# NVRTC 12.8 is the last that knows sm_70; the other wheels hold headers it needs (cuda_fp16.h, nv/target, crt/mma.h)
PINS = (
    "nvidia-cuda-nvrtc-cu12==12.8.93",
    "nvidia-cuda-runtime-cu12==12.8.90",
    "nvidia-cuda-cccl-cu12==12.8.90",
    "nvidia-cuda-nvcc-cu12==12.8.93",
)
COMPILER_VERSION = (12, 8)
CUBINS = ("sm_70", "sm_80", "sm_90")
PTX = ("compute_70", "compute_80")
TARGETS = CUBINS + PTX

CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
ALL_BITS = tuple(range(1, 9))


class BuildError(Exception):
    """The kernels cannot be built, or an image breaks a limit. The text is one line."""


@dataclass(frozen=True)
class Limit:
    """The most a kernel may use; ``spill`` in bytes of stores plus loads."""

    registers: int
    spill: int
    shared: int


# by the start of a kernel's name. The multiplications may not spill at all and must leave room for several CTAs on a
# multiprocessor (65,536 registers); 48 KB is the static limit of shared memory.
LIMITS = {
    "exl3_decode_multiply2_": Limit(128, 0, 4 << 10),
    "exl3_decode_multiply4_": Limit(64, 0, 48 << 10),
    "exl3_decode_multiply8_": Limit(128, 0, 48 << 10),
    "exl3_prefill_multiply_": Limit(128, 0, 48 << 10),
    "exl3_decode_prepare_": Limit(64, 0, 24 << 10),
    "exl3_route": Limit(64, 0, 40 << 10),
    "exl3_": Limit(128, 0, 8 << 10),
}


@dataclass(frozen=True)
class Variant:
    """What the kernels can decode. A build for one pack's rates and codebook is several times quicker than one for all.

    Args:
        bits: the K that occur, each 1..8.
        codebooks: names out of :data:`CODEBOOKS`.
    """

    bits: tuple[int, ...] = ALL_BITS
    codebooks: tuple[str, ...] = tuple(CODEBOOKS)

    def __post_init__(self) -> None:
        if not self.bits or not set(self.bits) <= set(ALL_BITS):
            raise BuildError(f"bits per weight: expected some of 1..8, found {list(self.bits)}")
        if not self.codebooks or not set(self.codebooks) <= set(CODEBOOKS):
            raise BuildError(f"codebooks: expected some of {', '.join(CODEBOOKS)}, found {list(self.codebooks)}")

    def defines(self) -> tuple[str, ...]:
        """Preprocessor options."""
        k_mask = sum(1 << bits for bits in set(self.bits))
        codebook_mask = sum(1 << CODEBOOKS[name] for name in set(self.codebooks))
        return f"-DDS41_K_MASK={k_mask:#x}", f"-DDS41_CODEBOOK_MASK={codebook_mask:#x}"


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers a thread, and bytes of spills, stack and static shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Image:
    """One compiled source. ``kernels`` is empty for PTX, whose resources are known on the card only."""

    path: Path
    source: str
    target: str
    digest: str
    kernels: dict[str, Resources] = field(default_factory=dict)
    seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Toolchain:
    """NVRTC and its headers as the wheels install them: ``root/nvidia/cuda_nvrtc/lib/libnvrtc.so.12`` and so on."""

    library: Path
    includes: tuple[Path, ...]
    digest: str


def find_toolchain(places: Sequence[Path] | None = None) -> Toolchain:
    """The pinned wheels.

    Args:
        places: directories that may hold ``nvidia/``; None takes ``DS41_NVRTC_PATH`` and those of ``sys.path``.

    Raises:
        BuildError: a wheel is missing.
    """
    if places is None:
        named = os.environ.get("DS41_NVRTC_PATH", "")
        places = [Path(p) for p in [*(named.split(os.pathsep) if named else []), *sys.path] if p]
    for place in map(Path.resolve, places):
        library = place / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
        if not library.is_file():
            continue
        includes = tuple(place / "nvidia" / part / "include" for part in ("cuda_runtime", "cuda_nvcc", "cuda_cccl"))
        for include, needed in zip(includes, ("cuda_fp16.h", "crt/mma.h", "nv/target"), strict=True):
            if not (include / needed).is_file():
                raise BuildError(f"{include / needed} is missing: pip install {' '.join(PINS)}")
        return Toolchain(library, includes, _compiler_digest(place, library))
    raise BuildError(f"NVRTC 12.8 is not installed: pip install {' '.join(PINS)}")


def _compiler_digest(place: Path, library: Path) -> str:
    """The hash pip recorded when it installed the wheel, else the library's own sha256."""
    for distribution in metadata.distributions(name="nvidia-cuda-nvrtc-cu12", path=[str(place)]):
        for entry in distribution.files or ():
            if entry.name == library.name and entry.hash is not None:
                return f"{distribution.version}:{entry.hash.value}"
    with library.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _Nvrtc:
    """The few calls of libnvrtc that compile one program."""

    def __init__(self, toolchain: Toolchain) -> None:
        try:
            self._library = ctypes.CDLL(str(toolchain.library))
        except OSError as error:
            raise BuildError(f"{toolchain.library} cannot be loaded: {error}") from None
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        if (major.value, minor.value) != COMPILER_VERSION:
            raise BuildError(f"NVRTC: expected 12.8, found {major.value}.{minor.value}: pip install {' '.join(PINS)}")

    def _check(self, status: int) -> None:
        if status:
            raise BuildError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def compile(self, source: bytes, name: str, options: Sequence[str], kind: str) -> tuple[bytes, str]:
        """(image, log); ``kind`` is CUBIN or PTX."""
        program = ctypes.c_void_p()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None))
        try:
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), array)
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                errors = [line for line in log.splitlines() if "error" in line] or [log.strip()]
                raise BuildError(f"{name}: {errors[0].strip()[:300]}")
            image = self._text(program, kind)
            return (image.rstrip(b"\0") if kind == "PTX" else image), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


def flags(target: str, variant: Variant) -> tuple[str, ...]:
    """Compiler options for a target, without the include directories.

    Raises:
        BuildError: not one of :data:`TARGETS`.
    """
    if target not in TARGETS:
        raise BuildError(f"target: expected one of {', '.join(TARGETS)}, found {target!r}")
    return (f"--gpu-architecture={target}", "-std=c++17", "-default-device", "--ptxas-options=-v", *variant.defines())


def source_digest(source: str, options: Iterable[str], compiler: str) -> str:
    """sha256 over the source, all headers, the options and the compiler."""
    digest = hashlib.sha256(repr((tuple(options), compiler)).encode())
    for name in (source, *HEADERS):
        digest.update(name.encode() + b"\0" + (SOURCE_DIR / name).read_bytes() + b"\0")
    return digest.hexdigest()


def parse_resources(log: str) -> dict[str, Resources]:
    """The lines of ``ptxas -v``, by kernel."""
    found: dict[str, Resources] = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part.split("'", 1)[0]
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if spills is None or registers is None:
            raise BuildError(f"ptxas says nothing of {name}'s registers and spills")
        found[name] = Resources(
            registers=int(registers[1]),
            spill_stores=int(spills[2]),
            spill_loads=int(spills[3]),
            stack=int(spills[1]),
            shared=int(shared[1]) if shared else 0,
        )
    return found


def breaches(kernels: dict[str, Resources]) -> list[str]:
    """One line for each limit that a kernel breaks."""
    lines = []
    for name, found in kernels.items():
        limit = next((LIMITS[prefix] for prefix in LIMITS if name.startswith(prefix)), None)
        if limit is None:
            lines.append(f"{name}: no limit is set for it")
            continue
        spill = found.spill_stores + found.spill_loads
        for what, value, most in (
            ("registers", found.registers, limit.registers),
            ("bytes of spills", spill, limit.spill),
            ("bytes of shared memory", found.shared, limit.shared),
        ):
            if value > most:
                lines.append(f"{name}: expected at most {most} {what}, found {value}")
    return lines


def build(
    target: str,
    cache: Path,
    variant: Variant | None = None,
    toolchain: Toolchain | None = None,
    sources: Sequence[str] = SOURCES,
) -> list[Image]:
    """Compile every source for ``target``, or take it from ``cache``.

    Args:
        target: one of :data:`TARGETS`; ``sm_*`` gives a cubin, ``compute_*`` PTX for the driver to finish.
        cache: directory of images; made when missing.
        variant: which bit rates and codebooks; None builds all.
        toolchain: from :func:`find_toolchain`; None looks for it.

    Raises:
        BuildError: no toolchain, a source that does not compile, or an image beyond :data:`LIMITS`.
    """
    toolchain = toolchain or find_toolchain()
    options = flags(target, variant or Variant())
    cache.mkdir(parents=True, exist_ok=True)
    compiler: _Nvrtc | None = None
    images = []
    for source in sources:
        path, digest = _place(source, target, cache, options, toolchain)
        found = _from_cache(path, source, target, digest)
        if found is None:
            compiler = compiler or _Nvrtc(toolchain)
            found = _compile(compiler, toolchain, path, source, target, options, digest)
        images.append(found)
    return images


def cached(target: str, cache: Path, variant: Variant, toolchain: Toolchain) -> bool:
    """True when :func:`build` of all sources would compile nothing."""
    options = flags(target, variant)
    for source in SOURCES:
        path, digest = _place(source, target, cache, options, toolchain)
        if _from_cache(path, source, target, digest) is None:
            return False
    return True


def _place(source: str, target: str, cache: Path, options: Iterable[str], toolchain: Toolchain) -> tuple[Path, str]:
    """Where the image of a source is kept, and the digest of all that goes into it."""
    digest = source_digest(source, options, toolchain.digest)
    return cache / f"{Path(source).stem}-{target}-{digest[:16]}.{'ptx' if target in PTX else 'cubin'}", digest


def _compile(
    compiler: _Nvrtc, toolchain: Toolchain, path: Path, source: str, target: str, options: Sequence[str], digest: str
) -> Image:
    includes = [f"-I{place}" for place in (SOURCE_DIR, *toolchain.includes)]
    started = time.monotonic()
    kind = "PTX" if target in PTX else "CUBIN"
    content, log = compiler.compile((SOURCE_DIR / source).read_bytes(), source, [*options, *includes], kind)
    kernels = parse_resources(log) if kind == "CUBIN" else {}
    if kind == "CUBIN" and not kernels:
        raise BuildError(f"{source} for {target}: the compiler reported no kernel")
    broken = breaches(kernels)
    if broken:
        raise BuildError(f"{source} for {target}: {'; '.join(broken)}")
    image = Image(path, source, target, digest, kernels, round(time.monotonic() - started, 3))
    record = {
        "source": source,
        "target": target,
        "digest": digest,
        "sha256": hashlib.sha256(content).hexdigest(),
        "kernels": {name: asdict(found) for name, found in kernels.items()},
        "seconds": image.seconds,
    }
    _publish(path, content)
    _publish(path.with_suffix(".json"), json.dumps(record, indent=1).encode())
    return image


def _publish(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _from_cache(path: Path, source: str, target: str, digest: str) -> Image | None:
    """The image if it is whole; a damaged entry counts as none and is built again."""
    try:
        record: Any = json.loads(path.with_suffix(".json").read_text())
        if record["digest"] != digest or record["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest():
            return None
        kernels = {name: Resources(**found) for name, found in record["kernels"].items()}
        return Image(path, source, target, digest, kernels, float(record["seconds"]), cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def target_for(major: int, minor: int) -> str:
    """The best target for a card's compute capability: a cubin of its own major version, else PTX.

    Raises:
        BuildError: older than 7.0.
    """
    if (major, minor) < (7, 0):
        raise BuildError(f"compute capability: expected 7.0 or later, found {major}.{minor}")
    return {7: "sm_70", 8: "sm_80", 9: "sm_90"}.get(major, "compute_80")


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m ds41_kernels.build sm_70 --cache DIR``: one line of JSON an image; 1 and one line when it fails."""
    parser = argparse.ArgumentParser(prog="ds41_kernels.build", description="Compile the GPU kernels with NVRTC.")
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument("--cache", type=Path, default=Path("images"), help="directory of the images")
    parser.add_argument("--pins", action="store_true", help="print the wheels that the compiler needs, and end")
    parser.add_argument("--bits", default="1,2,3,4,5,6,7,8", help="bits per weight that occur")
    parser.add_argument("--codebooks", default=",".join(CODEBOOKS), help="codebooks that occur")
    options = parser.parse_args(argv)
    if options.pins:
        print(*PINS)
        return 0
    if not options.targets:
        parser.error("no target")
    try:
        bits = tuple(int(part) if part.isdecimal() else 0 for part in options.bits.split(","))
        variant = Variant(bits, tuple(options.codebooks.split(",")))
        for target in options.targets:
            for image in build(target, options.cache, variant):
                record: dict[str, Any] = {"path": str(image.path), "source": image.source, "target": image.target}
                record |= {"kernels": len(image.kernels), "seconds": image.seconds, "cached": image.cached}
                print(json.dumps(record), flush=True)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
