"""What `gpu_check.py` goes through on a machine with GPUs: one row a check, in the order of what fails first.

A check that needs less comes before one that needs more: the device, kernels, losses, ranks, Transformer Engine,
engines, refits, whole runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

TRITON = ("triton",)
RANKS = ("megatron.core", "pydantic", "hydra", "omegaconf", "antlr4", "xxhash", "transformers", "safetensors")
"""Modules that a rank of a model is made of, beside torch."""
LAYERS = (*RANKS, "transformer_engine.pytorch", "transformer_engine_torch")
"""Looking for the last but one imports the package around it, which loads the last, its extension for torch."""
ENGINES = (*RANKS, "ray", "vllm")
CUDA_ONLY = ("transformer_engine.pytorch", "transformer_engine_torch", "fla")
"""Modules that a dry run does without."""
PARTS = ("torch_only", "image")
"""`torch_only`: for a machine with torch and Triton, and as much of RANKS as was brought there; `image`: the rest."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check: its command, its needs, its deadline, and the command that stands in for it without a GPU."""

    name: str
    part: Literal["torch_only", "image"]
    run: str
    """Arguments of pytest, a file of tests first; or a script of benchmarks/ that prints a JSON, and its options."""
    needs: tuple[str, ...] = ()
    """Modules that have to be importable."""
    gpus: int = 1
    """Fewest GPUs; tests that need more than the machine has are skipped one by one."""
    deadline_s: float = 300.0
    dry: Literal["cpu", "interpreter", "fake tensors", ""] = ""
    """What stands in for a GPU in a dry run: the CPU, there with kernels in Triton's interpreter, or the dry platform's
    tensors without numbers; "": nothing."""
    dry_run: str = ""
    """`run` of a dry run, if it differs."""


_POLICY = "tests/gpu/torch_only/test_policy_on_gpu.py"
_ENGINE = "tests/gpu/image/test_transformer_engine_on_gpu.py"
_REFIT = "tests/gpu/image/test_refit_on_gpu.py"
_COLOCATED = "tests/gpu/image/test_colocated_on_gpu.py"
_BITS = f"{_REFIT}::test_engines_on_gpus_of_their_own"
_LOST = "tests/gpu/image/test_lost_engines_on_gpu.py"
_RUN = "tests/gpu/image/test_run_on_gpus.py"
_SMALL_HEAD = "benchmarks/logprob.py --tokens=512 --vocab=5000 --hidden=64"


def _torch(name: str, run: str, needs: tuple[str, ...] = (), **fields: Any) -> Check:
    return Check(name=name, part="torch_only", run=run, needs=needs, **fields)


def _image(name: str, run: str, needs: tuple[str, ...] = ENGINES, **fields: Any) -> Check:
    return Check(name=name, part="image", run=run, needs=needs, **fields)


