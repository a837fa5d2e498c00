"""Defects of one of several engines, of seeds and of checkpoints, and healthy runs of other options, for the doctor."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.planted import Case, Plant, changed_folder, dtype_of, engine, write
from tests.support.planted_engines import (
    SAMPLING,
    STALE,
    WEIGHTS,
    likeliest,
    old,
    presence_penalised,
    scaled,
    truncated,
)
from tests.support.planted_healthy import Healthy
from tests.support.planted_options import both_sides
from tests.support.planted_orders import EMBED, exchanged_rows
from tests.support.planted_others import RECORD
from tests.support.planted_parts import biased, of_least_length
from tests.support.recorded_runs import EOS, RecordedRun, moved, rollout, sampled, save_checkpoint, scored

GROUPS_OF_FOUR = ("grpo.num_generations_per_prompt=4",)
GROUPS_OF_SIX = ("grpo.num_generations_per_prompt=6",)


def served(count: int, *wrong: tuple[int, dict[str, Any]], numbered: bool = True) -> Plant:
    """Several engines take turns, some of which are wrong.

    Args:
        count: number of engines.
        wrong: number of a wrong engine, and arguments of `sampled`, `edit` and `against` of `changed_folder`.
        numbered: whether the rollouts record their engine.
    """

    def plant(run: RecordedRun) -> None:
        version, right = len(run.versions) - 1, run.versions[-1]
        temperature = run.config.generation.temperature
        usual: dict[str, Any] = {"version": version, "samples": run.samples, "dtype": dtype_of(run)}
        usual["temperature"] = temperature
        drawn = sampled(right, run.prompts(), **usual)
        for number, options in wrong:
            more = dict(options)
            edit, against = more.pop("edit", None), more.pop("against", -2)
            folder = changed_folder(run, edit, None, against) if edit else right
            if "forward" in more:
                more["forward"] = more["forward"](run)
            other = sampled(folder, run.prompts(), **{**usual, "seed": 8 + number, **more})
            drawn[number::count] = other[number::count]
            shutil.rmtree(run.root / "wrong", ignore_errors=True)
        if numbered:
            drawn = [replace(one, engine=place % count) for place, one in enumerate(drawn)]
        write(run, drawn, scored(right, drawn, dtype=dtype_of(run), temperature=temperature), recorded=False)

    return plant


def one_engine_of_one_seed(run: RecordedRun) -> None:
    """The second of two engines draws every request with one seed; samples 2 and 3 of a prompt are its."""
    version = len(run.versions) - 1
    drawn = sampled(run.versions[version], run.prompts(), version=version, samples=4)
    drawn = [replace(one, engine=int(one.sample > 1)) for one in drawn]
    copies = [replace(drawn[place - 1], sample=3) if one.sample == 3 else one for place, one in enumerate(drawn)]
    write(run, copies, scored(run.versions[version], copies), recorded=False)


def checkpoint_of_another_run(run: RecordedRun) -> None:
    """The newest checkpoint is that of another run of the same model."""
    engine()(run)
    newest = len(run.versions) - 1
    before = run.run_dir / "checkpoints"
    folder = before.resolve()
    before.unlink()
    shutil.copytree(folder, before)
    shutil.rmtree(before / f"step_{newest}")
    other = moved(run.versions[0], run.root / "other", seed=77, scale=0.05)
    save_checkpoint(other, before / f"step_{newest}/megatron", run.config)


def checkpoints_exchanged(run: RecordedRun) -> None:
    """The folders of the two newest checkpoints are in each other's place, and the step recorded both sides."""
    engine(recorded=True)(run)
    before = run.run_dir / "checkpoints"
    folder = before.resolve()
    before.unlink()
    before.mkdir()
    for number, source in ((1, 2), (2, 1)):
        (before / f"step_{number}").symlink_to(folder / f"step_{source}")


def filter_ignored(run: RecordedRun) -> None:
    """The engine does not filter, and the trainer does."""
    version, right = len(run.versions) - 1, run.versions[-1]
    drawn = sampled(right, run.prompts(), version=version, samples=run.samples)
    write(run, drawn, scored(right, drawn, choose=likeliest(5)), recorded=True)


