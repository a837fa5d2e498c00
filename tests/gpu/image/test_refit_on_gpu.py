"""Weights from ranks into engines over NCCL and through memory of one GPU: the same bits as from a folder."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen3Config

from megatron_grpo.config.schema import ParallelConfig, RefitConfig
from megatron_grpo.weight_sync.refit_checks import BOUNDS, Canary, draw_canary
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration import test_reshard
from tests.integration.test_refit import assert_serves, ray_cluster, start_policy
from tests.integration.test_reshard import REFIT, Case, after, answers
from tests.integration.vllm_helpers import ON_GPUS, VOCAB, Oracle, engines, make_config, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here
LAYOUTS = {"one_to_one": Case("dense", ParallelConfig(), {}), **test_reshard.CASES, **test_reshard.RARE}
ENGINE_RANKS = ("tensor", "pipeline", "data")


def require_gpus(count: int) -> None:
    """Skip the test on a machine with fewer GPUs; a dry run has none."""
    if 0 < torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, and this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_engines_on_gpus_of_their_own(name: str, tmp_path: Path) -> None:
    case = LAYOUTS[name]
    require_gpus(case.training.world_size + math.prod(case.generation.get(key, 1) for key in ENGINE_RANKS))
    test_reshard.test_the_engine_holds_the_same_bits_as_after_a_broadcast_and_as_from_a_folder(case, tmp_path)


def test_an_engine_on_the_gpu_of_a_rank(tmp_path: Path) -> None:
    """Also when a message is damaged on the way."""
    base, trained = make_model(tmp_path / "base", seed=0), make_model(tmp_path / "trained", seed=1)
    with engines(trained) as generation:
        loaded = answers(generation)
    policy = start_policy(trained, ParallelConfig())
    policy.wait_ready()
    try:
        with engines(base, colocated=True) as generation:
            assert not np.array_equal(answers(generation), loaded), "another model"
            assert np.array_equal(after("reshard", policy, generation, version=1), loaded)
            assert_serves(generation, Oracle(trained), version=1)
            transport = make_transport(policy, generation, REFIT, Path())
            transport.connect()
            ray.get(policy.submit(_flip_a_bit))
            assert transport.publish(2).retries == 1
            assert np.array_equal(answers(generation), loaded)
    finally:
        policy.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["dense", "experts"])
def test_an_engine_in_fp8(family: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """With the kernels that its GPU takes. vLLM's own rounding of a folder is the oracle, and a canary admits."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")

    def sized(**sizes: Any) -> Any:
        return make_config(family, {**test_reshard.BLOCKED, "num_experts": 8}, **sizes)

    base = make_model(tmp_path / "base", seed=0, family=sized)
    trained = test_reshard._in_fp8_exactly(make_model(tmp_path / "trained", seed=1, family=sized))
    worker = "tests.support.kernel_worker.KernelWorker"
    in_fp8: dict[str, Any] = {"colocated": True, "precision": "bfloat16"}
    in_fp8["engine_args"] = {"quantization": "fp8_per_block", "worker_extension_cls": worker}
    with engines(trained, **in_fp8) as generation:
        loaded = answers(generation)
    policy = start_policy(trained, ParallelConfig())
    policy.wait_ready()
    try:
        with engines(base, **in_fp8) as generation:
            kernels = ray.get(generation.engines[0]._call_workers.remote(SimpleNamespace(__name__="name_kernels")))
            record_property("kernels", kernels[0])
            assert not np.allclose(answers(generation), loaded, atol=0.05), "another model"
            for version, rounded in enumerate((True, False), start=1):
                config = replace(REFIT, fp8_blocks=rounded)
                canary = Canary(config, draw_canary(7, VOCAB, 32), BOUNDS["8 bits"])
                transport = make_transport(policy, generation, config, Path(), canary)
                transport.connect()
                report = transport.admit(transport.publish(version))
                difference = float(np.abs(answers(generation) - loaded).max())
                record_property(f"differences, fp8_blocks={rounded}", (difference, report.checks))
                assert difference < 0.05, "as if vLLM had read and rounded the folder"
    finally:
        policy.shutdown()


def large(**sizes: Any) -> Qwen3Config:
    """300 million parameters in eight layers; in a dry run the small model."""
    larger = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8}
    return Qwen3Config(**sizes | (larger if ON_GPUS else {}))


@pytest.mark.parametrize("colocated", [True, False], ids=["through memory", "over the network"])
def test_bandwidth(colocated: bool, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    require_gpus(1 if colocated else 2)
    path = make_model(tmp_path / "model", seed=0, family=large)
    policy = start_policy(path, ParallelConfig())
    policy.wait_ready()
    try:
        with engines(path, colocated=colocated) as generation:
            transport = make_transport(policy, generation, RefitConfig(timeout_s=120.0), Path())
            transport.connect()
            reports = [transport.publish(version) for version in (1, 2, 3)]
        record_property("gigabytes", reports[-1].bytes_sent / 1e9)
        record_property("seconds", [report.seconds for report in reports])
        assert all(report.bytes_sent > 0 and report.retries == 0 for report in reports)
    finally:
        policy.shutdown()


def _flip_a_bit(rank: Any) -> None:
    """On the rank: flip one bit of its first message after it is sealed, once."""
    links = rank.weight_sender.links
    begin = links.begin

    def flipped(number: int) -> Any:
        links.view_buffer(number)[3] ^= 1
        links.begin = begin  # type: ignore[method-assign]
        return begin(number)

    links.begin = flipped  # type: ignore[method-assign]
