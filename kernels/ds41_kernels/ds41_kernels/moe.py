"""An EXL3 mixture-of-experts layer on the GPU: device tables, work space and the order of the launches.

torch holds the memory and gives the stream; the kernels are started through :mod:`.driver`. A call launches five
kernels (decode) or six (prefill), allocates nothing and never waits, so it can be captured into a graph. All grids are
of worst-case size: which experts are used is read on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .census import Census
from .driver import Kernel, Module

HADAMARD = 128
MAX_WIDTH = 8192
MAX_EXPERTS = 512
MAX_DECODE_TOKENS = 64
PREFILL_ROWS = 64
STAGE_THREADS = 512
FINISH_THREADS = 64
PREFILL_THREADS = 256
ROUTE_THREADS = 1024


class MoeError(ValueError):
    """Weights or arguments that the kernels cannot take. The text is one line."""


class _WorkList(ctypes.Structure):
    _fields_ = (("groups_used", ctypes.c_void_p), ("groups", ctypes.c_void_p), ("sorted_slots", ctypes.c_void_p))


class _Product(ctypes.Structure):
    _fields_ = (
        ("linears", ctypes.c_void_p),
        ("acts", ctypes.c_void_p),
        ("infos", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("work", _WorkList),
        ("first_projection", ctypes.c_int),
        ("projections", ctypes.c_int),
        ("k", ctypes.c_int),
        ("n", ctypes.c_int),
    )


@dataclass(frozen=True)
class Geometry:
    """How a family of images cuts the work; must agree with the sources.

    ``group_rows`` are the sizes of the decode kernels, smallest first; a batch of at most ``small_batch`` tokens takes
    the smallest. The result does not depend on the choice.
    """

    decode_threads: int
    decode_columns: int
    group_rows: tuple[int, ...]
    small_batch: int
    prefill_columns: int


VOLTA = Geometry(128, 32, (2,), MAX_DECODE_TOKENS, 128)
AMPERE = Geometry(256, 64, (4, 8), 48, 256)  # H200: at 48 tokens 4 rows are quicker by 9 %, at 64 slower by 5 %


@dataclass(frozen=True)
class Images:
    """The loaded decode and prefill modules, and the target they were built for (``sm_70``, ``compute_80``, ...)."""

    decode: Module
    prefill: Module
    target: str

    @classmethod
    def load(cls, paths: Sequence[Path], target: str) -> Images:
        """From the files :func:`build.build` made for one target. Raises DriverError, MoeError when one is missing."""
        by_source = {path.name.split("-", 1)[0]: path for path in paths}
        if not {"exl3_decode", "exl3_prefill"} <= set(by_source):
            raise MoeError(f"images for {target}: expected exl3_decode and exl3_prefill, found {sorted(by_source)}")
        return cls(Module(by_source["exl3_decode"]), Module(by_source["exl3_prefill"]), target)

    @property
    def geometry(self) -> Geometry:
        """:data:`VOLTA` for code written for compute capability 7, else :data:`AMPERE`."""
        return VOLTA if self.target.endswith("_70") else AMPERE


@dataclass(frozen=True)
class DeviceLinear:
    """One projection on the card: ``trellis [k/16, n/16, 16 K]`` int16, ``suh [k]`` and ``svh [n]`` half."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor

    @property
    def bits(self) -> int:
        """K, by the trellis' shape."""
        return int(self.trellis.shape[2]) // 16

    def check(self, inputs: int, outputs: int) -> None:
        """Raises MoeError unless the tensors are those of an ``inputs -> outputs`` layer of whole bits."""
        shape = tuple(self.trellis.shape)
        if shape[:2] != (inputs // 16, outputs // 16) or shape[2] % 16 or not 1 <= shape[2] // 16 <= 8:
            raise MoeError(
                f"trellis: expected [{inputs // 16}, {outputs // 16}, 16 K] with K of 1..8, found {list(shape)}"
                " (half bit rates have no GPU kernel)"
            )
        for name, tensor, count in (("suh", self.suh, inputs), ("svh", self.svh, outputs)):
            if tensor.dtype != torch.float16 or tuple(tensor.shape) != (count,):
                raise MoeError(f"{name}: expected float16 [{count}], found {tensor.dtype} {list(tensor.shape)}")
        for name, tensor in (("trellis", self.trellis), ("suh", self.suh), ("svh", self.svh)):
            if not tensor.is_cuda or not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise MoeError(f"{name}: expected a contiguous CUDA tensor, aligned to 16 bytes")


class Workspace:
    """Buffers of one rank, shared by all its layers (they run one after the other).

    Args:
        hidden, inner, experts, top_k: the layer's shape on this rank; ``inner`` is the slice's width under TP.
        prefill_tokens: tokens of one prefill slice; longer batches are cut, with the same bits.
        device: the card.
    """

    def __init__(
        self, hidden: int, inner: int, experts: int, top_k: int, prefill_tokens: int, device: torch.device
    ) -> None:
        for name, width in (("hidden", hidden), ("inner", inner)):
            if width % HADAMARD or not 0 < width <= MAX_WIDTH:
                raise MoeError(f"{name}: expected a multiple of {HADAMARD} up to {MAX_WIDTH}, found {width}")
        if not 0 < experts <= MAX_EXPERTS:
            raise MoeError(f"experts: expected 1..{MAX_EXPERTS}, found {experts}")
        self.hidden, self.inner, self.experts, self.top_k = hidden, inner, experts, top_k
        self.tokens = max(prefill_tokens, MAX_DECODE_TOKENS)
        slots = self.tokens * top_k

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.acts_in = buffer(slots, 2, hidden, dtype=torch.float16)
        self.infos_in = buffer(slots, 2, 2, dtype=torch.int32)
        self.sums_in = buffer(slots, 2, inner, dtype=torch.float32)
        self.acts_out = buffer(slots, inner, dtype=torch.float16)
        self.infos_out = buffer(slots, 2, dtype=torch.int32)
        self.sums_out = buffer(slots, hidden, dtype=torch.float32)
        self.groups_used = buffer(1, dtype=torch.int32)
        self.groups = buffer(slots, 4, dtype=torch.int32)
        self.sorted_slots = buffer(slots, dtype=torch.int32)

    def work_list(self) -> _WorkList:
        """The device's work list."""
        return _WorkList(self.groups_used.data_ptr(), self.groups.data_ptr(), self.sorted_slots.data_ptr())


def worst_groups(slots: int, experts: int, rows: int) -> int:
    """Most groups of up to ``rows`` rows that ``slots`` rows over ``experts`` experts can need."""
    return min(slots, experts + slots // rows)


class Exl3Moe:
    """The experts of one layer on one rank.

    Args:
        images: loaded for this card.
        experts: (gate, up, down) of every expert held here, by local number; rates may differ between all of them.
        codebook: ``3inst``, ``mcg`` or ``mul1``; one for the whole layer.
        workspace: shared between layers.
        limit: SwiGLU clamp (config.json ``swiglu_limit``).
        scale: factor of the result, 1.0 when the routed scale is already in the weights.
        census: told which kernels serve the layer.
        name: the layer's name in the census.
    """

    def __init__(
        self,
        images: Images,
        experts: Sequence[tuple[DeviceLinear, DeviceLinear, DeviceLinear]],
        codebook: str,
        workspace: Workspace,
        limit: float = 10.0,
        scale: float = 1.0,
        census: Census | None = None,
        name: str = "",
    ) -> None:
        w = workspace
        if len(experts) != w.experts:
            raise MoeError(f"experts: expected {w.experts}, found {len(experts)}")
        rows = []
        for gate, up, down in experts:
            gate.check(w.hidden, w.inner)
            up.check(w.hidden, w.inner)
            down.check(w.inner, w.hidden)
            for part in (gate, up, down):
                rows.append([part.trellis.data_ptr(), part.suh.data_ptr(), part.svh.data_ptr(), part.bits])
        self._kept = experts
        self._table = torch.tensor(rows, dtype=torch.int64, device=w.acts_in.device)
        self._images, self._workspace, self._codebook = images, w, codebook
        self._limit, self._scale = limit, scale
        self._census, self.name = census, name
        self._work = w.work_list()
        decode, prefill = images.decode, images.prefill
        self._prepare = decode.kernel(f"exl3_decode_prepare_{codebook}")
        self._middle = decode.kernel(f"exl3_decode_middle_{codebook}")
        self._multiply = {n: decode.kernel(f"exl3_decode_multiply{n}_{codebook}") for n in images.geometry.group_rows}
        self._finish = decode.kernel("exl3_finish")
        self._route = prefill.kernel("exl3_route")
        self._prefill_prepare = prefill.kernel("exl3_prefill_prepare")
        self._prefill_middle = prefill.kernel("exl3_prefill_middle")
        self._prefill_multiply = prefill.kernel(f"exl3_prefill_multiply_{codebook}")

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The routed experts' weighted sum.

        Args:
            x: ``[T, hidden]`` float16.
            ids: ``[T, top_k]`` int32, local expert numbers; anything outside ``0..experts-1`` is another rank's.
            weights: ``[T, top_k]`` float32.
            out: ``[T, hidden]`` float32; made when None.

        Raises:
            MoeError: another shape, type or layout.
        """
        w = self._workspace
        tokens = x.shape[0]
        for name, tensor, dtype, shape in (
            ("x", x, torch.float16, (tokens, w.hidden)),
            ("ids", ids, torch.int32, (tokens, w.top_k)),
            ("weights", weights, torch.float32, (tokens, w.top_k)),
        ):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise MoeError(
                    f"{name}: expected contiguous {dtype} {list(shape)}, found {tensor.dtype} {list(tensor.shape)}"
                )
        if out is None:
            out = torch.empty(tokens, w.hidden, dtype=torch.float32, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        if 0 < tokens <= MAX_DECODE_TOKENS:
            self._decode(x, ids, weights, out, tokens, stream)
        else:
            for begin in range(0, tokens, w.tokens):
                end = min(tokens, begin + w.tokens)
                self._prefill(x[begin:end], ids[begin:end], weights[begin:end], out[begin:end], end - begin, stream)
        return out

    def prefill(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """The prefill kernels for any number of tokens up to the work space's, for comparisons."""
        self._prefill(x, ids, weights, out, x.shape[0], torch.cuda.current_stream(x.device).cuda_stream)

    def _decode(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, tokens: int, stream: int
    ) -> None:
        w, geometry = self._workspace, self._images.geometry
        slots = tokens * w.top_k
        sizes = geometry.group_rows
        rows = sizes[0] if tokens <= geometry.small_batch else sizes[-1]
        groups = worst_groups(slots, w.experts, rows)
        multiply = self._multiply[rows]
        self._note("decode", multiply)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._prepare.launch(
            (2 * slots + 1, 1, 1),
            STAGE_THREADS,
            stream,
            (
                pointer(x.data_ptr()),
                pointer(ids.data_ptr()),
                pointer(self._table.data_ptr()),
                *(number(n) for n in (slots, w.top_k, w.experts, w.hidden, rows)),
                pointer(w.acts_in.data_ptr()),
                pointer(w.infos_in.data_ptr()),
                self._work,
            ),
        )
        threads, columns = geometry.decode_threads, geometry.decode_columns
        self._product(multiply, threads, columns, groups, stream, gate_up=True)
        self._middle.launch(
            (slots, 1, 1),
            STAGE_THREADS,
            stream,
            (
                pointer(w.sums_in.data_ptr()),
                pointer(ids.data_ptr()),
                pointer(self._table.data_ptr()),
                number(w.experts),
                number(w.inner),
                ctypes.c_float(self._limit),
                pointer(w.acts_out.data_ptr()),
                pointer(w.infos_out.data_ptr()),
            ),
        )
        self._product(multiply, threads, columns, groups, stream, gate_up=False)
        self._sum(ids, weights, out, tokens, stream)

    def _prefill(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, tokens: int, stream: int
    ) -> None:
        if not tokens:
            return
        w, geometry = self._workspace, self._images.geometry
        slots = tokens * w.top_k
        groups = worst_groups(slots, w.experts, PREFILL_ROWS)
        self._note("prefill", self._prefill_multiply)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        id_pointer, table = pointer(ids.data_ptr()), pointer(self._table.data_ptr())
        self._route.launch(
            (1, 1, 1),
            ROUTE_THREADS,
            stream,
            (id_pointer, number(slots), number(w.experts), number(PREFILL_ROWS), self._work),
        )
        self._prefill_prepare.launch(
            (2 * slots, 1, 1),
            STAGE_THREADS,
            stream,
            (
                pointer(x.data_ptr()),
                id_pointer,
                table,
                *(number(n) for n in (slots, w.top_k, w.experts, w.hidden)),
                pointer(w.acts_in.data_ptr()),
            ),
        )
        columns = geometry.prefill_columns
        self._product(self._prefill_multiply, PREFILL_THREADS, columns, groups, stream, gate_up=True)
        self._prefill_middle.launch(
            (slots, 1, 1),
            STAGE_THREADS,
            stream,
            (
                pointer(w.sums_in.data_ptr()),
                id_pointer,
                table,
                number(w.experts),
                number(w.inner),
                ctypes.c_float(self._limit),
                pointer(w.acts_out.data_ptr()),
            ),
        )
        self._product(self._prefill_multiply, PREFILL_THREADS, columns, groups, stream, gate_up=False)
        self._sum(ids, weights, out, tokens, stream)

    def _product(self, kernel: Kernel, threads: int, columns: int, groups: int, stream: int, *, gate_up: bool) -> None:
        w = self._workspace
        acts, infos, sums = (w.acts_in, w.infos_in, w.sums_in) if gate_up else (w.acts_out, w.infos_out, w.sums_out)
        inputs, outputs = (w.hidden, w.inner) if gate_up else (w.inner, w.hidden)
        projections = 2 if gate_up else 1
        job = _Product(
            self._table.data_ptr(),
            acts.data_ptr(),
            infos.data_ptr(),
            sums.data_ptr(),
            self._work,
            0 if gate_up else 2,
            projections,
            inputs,
            outputs,
        )
        kernel.launch((-(-outputs // columns), groups, projections), threads, stream, (job,))

    def _sum(self, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, tokens: int, stream: int) -> None:
        w = self._workspace
        warps = tokens * (w.hidden // HADAMARD)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._finish.launch(
            (-(-warps * 32 // FINISH_THREADS), 1, 1),
            FINISH_THREADS,
            stream,
            (
                pointer(w.sums_out.data_ptr()),
                pointer(ids.data_ptr()),
                pointer(weights.data_ptr()),
                pointer(self._table.data_ptr()),
                *(number(n) for n in (tokens, w.top_k, w.experts, w.hidden)),
                ctypes.c_float(self._scale),
                pointer(out.data_ptr()),
            ),
        )

    def _note(self, route: str, kernel: Kernel) -> None:
        if self._census is not None:
            self._census.note(self.name, route, f"{kernel.name} ({self._images.target})")


def decoded_weights(images: Images, linear: DeviceLinear, codebook: str) -> torch.Tensor:
    """``T [k, n]`` as the kernels decode it, half; for checks."""
    rows, columns, _ = linear.trellis.shape
    out = torch.empty(rows * 16, columns * 16, dtype=torch.float16, device=linear.trellis.device)
    images.decode.kernel(f"exl3_weights_{codebook}").launch(
        (-(-rows * columns * 32 // STAGE_THREADS), 1, 1),
        STAGE_THREADS,
        torch.cuda.current_stream(out.device).cuda_stream,
        (
            ctypes.c_void_p(linear.trellis.data_ptr()),
            ctypes.c_int(linear.bits),
            ctypes.c_int(rows * 16),
            ctypes.c_int(columns * 16),
            ctypes.c_void_p(out.data_ptr()),
        ),
    )
    return out
