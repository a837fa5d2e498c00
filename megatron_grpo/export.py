"""Turns a checkpoint into a Hugging Face folder: python -m megatron_grpo.export checkpoint=… output=…"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.help import answered
from megatron_grpo.config.schema import LoraConfig, QuantizationFormat
from megatron_grpo.controller.checkpoint_files import MANIFEST_FILE, verify
from megatron_grpo.controller.directory import CONFIG_FILE, POLICY_FOLDER, read_config_file
from megatron_grpo.weights.families import shape_of_folder
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.source import model_folder

USAGE = """\
python -m megatron_grpo.export checkpoint=PATH output=PATH [format=hf|peft|quantized]

  checkpoint  folder of one checkpoint: RUN_DIR/checkpoints/step_N
  output      folder to write; must not exist yet
  format      hf: a model in Hugging Face format, adapters merged into its weights (the default);
              peft: the adapters of a run with policy.lora.rank above 0 alone, as the peft package loads them;
              quantized: the weights of a run with policy.quantization in the 8 bits that it trained with, for vLLM
"""
MISTAKE = 2
"""Exit code of a command line that cannot be run."""
_PATHS, _FORMATS = ("checkpoint", "output"), ("hf", "peft", "quantized")
_ARGUMENTS = (*_PATHS, "format")


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A checked command line."""

    weights: Path
    """Folder of Megatron's distributed checkpoint."""
    source: Path
    """Local folder of the model that the run started from, with its config.json and tokenizer."""
    precision: Literal["float32", "bfloat16"]
    shape: ModelShape
    output: Path
    base: str
    """Path or hub name of that model in the run's configuration."""
    lora: LoraConfig
    adapters_alone: bool
    """Whether only the adapters are written, in the format of peft."""
    quantization: QuantizationFormat | None
    """Format of the layers' matrices; None: the precision of the run."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    if answered(arguments, USAGE):
        return 0
    try:
        plan = plan_export(arguments)
        _export(plan)
    except (ValueError, RunError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"wrote {plan.output}")
    return 0


def _export(plan: ExportPlan) -> None:
    from megatron_grpo.weights.hf_export import export_checkpoint  # torch: mistakes above are answered without it

    export_checkpoint(
        plan.weights,
        plan.source,
        plan.shape,
        plan.output,
        precision=plan.precision,
        lora=plan.lora,
        adapters_of=plan.base if plan.adapters_alone else None,
        quantization=plan.quantization,
    )


def plan_export(arguments: Sequence[str]) -> ExportPlan:
    """Check a command line before anything large is imported.

    Raises:
        ValueError: what is wrong with it.
        RunError: the checkpoint is incomplete or damaged, or the run started from a hub model whose files are not here
            and cannot be downloaded.
        OSError: a file of the checkpoint is there and cannot be read.
    """
    given = _read_arguments(arguments)
    checkpoint, output = (Path(os.path.expanduser(given[name])) for name in _PATHS)
    weights = checkpoint / POLICY_FOLDER
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={checkpoint} does not exist; give a folder RUN_DIR/checkpoints/step_N")
    if not (checkpoint / MANIFEST_FILE).exists() and not weights.exists():
        raise ValueError(f"checkpoint={checkpoint} is not a checkpoint; give a folder RUN_DIR/checkpoints/step_N")
    _require_writable(output)
    config_file = checkpoint.resolve().parent.parent / CONFIG_FILE
    source, precision, lora, quantization = _trained_model(config_file)
    alone = given.get("format") == "peft"
    if alone and not lora.rank:
        raise ValueError(f"format=peft: {config_file} has no policy.lora.rank above 0, so there are no adapters")
    in_bits = given.get("format") == "quantized"
    if in_bits and quantization is None:
        raise ValueError(f"format=quantized: {config_file} has no policy.quantization, so nothing says what to write")
    folder = model_folder(source)
    shape = shape_of_folder(folder)
    remark = verify(checkpoint)  # last: of a large checkpoint it takes a while
    if remark:
        print(f"export: {remark}", file=sys.stderr)
    return ExportPlan(weights, folder, precision, shape, output, source, lora, alone, quantization if in_bits else None)


def _trained_model(
    config_file: Path,
) -> tuple[str, Literal["float32", "bfloat16"], LoraConfig, QuantizationFormat | None]:
    """Path or name of the model that a run started from, its precision, its adapters and its quantisation.

    Raises:
        ValueError: the file is missing, or not the configuration of a run.
    """
    try:
        policy = read_config_file(config_file).get("policy")
    except FileNotFoundError:
        raise ValueError(f"{config_file} does not exist; a checkpoint has to stay in its run directory") from None
    model = policy.get("model") if isinstance(policy, dict) else None
    source = model.get("path") if isinstance(model, dict) else None
    precision = policy.get("precision") if isinstance(policy, dict) else None
    if not isinstance(source, str) or precision not in ("float32", "bfloat16"):
        raise ValueError(f"{config_file} is not the configuration of a run: policy.model.path or precision is missing")
    try:
        lora = LoraConfig(**policy.get("lora", {})) if isinstance(policy, dict) else LoraConfig()
    except TypeError as error:
        raise ValueError(f"{config_file} is not the configuration of a run: policy.lora: {error}") from None
    quantization = policy.get("quantization") if isinstance(policy, dict) else None
    if quantization not in (None, *get_args(QuantizationFormat)):
        raise ValueError(f"{config_file} is not the configuration of a run: policy.quantization={quantization}")
    return source, precision, lora, quantization


def _require_writable(output: Path) -> None:
    """Try whether a folder can be made at the output; the probe and the parents made for it are removed.

    Raises:
        ValueError: something is there already, or a folder cannot be made there.
    """
    made: list[Path] = []
    try:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise ValueError(f"output={output} already exists; give the path of a new folder")
        probe = output.absolute().with_name(f".{output.absolute().name}.incomplete-{os.getpid()}")
        for folder in (*reversed(probe.parents), probe):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
    except OSError as error:
        raise ValueError(f"output={output} cannot be written: {error}") from None
    finally:
        for folder in reversed(made):
            folder.rmdir()


def _read_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """The value of each argument, by name."""
    values: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in _ARGUMENTS or not equals:
            close = difflib.get_close_matches(name.lstrip("-+"), _ARGUMENTS, n=1)
            hint = f"; did you mean {close[0]}=...?" if close else ""
            raise ValueError(f"{argument} is not understood{hint}\n{USAGE}".rstrip())
        if name in values:
            raise ValueError(f"{name} is given twice: {values[name]} and {value}")
        values[name] = value
    for name in _PATHS:
        if not values.get(name):
            raise ValueError(f"{name}=PATH is missing\n{USAGE}".rstrip())
        if "\0" in values[name]:
            raise ValueError(f"{name} has a NUL character, which no name has")
    if values.get("format", _FORMATS[0]) not in _FORMATS:
        raise ValueError(f"format={values['format']} is not known; use {' or '.join(_FORMATS)}")
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
