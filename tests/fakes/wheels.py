"""Wheels of engines that are not there: a torch and a vllm that import at once and say what they are told to."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

TORCH = """
__version__ = "{version}"
class version: cuda = {cuda!r}
class cuda:
    @staticmethod
    def get_arch_list(): return {archs!r}
"""
PLATFORMS = """
class current_platform:
    @staticmethod
    def import_kernels(): pass
"""
MODEL = "def answer():\n    first = 1\n    second = 2\n    return first\n"


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: dict[str, str],
    tag: str = "py3-none-any",
    requires: tuple[str, ...] = (),
) -> Path:
    """Write one wheel."""
    needs = "".join(f"Requires-Dist: {item}\n" for item in requires)
    info = f"{name}-{version}.dist-info"
    parts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    rows = []
    for path, text in parts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    parts[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in parts.items():
            archive.writestr(path, text)
    return target


def torch(folder: Path, version: str = "9.1", cuda: str = "12.8", archs: tuple[str, ...] = ("sm_70", "sm_80")) -> Path:
    """A torch."""
    text = TORCH.format(version=version, cuda=cuda, archs=list(archs))
    return wheel(folder, "torch", version, {"torch/__init__.py": text})


def vllm(folder: Path, version: str = "1.0", model: str = MODEL, tag: str = "py3-none-any") -> Path:
    """A vllm."""
    files = {"vllm/__init__.py": f'__version__ = "{version}"\n', "vllm/platforms.py": PLATFORMS, "vllm/model.py": model}
    return wheel(folder, "vllm", version, files, tag)


def lock(path: Path, *wheels: Path) -> Path:
    """A lock of exactly these wheels."""
    lines = []
    for item in wheels:
        name, version = item.name.split("-")[:2]
        lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(item.read_bytes()).hexdigest()}")
    path.write_text("\n".join(lines) + "\n")
    return path


def sums(folder: Path, *wheels: Path) -> str:
    """SHA256SUMS of a release; returns its own sha256."""
    text = "".join(f"{hashlib.sha256(item.read_bytes()).hexdigest()}  {item.name}\n" for item in wheels)
    (folder / "SHA256SUMS").write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()