SERVED: Sequence[Case] = (
    Case(
        "weights two versions back in one engine of two",
        "dense",
        served(2, (1, {"edit": old(""), "against": -3})),
        STALE,
        ("version 0", "engine 1"),
        "$^",
    ),
    Case(
        "one of three engines at another temperature",
        "dense",
        served(3, (2, {"temperature": 1.3, "reported": 1.3})),
        SAMPLING,
        ("temperature 1.3", "engine 2"),
        "$^|model.norm|lm_head",
        overrides=GROUPS_OF_SIX,
    ),
    Case(
        "least length in one of two engines",
        "dense",
        served(2, (1, {"forward": of_least_length(9)})),
        SAMPLING,
        ("min_tokens=|end a response", "engine 1"),
        "$^",
        must=False,
        overrides=GROUPS_OF_FOUR,
    ),
    Case(
        "presence penalty in one of two engines",
        "llama",
        served(2, (0, {"forward": presence_penalised(0.7)})),
        SAMPLING,
        ("presence_penalty=0.7", "engine 0"),
        "$^",
    ),
    Case(
        "two tokens biased in one of two engines",
        "dense",
        served(2, (0, {"choose": biased({60: 1.5, 30: -2.0})})),
        SAMPLING,
        ("token 60", "token 30", "engine 0"),
        "$^",
    ),
    Case(
        "top_p in one of two engines",
        "llama",
        served(2, (1, {"choose": truncated(0.9)})),
        SAMPLING,
        ("top_p", "engine 1"),
        "$^",
    ),
    Case(
        "two engines with two defects",
        "dense",
        served(2, (0, {"temperature": 1.2}), (1, {"edit": scaled(0.8, "layers.1.mlp.down_proj")})),
        SAMPLING | WEIGHTS,
        ("temperature 1.2", r"layers\.1\.mlp"),
        r"layers\.1\.mlp\.(down|up)_proj|model.norm|lm_head",
        must=False,
        overrides=GROUPS_OF_FOUR,
    ),
    Case(
        "rows of the embedding in one engine that is not numbered",
        "llama",
        served(2, (1, {"edit": exchanged_rows(EMBED, [(72, 87)])}), numbered=False),
        WEIGHTS,
        ("rows", "embed_tokens"),
        "embed_tokens",
        overrides=GROUPS_OF_FOUR,
    ),
    Case(
        "one engine of one seed",
        "dense",
        one_engine_of_one_seed,
        SAMPLING,
        ("seed|copies", "4 of 4 groups"),
        "$^",
        overrides=GROUPS_OF_FOUR,
    ),
    Case("checkpoint of another run", "dense", checkpoint_of_another_run, RECORD, ("checkpoint step_2",), "$^"),
    Case("checkpoints exchanged", "dense", checkpoints_exchanged, RECORD, ("checkpoint step_2", "version 1"), "$^"),
    Case(
        "top_k ignored by the engine",
        "dense",
        filter_ignored,
        SAMPLING,
        ("top_k",),
        "$^",
        overrides=("generation.top_k=5",),
    ),
    Case("temperature twice", "colder", engine(temperature=0.49), SAMPLING, ("temperature 0.49",), None),
    Case(
        "temperature left out of one engine of two",
        "colder",
        served(2, (1, {"temperature": 1.0})),
        SAMPLING,
        ("temperature", "engine 1"),
        None,
    ),
)


def with_empty_response(run: RecordedRun) -> None:
    """One response is its end alone, and one rollout ended before a token was sampled."""
    version, right = len(run.versions) - 1, run.versions[-1]
    drawn = sampled(right, run.prompts(), version=version, samples=run.samples)
    prompt = run.prompts()[1]
    (alone,) = scored(right, [rollout(1, 0, prompt, [EOS], [0.0], version)])
    drawn[2] = rollout(1, 0, prompt, [EOS], [float(alone[0])], version)
    trained = scored(right, drawn)
    drawn[5] = replace(
        drawn[5],
        token_ids=drawn[5].token_ids[: drawn[5].spans[0].start],
        spans=[],
        logprobs=np.zeros(0, np.float32),
        stop_reason="length",
    )
    trained[5] = np.zeros(0, np.float32)
    write(run, drawn, trained, recorded=True)


MORE_OPTIONS: Sequence[Healthy] = (
    Healthy("temperature 0.7 with adapters", "adapters", engine(recorded=True), ("generation.temperature=0.7",)),
    Healthy(
        "top_p with experts",
        "experts",
        both_sides(truncated(0.9)),
        ("generation.top_p=0.9",),
    ),
    Healthy("an empty response", "dense", with_empty_response),
    Healthy("three engines, six samples", "llama", served(3), GROUPS_OF_SIX),
    Healthy("tied head at temperature 1.5", "tied", engine(recorded=True), ("generation.temperature=1.5",)),
    Healthy("experts at temperature 0.5", "experts", engine(recorded=True), ("generation.temperature=0.5",)),
    Healthy("gemma at temperature 0.6", "gemma", engine(), ("generation.temperature=0.6",)),
    Healthy("biases with three engines", "biases", served(3), GROUPS_OF_SIX),
    Healthy("shared experts with four samples", "shared experts", served(2), GROUPS_OF_FOUR),
    Healthy("bfloat16 at temperature 0.6", "bfloat16", engine(recorded=True), ("generation.temperature=0.6",)),
)
