"""Profiles of the steps that logger.profile_steps names: run_dir/profiles/step_N, files of every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_grpo.run.context import SamplingRun

PROFILES_FOLDER = "profiles"


@contextmanager
def profiled(run: SamplingRun, step: int) -> Iterator[None]:
    """Record what the ranks of every model do in the body, if this step is to be profiled; it takes longer for that.

    Args:
        run: whose models are profiled.
        step: number of the step that the body makes.
    """
    if step not in run.config.logger.profile_steps:
        yield
        return
    for model in run.models():
        model.begin_profile()
    yield
    folder = run.logger.run_dir / PROFILES_FOLDER / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for model in run.models():
        model.end_profile(str(folder))
    run.logger.note(f"step {step}: profiles in {folder}")
