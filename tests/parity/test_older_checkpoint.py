"""A checkpoint of an earlier version of Megatron-Core: resumed in its own and in other layouts, and exported."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megatron_grpo.export import main
from tests.parity.on_rank import expect_close
from tests.parity.policy_training import make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge, whole_tensors
from tests.support.older_checkpoint import make_older_run
from tests.support.tiny_models import TinyModel

LAYOUTS = [Layout(pipeline=2), Layout(tensor=2, sequence=True), Layout(expert=2, data=2)]


def resume_on_rank(layout: Layout, model: TinyModel, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights that are loaded, and those a step later."""
    engine = make_engine(layout, model)
    engine.checkpoint.load(str(folder))
    loaded = whole_tensors(engine)
    engine.train(*train_arguments(layout))
    return loaded, whole_tensors(engine)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_of_an_earlier_version_is_resumed(layout: Layout, tmp_path: Path) -> None:
    run = make_older_run(tmp_path)
    by_rank = run_on_ranks(layout, resume_on_rank, run.model, run.checkpoint / "megatron")
    loaded, later = (merge([tensors[index] for tensors in by_rank]) for index in (0, 1))
    assert loaded.keys() == run.saved.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in run.saved.items())
    expect_close(later, run.a_step_later)


def test_a_checkpoint_of_an_earlier_version_is_exported(tmp_path: Path) -> None:
    run = make_older_run(tmp_path / "run")
    assert main([f"checkpoint={run.checkpoint}", f"output={tmp_path / 'out'}"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    exported = revert_weight_conversion(model, dict(model.named_parameters()))
    for name, tensor in run.saved.items():
        assert torch.equal(exported[name], tensor), name
