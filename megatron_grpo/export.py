"""Writes a checkpoint as a Hugging Face folder: python -m megatron_grpo.export checkpoint=… output=…"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megatron_grpo.config.algorithms import choose_imported, find_algorithm
from megatron_grpo.config.command_line import as_command, parse_arguments, silence_packages
from megatron_grpo.config.errors import ConfigError, to_text
from megatron_grpo.config.outside_files import read_text
from megatron_grpo.config.paths import check_writable, is_hub_name
from megatron_grpo.config.schema import Config, PolicyConfig
from megatron_grpo.config.section import FamilyPath, PathText
from megatron_grpo.config.started_values import TRUST, find_untrusted_values
from megatron_grpo.models.families import exchange_head
from megatron_grpo.models.families.reading import include_tower, read_model_shape
from megatron_grpo.models.families.user_families import is_shared
from megatron_grpo.models.heads import POLICY_HEADS, Head
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import adopt_families, fetch_model_folder
from megatron_grpo.models.tokenizer_files import read_settings
from megatron_grpo.run.checkpoint_files import MANIFEST_FILE, verify_checkpoint
from megatron_grpo.run.checkpoints import resolve_checkpoint
from megatron_grpo.run.directory import CONFIG_FILE, FORMAT_FILE, POLICY_FOLDER, TEMPLATE_FILE, read_config_file
from megatron_grpo.run.exports import push_to_hub

FAMILY = "policy.model.family"
USAGE = """\
python -m megatron_grpo.export checkpoint=PATH output=PATH [format=hf|peft|quantized] [push_to_hub=NAME]
    [trust_run=true]

  checkpoint  folder of one checkpoint: RUN_DIR/checkpoints/step_N; best is the one that the run ranks first, latest the
              last one
  output      folder to write; must not exist yet
  format      hf: a model in Hugging Face format, adapters merged into its weights (the default);
              peft: the adapters of a run with policy.lora.rank above 0 alone, as the peft package loads them;
              quantized: the weights of a run with policy.quantization in the 8 bits that it trained with, for vLLM
  push_to_hub  repository on the Hugging Face hub, such as ORGANISATION/NAME, that the folder is sent to; a new one is
              private
  trust_run   true: import the family of models that the run's config.yaml names (false); or name it yourself, as
              policy.model.family=module:NAME
"""
_TYPES = {
    "checkpoint": PathText,
    "output": PathText,
    "format": Literal["hf", "peft", "quantized"],
    "push_to_hub": str,
    TRUST: bool,
    FAMILY: FamilyPath,
}


@as_command("export", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Export a checkpoint; return the exit code."""
    parsed = parse_arguments(arguments, _TYPES)
    checkpoint, output = (Path(parsed.require(name, "PATH")) for name in ("checkpoint", "output"))
    form, hub_name = parsed.options.get("format", "hf"), parsed.options.get("push_to_hub")
    # Check every argument first: the export of a large model takes minutes.
    if hub_name is not None and not is_hub_name(hub_name):
        raise ValueError(f"push_to_hub={hub_name} is not a name on the hub; give ORGANISATION/NAME")
    checkpoint = resolve_checkpoint(checkpoint)
    if not any((checkpoint / name).exists() for name in (MANIFEST_FILE, POLICY_FOLDER)):
        reason = "is not a checkpoint" if checkpoint.is_dir() else "does not exist"
        raise ValueError(f"checkpoint={checkpoint} {reason}; give a folder RUN_DIR/checkpoints/step_N")
    # The folder is written under this name, and renamed when it is complete.
    incomplete = output.absolute().with_name(f".{output.absolute().name}.incomplete-{os.getpid()}")
    for problem in check_writable("output", str(incomplete)):
        raise ValueError(f"output={output} cannot be written: {problem.text}")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"output={output} already exists; give the path of a new folder")
    config_file = checkpoint.resolve().parent.parent / CONFIG_FILE
    policy, head = _read_policy(config_file, parsed.options.get(FAMILY))
    _adopt_family(policy, config_file, [*parsed.options], is_trusted=parsed.options.get(TRUST, False))
    if form == "peft" and not policy.lora.rank:
        raise ValueError(f"format=peft: {config_file} has no policy.lora.rank above 0, so there are no adapters")
    if form == "quantized" and policy.quantization is None:
        raise ValueError(
            f"format=quantized: {config_file} has no policy.quantization, so its weights were not trained for 8 bits"
        )
    source = fetch_model_folder(policy.model.path)
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source}: the model that the run began with, policy.model.path in {config_file}, is not there; its "
            "settings and tokenizer belong to the export: put it back, or correct the path in that file"
        )
    shape = exchange_head(read_model_shape(source, reward_models=head.is_scalar), head)
    if policy.train_vision_tower:
        shape = include_tower(shape, source)
    template = config_file.with_name(TEMPLATE_FILE)
    _write_model(checkpoint, source, shape, output, policy, form, template)
    print(f"wrote {output} from {checkpoint}")
    if template.is_file():
        text = "serve the base model with it" if form == "peft" else f"{output} has the same one"
        print(f"the run's prompts were rendered with the chat template {template}; {text}")
    if hub_name is not None:
        print(f"sent to {push_to_hub(output, hub_name, policy.model.path, checkpoint, adapters=form == 'peft')}")
    return 0


