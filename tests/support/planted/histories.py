"""Runs whose rollouts have several versions, several turns or other rare forms, each healthy or with a defect."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_grpo.batch.rollout_files import locate_rollouts_file
from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted.engines import likeliest
from tests.support.planted.plants import (
    Edit,
    Plant,
    Rollouts,
    changed_folder,
    draw,
    engine,
    link_checkpoints,
    record,
    write,
    write_scored,
)
from tests.support.recorded_runs import (
    EOS,
    RecordedRun,
    last_logits,
    move_weights,
    rollout,
    sample_rollouts,
    save_checkpoint,
    score_rollouts,
)

FIRST = 5
"""Tokens of the first part of a response."""
ANSWER = (40, 41, 42, 43)
"""Tokens with which an environment answers the first part of a response."""


def in_two_versions(rollout: Trajectory, version: int, first: int = FIRST) -> Trajectory:
    """A rollout whose weights changed after some tokens."""
    ((start, end, _),) = rollout.spans
    middle = min(start + first, end)
    spans = [Span(start, middle, version - 1), Span(middle, end, version)]
    return replace(rollout, spans=[span for span in spans if span.end > span.start])


def of_two_versions(edit: Edit | None = None, *, stale: bool = False) -> Plant:
    """The weights changed within every response, and the cache was computed anew; `edit`: the later engine is wrong."""

    def plant(run: RecordedRun) -> None:
        version = len(run.versions) - 1
        later = AutoModelForCausalLM.from_pretrained(changed_folder(run, edit), dtype="float32").eval()

        def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
            return last_logits(model if len(ids) - prompt < FIRST else later, ids, prompt)

        drawn = [in_two_versions(rollout, version) for rollout in draw(run, -2, forward=forward)]
        write_scored(run, drawn, recorded=False, stale=stale)

    return plant


def keep_earlier_weights(run: RecordedRun) -> None:
    """The record says that the weights changed within each response, and the engine kept the earlier ones."""
    version = len(run.versions) - 1
    drawn = [
        in_two_versions(rollout, version, 3) if rollout.spans[0].end > rollout.spans[0].start + 3 else rollout
        for rollout in draw(run, -2)
    ]
    write_scored(run, drawn, recorded=False)


def of_version_before(run: RecordedRun) -> None:
    """The step trains on samples of the weights before."""
    write_scored(run, draw(run, -2), recorded=True)


def of_mixed_versions(run: RecordedRun) -> None:
    """Some groups are of the version before, as a queue of an asynchronous run has them."""
    write_scored(run, [*draw(run, -2)[:2], *draw(run)[2:]], recorded=True)


def in_turns(edit: Edit | None = None, *, stale: bool = False) -> Plant:
    """An environment's tokens stand between the two parts of a response; `edit`: the engine is wrong."""

    def plant(run: RecordedRun) -> None:
        drawn = with_answer(run, changed_folder(run, edit), len(run.versions) - 1)
        write_scored(run, drawn, recorded=False, stale=stale)

    return plant


def with_answer(run: RecordedRun, folder: Path, version: int) -> Rollouts:
    """Rollouts of an engine with the weights of a folder, with an environment's tokens between two parts of each."""

    def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
        first = prompt + FIRST
        return last_logits(model, ids if len(ids) < first else [*ids[:first], *ANSWER, *ids[first:]], prompt)

    def in_two(rollout: Trajectory) -> Trajectory:
        ((start, end, _),) = rollout.spans
        first = start + FIRST
        if end <= first:
            return rollout
        ids = np.concatenate([rollout.token_ids[:first], ANSWER, rollout.token_ids[first:]]).astype(np.int32)
        spans = [Span(start, first, version), Span(first + len(ANSWER), end + len(ANSWER), version)]
        return replace(rollout, token_ids=ids, spans=spans)

    return [in_two(rollout) for rollout in sample_rollouts(folder, run.prompts(), version=version, forward=forward)]


def filter_both_sides(run: RecordedRun) -> None:
    """Both sides sample from the five likeliest tokens; one token left them when the policy moved."""
    drawn = draw(run, choose=likeliest(5))
    trained = score_rollouts(run.versions[-1], drawn, choose=likeliest(5))
    trained[0][2] = -np.inf
    write(run, drawn, trained, recorded=True)


def filter_ignored(run: RecordedRun) -> None:
    """The engine does not filter, and the trainer does."""
    write_scored(run, draw(run), choose=likeliest(5), recorded=True)


def without_metrics(run: RecordedRun) -> None:
    engine()(run)
    (run.run_dir / "metrics.jsonl").unlink()


def with_empty_response(run: RecordedRun) -> None:
    """One response is its end alone, and one rollout ended before a token was sampled."""
    version, right, prompt = len(run.versions) - 1, run.versions[-1], run.prompts()[1]
    drawn = draw(run)
    (ending,) = score_rollouts(right, [rollout(1, 0, prompt, [EOS], [0.0], version)])
    drawn[2] = rollout(1, 0, prompt, [EOS], [float(ending[0])], version)
    trained = score_rollouts(right, drawn)
    nothing = np.zeros(0, np.float32)
    ids = drawn[5].token_ids[: drawn[5].spans[0].start]
    drawn[5] = replace(drawn[5], token_ids=ids, spans=[], logprobs=nothing, stop_reason="length")
    trained[5] = nothing
    write(run, drawn, trained, recorded=True)


def use_one_seed_of_one_engine(run: RecordedRun) -> None:
    """The second of two engines draws every request with one seed; samples 2 and 3 of a prompt are its."""
    drawn = [replace(rollout, engine=int(rollout.sample > 1)) for rollout in draw(run, samples=4)]
    copies = [
        replace(drawn[index - 1], sample=3) if rollout.sample == 3 else rollout for index, rollout in enumerate(drawn)
    ]
    write_scored(run, copies, recorded=False)


def use_checkpoint_of_another_run(run: RecordedRun) -> None:
    """The newest checkpoint is that of another run of the same model."""
    engine()(run)
    newest = len(run.versions) - 1
    link_checkpoints(run, range(1, newest))
    other_folder = move_weights(run.versions[0], run.root / "other", seed=77, scale=0.05)
    save_checkpoint(other_folder, run.run_dir / f"checkpoints/step_{newest}/megatron", run.config)


def cut_file(share: float) -> Plant:
    """The file of the newest step ends before its end."""

    def plant(run: RecordedRun) -> None:
        record(lambda rollouts: rollouts)(run)
        file = locate_rollouts_file(run.run_dir, len(run.versions))
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])

    return plant
