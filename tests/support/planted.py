"""Planted defects for the doctor: how they are written into a record, and how its answer is judged."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo import doctor
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.run.directory import override_values
from tests.support.recorded_runs import (
    RecordedRun,
    alone,
    consistency,
    edit_config,
    edited_copy,
    make_run,
    sampled,
    scored,
)

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors, Tensors], Tensors]
"""Changes the tensors of a model; the second argument has those of the version before."""
Column = list[NDArray[np.float32]]
"""Values of the sampled tokens of every rollout."""
Plant = Callable[[RecordedRun], None]
"""Writes the record of the newest step of a run."""
Forward = Callable[[Any, list[int], int], Tensor]
"""Computes the logits of the next token (`recorded_runs.last_logits`)."""
NOWHERE = frozenset({"unexplained"})
"""Causes that claim nothing."""
HEALTHY_ERROR = {"token_mult_prob_error": 1.0000003, "token_mult_prob_error_max": 1.000005}
TENSOR = re.compile(r"(?:model\.|lm_head)[\w.]+")


@dataclass(frozen=True)
class Case:
    """A defect, and the answer that names it."""

    name: str
    run: str
    """Name of the run in which it is planted (`RUNS`)."""
    plant: Plant
    causes: frozenset[str]
    """Causes that are true; any other, except `NOWHERE`, is a wrong one."""
    words: tuple[str, ...] = ()
    """Patterns of which each has to stand in the text or the key of a finding."""
    tensors: str | None = None
    """Pattern of the tensors that a text may name; None: any."""
    must: bool = True
    """Whether it has to be named; else it is enough that the run is not called healthy, and nothing wrong is."""
    overrides: tuple[str, ...] = ()
    """Changes of the run's configuration."""


@dataclass(frozen=True)
class Answer:
    """What the command said."""

    code: int
    found: dict[str, Any]
    """The JSON object; empty if the command refused."""
    errors: str
    """Standard error."""

    @property
    def texts(self) -> str:
        """Texts and keys of all findings, or the message."""
        findings = self.found.get("findings", [])
        return " | ".join(f"{one['text']} [{one['key']}]" for one in findings) or self.errors

    @property
    def causes(self) -> set[str]:
        return {one["cause"] for one in self.found.get("findings", [])}


