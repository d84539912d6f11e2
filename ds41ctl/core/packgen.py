"""Materialise a generated pack: from a small committed recipe to every file of a checkpoint, bit-exactly.

A recipe folder holds `pack.json` (the recipe proper), small files that are copied as they are, a tokenizer seed and
one xz-compressed container of trained tensors (itself a safetensors file). What training did not touch (filler
vocabulary, frozen Engram rows) comes from a SHAKE-256 stream, so the same recipe gives the same bytes everywhere.
A recipe may have a base, a recipe folder beside its own: what it does not change it takes from there (`"of": "base"`).

Pure: reads the recipe folder, yields bytes. Whoever calls writes the file, syncs it and compares `PackFile.sha256`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE_FILE = "pack.json"
FORMAT = 1
_BLOCK = 1 << 20
_DTYPE_BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class PackFile:
    """One output file: its name, size in bytes and lower-case hex sha256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackRecipe:
    """A loaded recipe. `sources` says, for each file name, how its bytes are made."""

    folder: Path
    revision: str
    seed: str
    files: tuple[PackFile, ...]
    sources: Mapping[str, Mapping[str, Any]]
    base: str = ""

    def folder_of(self, item: Mapping[str, Any]) -> Path:
        """Where a file or tensor comes from: the recipe's own folder, or its base's."""
        if item.get("of") != "base":
            return self.folder
        if not self.base:
            raise LookupError("takes something from a base and names none")
        return self.folder.parent / self.base


class _RecipeError(ValueError):
    """A ValueError that is already the one line the user should read."""


def _bad(where: object, found: str, expected: str) -> _RecipeError:
    return _RecipeError(f"pack recipe {where}: {found}; expected {expected}; reinstall ds41ctl to restore its data")


def load_recipe(folder: Path) -> PackRecipe:
    """Read `pack.json` of a recipe folder.

    Raises ValueError with one line when the recipe is missing, is no JSON, or lacks a field.
    """
    path = folder / RECIPE_FILE
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})", "a readable file") from None
    except ValueError:
        raise _bad(path, "is no JSON", "a JSON object") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise _bad(path, f"format is {found!r}", f"format {FORMAT}")
    try:
        files = tuple(PackFile(str(f["name"]), int(f["size"]), str(f["sha256"])) for f in raw["files"])
        sources = {str(f["name"]): dict(f["source"]) for f in raw["files"]}
        recipe = PackRecipe(folder, str(raw["revision"]), str(raw["seed"]), files, sources, str(raw.get("base", "")))
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(path, f"has a broken field ({error})", "revision, seed and files[]") from None
    if recipe.base and (Path(recipe.base).name != recipe.base or recipe.base in {".", ".."}):
        raise _bad(path, f"base {recipe.base!r} is malformed", "the name of a recipe folder beside this one")
    for file in files:
        hexadecimal = len(file.sha256) == 64 and not set(file.sha256) - set("0123456789abcdef")
        if not hexadecimal or file.size < 0 or Path(file.name).name != file.name or file.name in {"", ".", ".."}:
            raise _bad(path, f"entry {file.name!r} is malformed", "a plain file name, a size and a hex sha256")
    if not files or len(sources) != len(files):
        raise _bad(path, "lists no file or one file twice", "each file once")
    return recipe


def generate(recipe: PackRecipe, name: str) -> Iterator[bytes]:
    """Yield the bytes of one file of the pack, in order.

    Raises ValueError with one line for a name that the recipe lacks and for recipe data that is missing or corrupt.
    """
    source = recipe.sources.get(name)
    if source is None:
        raise _bad(recipe.folder / RECIPE_FILE, f"has no file {name!r}", "one of " + ", ".join(recipe.sources))
    maker = _MAKERS.get(str(source.get("kind")))
    if maker is None:
        kind = source.get("kind")
        raise _bad(recipe.folder / RECIPE_FILE, f"{name} has unknown kind {kind!r}", ", ".join(_MAKERS))
    try:
        yield from maker(recipe, source)
    except _RecipeError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, struct.error, lzma.LZMAError, EOFError) as error:
        what = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise _bad(recipe.folder, f"data for {name} is corrupt ({what})", "intact recipe data") from None


# ---- seeded bytes ---------------------------------------------------------------------------------------------------


def stream(seed: str, label: str, size: int, table: bytes | None = None) -> Iterator[bytes]:
    """Yield `size` pseudo-random bytes of the stream (seed, label), at most 1 MiB at a time.

    Block i is SHAKE-256 of "seed/label/i". `table` (256 bytes) maps each byte, e.g. to FP8 codes of a normal
    distribution.
    """
    for index, start in enumerate(range(0, size, _BLOCK)):
        block = hashlib.shake_256(f"{seed}/{label}/{index}".encode()).digest(min(_BLOCK, size - start))
        yield block if table is None else block.translate(table)


def _table(source: Mapping[str, Any], key: str) -> bytes:
    table = bytes.fromhex(source[key])
    if len(table) != 256:
        raise IndexError(f"{key} has {len(table)} entries, not 256")
    return table


# ---- readers of the recipe folder -----------------------------------------------------------------------------------


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        return path.read_bytes()
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})", "a readable file") from None


