"""Two steps with every preset on the processes of one run; argument: the folder, which gets metrics.json."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from megatron_grpo.algorithms.grpo import grpo_step
from megatron_grpo.algorithms.setup import setup
from megatron_grpo.cluster.machines import prepare_ray_environment
from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.data.loader import iterate_batches
from megatron_grpo.losses.loss import make_loss
from megatron_grpo.preflight.load import compose_config

STEPS = 2
ON_RATIOS = ("cispo", "gspo", "sapo", "gmpo", "luspo", "fipo", "kl_cov", "clip_cov")
"""Presets that act on ratios, which only later optimizer steps on the same samples have."""
SHORT = (
    "+exp=quickstart",
    "grpo.num_prompts_per_step=16",
    "grpo.val_at_start=false",
    "policy.parallel.pipeline=1",
    "generation.parallel.pipeline=1",
    "policy.optimizer.warmup_steps=0",
    "policy.optimizer.lr=3e-4",
    "checkpointing=none",
    "logger.rollouts=off",
    "logger.progress=false",
)


def main(folder: Path) -> None:
    presets = list_config_groups()["variant"]
    minibatches = ("policy.train_global_batch_samples=32",)
    configs = {
        name: compose_config([*SHORT, *(minibatches if name in ON_RATIOS else ()), f"+variant={name}"])
        for name in presets
    }
    prepare_ray_environment()
    metrics: dict[str, list[dict[str, float]]] = {}
    # The penalty loads the reference policy, which some presets need.
    with setup(
        compose_config([*SHORT, "loss_fn.reference_policy_kl_penalty=0.01", f"run_dir={folder / 'run'}"])
    ) as run:
        batches = iterate_batches(run.loader, 100)
        for name, config in configs.items():
            of_preset = replace(run, config=config, loss_fn=make_loss(config), batch_cache=[])
            metrics[name] = []
            for _ in range(STEPS):
                report = grpo_step(of_preset, batches)
                assert report is not None
                run.state["total_steps"] += 1  # also the version of the weights
                metrics[name].append(dict(report.metrics))
            print(name, metrics[name][-1]["loss"], flush=True)
    (folder / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
