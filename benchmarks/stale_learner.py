"""Runs of the learner on samples of older weights, in one process: transformers computes policy and engine.

Loss, advantages, importance weights and masks are those of a run, and so are optimizer settings and the model. The
engine has the weights of `lag` steps before, in its own precision: what an asynchronous run trains on, at an age that
is exact. Rollout workers, ranks and refits are left out, which a comparison of methods does not need.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.config.schema import Config, GRPOConfig
from megatron_grpo.losses.advantages import make_estimator, response_advantages
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.source import EOS, VOCABULARY
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.lessons import TRAIN_FILE, VAL_FILE
from megatron_grpo.prepare.models import prepare
from megatron_grpo.verification.hf_model import load_eager_model

_EOS = VOCABULARY[EOS]


@dataclass(frozen=True, kw_only=True)
class LaggedRun:
    """A run of a method."""

    overrides: tuple[str, ...]
    lag: int
    """Steps of the policy that the engine's weights lack, once so many have passed."""
    seed: int
    engine_dtype: str


@dataclass(slots=True)
class Samples:
    """Responses to prompts of one length: [rows, longest] each, meaningless behind a response's end."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    """[rows], int64: sampled tokens, with the one that ends a response."""


@torch.no_grad()
def sample(model: Any, prompts: Tensor, config: Config, draw: torch.Generator | None) -> Samples:
    """Sample a response to each prompt, [rows, prompt tokens]; greedily without `draw`."""
    inputs, cache, columns, logprobs = prompts, None, [], []
    longest = config.generation.max_new_tokens
    lengths = torch.full((len(prompts),), longest)
    for position in range(longest):
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        distribution = (output.logits[:, -1].float() / config.generation.temperature).log_softmax(-1)
        chosen = distribution.argmax(-1) if draw is None else distribution.exp().multinomial(1, generator=draw)[:, 0]
        inputs = chosen[:, None]
        columns.append(chosen)
        logprobs.append(distribution.gather(1, inputs)[:, 0])
        lengths = torch.where((chosen == _EOS) & (lengths > position + 1), position + 1, lengths)
        if int(lengths.max()) <= position + 1:
            break
    return Samples(torch.stack(columns, dim=1), torch.stack(logprobs, dim=1), lengths)


@dataclass(frozen=True)
class Problems:
    """Sums: prompts, [rows, tokens], and right responses, [rows, tokens]."""

    prompts: Tensor
    answers: Tensor

    @staticmethod
    def read(file: Path) -> Problems:
        """Read prompts and answers of a file of rows; all have one length."""
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        prompts, answers = (
            [[VOCABULARY[letter] for letter in row[key]] for row in rows] for key in ("prompt", "answer")
        )
        return Problems(torch.tensor(prompts), torch.tensor([[*answer, _EOS] for answer in answers]))

    def select(self, indices: Tensor) -> Problems:
        """Select the problems with these indices."""
        return Problems(self.prompts[indices], self.answers[indices])

    def score(self, samples: Samples) -> Tensor:
        """Score responses, [rows], float32: 1 for exactly the answer, else 0."""
        width = self.answers.shape[1]
        if samples.tokens.shape[1] < width:
            return torch.zeros(len(self.prompts))
        is_right = (samples.tokens[:, :width] == self.answers).all(dim=1)
        return (is_right & (samples.lengths == width)).float()


class Learner:
    """The policy of a run, with its optimizer."""

    def __init__(self, config: Config, folder: Path) -> None:
        assert isinstance(config.loop, GRPOConfig)
        self.config, self.loop, self.loss_fn = config, config.loop, ClippedPGLossFn(config.loss_fn)
        self.model, self.estimator = load_eager_model(folder, torch.float32), make_estimator(config.loop)
        settings = config.policy.optimizer
        assert settings.decay_style == "linear"
        betas, steps = (settings.adam_beta1, settings.adam_beta2), config.decay_steps
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), settings.lr, betas, settings.adam_eps, settings.weight_decay
        )
        least = settings.min_lr / settings.lr

        def find_factor(step: int) -> float:
            remaining = (steps - step) / max(1, steps - settings.warmup_steps)
            return min((step + 1) / max(1, settings.warmup_steps), least + (1 - least) * max(0.0, remaining))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, find_factor)

    def copy_weights(self) -> dict[str, Tensor]:
        """Copy the weights by name."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def learn(self, prompts: Tensor, samples: Samples, rewards: Tensor) -> list[float]:
        """Train on a step's responses; the share of tokens that corrections changed, by optimizer step."""
        tokens = torch.cat([prompts, samples.tokens], dim=1)
        fields = self._lay_out(tokens, prompts.shape[1], samples, rewards)
        with torch.no_grad():
            fields.prev_logprobs = self._compute_logprobs(tokens)
        size = self.config.policy.train_global_batch_samples or len(tokens)
        changed = []
        for begin in range(0, len(tokens), size):
            rows = slice(begin, begin + size)
            part = TokenFields(**{name: tensor[rows] for name, tensor in fields.as_dict().items()})
            mask = require_field(part.loss_mask)
            rollouts = float(len(mask))
            counts = GlobalCounts(tokens=float(mask.sum()), sequences=rollouts, all_sequences=rollouts)
            loss, metrics = self.loss_fn(self._compute_logprobs(tokens[rows]), part, counts)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.policy.max_grad_norm)
            self.optimizer.step()
            self.schedule.step()
            changed += [float(metrics[name]) for name in ("is_oob_ratio",) if name in metrics]
        return changed

    def _compute_logprobs(self, tokens: Tensor) -> Tensor:
        """Compute the log-probability of each token, 0 at the first: [rows, tokens]."""
        logits = self.model(tokens[:, :-1], use_cache=False).logits / self.config.generation.temperature
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(logprobs, (1, 0))

    def _lay_out(self, tokens: Tensor, width: int, samples: Samples, rewards: Tensor) -> TokenFields:
        """Lay responses out behind their prompts of `width` tokens, with the advantages of their groups."""
        shape = (-1, self.loop.num_generations_per_prompt)
        advantages = response_advantages(
            self.estimator, rewards.view(shape), samples.lengths.view(shape), reward_parts=None, task_baselines=None
        )
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        sampled = (positions >= width) & (positions < (width + samples.lengths)[:, None])
        logprobs = torch.nn.functional.pad(samples.logprobs, (width, 0))
        return TokenFields(
            loss_mask=sampled.float(),
            generation_logprobs=torch.where(sampled, logprobs, 0.0),
            advantages=advantages.flatten()[:, None] * sampled,
        )


