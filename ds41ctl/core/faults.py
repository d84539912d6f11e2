"""Known faults of an engine's start: what in the log names each, what it means, and what helps.

Sources: the messages of vLLM 0.32/0.33, torch, NCCL, docker and podman as they are in their code, and field reports of
these machines. The first row that matches wins, so the special ones stand before the general ones (a worker that died
is the consequence of something further up).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LEVEL = re.compile(r"\b(?:INFO|WARNING|DEBUG) \d\d-\d\d ")  # vLLM's line prefix
_WINDOW = 400  # lines from the end


@dataclass(frozen=True)
class Fault:
    """A known way to fail: `meaning` is its cause in one line, `fix` what helps (a command where there is one)."""

    name: str
    meaning: str
    fix: str


@dataclass(frozen=True)
class Known:
    """One row: `pattern` is searched in every line; its group `line` fills `{line}` of the texts."""

    pattern: re.Pattern[str]
    fault: Fault


def _row(name: str, pattern: str, meaning: str, fix: str) -> Known:
    return Known(re.compile(pattern), Fault(name, meaning, fix))


KNOWN: tuple[Known, ...] = (
    # ---- our own plugin says it best; `run: ...` in its line is the fix
    _row("plugin", r"(?:^|[\s:])ds41: (?P<line>(?!cannot start|limit ).+)", "{line}", "ds41ctl preflight --for-serve"),
    # ---- the pack
    _row(
        "weights",
        r"weights were not initialized from checkpoint: (?P<line>.{0,160})",
        "tensors are missing from the pack: {line}",
        "ds41ctl fetch --verify",
    ),
    _row(
        "tokenizer",
        r"Compressed vocab size mismatch: (?P<line>.{0,120})",
        "the tokenizer is not the one the Engram tables were hashed with: {line}",
        "ds41ctl fetch --verify",
    ),
    _row(
        "shard-missing",
        r"Weight files referenced in index but missing|No such file or directory: .*(?P<line>model-\d+-of-\d+\.\w+)"
        r"|FileNotFoundError: .*\.safetensors",
        "a shard that the index names is not there: {line}",
        "ds41ctl fetch",
    ),
    _row(
        "shard-cut",
        r"SafetensorError: (?P<line>.{0,120})|incomplete metadata, file not fully covered|MetadataIncompleteBuffer",
        "a shard is cut off or damaged: {line}",
        "ds41ctl fetch --repair",
    ),
    _row(
        "config",
        r"JSONDecodeError|is not a valid JSON file|It looks like the config file at .* is not",
        "config.json of the pack is not JSON any more",
        "ds41ctl fetch --repair",
    ),
    _row(
        "pack-missing",
        r"is not a local folder and is not a valid model identifier|Repo id must be in the form"
        r"|LocalEntryNotFound|OfflineModeIsEnabled|Invalid repository ID or local directory"
        r"|Can't load (?:the configuration|tokenizer) (?:of|for)",
        "the engine found no pack where it was told to look (and may not download one)",
        "ds41ctl fetch",
    ),
    _row(
        "architecture",
        r"Model architectures \[(?P<line>[^\]]*)\] (?:are not supported|failed to be inspected)",
        "this engine does not know the model {line}",
        "ds41ctl engine install   # the engine that the profile pins",
    ),
    _row(
        "quantisation",
        r"Unknown quantization method|Quantization method specified in the model config|quantization .{0,40}not supp",
        "the engine lacks the quantisation of this pack (or its plugin was not loaded)",
        "ds41ctl engine verify",
    ),
    _row(
        "no-kernel",
        r"Failed to find a kernel that can implement (?P<line>.{0,60}?)[.,]",
        "this engine has no kernel for {line} of the pack on this hardware (or a plugin that brings one is not loaded)",
        "ds41ctl engine verify",
    ),
    # ---- the command line
    _row(
        "arguments",
        r"error: unrecognized arguments: (?P<line>.{0,120})|error: argument (?P<arg>.{0,160})",
        "the engine does not know this option: {line}{arg}",
        "ds41ctl profile check",
    ),
    _row(
        "parser",
        r"invalid (?P<line>(?:tool call|reasoning) parser: \S+)",
        "{line}",
        "use the parser deepseek_v41",
    ),
    _row(
        "context",
        r"max_model_len \((?P<line>\d+)\) is greater than the derived",
        "max_model_len {line} is more than the model has",
        "lower serve.max_model_len and --max-model-len",
    ),
    _row(
        "parallel",
        r"must be divisible by tensor parallel size|pipeline.{0,60}split.{0,60}(?:group|kv)|may not split a kv"
        r"|pipeline parallelism is not supported",
        "the model cannot be cut this way over ranks",
        "tensor parallel 1, 2, 4 or 8; pipeline cut at layer 2, 8, 14 or 20",
    ),
    # seen on two H200s with stock vLLM 0.33 and the tiny pack; vllm-project/vllm#54710 and #54711
    _row(
        "pipeline-layouts",
        r"Workers disagree on supported KV cache layouts",
        "the pipeline stages own different kinds of layers and find no common form of the KV cache",
        "cut elsewhere (VLLM_PP_LAYER_PARTITION): a stage with sliding-window layers alone is too little",
    ),
    _row(
        "pipeline-kv-group",
        r"^.{0,80}group_id, group = next\(",
        "a pipeline stage was given KV-cache tensors of layers that it does not own",
        "ds41ctl engine install   # brings our source patch for it; or cut the pipeline elsewhere",
    ),
    _row(
        "pipeline-replay",
        r"assert residual is not None and post_mix is not None",
        "a pipeline stage begins at the last layer that owns a KV cache: its window replay has no layer to run",
        "add --no-swa-bounded-replay to serve.argv, or cut elsewhere",
    ),
    _row(
        "drafter",
        r"does not support: .{0,40}speculative"
        r"|(?:DSpark|dspark|num_speculative_tokens|speculative).{0,120}(?:not supported|must be|invalid|divisible)",
        "the drafter cannot run with these settings",
        "ds41ctl serve --no-dspark, or serve.spec_tokens 5",
    ),
    # ---- the engine's installation
    _row(
        "shadowed",
        r"No module named 'vllm\.|module 'vllm' has no attribute|cannot import name .{0,60} from 'vllm' \(unknown",
        "a folder named vllm hides the installed engine",
        "unset PYTHONPATH; ds41ctl engine verify",
    ),
    _row(
        "plugin-import",
        r"Failed to load plugin (?P<line>\S+)",
        "the plugin {line} cannot be imported",
        "ds41ctl engine install --force",
    ),
    _row(
        "torchvision",
        r"operator torchvision::nms does not exist",
        "a torchvision of another build shadows torch",
        "ds41ctl engine install --force",
    ),
    _row(
        "cuda-13",
        r"libcudart\.so\.13|libnvrtc\.so\.13|libcublas\.so\.13",
        "this wheel is a CUDA 13 build and its libraries are not there (Volta needs 12.8)",
        "ds41ctl engine install   # the engine that the profile pins",
    ),
    _row(
        "nccl-old",
        r"undefined symbol: (?P<line>nccl\w+)",
        "an older NCCL is loaded first: it lacks {line}",
        "LD_PRELOAD the engine's own nvidia/nccl/lib/libnccl.so.2 in [serve.env]",
    ),
    _row(
        "abi",
        r"undefined symbol: (?P<line>\S{0,80})",
        "a compiled part was built for another torch or CUDA ({line})",
        "ds41ctl engine install --force",
    ),
    _row(
        "libc",
        r"version `(?P<line>GLIBC(?:XX)?_[\d.]+)' not found",
        "this system's C library is too old for the wheel: {line} is wanted",
        "use a newer distribution, or a container engine",
    ),
    _row(
        "instruction",
        r"Illegal instruction|SIGILL",
        "the engine uses instructions that this processor does not have",
        "ds41ctl preflight --only host",
    ),
    _row(
        "module",
        r"No module named '?(?P<line>[\w.]+)",
        "the engine's venv lacks {line}",
        "ds41ctl engine verify",
    ),
    # ---- compilers at the first start
    _row(
        "arch-nvcc",
        r"Unsupported gpu architecture '(?P<line>\w+)'|nvcc fatal\s+: (?P<fatal>.{0,100})",
        "nvcc cannot compile for this card: {line}{fatal}",
        "install the CUDA 12.8 toolkit and set CUDA_HOME to it",
    ),
    _row(
        "nvcc",
        r"nvcc(?:: not found| was not found|'? ?: No such file)|CUDA_HOME environment variable is not set"
        r"|No such file or directory: '[^']*nvcc'",
        "no CUDA compiler where the engine looks for it",
        "ds41ctl preflight --only cuda; export CUDA_HOME=/usr/local/cuda-12.8",
    ),
    _row(
        "ninja",
        r"Ninja is required|No such file or directory: 'ninja'",
        "ninja is missing, and extensions compile at the first start",
        "ds41ctl engine install --force",
    ),
    _row(
        "compiler",
        r"Failed to find C compiler|Python\.h: No such file|(?:gcc|g\+\+|cc|c\+\+): (?:command )?not found"
        r"|No such file or directory: '(?:gcc|g\+\+|c\+\+)'",
        "no C++ compiler (or no Python headers), and kernels compile at the first start",
        "sudo apt-get install g++ python3-dev   # Fedora: sudo dnf install gcc-c++ python3-devel",
    ),
    _row(
        "triton",
        r"LLVM ERROR: Cannot select: intrinsic|PassManager::run failed|triton.{0,80}sm_70",
        "this triton cannot compile for the GPU",
        "ds41ctl engine install --force   # the triton that the engine pins",
    ),
    _row(
        "jit-lock",
        r"[Ww]aiting for (?:the )?lock|FileBaton|lock file .{0,80} exists",
        "a compiler waits for the lock of another one that may be dead",
        "ds41ctl preflight --only host.jit-locks",
    ),
    # ---- driver and cards
    _row(
        "driver-mismatch",
        r"Driver/library version mismatch",
        "the driver was updated under the running kernel module",
        "sudo reboot",
    ),
    _row(
        "driver-old",
        r"CUDA driver version is insufficient|driver on your system is too old",
        "the driver is older than the engine's CUDA needs",
        "ds41ctl preflight --only gpu.driver",
    ),
    _row(
        "gpu-lost",
        r"fallen off the bus|GPU is lost|Unable to determine the device handle|CUDA error: unspecified launch failure",
        "a GPU stopped answering",
        "sudo dmesg | grep Xid; lower the power limit, then reboot",
    ),
    _row(
        "no-gpu",
        r"No CUDA GPUs are available|invalid device ordinal|no CUDA-capable device is detected"
        r"|Torch not compiled with CUDA enabled",
        "the engine sees fewer GPUs than it was given",
        "ds41ctl preflight --only gpu",
    ),
    _row(
        "gpu-exclusive",
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "a GPU is in exclusive mode and somebody holds it",
        "sudo nvidia-smi -c 0; ds41ctl preflight --only gpu",
    ),
    _row(
        "no-kernels",
        r"no kernel image is available",
        "the engine has no kernels for this card's architecture",
        "ds41ctl preflight --level 2 --only engine.abi",
    ),
    _row(
        "indexer",
        r"num_heads == 32 or num_heads == 64",
        "DeepGEMM's indexer kernel takes 32 or 64 index heads",
        "use a pack with index_n_heads 32",
    ),
    # ---- memory
    _row(
        "gpu-taken",
        r"Free memory on device .{0,80}is less than desired GPU memory utilization",
        "somebody else's memory is on the GPUs",
        "ds41ctl preflight --only gpu; nvidia-smi",
    ),
    _row(
        "kv-cache",
        r"No available memory for the cache blocks|To serve at least one request with the model's max seq len",
        "no room for the KV cache of one request of the longest context",
        "raise serve.gpu_memory_utilization, or lower serve.max_model_len",
    ),
    _row(
        "graph-memory",
        r"(?:capture|graph).{0,120}(?:out of memory|OutOfMemory)",
        "out of GPU memory while graphs were captured",
        "lower serve.gpu_memory_utilization by 0.01, or capture fewer sizes",
    ),
    _row(
        "memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory",
        "not enough GPU memory for weights and KV cache",
        "free the GPUs, or lower serve.gpu_memory_utilization",
    ),
    _row(
        "graph",
        r"operation not permitted when stream is capturing|CUDA error: .{0,60}captur",
        "a kernel cannot be captured into a CUDA graph",
        "ds41ctl engine verify; start once with --enforce-eager to see what it is",
    ),
    _row(
        "illegal-access",
        r"an illegal memory access was encountered|device-side assert triggered",
        "a kernel read or wrote where it must not",
        "ds41ctl engine verify; sudo dmesg | grep Xid",
    ),
    _row(
        "host-register",
        r"cudaHostRegister|cudaErrorHostMemory|resource already mapped",
        "the Engram tables could not be registered with the GPU",
        "ds41ctl preflight --only host.memlock",
    ),
    _row(
        "memlock",
        r"RLIMIT_MEMLOCK|mlock(?:all)?\b.{0,60}(?:failed|Cannot allocate)",
        "the limit of locked memory is too small",
        "ulimit -l unlimited (LimitMEMLOCK=infinity in a unit)",
    ),
    _row(
        "hugepages",
        r"Bus error|SIGBUS",
        "a page of the store could not be had: hugepages or a memory limit are exhausted",
        "ds41ctl engram verify; ds41ctl preflight --only host.hugepages",
    ),
    _row(
        "shm",
        r"/dev/shm.{0,80}No space left|unable to (?:open|allocate|mmap).{0,60}shared memory",  # noqa: S108
        "/dev/shm is too small for the ranks' messages",  # noqa: S108
        "mount -o remount,size=16G /dev/shm   (container: --ipc=host)",
    ),
    _row("disk", r"No space left on device|Disk quota exceeded", "a filesystem is full", "df -h"),
    _row(
        "host-memory",
        r"Cannot allocate memory|MemoryError|bad_alloc|DefaultCPUAllocator: can't allocate|mmap.{0,40}ENOMEM",
        "the host ran out of memory",
        "ds41ctl preflight --only host.ram",
    ),
    _row(
        "descriptors",
        r"(?:OSError|RuntimeError|error).{0,240}Too many open files",
        "the limit of open files is too small",
        "ulimit -n 65536",
    ),
    # ---- ranks that talk to each other
    _row(
        "gloo",
        r"(?:[Gg]loo|connectFullMesh).{0,160}(?:refused|timed out|failed|Unable to find)|Unable to find address for",
        "gloo chose a network interface on which the ranks do not reach each other",
        "GLOO_SOCKET_IFNAME=lo in [serve.env]",
    ),
    _row(
        "peer-cache",
        r"gpu_p2p_access_cache|generating GPU P2P access cache",
        "the peer access check does not end, or its cache is of other cards",
        "rm ~/.cache/vllm/gpu_p2p_access_cache_for_*.json",
    ),
    _row(
        "nccl",
        r"NCCL (?:error|WARN)|ncclInternalError|ncclSystemError|ncclUnhandledCudaError|ncclRemoteError",
        "NCCL could not connect the ranks",
        "ds41ctl preflight --only gpu; NCCL_DEBUG=INFO in [serve.env] shows why",
    ),
    _row(
        "rank-silent",
        r"No available shared memory broadcast block|Watchdog caught collective operation timeout",
        "a rank stopped taking part: the others wait for it",
        "look further up in the log for the rank that is missing: ds41ctl logs -n 400",
    ),
    _row(
        "start-timeout",
        r"Timed out waiting for .{0,40}engine core|Did not receive response from front-end process",
        "the engine's own time limit for a start ran out",
        "VLLM_ENGINE_READY_TIMEOUT_S=3600 in [serve.env]",
    ),
    # ---- containers
    _row(
        "cdi",
        r"unresolvable CDI devices? (?P<line>\S+)",
        "the container runtime knows no device {line}",
        "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    ),
    _row(
        "container-gpu",
        r"could not select device driver|unknown or invalid runtime name: nvidia",
        "the container runtime cannot give GPUs to a container",
        "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; docker needs the feature cdi",
    ),
    _row(
        "container-permission",
        r"permission denied while trying to connect to the [Dd]ocker",
        "this user may not talk to docker",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    _row(
        "container-daemon",
        r"Cannot connect to the Docker daemon|failed to connect to the docker API",
        "docker does not run",
        "sudo systemctl start docker",
    ),
    _row(
        "container-port",
        r"port is already allocated|Bind for \S+ failed|address already in use.{0,40}(?:rootlessport|proxy)",
        "the container's port is taken",
        "DS41_PORT=<another> ds41ctl serve",
    ),
    _row(
        "container-image",
        r"Unable to find image|No such image|pull access denied|manifest unknown",
        "the image is not there",
        "ds41ctl engine install",
    ),
    _row(
        "container-name",
        r"Conflict\. The container name|name .{0,80} is already in use",
        "a container of that name exists",
        "docker ps -a; docker rm -f NAME if it is yours",
    ),
    _row(
        "port", r"Address already in use|Errno 98", "the port was taken meanwhile", "DS41_PORT=<another> ds41ctl serve"
    ),
    # ---- consequences
    _row(
        "cannot-start",
        r"ds41: cannot start (?P<line>.{0,160})",
        "the engine's program cannot be started: {line}",
        "ds41ctl engine install",
    ),
    _row(
        "worker",
        # "exit code: None" when the engine asks before the kernel has it
        r"Worker proc .* died unexpectedly(?: \((?P<line>exit code: -?\d+))?",
        "a worker process died ({line})",
        "sudo dmesg | tail; ds41ctl logs -n 400",
    ),
    _row(
        "engine-core",
        r"EngineDeadError|Engine core proc \S+ died|EngineCore encountered (?:an issue|a fatal error)",
        "the engine's core process died",
        "sudo dmesg | tail; ds41ctl logs -n 400",
    ),
)

# how a process ended, when its log says nothing
ENDINGS: tuple[Known, ...] = (
    _row(
        "container-memory",
        r"killed for memory",
        "the container reached its memory limit",
        "raise --memory, or ds41ctl preflight --only host.ram",
    ),
    _row(
        "restarted",
        r"restarted \d+ times by its restart policy '(?P<line>[^']*)'",
        "the container runtime starts it again and again (restart policy {line}), which hides why it ends",
        "leave --restart out of serve.argv: ds41ctl watches the engine",
    ),
    _row(
        "killed",
        r"signal 9|exit status 137",
        "it was killed: by the kernel for want of memory, or by somebody",
        "sudo dmesg | grep -i 'killed process'; ds41ctl preflight --only host.ram",
    ),
    _row(
        "crashed",
        r"signal (?P<line>4|6|7|8|11)\b|exit status 13[2-9]",
        "it crashed in compiled code (signal {line})",
        "ds41ctl engine verify; sudo dmesg | tail",
    ),
    _row(
        "member-gone",
        r"(?P<line>VLLM::\S+) \(pid \d+\).{0,200} has ended$",
        "{line} ended without a word in the log: it was killed, or it crashed in compiled code",
        "sudo dmesg | tail; ds41ctl stop && ds41ctl serve",
    ),
    _row(
        "ended",
        r"signal (?P<line>1|2|15)\b|exit status 14[13]",
        "somebody ended it (signal {line})",
        "ds41ctl serve",
    ),
)


def fingerprint(lines: Iterable[str], ending: str = "") -> Fault | None:
    """The first known fault in the last lines of a log, else what `ending` alone says; None: unknown."""
    window = list(lines)[-_WINDOW:]
    for known in KNOWN:
        for line in reversed(window):
            match = known.pattern.search(line)
            if match and not _LEVEL.search(line):  # information and warnings name what is well or was got over
                return _filled(known, match, line)
    for known in ENDINGS:
        match = known.pattern.search(ending)
        if match:
            return _filled(known, match, ending)
    return None


def _filled(known: Known, match: re.Match[str], line: str) -> Fault:
    groups = {name: (text or "").strip() for name, text in match.groupdict().items()}
    found = known.fault
    fix = found.fix
    if found.name == "plugin":
        said = re.search(r"(?:run|fix): (.{3,120})$", line)
        fix = said[1].strip() if said else fix
    meaning = found.meaning
    for name in ("line", "arg", "fatal"):
        meaning = meaning.replace("{" + name + "}", groups.get(name, ""))
    return Fault(found.name, re.sub(r"[:(\s]*\)?\s*$", "", meaning) if meaning.endswith((": ", "()")) else meaning, fix)
