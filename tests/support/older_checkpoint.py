"""A checkpoint that this package wrote with Megatron-Core 0.16.1, from two stages of a tiny mixture after two steps.

Beside it are the weights that were saved, and those of the same ranks one step later.
"""

import tarfile
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.run.checkpoint_files import write_driver_files
from tests.support.tiny_models import TinyModel

ARCHIVE = Path(__file__).parents[1] / "data" / "megatron_0_16.tar.xz"


@dataclass(frozen=True)
class OlderRun:
    """A run directory with the checkpoint; its model has other weights."""

    checkpoint: Path
    model: TinyModel

    @property
    def saved(self) -> dict[str, Tensor]:
        """The weights that were saved, under the names and in the shapes of transformers."""
        return load_file(self.checkpoint.parent / "at_the_save.safetensors")

    @property
    def a_step_later(self) -> dict[str, Tensor]:
        """The weights after one more step."""
        return load_file(self.checkpoint.parent / "a_step_later.safetensors")


def make_older_run(run_dir: Path) -> OlderRun:
    """Unpack the checkpoint into a run directory."""
    checkpoint, model = run_dir / "checkpoints" / "step_2", run_dir / "model"
    checkpoint.mkdir(parents=True)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(checkpoint, filter="data")
    for file in checkpoint.glob("*.safetensors"):
        file.rename(checkpoint.parent / file.name)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint)).save_pretrained(model)
    (checkpoint / "config.json").unlink()
    OmegaConf.save(
        OmegaConf.create({"policy": {"model": {"path": str(model)}, "precision": "float32"}}), run_dir / "config.yaml"
    )
    write_driver_files(
        checkpoint, 2, {"save_state": {"total_steps": 2}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    return OlderRun(checkpoint, TinyModel("qwen3_moe", model))
