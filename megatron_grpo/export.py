"""Turns a checkpoint into a Hugging Face folder: python -m megatron_grpo.export checkpoint=… output=…"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from megatron_grpo.config.conversion import convert_argument
from megatron_grpo.config.errors import suggest_name, to_text
from megatron_grpo.config.help import run_command
from megatron_grpo.config.paths import check_writable, is_hub_name
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.config.section import PathText
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.models.source import fetch_model_folder
from megatron_grpo.run.checkpoint_files import MANIFEST_FILE, verify_checkpoint
from megatron_grpo.run.checkpoints import resolve_checkpoint
from megatron_grpo.run.directory import CONFIG_FILE, POLICY_FOLDER, TEMPLATE_FILE, read_config_file
from megatron_grpo.run.model_card import push_to_hub

USAGE = """\
python -m megatron_grpo.export checkpoint=PATH output=PATH [format=hf|peft|quantized] [push_to_hub=NAME]

  checkpoint  folder of one checkpoint: RUN_DIR/checkpoints/step_N; best is the one that the run ranks first, newest the
              last one
  output      folder to write; must not exist yet
  format      hf: a model in Hugging Face format, adapters merged into its weights (the default);
              peft: the adapters of a run with policy.lora.rank above 0 alone, as the peft package loads them;
              quantized: the weights of a run with policy.quantization in the 8 bits that it trained with, for vLLM
  push_to_hub  repository on the Hugging Face hub, such as ORGANISATION/NAME, that the folder is sent to; a new one is
              private
"""
_PATHS, _PUSH = ("checkpoint", "output"), "push_to_hub"
_KINDS: dict[str, Any] = {**dict.fromkeys(_PATHS, PathText), "format": Literal["hf", "peft", "quantized"], _PUSH: str}
"""Types of the arguments, by name."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return run_command("export: ", arguments, USAGE, _export)


def _export(arguments: Sequence[str]) -> int:
    """Check command line, checkpoint and model before torch is imported, then write the model."""
    given = _read_arguments(arguments)
    checkpoint, output = (Path(given[name]) for name in _PATHS)
    checkpoint = resolve_checkpoint(checkpoint)
    weights, form = checkpoint / POLICY_FOLDER, given.get("format", "hf")
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={checkpoint} does not exist; give a folder RUN_DIR/checkpoints/step_N")
    if not (checkpoint / MANIFEST_FILE).exists() and not weights.exists():
        raise ValueError(f"checkpoint={checkpoint} is not a checkpoint; give a folder RUN_DIR/checkpoints/step_N")
    _require_writable(output)
    config_file = checkpoint.resolve().parent.parent / CONFIG_FILE
    policy = _trained_policy(config_file)
    template = config_file.with_name(TEMPLATE_FILE)
    if form == "peft" and not policy.lora.rank:
        raise ValueError(f"format=peft: {config_file} has no policy.lora.rank above 0, so there are no adapters")
    if form == "quantized" and policy.quantization is None:
        raise ValueError(f"format=quantized: {config_file} has no policy.quantization, so nothing says what to write")
    source = fetch_model_folder(policy.model.path)
    if not (source / "config.json").is_file():
        text = f"the model that the run began with, policy.model.path in {config_file}, is not there; its settings and"
        raise ValueError(
            f"{source}: {text} tokenizer belong to the export: put it back, or correct the path in that file"
        )
    shape = read_model_shape(source)
    remark = verify_checkpoint(checkpoint)  # last, because a large checkpoint takes a while
    if remark:
        print(f"export: {remark}", file=sys.stderr)
    logging.disable(logging.WARNING)  # packages log their fallbacks
    try:
        with warnings.catch_warnings(action="ignore"):
            from megatron_grpo.trainer.hf_export import export_checkpoint  # only now, because it imports torch

            export_checkpoint(
                weights,
                source,
                shape,
                output,
                precision=policy.precision,
                lora=policy.lora,
                adapters_of=policy.model.path if form == "peft" else None,
                quantization=policy.quantization if form == "quantized" else None,
                chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
            )
    finally:
        logging.disable(logging.NOTSET)
    print(f"wrote {output} from {checkpoint}")
    if template.is_file():
        text = "serve the base model with it" if form == "peft" else f"which is that of {output} too"
        print(f"the run's prompts were rendered by {template}, {text}")
    if _PUSH in given:
        print(f"sent to {push_to_hub(output, given[_PUSH], policy.model.path, checkpoint, adapters=form == 'peft')}")
    return 0


def _trained_policy(config_file: Path) -> PolicyConfig:
    """Model, precision, adapters and quantisation of a run; other keys, which may be another version's, are ignored."""
    try:
        policy = read_config_file(config_file).get("policy")
    except FileNotFoundError:
        raise ValueError(f"{config_file} does not exist; a checkpoint has to stay in its run directory") from None
    given = policy if isinstance(policy, dict) else {}
    model = given.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("path"), str) or "precision" not in given:
        raise ValueError(f"{config_file} is not the configuration of a run: policy.model.path or precision is missing")
    kept = {name: given[name] for name in ("precision", "lora", "quantization") if name in given}
    try:
        return TypeAdapter(PolicyConfig).validate_python({"model": {"path": model["path"]}, **kept})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("policy", *map(str, first["loc"])))
        text = f"{key}={to_text(first['input'])}: {first['msg']}"
        raise ValueError(f"{config_file} is not the configuration of a run: {text}") from None


def _require_writable(output: Path) -> None:
    """Raise ValueError if the folder cannot be made, or exists and is not empty."""
    absolute = output.absolute()
    incomplete = absolute.with_name(f".{absolute.name}.incomplete-{os.getpid()}")  # the name under which it is written
    for problem in check_writable("output", str(incomplete)):
        raise ValueError(f"output={output} cannot be written: {problem.text}")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"output={output} already exists; give the path of a new folder")


def _read_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """The value of each argument, by name."""
    values: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in _KINDS or not equals:
            hint = suggest_name(name.lstrip("-+"), _KINDS, "{}=...", otherwise="")
            raise ValueError(f"{argument} is not understood{hint}\n{USAGE}".rstrip())
        values[name] = convert_argument(name, value, _KINDS[name])
    for name in _PATHS:
        if not values.get(name):
            raise ValueError(f"{name}=PATH is missing\n{USAGE}".rstrip())
    if _PUSH in values and not is_hub_name(values[_PUSH]):
        raise ValueError(f"{_PUSH}={values[_PUSH]} is not a name on the hub; give ORGANISATION/NAME")
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
