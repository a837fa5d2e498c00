"""A run of recorded steps, and what the files of recorded rollouts say beside them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_grpo.batch.replay_files import (
    StepFigures,
    choose_watched_tokens,
    locate_figures_file,
    sum_states,
    write_figures,
)
from megatron_grpo.batch.rollout_files import RunFacts, StepFacts, StepRecord, locate_rollouts_file, write_rollouts
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, find_token_indices
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.conversion import convert_values
from megatron_grpo.config.keys import build_values
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.run.directory import record_start
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.problem import prepare_model
from megatron_grpo.verification.processes import run_on_ranks
from megatron_grpo.verification.replay.record import open_step
from megatron_grpo.verification.replay.replayed_step import ReplayTask, build_replay_task, replay_step

PROMPTS, SAMPLES = 3, 4


def make_recorded_run(
    folder: Path, family: str = "qwen3", *, step: int = 1, prev: bool = False, **sections: Any
) -> Path:
    """The folder of a run that made step `step`: `PROMPTS` prompts with `SAMPLES` responses of different lengths.

    Args:
        folder: folder of the test.
        family: family of the tiny model.
        prev: whether the step knew the policy's log-probabilities, which are then those of the engine.
        sections: values of the configuration by section, over float32 and no KL penalty.
    """
    model = prepare_model(f"tiny:{family}", False, folder / "model", 0)
    values = {
        "policy": {"model": {"path": str(model)}, "precision": "float32", "microbatch_tokens": 64, "threads": 1},
        "grpo": {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": SAMPLES, "max_num_steps": 4},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "data": {"train_path": "prompts.jsonl"},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    config, problems = convert_values(values, "grpo")
    assert config is not None
    assert not problems, problems
    run_dir = folder / "run"
    run_dir.mkdir()
    record_start(run_dir, config)
    vocab = read_model_shape(model).vocab
    facts = RunFacts(
        prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, max_num_steps=4, vocab=vocab, vocabulary=None
    )
    record = StepRecord(facts, make_facts())
    write_rollouts(locate_rollouts_file(run_dir, step), list(_groups(vocab, prev)), record.to_metadata())
    return run_dir


def add_figures(run_dir: Path, *overrides: str) -> None:
    """Write the figures of step 1 as a run records them, in the layout of `overrides`, which the record names."""
    record = open_step(run_dir, 1, overrides)
    task = build_replay_task(record, 1)
    ranks = run_on_ranks(_watch_on_rank, task, record.config.policy.parallel, seed=0, timeout_s=300)
    computed = replay_step(record, hidden_tokens=1, timeout_s=300, gpus=0)
    figures = StepFigures(
        loss=computed.result.loss,
        grad_norm=computed.result.grad_norm,
        learning_rate=computed.result.learning_rate,
        tensors=computed.tensors,
        states=sum_states(
            [(point, *(array.numpy() for array in part)) for point, *part in rank["states"]] for rank in ranks
        ),
        config=build_values(record.config),
        device="cpu",
    )
    write_figures(locate_figures_file(run_dir, 1), figures)


def _watch_on_rank(task: ReplayTask, enter: Callable[[str], object]) -> dict[str, Any]:
    """The pass for log-probabilities of a recorded step, as the driver has a rank of a run make it."""
    enter("log-probabilities")
    rank = PolicyRank(task.settings)
    replica = parallel_state.get_data_parallel_rank()
    members = task.members[replica]
    numbers = find_token_indices(np.asarray(task.batch.lengths), members)
    positions = np.flatnonzero(np.isin(numbers, choose_watched_tokens(sum(task.batch.lengths))))
    rank.recorder.watch(positions, numbers[positions])
    local_index = {int(number): index for index, number in enumerate(members)}
    plan = [[local_index[int(number)] for number in microbatch] for microbatch in task.logprobs[replica]]
    batch = task.batch.select(members.tolist())
    for _ in range(2):  # only the first pass is recorded
        rank.compute_logprobs(TokenBatch(batch.lengths, TokenFields(token_ids=batch.fields.token_ids)), plan)
    parts = rank.recorder.end_states()
    return {"states": [(point, torch.from_numpy(tokens), torch.from_numpy(values)) for point, tokens, values in parts]}


def _groups(vocab: int, prev: bool) -> Any:
    """The groups of the step: random tokens, one response in two spans, one without a reward."""
    draw = np.random.default_rng(0)
    for group in range(PROMPTS):
        prompt = draw.integers(0, vocab, 3 + group)
        rollouts = []
        for sample in range(SAMPLES):
            sampled = int(draw.integers(3, 17))
            start, end = len(prompt), len(prompt) + sampled
            spans = [Span(start, start + 1, 0), Span(start + 2, end, 0)] if sample == 1 else [Span(start, end, 0)]
            count = sum(span.end - span.start for span in spans)
            trajectory = Trajectory(
                prompt_idx=group,
                group=group,
                sample=sample,
                token_ids=np.concatenate([prompt, draw.integers(0, vocab, sampled)]).astype(np.int32),
                spans=spans,
                logprobs=-draw.random(count).astype(np.float32),
                response="",
                stop_reason="length" if sample == 2 else "stop",
                reward=None if (group, sample) == (1, 3) else float(sample),
            )
            advantages = np.full(count, float(draw.normal()), dtype=np.float32)
            rollouts.append(
                (trajectory, {"advantages": advantages} | ({"prev_logprobs": trajectory.logprobs} if prev else {}))
            )
        yield group, rollouts


RUN = RunFacts(prompts_per_step=2, samples_per_prompt=2, max_num_steps=2, vocab=9, vocabulary=None)


def make_facts(**changes: Any) -> StepFacts:
    """Of a step that sampled what it trains on, and no more; `changes` are fields."""
    return StepFacts(**{"position": {"epoch": 0}, "longest": 4, **changes})


def make_record(facts: StepFacts | None = None, **changes: Any) -> StepRecord:
    """Of a step of `RUN`, whose fields are changed by `changes`."""
    return StepRecord(replace(RUN, **changes), facts or make_facts())
