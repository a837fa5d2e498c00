"""Keys that only the other algorithm reads, and what to say of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.loop_keys import is_foreign_to, other_than


def misplaced_keys(algorithm: str, given: Mapping[str, str], already: Collection[str]) -> Iterator[Problem]:
    """Keys that the user gave and that the other algorithm reads, also those given at their defaults.

    Args:
        algorithm: the one that runs.
        given: values, as text, by key.
        already: keys that another problem names.
    """
    for key, value in given.items():
        if is_foreign_to(algorithm, key) and "." in key and key not in already:
            yield Problem(f"{key}={value}", misplaced(key, algorithm))


def misplaced(key: str, algorithm: str) -> str:
    """What to say of a key that only the algorithm reads that does not run."""
    advice = {
        "ppo.ppo_epochs": "; give grpo.num_iterations",
        "grpo.num_iterations": "; give ppo.ppo_epochs",
    }.get(key, "; the value model is PPO's baseline" if algorithm == "ppo" else "")
    return f"is for algorithm={other_than(algorithm)}, and this run has algorithm={algorithm}{advice}"
