"""Whole runs whose environments and agents show pictures in turns: transformers computes what they computed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.source import COUNTING_VOCABULARY, PREPARED_MODELS
from megatron_grpo.verification.random_pictures import load_whole_model, make_model_inputs
from tests.integration.runs import TrainingRun
from tests.integration.whole_runs import complete, export

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")  # vLLM's module of these models imports it

VISION = parse_model_shape(PREPARED_MODELS["counting"]).vision
FEW = (
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_rollout_turns=3",
    "grpo.val_period=2",
    "grpo.max_val_samples=16",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=null",
    "policy.optimizer.warmup_steps=0",
    "policy.optimizer.decay_steps=50",
    "policy.max_total_sequence_length=128",
    "data.max_images=2",
    "policy.train_global_batch_samples=16",  # two optimizer steps, so that rollouts have prev_logprobs
)


@torch.no_grad()
def compute_logprobs(model: Any, folder: Path, run_dir: Path, rollout: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of the sampled tokens over all tokens but the placeholders."""
    assert VISION is not None
    ids = torch.tensor(np.array(rollout["token_ids"]), dtype=torch.long)
    inputs = make_model_inputs(ids, rollout["images"], VISION, folder, run_dir / "images")
    logits = model(**inputs, use_cache=False).logits[0]
    logits[:, list(VISION.placeholders)] = -torch.inf
    positions = torch.tensor([token for begin, end, _ in rollout["spans"] for token in range(begin, end)])
    return logits[positions - 1].log_softmax(-1).gather(1, ids[positions][:, None])[:, 0]


def split(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    """The segments of a rollout as rollouts."""
    rows = [part.to_row() for part in Trajectory.from_row(rollout).split_segments()]
    sizes = [sum(end - begin for begin, end, _ in row["spans"]) for row in rows]
    trained = np.split(rollout["prev_logprobs"], np.cumsum(sizes)[:-1])
    return [{**row, "prev_logprobs": values} for row, values in zip(rows, trained, strict=True)]


def expect_the_trained_model(run: TrainingRun, folder: Path) -> list[dict[str, Any]]:
    """The rollouts of the second step: engine and policy computed what the first step's model does in transformers."""
    model, rollouts = load_whole_model(folder, torch.float32), list(read_rollouts(run.run_dir, 2))
    for segment in [segment for rollout in rollouts for segment in split(rollout)]:
        expected = compute_logprobs(model, folder, run.run_dir, segment)
        for name in ("logprobs", "prev_logprobs"):
            torch.testing.assert_close(torch.tensor(segment[name]), expected, atol=2e-5, rtol=0)
    return rollouts


def test_turns_with_pictures_of_unlike_sizes(tmp_path: Path) -> None:
    environment = "env.counting.type=tests.support.showing_environment:ShowingEnvironment"
    run = complete(TrainingRun(tmp_path / "run", *FEW, environment, recipe="quickstart_vision"))
    rows = run.metrics()
    assert all(row["grad_norm"] > 0 and row["token_mult_prob_error_max"] < 1.001 for row in rows)
    folder = export(run.run_dir / "checkpoints" / "step_1", tmp_path / "exported")
    rollouts = expect_the_trained_model(run, folder)
    sizes = [[(image["rows"], image["columns"]) for image in rollout["images"]] for rollout in rollouts]
    assert all(len(images) == 2 for images in sizes)
    assert any(first != second for first, second in sizes)
    assert all(len(rollout["spans"]) >= 2 for rollout in rollouts)
    placeholders = [COUNTING_VOCABULARY["<|image_pad|>"]]
    for rollout, images in zip(rollouts, sizes, strict=True):
        count = int(np.isin(rollout["token_ids"], placeholders).sum())
        assert count == sum(rows * columns // 4 for rows, columns in images)


def test_a_rollout_ends_where_its_pictures_are_too_many(tmp_path: Path) -> None:
    environment = "env.counting.type=tests.support.showing_environment:ShowingEnvironment"
    options = ("env.counting.options.turns=3", "grpo.max_num_steps=1", "debug.train=false")
    run = complete(TrainingRun(tmp_path / "run", *FEW, environment, *options, recipe="quickstart_vision"))
    for rollout in read_rollouts(run.run_dir, 1):
        reason = "the conversation has 3 images, more than data.max_images=2"
        assert rollout["notes"]["ended"] == f"with the next turn of environment counting {reason}"
        assert (len(rollout["images"]), rollout["stop_reason"]) == (2, "length")


def test_an_agent_sees_the_pictures_of_its_prompt_and_shows_others(tmp_path: Path) -> None:
    agent = (
        "env.counting.type=reward_functions",
        "env.counting.agent_func=tests.support.showing_agent.look_twice",
        "env.counting.reward_funcs=[tests.support.showing_agent.counts_right]",
        "generation.endpoint.enabled=true",
        "grpo.max_rollout_turns=1",
    )
    run = complete(TrainingRun(tmp_path / "run", *FEW, *agent, recipe="quickstart_vision"))
    assert all(row["grad_norm"] > 0 and row["token_mult_prob_error_max"] < 1.001 for row in run.metrics())
    rollouts = expect_the_trained_model(run, export(run.run_dir / "checkpoints" / "step_1", tmp_path / "exported"))
    for rollout in rollouts:
        digests = [image["digest"] for image in rollout["images"]]
        assert digests[1] == digests[2], "the second conversation has the second picture alone"
        assert rollout["columns"]["images"].startswith(digests[0])
        assert rollout["segment_images"] == [2, 1]