def _write_model(
    checkpoint: Path,
    source: Path,
    shape: ModelShape,
    output: Path,
    policy: PolicyConfig,
    form: str,
    template: Path,
) -> None:
    # The last check, because a large checkpoint takes a while.
    if remark := verify_checkpoint(checkpoint):
        print(f"export: {remark}", file=sys.stderr)
    with silence_packages():
        # After the checks, because torch takes seconds to import.
        from megatron_grpo.trainer.hf_export import export_checkpoint

        export_checkpoint(
            checkpoint / POLICY_FOLDER,
            source,
            shape,
            output,
            precision=policy.precision,
            lora=policy.lora,
            adapters_of=policy.model.path if form == "peft" else None,
            quantization=policy.quantization if form == "quantized" else None,
            chat_template=read_text(template) if template.is_file() else None,
            conversation_format=read_settings(template.with_name(FORMAT_FILE)),
        )


def _adopt_family(policy: PolicyConfig, config_file: Path, overrides: Sequence[str], *, is_trusted: bool) -> None:
    """Import the family of a model; ConfigError: not trusted, or wrong."""
    if policy.model.family is not None and is_shared(policy.model.family):
        return  # by the command that calls this one, in the folders of its run
    config = Config(policy=policy)
    untrusted = [] if is_trusted else find_untrusted_values(config, str(config_file), overrides, [FAMILY])
    if problems := untrusted or adopt_families(config, run_dir=config_file.parent):
        raise ConfigError(problems)


def _read_policy(config_file: Path, family: str | None) -> tuple[PolicyConfig, Head]:
    """Read the settings of a run's policy, and find its head.

    `family` replaces the recorded one.
    """
    try:
        config = read_config_file(config_file)
        policy = config["policy"]
        # An export needs no other keys, and they may be those of another version of megatron_grpo.
        names = ("lora", "quantization", "train_vision_tower")
        optional = {name: policy[name] for name in names if name in policy}
        model = {"path": policy["model"]["path"], "family": family or policy["model"].get("family")}
        needed = {"model": model, "precision": policy["precision"], **optional}
        algorithm = find_algorithm(choose_imported(config.get("algorithm")))
        return TypeAdapter(PolicyConfig).validate_python(needed), POLICY_HEADS[algorithm.head]
    except FileNotFoundError:
        raise ValueError(f"{config_file} does not exist; a checkpoint has to stay in its run directory") from None
    except (KeyError, TypeError):
        text = "policy.model.path or precision is missing"
    except ValidationError as error:
        first = error.errors()[0]
        text = f"{'.'.join(('policy', *map(str, first['loc'])))}={to_text(first['input'])}: {first['msg']}"
    raise ValueError(f"{config_file} is not the configuration of a run: {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
