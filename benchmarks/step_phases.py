"""Times the phases of a GRPO step; prints JSON.

    python benchmarks/step_phases.py [--steps 20] [override ...]

Runs the quickstart (any override of the train command may be added) for a few steps and reports the median seconds of
each phase. The reference, in the same run and on the same batches, is the optimizer step alone in plain transformers
and torch, in one process with all the machine's cores: `train_ratio` is our training phase (all ranks, Ray included)
over it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from header import header

from megatron_grpo.cluster.machines import prepare_ray_environment

prepare_ray_environment()  # before anything imports Ray

import torch  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from megatron_grpo.algorithms.grpo import grpo_step, setup  # noqa: E402
from megatron_grpo.batch.rollout_files import locate_rollouts_file, read_recorded_rollouts  # noqa: E402
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, require_field  # noqa: E402
from megatron_grpo.batch.trajectory import Trajectory  # noqa: E402
from megatron_grpo.models.source import fetch_model_folder  # noqa: E402
from megatron_grpo.observability.summary import WORK_PHASES  # noqa: E402
from megatron_grpo.preflight.load import load_config  # noqa: E402
from megatron_grpo.rollouts.partitions import concatenate_trajectories  # noqa: E402

WARM_UP_STEPS = 3


class PlainTorch:
    """A policy-gradient step on the run's samples without Megatron, Ray or pipeline: one padded batch, AdamW."""

    def __init__(self, folder: str, lr: float, temperature: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.temperature = temperature

    def step(self, batch: TokenBatch) -> float:
        """Seconds of one optimizer step."""
        began = time.perf_counter()
        entries = (batch.fields.token_ids, batch.fields.loss_mask, batch.fields.advantages)
        rows = [pad_sequence(require_field(entry).split(batch.lengths), batch_first=True) for entry in entries]
        ids, mask, advantages = rows[0].long(), rows[1][:, 1:], rows[2][:, 1:]
        logits = self.model(ids).logits[:, :-1] / self.temperature
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * advantages * mask).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - began


def as_one_batch(trajectories: list[Trajectory]) -> TokenBatch:
    """The tokens of a step in this process; what stands for the advantages, here rewards, does not change the time."""
    arrays = {name: torch.from_numpy(array) for name, array in concatenate_trajectories(trajectories).items()}
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    rewards = torch.tensor([trajectory.reward or 0.0 for trajectory in trajectories]).repeat_interleave(
        torch.tensor(lengths)
    )
    mask = arrays["sampled"].float()
    return TokenBatch(lengths, TokenFields(token_ids=arrays["token_ids"], loss_mask=mask, advantages=rewards * mask))


def written_trajectories(run_dir: Path, step: int) -> list[Trajectory]:
    """The rollouts of a step, as the run wrote them down."""
    _, groups = read_recorded_rollouts(locate_rollouts_file(run_dir, step))
    return [trajectory for group in groups for trajectory in group]


def measure(steps: int, overrides: Sequence[str]) -> dict[str, object]:
    phases: dict[str, list[float]] = defaultdict(list)
    plain_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ["+exp=quickstart", f"run_dir={folder}/run", "logger.progress=false", "checkpointing=none", *overrides]
        )
        with setup(config) as run:
            model = str(fetch_model_folder(config.policy.model.path))
            plain = PlainTorch(model, config.policy.optimizer.lr, config.generation.temperature or 1.0)
            prompts = [next(iter(run.loader)) for _ in range(steps + WARM_UP_STEPS)]
            for number, batch_of_prompts in enumerate(prompts):
                report = grpo_step(run, iter([batch_of_prompts]))
                assert report is not None
                run.state["total_steps"] += 1
                run.dumps.finish(number + 1)
                seconds = plain.step(as_one_batch(written_trajectories(run.run_dir, number + 1)))
                if number >= WARM_UP_STEPS:
                    plain_s.append(seconds)
                    for name, value in report.timing.items():
                        phases[name].append(value)
    medians = {name: statistics.median(values) for name, values in phases.items()}
    samples = config.samples_per_step
    totals = phases["total"]
    # Of each step, not of the medians: those of the phases need not be of one step.
    overhead = [
        1 - sum(phases[name][step] for name in WORK_PHASES if name in phases) / totals[step] for step in range(steps)
    ]
    return {
        **header("step_phases"),
        "overrides": list(overrides),
        "steps": steps,
        "samples_per_step": samples,
        "median_s": medians,
        "samples_per_s": samples / medians["total"],
        "overhead_fraction": statistics.median(overhead),
        "plain_torch_train_s": statistics.median(plain_s),
        "train_ratio": medians["train"] / statistics.median(plain_s),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr):  # what a run says of itself
        measured = measure(arguments.steps, arguments.overrides)
    print(json.dumps(measured, indent=2))
