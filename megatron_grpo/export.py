"""Turns a checkpoint into a Hugging Face folder: python -m megatron_grpo.export checkpoint=… output=…"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_grpo.composition.help import version
from megatron_grpo.config.errors import RunError
from megatron_grpo.models.families import shape_of_folder
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import model_folder
from megatron_grpo.run.checkpoint_files import verify
from megatron_grpo.run.directory import CONFIG_FILE, POLICY_FOLDER, read_config_file
from megatron_grpo.run.manifest import MANIFEST_FILE

USAGE = """\
python -m megatron_grpo.export checkpoint=PATH output=PATH

  checkpoint  folder of one checkpoint: RUN_DIR/checkpoints/step_N
  output      folder to write, in Hugging Face format; must not exist yet
"""
MISTAKE = 2
"""Exit code of a command line that cannot be run."""
_GATHER_BYTES = 2**30
_ARGUMENTS = ("checkpoint", "output")


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What to export, from a command line that was checked."""

    weights: Path
    """Folder of Megatron's distributed checkpoint."""
    source: Path
    """Folder of the model that the run started from, in the hub's cache perhaps: config.json, tokenizer."""
    precision: Literal["float32", "bfloat16"]
    shape: ModelShape
    output: Path


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    if "--version" in arguments:
        print(f"megatron_grpo {version()}")
        return 0
    try:
        plan = plan_export(arguments)
        export(plan)
    except (ValueError, RunError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"wrote {plan.output}")
    return 0


def plan_export(arguments: Sequence[str]) -> ExportPlan:
    """Check a command line before anything large is imported.

    Raises:
        ValueError: what is wrong with it.
        RunError: the checkpoint is incomplete or damaged, or the run started from a hub model whose files are not here
            and cannot be downloaded.
        OSError: a file of the checkpoint is there and cannot be read.
    """
    checkpoint, output = _read_arguments(arguments)
    weights = checkpoint / POLICY_FOLDER
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={checkpoint} does not exist; give a folder RUN_DIR/checkpoints/step_N")
    if not (checkpoint / MANIFEST_FILE).exists() and not weights.exists():
        raise ValueError(f"checkpoint={checkpoint} is not a checkpoint; give a folder RUN_DIR/checkpoints/step_N")
    _require_writable(output)
    source, precision = _trained_model(checkpoint.resolve().parent.parent / CONFIG_FILE)
    folder = model_folder(source)
    shape = shape_of_folder(folder)
    remark = verify(checkpoint)  # last: of a large checkpoint it takes a while
    if remark:
        print(f"export: {remark}", file=sys.stderr)
    return ExportPlan(weights, folder, precision, shape, output)


def export(plan: ExportPlan) -> None:
    """Load the whole model in this process and write it; nothing is left at the output unless it is complete.

    Raises:
        RunError: the checkpoint cannot be loaded into the model, or the output cannot be written.
        ValueError: the model's folder cannot be read, or the output has come into being meanwhile.
    """
    # Imported here so that a mistake on the command line is answered at once.
    from megatron.core import dist_checkpointing
    from safetensors import SafetensorError
    from torch.distributed import HashStore

    from megatron_grpo.config.schema import ParallelConfig
    from megatron_grpo.models.hf_folder import write_hf_folder
    from megatron_grpo.models.hf_weights import iter_hf_tensors
    from megatron_grpo.policy.modeling.build import build_model
    from megatron_grpo.policy.rank.checkpoint import set_weights, sharded_weights
    from megatron_grpo.policy.rank.checkpoint_errors import errors_told
    from megatron_grpo.policy.rank.parallel import destroy_parallel, initialize_parallel

    parallel = ParallelConfig()
    initialize_parallel(parallel, rank=0, world_size=1, store=HashStore(), seed=0, timeout_s=600)
    try:
        chunks = build_model(plan.shape, parallel, precision=plan.precision)
        with errors_told(f"{plan.weights} cannot be loaded as {plan.source}"):
            metadata = dist_checkpointing.load_content_metadata(str(plan.weights))
            state = dist_checkpointing.load({"model": sharded_weights(chunks, metadata)}, str(plan.weights))
            set_weights(chunks, state["model"])
        tensors = (
            (name, tensor) for name, tensor in iter_hf_tensors(chunks, plan.shape, _GATHER_BYTES) if tensor is not None
        )
        try:
            write_hf_folder(tensors, plan.source, plan.output)
        except (OSError, SafetensorError) as error:
            raise RunError(f"output={plan.output} cannot be written: {error}") from None
    finally:
        destroy_parallel()


def _trained_model(config_file: Path) -> tuple[str, Literal["float32", "bfloat16"]]:
    """Path or name of the model that a run started from, and its precision.

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
    return source, precision


def _require_writable(output: Path) -> None:
    """Make a folder in place of the output and take it away again, with the parents that it needed.

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


def _read_arguments(arguments: Sequence[str]) -> tuple[Path, Path]:
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
    for name in _ARGUMENTS:
        if not values.get(name):
            raise ValueError(f"{name}=PATH is missing\n{USAGE}".rstrip())
        if "\0" in values[name]:
            raise ValueError(f"{name} has a NUL character, which no name has")
    checkpoint, output = (Path(os.path.expanduser(values[name])) for name in _ARGUMENTS)
    return checkpoint, output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
