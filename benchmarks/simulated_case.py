"""A case of the simulation: the cluster, the way of sampling and the fault, and the configuration of its run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from data_plane_parts import TASK
from simulated_parts import Times

PROMPT_TOKENS = 128
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
}
"""config.json of a dense model of 32 billion parameters (the sizes of Qwen3-32B), which nobody loads."""

MODES = ("colocated", "separate", "async", "oversampling")
FAULTS = ("none", "slow_engine", "slow_rank", "lost_engine")
SLOW = 0.3
"""Share of the usual speed of a slow engine or rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is simulated."""

    gpus: int
    mode: str
    """colocated: policy and engines share all GPUs and take turns. separate: each has half of the GPUs, in turns.
    async: each has half, and samples are drawn a step ahead. oversampling: as async, with more prompts under way."""
    fault: str
    """none; slow_engine, slow_rank: one of them has `SLOW` of the usual speed; lost_engine: one ends in a step."""
    steps: int
    """Steps that are measured, after one to warm up."""
    samples_per_gpu: int
    group: int
    """Samples of a prompt."""
    minibatches: int
    """Optimizer steps of a step."""
    tensor: int
    pipeline: int
    engine_tensor: int
    longest: int
    """Most tokens of a response."""
    hosts: int
    """Processes that share all logical actors."""
    lost_after_s: float
    """Simulated seconds from the beginning of a step to the end of an engine that is lost."""
    times: Times
    profile: str | None = None
    """File for cProfile's figures of the driver's main thread in the measured steps."""

    @property
    def training_gpus(self) -> int:
        """Ranks of the policy."""
        return self.gpus if self.mode == "colocated" else self.gpus // 2

    @property
    def engines(self) -> int:
        """Number of engines."""
        sampling = self.gpus if self.mode == "colocated" else self.gpus - self.training_gpus
        return sampling // self.engine_tensor

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.gpus * self.samples_per_gpu

    def overrides(self, folder: Path) -> list[str]:
        """The configuration of the run, whose files are in `folder`."""
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        sequence = PROMPT_TOKENS + self.longest
        ahead = {
            "async": ["grpo.async_grpo.max_trajectory_age_steps=1"],
            "oversampling": [
                "grpo.async_grpo.max_trajectory_age_steps=2",
                "grpo.async_grpo.oversampling_factor=1.5",
            ],
        }.get(self.mode)
        asynchronous = [
            "grpo.async_grpo.enabled=true",
            "loss_fn.use_importance_sampling_correction=true",
            "loss_fn.truncated_importance_sampling_type=tis",
            "loss_fn.truncated_importance_sampling_ratio=2",
        ]
        return [
            f"run_dir={folder / 'run'}",
            f"policy.model.path={model}",
            f"policy.parallel.tensor={self.tensor}",
            f"policy.parallel.pipeline={self.pipeline}",
            f"policy.parallel.data={self.training_gpus // (self.tensor * self.pipeline)}",
            f"policy.max_total_sequence_length={sequence}",
            f"policy.microbatch_tokens={2 * sequence}",
            f"policy.train_global_batch_samples={self.samples // self.minibatches}",
            f"generation.placement={'colocated' if self.mode == 'colocated' else 'separate'}",
            f"generation.parallel.tensor={self.engine_tensor}",
            f"generation.parallel.data={self.engines}",
            f"generation.max_new_tokens={self.longest}",
            f"generation.engine_restarts={0 if self.mode == 'colocated' else 1}",
            f"data.max_input_seq_length={PROMPT_TOKENS}",
            "data.train_path=made_up.jsonl",
            "data.apply_chat_template=false",
            f"env.{TASK}.type=reward_functions",
            f"env.{TASK}.reward_funcs=[simulated_parts.right_answer]",
            f"grpo.num_prompts_per_step={self.samples // self.group}",
            f"grpo.num_generations_per_prompt={self.group}",
            f"grpo.max_num_steps={1 + self.steps}",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "loss_fn.reference_policy_kl_penalty=0",
            "checkpointing.enabled=false",
            "logger.progress=false",
            *(asynchronous if ahead else []),
            *(ahead or []),
        ]
