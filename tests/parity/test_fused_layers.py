"""Models of the form that they have on a GPU compute the same as transformers, and read the same checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.parity.fused_layers import UNFUSED, NormColumnLinear, use_fused_layers
from tests.parity.on_rank import expect_close, load_on_rank, save_on_rank
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank, make_engine
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge
from tests.support.tiny_models import TinyModel, make_tiny_model

SETTINGS = {"megatron": UNFUSED}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    folder = tmp_path_factory.mktemp("fused")
    return [make_tiny_model(name, folder) for name in ("deepseek_v3", "deepseek_v3_compressed", "qwen3_tied")]


def fused_gradients_on_rank(layout: Layout, models: list[TinyModel]) -> list[tuple[dict[str, Tensor], float]]:
    with use_fused_layers():
        engine = make_engine(layout, models[0], **SETTINGS)
        assert any(isinstance(module, NormColumnLinear) for module in engine.chunks[0].modules())
        by_model = gradients_on_rank(layout, models, settings=SETTINGS)
    for gradients, _ in by_model:  # the bias by which experts are chosen has none
        for name in [name for name in gradients if name.endswith("e_score_correction_bias")]:
            del gradients[name]
    return by_model


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=2, sequence=True),
        Layout(context=2),
        pytest.param(Layout(pipeline=2, data=2, expert=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_those_of_transformers(layout: Layout, models: list[TinyModel]) -> None:
    chosen = [model for model in models if layout.expert == 1 or model.shape.experts is not None]
    expect_gradients_of_transformers(run_on_ranks(layout, fused_gradients_on_rank, chosen), chosen, 1e-4)


def save_fused_on_rank(layout: Layout, model: TinyModel, folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    with use_fused_layers():
        return save_on_rank(layout, model, folder, settings)


def load_fused_on_rank(layout: Layout, model: TinyModel, folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    with use_fused_layers():
        return load_on_rank(layout, model, folder, settings)


@pytest.mark.parametrize("is_back", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_of_both_forms_read_each_others_checkpoints(
    is_back: bool, models: list[TinyModel], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    folder, layout = tmp_path / "checkpoint", Layout(tensor=2, sequence=True)
    save, load = (save_fused_on_rank, load_on_rank) if is_back else (save_on_rank, load_fused_on_rank)
    expected = merge(run_on_ranks(layout, save, models[1], folder, SETTINGS))
    actual = merge(run_on_ranks(Layout(), load, models[1], folder, SETTINGS))
    expect_close(actual, expected)