@dataclass(frozen=True, slots=True)
class _Container:
    """The trained tensors: a safetensors file held in memory."""

    header: Mapping[str, Any]
    data: memoryview

    def tensor(self, name: str) -> memoryview:
        start, end = self.header[name]["data_offsets"]
        if not 0 <= start <= end <= len(self.data):
            raise IndexError(f"tensor {name} lies outside the container")
        return self.data[start:end]


@functools.lru_cache(maxsize=2)
def _container(path: Path, sha256: str) -> _Container:
    compressed = _read(path.parent, path.name)
    found = hashlib.sha256(compressed).hexdigest()
    if found != sha256:
        raise _bad(path, f"sha256 is {found}", sha256)
    raw = lzma.decompress(compressed)
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return _Container(header, memoryview(raw)[8 + length :])


# ---- file makers ----------------------------------------------------------------------------------------------------


def _make_copy(recipe: PackRecipe, source: Mapping[str, Any]) -> Iterator[bytes]:
    yield _read(recipe.folder_of(source), source["file"])


def _make_tokenizer(recipe: PackRecipe, source: Mapping[str, Any]) -> Iterator[bytes]:
    """tokenizer.json: the committed base vocabulary and merges, filler ids up to vocab_size, special ids."""
    yield tokenizer_json(json.loads(_read(recipe.folder_of(source), source["file"]))).encode()


def tokenizer_json(seed: Mapping[str, Any]) -> str:
    """tokenizer.json as text from a tokenizer seed.

    Seed keys: base (tokens in id order), merges, special and plain ({id: text}; special ones are stripped from output),
    vocab_size, pre_tokenizer, decoder.
    """
    base: Sequence[str] = seed["base"]
    special = {int(i): str(t) for i, t in seed["special"].items()}
    plain = {int(i): str(t) for i, t in seed["plain"].items()}
    named = special | plain
    vocab = {token: index for index, token in enumerate(base)}
    for index in range(len(base), int(seed["vocab_size"])):
        vocab[named.get(index) or f"<｜place▁holder▁no▁{index}｜>"] = index
    added = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": index in special,
        }
        for index, text in sorted(named.items())
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": seed["merges"],
    }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": seed["pre_tokenizer"],
        "post_processor": None,
        "decoder": seed["decoder"],
        "model": model,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _trained(recipe: PackRecipe, source: Mapping[str, Any], tensor: Mapping[str, Any]) -> _Container:
    kind = "base_trained" if tensor.get("of") == "base" else "trained"
    return _container(recipe.folder_of(tensor) / source[kind], source[f"{kind}_sha256"])


def _make_safetensors(recipe: PackRecipe, source: Mapping[str, Any]) -> Iterator[bytes]:
    """One shard: a safetensors header from the tensor list, then each tensor from its own source, in list order."""
    tensors: Sequence[Mapping[str, Any]] = source["tensors"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        size = _DTYPE_BYTES[tensor["dtype"]]
        for extent in tensor["shape"]:
            size *= extent
        header[tensor["name"]] = {
            "dtype": tensor["dtype"],
            "shape": tensor["shape"],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        start, end = header[tensor["name"]]["data_offsets"]
        sent = 0
        for piece in _TENSORS[tensor.get("from", "trained")](recipe, source, tensor, end - start):
            sent += len(piece)
            yield piece
        if sent != end - start:
            raise IndexError(f"tensor {tensor['name']} has {sent} bytes, not {end - start}")


def _tensor_trained(
    recipe: PackRecipe, source: Mapping[str, Any], tensor: Mapping[str, Any], size: int
) -> Iterator[bytes]:
    yield bytes(_trained(recipe, source, tensor).tensor(tensor["name"]))


def _tensor_stream(
    recipe: PackRecipe, source: Mapping[str, Any], tensor: Mapping[str, Any], size: int
) -> Iterator[bytes]:
    yield from stream(recipe.seed, tensor["name"], size, _table(source, tensor["table"]))


def _tensor_vocab(
    recipe: PackRecipe, source: Mapping[str, Any], tensor: Mapping[str, Any], size: int
) -> Iterator[bytes]:
    """A BF16 vocabulary matrix: trained rows at the trained ids, the container's filler row everywhere else."""
    container = _trained(recipe, source, tensor)
    rows, columns = tensor["shape"]
    width = 2 * columns
    trained = container.tensor(tensor["name"])
    filler = bytes(container.tensor(tensor["filler"]))
    ids = struct.unpack(f"<{len(trained) // width}I", container.tensor(tensor["ids"]))
    if len(filler) != width or list(ids) != sorted(set(ids)) or (ids and ids[-1] >= rows):
        raise IndexError(f"vocabulary rows of {tensor['name']} do not fit [{rows}, {columns}]")
    matrix = bytearray(filler * rows)
    for index, row in enumerate(ids):
        matrix[row * width : (row + 1) * width] = trained[index * width : (index + 1) * width]
    for start in range(0, len(matrix), _BLOCK):
        yield bytes(matrix[start : start + _BLOCK])


_TENSORS: dict[str, Callable[[PackRecipe, Mapping[str, Any], Mapping[str, Any], int], Iterator[bytes]]] = {
    "trained": _tensor_trained,
    "stream": _tensor_stream,
    "vocab": _tensor_vocab,
}
_MAKERS: dict[str, Callable[[PackRecipe, Mapping[str, Any]], Iterator[bytes]]] = {
    "copy": _make_copy,
    "tokenizer": _make_tokenizer,
    "safetensors": _make_safetensors,
}
