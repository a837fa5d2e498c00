"""Runs of the learner on samples of older weights, in one process: the policy's rank, and transformers as engine.

Loss, advantages, importance weights, masks and optimizer are those of a run. The engine has the weights of `lag` steps
before, in its own precision: what an asynchronous run trains on, at an age that is exact.
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

from megatron_grpo.batch.packing import TOKEN_COST, make_packer
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import Config, GRPOConfig, ParallelConfig
from megatron_grpo.losses.advantages import make_estimator, response_advantages
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.models.source import EOS, VOCABULARY
from megatron_grpo.platform.device import open_store
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.lessons import TRAIN_FILE, VAL_FILE
from megatron_grpo.prepare.models import prepare
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import initialize_parallel
from megatron_grpo.trainer.rank import Microbatches, PolicyRank
from megatron_grpo.verification.hf_model import load_eager_model
from megatron_grpo.verification.problem import count_tokens

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


class Engine:
    """A model of transformers that samples."""

    def __init__(self, folder: Path, dtype: str, config: Config) -> None:
        self.model = load_eager_model(folder, getattr(torch, dtype))
        self.longest, self.temperature = config.generation.max_new_tokens, config.generation.temperature

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take weights by their names in the folder."""
        missing, unknown = self.model.load_state_dict(stack_experts(weights), strict=False)
        assert missing in ([], ["lm_head.weight"]), missing  # tied to the embedding
        assert not unknown, unknown

    @torch.no_grad()
    def sample(self, prompts: Tensor, draw: torch.Generator | None) -> Samples:
        """Sample a response to each prompt, [rows, prompt tokens]; greedily without `draw`."""
        inputs, cache, columns, logprobs = prompts, None, [], []
        lengths = torch.full((len(prompts),), self.longest)
        for place in range(self.longest):
            output = self.model(inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = (output.logits[:, -1].float() / self.temperature).log_softmax(-1)
            inputs = (
                distribution.argmax(-1, keepdim=True)
                if draw is None
                else distribution.exp().multinomial(1, generator=draw)
            )
            columns.append(inputs[:, 0])
            logprobs.append(distribution.gather(1, inputs)[:, 0])
            lengths = torch.where((inputs[:, 0] == _EOS) & (lengths > place + 1), place + 1, lengths)
            if int(lengths.max()) <= place + 1:
                break
        return Samples(torch.stack(columns, dim=1), torch.stack(logprobs, dim=1), lengths)


def stack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the matrices of experts as transformers has them in memory."""
    stacked = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:

        def gather(matrix: str, layer: str = layer) -> Tensor:
            names = sorted(name for name in weights if name.startswith(f"{layer}.experts.") and matrix in name)
            return torch.stack([weights[name] for name in names])

        stacked[f"{layer}.experts.gate_up_proj"] = torch.cat([gather("gate_proj"), gather("up_proj")], dim=1)
        stacked[f"{layer}.experts.down_proj"] = gather("down_proj")
    return stacked


@dataclass(frozen=True)
class Problems:
    """Sums: prompts, [rows, tokens], and right responses, [rows, tokens]."""

    prompts: Tensor
    answers: Tensor

    @staticmethod
    def read(file: Path) -> Problems:
        """Read prompts and answers of a file of rows; all have one length."""
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        encode = [[[VOCABULARY[letter] for letter in row[key]] for row in rows] for key in ("prompt", "answer")]
        return Problems(torch.tensor(encode[0]), torch.tensor([[*answer, _EOS] for answer in encode[1]]))

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
    """The policy of a run: a rank that holds all of it."""

    def __init__(self, config: Config, folder: Path) -> None:
        assert isinstance(config.loop, GRPOConfig)
        self.config, self.loop, self.loss_fn = config, config.loop, ClippedPGLossFn(config.loss_fn)
        settings = RankSettings(
            config=config.policy,
            shape=read_model_shape(folder),
            folder=str(folder),
            temperature=config.generation.temperature,
            decay_steps=config.decay_steps,
        )
        self.rank, self.estimator = PolicyRank(settings), make_estimator(config.loop)

    def export(self) -> dict[str, Tensor]:
        """Copy the weights by their names in the folder."""
        tensors = iter_hf_tensors(self.rank.gather_chunks(), self.rank.shape)
        return {name: tensor.clone() for name, tensor in tensors if tensor is not None}

    def learn(self, prompts: Tensor, samples: Samples, rewards: Tensor) -> list[dict[str, float]]:
        """Train on a step's responses; the metrics of each optimizer step."""
        batch = self._lay_out(prompts, samples, rewards)
        batch.fields.prev_logprobs = self.rank.compute_logprobs(batch, self._divide(batch))
        size = self.config.policy.train_global_batch_samples or len(batch)
        metrics = []
        for begin in range(0, len(batch), size):
            part = batch.select(range(begin, begin + size))
            result = self.rank.train(part, self._divide(part), self.loss_fn, count_tokens(part))
            assert result.metrics is not None
            metrics.append(
                {name: sum(row[name] for row in result.metrics) for name in ("is_oob_ratio", "probs_ratio")}
                if "is_oob_ratio" in result.metrics[0]
                else {}
            )
        return metrics

    def _divide(self, batch: TokenBatch) -> Microbatches:
        packer = make_packer(self.config.policy, TOKEN_COST)
        (microbatches,) = packer.make_microbatches([np.array(batch.lengths)])
        return microbatches

    def _lay_out(self, prompts: Tensor, samples: Samples, rewards: Tensor) -> TokenBatch:
        """Lay responses with their prompts end to end, with the advantages of their groups."""
        shape = (-1, self.loop.num_generations_per_prompt)
        advantages = response_advantages(
            self.estimator, rewards.view(shape), samples.lengths.view(shape), reward_parts=None, task_baselines=None
        )
        width, lengths = prompts.shape[1], samples.lengths
        tokens = torch.cat([prompts, samples.tokens], dim=1)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        is_token = places < (width + lengths)[:, None]
        sampled = is_token & (places >= width)
        logprobs = torch.cat([torch.zeros(prompts.shape), samples.logprobs], dim=1)
        by_token = advantages.flatten()[:, None].expand_as(logprobs)
        fields = TokenFields(
            token_ids=tokens[is_token].int(),
            sampled=sampled[is_token],
            loss_mask=sampled[is_token].float(),
            generation_logprobs=torch.where(sampled, logprobs, 0.0)[is_token],
            advantages=torch.where(sampled, by_token, 0.0)[is_token],
        )
        return TokenBatch((width + lengths).tolist(), fields)


def start_process() -> None:
    """Make this process the only rank of a layout."""
    torch.set_num_threads(1)
    initialize_parallel(ParallelConfig(), rank=0, store=open_store("127.0.0.1", 600.0), seed=0, timeout_s=600.0)


def train(run: LaggedRun) -> dict[str, Any]:
    """Train a run to its end.

    Returns the accuracy of greedy responses to all held-out prompts, mean rewards of ten steps each, and figures of the
    samples: lengths, and the share of tokens that a correction changed.
    """
    config = _compose(run.overrides)
    folder = Path(config.prepare.folder or "")
    assert config.prepare.name is not None
    prepare(config.prepare.name, folder)
    torch.manual_seed(run.seed)
    draw = torch.Generator().manual_seed(run.seed)
    problems, held_out = Problems.read(folder / TRAIN_FILE), Problems.read(folder / VAL_FILE)
    learner, engine = Learner(config, folder / "model"), Engine(folder / "model", run.engine_dtype, config)
    versions = deque([learner.export()], maxlen=run.lag + 1)
    rewards, lengths, changed = [], [], []
    group = learner.loop.num_generations_per_prompt
    for _ in range(config.loop.max_num_steps):
        engine.load(versions[0])
        chosen = torch.randperm(len(problems.prompts), generator=draw)[: learner.loop.num_prompts_per_step]
        asked = problems.select(chosen.repeat_interleave(group))
        samples = engine.sample(asked.prompts, draw)
        scores = asked.score(samples)
        metrics = learner.learn(asked.prompts, samples, scores)
        versions.append(learner.export())
        rewards.append(float(scores.mean()))
        lengths.append(samples.lengths)
        changed += [row["is_oob_ratio"] for row in metrics if row]
    judge = Engine(folder / "model", "float32", config)
    judge.load(versions[-1])
    accuracy = float(held_out.score(judge.sample(held_out.prompts, None)).mean())
    return {"accuracy": accuracy, "reward": _thin(rewards), **_describe(torch.cat(lengths), changed)}


_compose = cache(compose_config)  # seeds share a configuration


def _thin(values: Sequence[float]) -> list[float]:
    """Means of ten steps each."""
    return [round(float(np.mean(values[begin : begin + 10])), 4) for begin in range(0, len(values), 10)]


def _describe(lengths: Tensor, changed: Sequence[float]) -> dict[str, float]:
    quantiles = torch.quantile(lengths.float(), torch.tensor([0.5, 0.99]))
    figures = {"median_length": float(quantiles[0]), "length_of_99_percent": float(quantiles[1])}
    return figures | ({"changed_by_corrections": round(float(np.mean(changed)), 4)} if changed else {})
