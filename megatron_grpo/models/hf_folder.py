"""A folder in Hugging Face format on disk: reading slices of its tensors, and writing a new one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.models.quantized_weights import (
    BLOCKS,
    EXPONENTS,
    SCALES,
    SHARED,
    Quantization,
    describe_values,
    read_quantization,
    unpack_shape,
)
from megatron_grpo.models.shape import read_config_json
from megatron_grpo.models.stored_tensors import INDEX_FILE, SINGLE_FILE, list_stored_tensors, read_index
from megatron_grpo.models.weight_map import WeightSlice

# Configuration, tokenizer and template files that travel with the weights.
_SIDE_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# Files that describe other weights, or the training of these.
_EXCLUDED_FILES = ("trainer_state.json", "adapter_config.json", "hf_quant_config.json", "params.json")


class HFFolderReader:
    """Reads slices of tensors from safetensors files; ValueError: a folder without weights."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._handles: dict[Path, Any] = {}
        index, single = self._folder / INDEX_FILE, self._folder / SINGLE_FILE
        if index.is_file():
            self._file_of = {name: self._folder / file for name, file in read_index(index).items()}
        elif single.is_file():
            self._file_of = dict.fromkeys(self._open(single).keys(), single)
        else:
            raise ValueError(f"{self._folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")

    def has(self, name: str) -> bool:
        return name in self._file_of or name + BLOCKS in self._file_of

    def read(self, part: WeightSlice) -> Tensor:
        """Read a slice of a tensor: contiguous, on the CPU, in the file's dtype.

        FP8 becomes float32 and MXFP4 bfloat16. An empty slice, of a rank that holds only padding of the vocabulary, is
        float32.

        Raises:
            ValueError: no such tensor, another shape than the model's config.json implies, values that are not
                finite, or an unreadable file.
        """
        is_packed = part.name not in self._file_of and part.name + BLOCKS in self._file_of
        stored = part.name + BLOCKS if is_packed else part.name
        file, tensor = self._find(stored)
        shape = tuple(tensor.get_shape())
        if is_packed and len(shape) == 4:
            shape = unpack_shape(shape)
        if shape != part.shape:
            raise ValueError(f"{file}: {part.name} has shape {list(shape)}, but config.json implies {list(part.shape)}")
        if 0 in part.local_shape:
            return torch.empty(part.local_shape)
        values: Tensor
        if is_packed:
            values = read_mxfp4(tensor, self._find(part.name + EXPONENTS)[1], part.bounds)
        elif tensor.get_dtype() == "F8_E4M3" and self._quantization is not None:
            values = read_fp8(tensor, self._find(part.name + SCALES)[1], part.bounds, self._quantization)
        else:
            values = tensor[part.region].contiguous()
        if values.is_floating_point() and values.itemsize > 1 and not values.isfinite().all():
            raise ValueError(f"{file}: {part.name} has values that are not finite")
        return values

    def iterate(self, selects: Callable[[str], bool] = bool) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the folder, quantized weights as numbers.

        `selects`: takes a name; tensors for which it is false are left out.
        """
        stored = list_stored_tensors(self._folder)
        quantization = self._quantization
        for name, tensor in (stored if quantization is None else describe_values(stored, quantization)).items():
            if selects(name):
                yield name, self.read(WeightSlice(name, tensor.shape, tuple((0, size) for size in tensor.shape)))

    def _find(self, name: str) -> tuple[Path, Any]:
        """Find a stored tensor: its file, and a slice that reads it."""
        file = self._file_of.get(name)
        if file is None:
            raise ValueError(f"{self._folder} has no tensor {name}")
        try:
            return file, self._open(file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{file} has no tensor {name}: {error}") from None

    @cached_property
    def _quantization(self) -> Quantization | None:
        return read_quantization(read_config_json(self._folder / "config.json"))

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
            except FileNotFoundError:
                raise ValueError(f"{file} does not exist, but {INDEX_FILE} names it") from None
            except SafetensorError as error:
                raise ValueError(f"{file} is not a complete safetensors file: {error}") from None
        return self._handles[file]


def write_hf_folder(
    tensors: Iterable[tuple[str, Tensor]],
    source_folder: str | Path,
    output: str | Path,
    max_file_bytes: int = 4 * 2**30,
    settings: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    end_tokens: Sequence[int] | None = None,
) -> None:
    """Write full tensors as a complete folder in Hugging Face format.

    Args:
        tensors: (name, tensor); taken one at a time, and copied to host memory until their file is written.
        source_folder: folder whose config.json, tokenizer and generation settings are copied; the dtype in config.json
            becomes that of the first tensor.
        output: folder to make; ValueError: it holds something already.
        max_file_bytes: largest weights file, unless a single tensor is larger.
        settings: further entries for config.json.
        chat_template: the only chat template of the new folder; None: those of `source_folder`.
        end_tokens: tokens that end a response, for generation_config.json; None: those of `source_folder`.
    """
    source = Path(source_folder)
    side_files = list(_list_side_files(source))
    for file in filter(partial(_is_link_elsewhere, source), side_files):
        raise ValueError(f"{file} is a link out of the model's folder, which a copy would carry; put the file there")
    with new_folder(output) as folder:
        dtype = _write_weights_files(tensors, folder, max_file_bytes)
        for file in side_files:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)  # contents alone: the source may be read-only
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text())
        # The weights are no longer quantized as the source's.
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        changed = _set_dtype(plain | dict(settings or {}), str(dtype).removeprefix("torch."))
        if changed != config:
            config_file.write_text(json.dumps(changed, indent=2) + "\n")
        if chat_template is not None:
            _replace_templates(folder, chat_template)
        if end_tokens is not None:
            file = folder / "generation_config.json"
            generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            file.write_text(json.dumps(generation | {"eos_token_id": list(end_tokens)}, indent=2) + "\n")


def _set_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Set the dtype of a config.json, also in the part of the language model."""
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]
    text = config.get("text_config")
    nested = {"text_config": _set_dtype(text, dtype)} if isinstance(text, dict) else {}
    return config | dict.fromkeys(keys, dtype) | nested


@contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """Make a folder under a temporary name; rename it afterwards.

    The permissions are those of an empty folder that was there; files get them too, but are not executable. ValueError:
    `output` already holds something.
    """
    target = Path(output)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} already exists; give the path of a new folder")
    partial = target.with_name(f".{target.name}.incomplete-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            partial.chmod(target.stat().st_mode & 0o7777)
        mode = partial.stat().st_mode & 0o7777
        for path in partial.rglob("*"):
            path.chmod(mode if path.is_dir() else mode & 0o666)  # files are not executable
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write safetensors with the permissions of any new file."""
    file.touch()  # the library makes files that only the user can read
    mode = file.stat().st_mode & 0o777
    save_file(tensors, file, metadata=metadata)  # renames a temporary file
    file.chmod(mode)


def _write_weights_files(tensors: Iterable[tuple[str, Tensor]], folder: Path, max_file_bytes: int) -> torch.dtype:
    names: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0
    dtype: torch.dtype | None = None

    def flush() -> None:
        save_tensors(pending, folder / f"shard-{len(names)}", {"format": "pt"})
        names.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_file_bytes:
            flush()
            pending_bytes = 0
        # A copy: views into one parameter (gate and up) share storage, which safetensors refuses to write.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
        dtype = dtype or tensor.dtype
    flush()
    count = len(names)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = files if count > 1 else [SINGLE_FILE]
    for number, file in enumerate(files):
        (folder / f"shard-{number}").rename(folder / file)
    if count > 1:
        weight_map = {name: file for file, members in zip(files, names, strict=True) for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return dtype or torch.float32


def _list_side_files(source: Path) -> Iterator[Path]:
    for entry in sorted(source.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_file() and _is_side_file(entry):
            yield entry
        elif entry.is_dir() and not entry.is_symlink():
            # Templates or a tokenizer travel; a folder with weights or a config.json of its own, such as a checkpoint
            # of a trainer, stays.
            inside = [file for file in sorted(entry.rglob("*")) if not file.is_dir()]
            if all(file.is_file() and _is_side_file(file) and file.name != "config.json" for file in inside):
                yield from inside


def _is_link_elsewhere(source: Path, file: Path) -> bool:
    """True for a link out of the model's files."""
    target, folder = file.resolve(), source.resolve()
    if folder.parent.name == "snapshots":  # of the hub's cache, whose files lie beside it under other names
        folder = folder.parents[1]
    is_of_model = target.name == file.name and (target.parent / "config.json").is_file()
    return file.is_symlink() and not target.is_relative_to(folder) and not is_of_model


def _is_side_file(file: Path) -> bool:
    has_suffix = file.suffix in _SIDE_FILE_SUFFIXES and not file.name.endswith(".index.json")
    return has_suffix and file.name not in _EXCLUDED_FILES


def _replace_templates(folder: Path, template: str) -> None:
    # Tokenizers may take their template from any of these.
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "chat_template" in settings:
        text = json.dumps({**settings, "chat_template": template}, indent=2, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")


_BIAS = 127  # of exponents
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Bounds = tuple[tuple[int, int], ...]
"""[begin, end) of a box in each dimension."""


def read_fp8(weight: Any, scales: Any, bounds: Bounds, quantization: Quantization) -> Tensor:
    """Read a box of an FP8 matrix: [rows, columns], float32.

    `weight` and `scales` are slices of safetensors, of which only the box is read.
    """
    region = tuple(slice(begin, end) for begin, end in bounds)
    values: Tensor = weight[region].float()
    if quantization.block is None:
        return values.mul_(scales[...].float())
    blocks = zip(bounds, quantization.block, strict=True)
    covering = tuple(slice(begin // width, -(-end // width)) for (begin, end), width in blocks)
    factors: Tensor = scales[covering].float()
    for axis, ((begin, end), width) in enumerate(zip(bounds, quantization.block, strict=True)):
        first = begin // width * width
        factors = factors.repeat_interleave(width, dim=axis).narrow(axis, begin - first, end - begin)
    return values.mul_(factors)


def read_mxfp4(blocks: Any, exponents: Any, bounds: Bounds) -> Tensor:
    """Read a box of a tensor of experts, [experts, columns, rows], bfloat16.

    Files have the bytes as [experts, rows, groups of 32 columns, 16], the lower half of a byte first.
    """
    experts, (begin, end), rows = bounds
    first = begin // SHARED
    region = (slice(*experts), slice(*rows), slice(first, -(-end // SHARED)))
    numbers = [*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)]
    pairs = torch.tensor([[numbers[byte % 16], numbers[byte // 16]] for byte in range(256)], dtype=torch.bfloat16)
    values = F.embedding(blocks[region].int(), pairs).flatten(-2)
    shift = exponents[region].int() - _BIAS
    values *= torch.ldexp(torch.ones(shift.shape), shift)[..., None].to(values.dtype)
    return values.flatten(-2).narrow(-1, begin - first * SHARED, end - begin).transpose(1, 2)
