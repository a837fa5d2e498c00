"""Tensors in a model's folder by their files' headers: names, shapes and dtypes, read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_grpo.config.outside_files import parse_file_json, read_bytes
from megatron_grpo.config.paths import LFS_POINTER, is_lfs_pointer

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Dtypes that weights are trained from; quantized weights and their scales have others.
FLOATS = ("F64", "F32", "F16", "BF16")
_CHUNK = 2**24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # name in safetensors, such as BF16 or F8_E4M3


def list_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of a folder, by name.

    ValueError names a damaged file, or one that not all of transformers, vLLM and this project would read.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        tensors = _read_header(single, f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        strays = sorted(file.name for file in folder.glob("*.safetensors") if file != single)
        if strays:
            raise ValueError(
                f"{strays[0]} lies beside {SINGLE_FILE}, and vLLM would read it too; keep one of them in {folder}, "
                "or write an index of both"
            )
        return tensors
    located = read_index(index)
    files = sorted(set(located.values()))
    if single.is_file() and files != [SINGLE_FILE]:
        raise ValueError(
            f"{folder} has both {SINGLE_FILE}, which transformers reads, and {INDEX_FILE}, whose files vLLM reads; "
            "remove one of them"
        )
    tensors = {}
    for name in files:
        tensors |= _read_header(folder / name, f"{folder / name} does not exist, but {INDEX_FILE} names it")
    for name, tensor in tensors.items():
        if located.get(name) != tensor.file.name:
            where = f"in {located[name]}" if name in located else "in no file"
            raise ValueError(f"{tensor.file} holds {name}, which is {where} by {INDEX_FILE}; write the index anew")
    return tensors


def read_index(index: Path) -> dict[str, str]:
    """Read each tensor's file from an index; ValueError: it is damaged."""
    try:
        located = parse_file_json(read_bytes(index, links=True))["weight_map"]
        if all(isinstance(file, str) for file in located.values()):
            return dict(located)
    except OSError as error:
        raise ValueError(f"{index} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    raise ValueError(f'{index} is not a safetensors index (JSON with a "weight_map")')


def _read_header(file: Path, missing: str) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  # safe_open is no dict
            return {
                name: StoredTensor(file, tuple(tensor.get_shape()), str(tensor.get_dtype()))
                for name, tensor in slices.items()
            }
    except FileNotFoundError:
        raise ValueError(missing) from None
    except (OSError, SafetensorError) as error:
        if is_lfs_pointer(file):
            raise ValueError(f"{file} {LFS_POINTER}") from None
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from None


def has_own_head(folder: Path, head_name: str = HEAD, embedding_name: str = EMBEDDING) -> bool:
    """Whether a folder's output head differs from its embedding, by their names.

    transformers 5 and vLLM then use the stored head, whatever tie_word_embeddings says. A folder whose weights cannot
    be read has none: other checks report it.
    """
    try:
        tensors = list_stored_tensors(folder)
    except ValueError:
        return False
    head, embedding = tensors.get(head_name), tensors.get(embedding_name)
    if head is None or embedding is None:
        return False
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return True
    # The comparison is cached, until a file's time or size shows that it was written anew.
    versions = [(file.stat().st_mtime_ns, file.stat().st_size) for file in (head.file, embedding.file)]
    return not _are_equal((head.file, embedding.file), (head_name, embedding_name), tuple(versions))


@lru_cache(maxsize=64)
def _are_equal(files: tuple[Path, Path], names: tuple[str, str], versions: tuple[tuple[int, int], ...]) -> bool:
    """Compare head and embedding; `versions` is a key of the cache."""
    with files[0].open("rb") as first, files[1].open("rb") as second:
        for stream, name in zip((first, second), names, strict=True):
            size = int.from_bytes(stream.read(8), "little")
            begin, end = json.loads(stream.read(size))[name]["data_offsets"]
            stream.seek(8 + size + begin)
        for remaining in range(end - begin, 0, -_CHUNK):
            size = min(_CHUNK, remaining)
            if first.read(size) != second.read(size):
                return False
    return True