def train(run: LaggedRun) -> dict[str, Any]:
    """Train a run to its end.

    Returns the accuracy of greedy responses to all held-out prompts, mean rewards of ten steps each, and figures of the
    samples: lengths, and the share of tokens that a correction changed.
    """
    config = _compose(run.overrides)
    folder = Path(config.prepare.folder or "")
    assert config.prepare.name is not None
    prepare(config.prepare.name, folder)
    draw = torch.Generator().manual_seed(run.seed)
    problems, held_out = Problems.read(folder / TRAIN_FILE), Problems.read(folder / VAL_FILE)
    learner = Learner(config, folder / "model")
    engine = load_eager_model(folder / "model", getattr(torch, run.engine_dtype))
    versions = deque([learner.copy_weights()], maxlen=run.lag + 1)
    rewards, lengths, changed = [], [], []
    group = learner.loop.num_generations_per_prompt
    for _ in range(config.loop.max_num_steps):
        engine.load_state_dict(versions[0])
        chosen = torch.randperm(len(problems.prompts), generator=draw)[: learner.loop.num_prompts_per_step]
        problems_of_step = problems.select(chosen.repeat_interleave(group))
        samples = sample(engine, problems_of_step.prompts, config, draw)
        scores = problems_of_step.score(samples)
        changed += learner.learn(problems_of_step.prompts, samples, scores)
        versions.append(learner.copy_weights())
        rewards.append(float(scores.mean()))
        lengths.append(samples.lengths)
    accuracy = float(held_out.score(sample(learner.model, held_out.prompts, config, None)).mean())
    return {"accuracy": accuracy, "reward": _thin(rewards), **_describe(torch.cat(lengths), changed)}


_compose = cache(compose_config)  # seeds share a configuration


def _thin(values: Sequence[float]) -> list[float]:
    """Means of ten steps each."""
    return [round(float(np.mean(values[begin : begin + 10])), 4) for begin in range(0, len(values), 10)]


def _describe(lengths: Tensor, changed: Sequence[float]) -> dict[str, float]:
    quantiles = torch.quantile(lengths.float(), torch.tensor([0.5, 0.99]))
    figures = {"median_length": float(quantiles[0]), "length_of_99_percent": float(quantiles[1])}
    return figures | ({"changed_by_corrections": round(float(np.mean(changed)), 4)} if changed else {})