CHECKS = (
    _torch("device", "tests/gpu/torch_only/test_device_on_gpu.py", deadline_s=120),
    _torch("estimates", "tests/gpu/torch_only/test_estimates_on_gpu.py", ("pydantic",), deadline_s=120, dry="cpu"),
    _torch("kernels", "tests/gpu/torch_only/test_kernels_on_gpu.py", TRITON, dry="interpreter"),
    _torch(
        "logprob kernels, hidden 1024",
        "benchmarks/logprob.py --dtype=bfloat16",
        TRITON,
        dry="cpu",
        dry_run=_SMALL_HEAD,
    ),
    _torch(
        "logprob kernels, hidden 4096",
        "benchmarks/logprob.py --dtype=bfloat16 --hidden=4096",
        TRITON,
        dry="cpu",
        dry_run=f"{_SMALL_HEAD} --dtype=bfloat16",
    ),
    _torch(
        "FP8 blocks",
        "benchmarks/fp8_blocks.py",
        TRITON,
        dry="cpu",
        dry_run="benchmarks/fp8_blocks.py --rows=300 --columns=300",
    ),
    _torch("shared memory", "tests/gpu/torch_only/test_ipc_on_gpu.py", dry="cpu"),
    _torch("NCCL", "tests/gpu/torch_only/test_nccl_on_gpu.py", gpus=2, dry="cpu"),
    _torch("losses", "tests/gpu/torch_only/test_losses_on_gpu.py", ("pydantic",), deadline_s=120, dry="cpu"),
    _torch("divergences", "tests/gpu/torch_only/test_divergences_on_gpu.py", deadline_s=120, dry="cpu"),
    _torch(
        "gradients",
        f"{_POLICY} -k every_family",
        RANKS,
        deadline_s=540,
        dry="interpreter",
        dry_run=f"{_POLICY} -k 'every_family and float32 and packed'",
    ),
    _torch("families", "tests/gpu/torch_only/test_families_on_gpu.py", RANKS, deadline_s=540, dry="cpu"),
    _torch("delta nets", "tests/gpu/torch_only/test_delta_nets_on_gpu.py", (*RANKS, "fla"), dry="cpu"),
    _torch("optimizer", f"{_POLICY} -k optimizer_steps", RANKS, dry="cpu"),
    _torch("Muon", f"{_POLICY} -k muon", (*RANKS, "emerging_optimizers"), dry="cpu"),
    _torch(
        "log-probabilities, layouts",
        f"{_POLICY} -k test_logprobs",
        RANKS,
        deadline_s=540,
        dry="cpu",
        dry_run=f"{_POLICY} -k 'test_logprobs and float32'",
    ),
    _torch("offload and waits", "tests/gpu/torch_only/test_device_memory_on_gpu.py", RANKS),
    _torch("deterministic", f"{_POLICY} -k deterministic", RANKS, dry="cpu"),
    _torch("grouped products", f"{_POLICY} -k grouped", RANKS, dry="cpu"),
    _torch(
        "gradients, layouts",
        f"{_POLICY} -k 'test_gradients[ or interleaved'",
        RANKS,
        gpus=2,
        deadline_s=540,
        dry="cpu",
        dry_run=f"{_POLICY} -k '(test_gradients[ or interleaved) and float32'",
    ),
    _torch("experts, layouts", f"{_POLICY} -k experts_are", RANKS, gpus=2, deadline_s=540, dry="cpu"),
    _image("packed attention", f"{_ENGINE} -k packed", LAYERS, dry="fake tensors"),
    _image("FP8 recipes", f"{_ENGINE} -k 'rounds or continues'", LAYERS, deadline_s=540, dry="fake tensors"),
    _image("fused gradients", f"{_ENGINE} -k fused", (*LAYERS, "fused_weight_gradient_mlp_cuda")),
    _image("experts in FP8", f"{_ENGINE} -k experts", LAYERS, dry="fake tensors"),
    _image("advantages", "tests/gpu/image/test_advantages_on_gpu.py", (*RANKS, "ray"), deadline_s=120),
    _image(
        "refit, faults without models",
        "tests/gpu/image/test_refit_faults_on_gpu.py",
        (*RANKS, "ray"),
        gpus=4,
        deadline_s=540,
        dry="cpu",
        dry_run="tests/gpu/image/test_refit_faults_on_gpu.py -k 'one_dead and middle'",
    ),
    _image("vLLM, long batches", "tests/gpu/image/test_vllm_on_gpu.py", ("vllm",), deadline_s=420, dry="cpu"),
    _image("refit through memory", f"{_REFIT} -k the_gpu_of_a_rank", deadline_s=540, dry="cpu"),
    _image("refit over NCCL", f"{_REFIT} -k one_to_one", gpus=2, deadline_s=540, dry="cpu"),
    _image("refit bandwidth", f"{_REFIT} -k bandwidth", deadline_s=540, dry="cpu"),
    _image("refit, FP8 engine", f"{_REFIT} -k in_fp8", deadline_s=540),
    _image("adapters alone", "tests/gpu/image/test_adapters_on_gpu.py", deadline_s=540),
    _image("colocated", f"{_COLOCATED} -k one_gpu_is", deadline_s=540, dry="cpu"),
    _image("colocated, PPO", f"{_COLOCATED} -k value_model", deadline_s=540),
    _image("colocated, asynchronous", f"{_COLOCATED} -k responses_in_flight", deadline_s=540),
    _image("colocated, replayed experts", f"{_COLOCATED} -k replays", deadline_s=540),
    _image("quickstart", f"{_RUN} -k 'one and one'", gpus=2, deadline_s=540, dry="cpu"),
    _image("quickstart, layouts", f"{_RUN} -k 'stages or replicas'", gpus=4, deadline_s=540),
    _image("refit, layouts", f"{_BITS}[tp2_to_pp2] {_BITS}[dp2_to_two_engines]", gpus=4, deadline_s=540),
    _image("refit, experts", f"{_BITS}[ep2_to_ep2] {_BITS}[latent_tp2_to_pp2]", gpus=4, deadline_s=540),
    _image("refit, killed engines", f"{_LOST} -k kill", gpus=4, deadline_s=540),
    _image("refit, stalled engines", f"{_LOST} -k stall", gpus=4, deadline_s=540),
    _image("refit, damaged messages", f"{_LOST} -k sent_again", gpus=4, deadline_s=540),
)