def examine(run: RecordedRun, *arguments: str) -> Answer:
    """The command's answer on the newest step of a run."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = doctor.main([str(run.run_dir), "--json", *arguments])
    return Answer(code, json.loads(out.getvalue()) if out.getvalue() else {}, errors.getvalue())


def verdict(case: Case, answer: Answer) -> str:
    """named, unnamed, healthy or wrong, and why."""
    if answer.code == 0:
        return "healthy"
    wrong = answer.causes - case.causes - NOWHERE
    if wrong:
        return f"wrong: the cause {', '.join(sorted(wrong))}"
    named = {name for one in answer.found.get("findings", []) for name in TENSOR.findall(one["text"])}
    stray = sorted(name for name in named if case.tensors is not None and not re.search(case.tensors, name))
    if stray:
        return f"wrong: it accuses {', '.join(stray)}"
    missing = [word for word in case.words if not re.search(word, answer.texts, re.IGNORECASE)]
    return f"unnamed: nothing says {', '.join(missing)}" if missing else "named"


def fresh(run: RecordedRun, root: Path, *overrides: str) -> RecordedRun:
    """A run with the weights of another one, an empty record, and changes of the configuration."""
    (root / "run").mkdir(parents=True)
    if (run.run_dir / "checkpoints").is_dir():
        (root / "run" / "checkpoints").symlink_to(run.run_dir / "checkpoints")
    changed = with_overrides(replace(run, root=root), f"run_dir={root / 'run'}", *overrides)
    return replace(changed, samples=changed.config.training_loop.num_generations_per_prompt)


def with_overrides(run: RecordedRun, *overrides: str) -> RecordedRun:
    """The run with other values of some keys, each section.key=VALUE."""
    return replace(run, config=override_values(asdict(run.config), overrides, "the test"))


def tensors_of(folder: Path) -> Tensors:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def engine(
    edit: Edit | None = None,
    *,
    config: dict[str, Any] | None = None,
    forward: Callable[[RecordedRun], Forward] | None = None,
    rollouts: int | None = None,
    against: int = -2,
    stale: bool = False,
    recorded: bool = False,
    **options: Any,
) -> Plant:
    """An engine that is wrong, and a trainer that is right.

    Args:
        edit: changes of the engine's weights.
        config: changes of the engine's config.json.
        forward: makes the engine's forward pass for the run.
        rollouts: number of rollouts, the first ones, that come from the wrong engine; None: all.
        against: the version whose tensors `edit` gets as the second argument.
        stale: the first step shows nothing yet.
        recorded: the step recorded the trainer's log-probabilities.
        options: further arguments of `sampled`.
    """

    def plant(run: RecordedRun) -> None:
        version, right = len(run.versions) - 1, run.versions[-1]
        wrong = changed_folder(run, edit, config, against)
        more = {} if forward is None else {"forward": forward(run)}
        temperature = run.config.generation.temperature
        sample: dict[str, Any] = {"version": version, "samples": run.samples, "dtype": dtype_of(run)}
        sample["temperature"] = temperature
        drawn = sampled(wrong, run.prompts(), **{**sample, **options, **more})
        if rollouts is not None:
            drawn[rollouts:] = sampled(right, run.prompts(), **sample)[rollouts:]
        trained = scored(right, drawn, dtype=dtype_of(run), temperature=temperature)
        write(run, drawn, trained, recorded=recorded, stale=stale)

    return plant


def changed_folder(run: RecordedRun, edit: Edit | None, config: dict[str, Any] | None, against: int = -2) -> Path:
    """A folder with the weights and the configuration that a wrong side has."""
    right = run.versions[-1]
    if edit is None and config is None:
        return right

    def changed(now: Tensors) -> Tensors:
        after = now if edit is None else edit(now, tensors_of(run.versions[against]))
        return {name: value.contiguous().clone() for name, value in after.items()}  # files take no shared memory

    wrong = edited_copy(right, run.root / "wrong", changed)
    edit_config(wrong, **(config or {}))
    return wrong


def dtype_of(run: RecordedRun) -> torch.dtype:
    return torch.bfloat16 if run.config.policy.precision == "bfloat16" else torch.float32


def trainer(
    *,
    recorded: bool,
    edit: Edit | None = None,
    forward: Callable[[Any, list[list[int]]], list[Tensor]] = alone,
    change: Callable[[Column], Column] = lambda column: column,
    stale: bool = False,
    **options: Any,
) -> Plant:
    """A trainer that is wrong, and an engine that is right.

    Args:
        recorded: the step recorded the trainer's log-probabilities; else only its metrics show them.
        edit: changes of the trainer's weights.
        forward: the trainer's forward pass over all sequences.
        change: changes of the log-probabilities.
        stale: the first step shows nothing yet.
        options: further arguments of `scored`.
    """

    def plant(run: RecordedRun) -> None:
        temperature = run.config.generation.temperature
        version, right = len(run.versions) - 1, run.versions[-1]
        drawn = sampled(right, run.prompts(), version=version, temperature=temperature, samples=run.samples)
        wrong = changed_folder(run, edit, None)
        trained = change(scored(wrong, drawn, forward=forward, **{"temperature": temperature, **options}))
        write(run, drawn, trained, recorded=recorded, stale=stale)

    return plant


def record(edit: Callable[[list[Trajectory]], list[Trajectory]], *, recorded: bool = False) -> Plant:
    """A run in which both sides are right, whose rollouts were changed afterwards."""

    def plant(run: RecordedRun) -> None:
        version, right = len(run.versions) - 1, run.versions[-1]
        drawn = sampled(right, run.prompts(), version=version, samples=run.samples)
        trained = scored(right, drawn)
        write(run, drawn, trained, recorded=recorded)
        learnt = [{"prev_logprobs": logprobs} for logprobs in trained] if recorded else ()
        run.write(version + 1, edit(drawn), learnt)

    return plant


def write(
    run: RecordedRun, drawn: Sequence[Trajectory], trained: Column, *, recorded: bool, stale: bool = False
) -> None:
    """Write rollouts and metrics of the newest step.

    Args:
        run: the run.
        drawn: the rollouts.
        trained: the trainer's log-probabilities of them.
        recorded: whether the rollouts' file has these.
        stale: whether earlier steps were right; else they have the figures of the newest one.
    """
    step = len(run.versions)
    run.write(step, drawn, [{"prev_logprobs": logprobs} for logprobs in trained] if recorded else ())
    figures = consistency(drawn, trained)
    run.write_metrics(
        {number: figures if number == step or not stale else HEALTHY_ERROR for number in range(1, step + 1)}
    )


def _run(family: str, *overrides: str, versions: int = 2, **config: Any) -> Callable[[Path], RecordedRun]:
    def make(root: Path) -> RecordedRun:
        run = make_run(root, family, *overrides, **config)
        for _ in range(versions - 1):
            run.add_version()
        return run

    return make


def _tied(root: Path) -> RecordedRun:
    """A model whose head is its embedding."""
    (root / "plain").mkdir()
    plain = make_run(root / "plain", "qwen3").versions[0]
    edit_config(plain, tie_word_embeddings=True)
    tied = edited_copy(plain, root / "tied", lambda now: {name: now[name] for name in now if name != "lm_head.weight"})
    shutil.rmtree(root / "plain")
    run = make_run(root, tied)
    run.add_version()
    return run


RUNS: dict[str, Callable[[Path], RecordedRun]] = {
    "dense": _run("qwen3", versions=3),
    "tied": _tied,
    "biases": _run("qwen2"),
    "llama": _run("llama", "policy.packing=true"),
    "experts": _run("qwen3_moe"),
    "shared experts": _run("deepseek_v3"),
    "gemma": _run("gemma3"),
    "adapters": _run("qwen3", "policy.lora.rank=4", versions=3),
    "bfloat16": _run("qwen3", "policy.precision=bfloat16"),
    "bfloat16 experts": _run("qwen3_moe", "policy.precision=bfloat16"),
    "bfloat16 adapters": _run("qwen3", "policy.precision=bfloat16", "policy.lora.rank=4"),
    "gpt_oss": _run("gpt_oss"),
    "glm4": _run("glm4"),
    "mixtral": _run("mixtral"),
    "colder": _run("llama", "generation.temperature=0.7"),
}
"""Runs by name: each makes models, versions and checkpoints in a folder."""
