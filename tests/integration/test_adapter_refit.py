"""Refits that send adapters alone: engines compute what the policy does, and faults in slots are found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from transformers import PretrainedConfig, Qwen3Config

from megatron_grpo.algorithms.placement import Placement, publish
from megatron_grpo.config.schema import LoraConfig, ModelConfig, ParallelConfig, PolicyConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.adapter_names import make_policy_slot, measure_adapters
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.refit_calls import RefitError
from megatron_grpo.weight_sync.refit_checks import Canary, draw_canary
from megatron_grpo.weight_sync.transport import WeightTransport, make_transport
from tests.integration.test_refit import ray_cluster
from tests.integration.vllm_helpers import START_S, VOCAB, engines, gpus, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here

REFIT = RefitConfig(bucket_mib=0.02, timeout_s=120.0, canary_share=1.0, weight_check_period=1, adapters="alone")
LORA = LoraConfig(rank=2, alpha=8.0)


@dataclass
class Case:
    """Layouts of both sides, and how adapters travel."""

    training: ParallelConfig
    generation: dict[str, Any] = field(default_factory=dict)
    mode: str = "reshard"
    precision: str = "float32"
    lora: LoraConfig = field(default_factory=lambda: LORA)
    family: Callable[..., PretrainedConfig] = Qwen3Config
    tolerance: float = 1e-4
    """Of a log-probability."""


CASES = {
    "pp2_to_tp2": Case(ParallelConfig(pipeline=2), {"tensor": 2}),
    "tp2_to_pp2": Case(ParallelConfig(tensor=2, sequence=True), {"pipeline": 2}),
    "two_engines_bfloat16": Case(ParallelConfig(), {"data": 2}, precision="bfloat16", tolerance=0.1),
    "files": Case(ParallelConfig(tensor=2), {"tensor": 2}, mode="files"),
}


@contextmanager
def start_pair(case: Case, folder: Path, **engine_args: Any) -> Iterator[tuple[MegatronPolicy, VllmGeneration]]:
    """A policy with adapters, and engines of its base model with a slot."""
    base = make_model(folder / "base", seed=0, family=case.family)
    config = PolicyConfig(
        model=ModelConfig(path=str(base)),
        parallel=case.training,
        lora=case.lora,
        precision=case.precision,  # type: ignore[arg-type]
        threads=1,
    )
    shape = read_model_shape(base)
    settings = RankSettings(config=config, shape=shape, folder=str(base), decay_steps=1, temperature=0.7)
    policy = MegatronPolicy(settings, actor_options=lambda rank: gpus(1), startup_timeout_s=START_S)
    policy.start()
    slot, layout = make_policy_slot(config, shape), case.generation
    try:
        with engines(base, precision=case.precision, adapter=slot, engine_args=engine_args, **layout) as generation:
            policy.wait_ready()
            yield policy, generation
    finally:
        policy.shutdown()


def connect(pair: tuple[MegatronPolicy, VllmGeneration], folder: Path, **changes: Any) -> WeightTransport:
    config = replace(REFIT, **changes)
    transport = make_transport(*pair, config, folder, Canary(config, draw_canary(7, VOCAB, 32)))
    transport.connect()
    return transport


@pytest.fixture(scope="module")
def pair(
    ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[MegatronPolicy, VllmGeneration]]:
    """A policy and an engine in whose slots tests can plant faults; there are none yet."""
    worker = {"worker_extension_cls": "tests.integration.faulty_slots.FaultySlots"}
    with start_pair(CASES["pp2_to_tp2"], tmp_path_factory.mktemp("pair"), **worker) as pair:
        yield pair


def test_engines_compute_what_the_policy_does_after_adapters_alone(
    pair: tuple[MegatronPolicy, VllmGeneration], tmp_path: Path
) -> None:
    check_adapters(pair, CASES["pp2_to_tp2"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES][1:])
def test_engines_of_any_layout_compute_what_the_policy_does(name: str, tmp_path: Path) -> None:
    with start_pair(CASES[name], tmp_path) as pair:
        check_adapters(pair, CASES[name], tmp_path)


def check_adapters(pair: tuple[MegatronPolicy, VllmGeneration], case: Case, folder: Path) -> None:
    shape = pair[0].settings.shape
    transport = connect(pair, folder, mode=case.mode)
    for version, seed in ((1, None), (2, 3), (3, 4)):
        if seed is not None:
            ray.get(pair[0].submit(train_adapters, seed))
        report = transport.admit(transport.publish(version))
        assert 0 <= report.checks["canary_logprob_error"] < case.tolerance
        assert report.checks["weight_check_s"] > 0, "the base model is compared"
        # Each engine rank gets the adapters of its stage, and no weights.
        adapters = sum(rows * columns for rows, columns in measure_adapters(shape, case.lora).values())
        weights = sum(torch.Size(sizes).numel() for sizes in measure_tensors(shape).values())
        width = 4 if case.precision == "float32" else 2
        copies = case.generation.get("tensor", 1) * case.generation.get("data", 1) if case.mode != "files" else 1
        assert adapters * width <= report.bytes_sent / copies < min(1.5 * adapters, weights) * width
    transport.close()


def test_a_slot_that_is_not_filled_is_never_served(pair: tuple[MegatronPolicy, VllmGeneration], tmp_path: Path) -> None:
    transport = connect(pair, tmp_path)
    for version, fault, text in (
        (11, "none", None),
        (12, "unchanged", "vLLM's model does not hold the adapter of model.layers.0.self_attn.qkv_proj"),
        (13, "unchecked", "generation engine 0 must not serve: with version 13 of the weights"),
        (14, "unused", "generation engine 0 must not serve: with version 14 of the weights"),
        (15, "none", None),
    ):
        plant = SimpleNamespace(__name__="plant")  # FaultySlots.plant, whose module would import vLLM here
        ray.get(pair[1].engines[0]._call_workers.remote(plant, fault))
        ray.get(pair[0].submit(train_adapters, version))
        if text is None:
            publish(transport, Placement(), version, StepTimer())
            continue
        with pytest.raises(RefitError) as error:
            publish(transport, Placement(), version, StepTimer())
        assert text in str(error.value)


@torch.no_grad()
def train_adapters(rank: Any, seed: int) -> None:
    """Move A and B as training would, alike on all ranks."""
    for chunk in rank.chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(("lora_a", "lora_b")):
                size = parameter.numel()
                values = torch.randn(size, generator=torch.Generator().manual_seed(seed * 1000 + size)) * 0.05
                parameter.copy_(values.view_as(parameter))
