"""Episodes of steps in which training and generation disagree: where they begin, become far worse and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_grpo.algorithms.context import EpisodeState, ProbErrorState

# Steps in a row within the bound that end an episode. Few, so that a fault which comes and goes is reported each time.
CALM_STEPS = 3

# An episode is far worse when a step is this many times as far beyond its bound as the last one that was reported.
# So an error that grows without end is reported once for each power of ten.
FAR_WORSE = 10.0

# Episodes of a run after which a checkpoint is saved. A fault that comes and goes would otherwise write one every few
# steps.
CHECKPOINTED_EPISODES = 3


@dataclass(frozen=True, slots=True)
class EpisodeChange:
    """A change of the episode that a step makes, to be reported."""

    kind: Literal["begin", "worse", "end"]
    text: str  # part of the message about the episode
    deserves_checkpoint: bool = False


def follow_episode(state: ProbErrorState, step: int, error: float, ratio: float | None) -> EpisodeChange | None:
    """Update the episode by a step; returns its change, if any.

    Args:
        state: the episode so far, which is updated.
        step: number of the step.
        error: its token_mult_prob_error.
        ratio: its excess relative to the bound; None: the step is within its bound.
    """
    episode = state.get("episode")  # checkpoints of earlier releases have none
    if ratio is None:
        return None if episode is None else _count_calm_step(state, episode)
    ratio = max(ratio, 1.0)  # a single token may be past the hard limit in a step that is within its bound
    if episode is None:
        number = state.get("episodes", 0) + 1
        state["episodes"] = number
        state["episode"] = EpisodeState(
            first_step=step, last_step=step, steps=1, calm_steps=0, worst_error=error, reported_ratio=ratio
        )
        text = f" (episode {number} of this run)" if number > 1 else ""
        return EpisodeChange("begin", text, deserves_checkpoint=number <= CHECKPOINTED_EPISODES)
    # A number that is not finite stays the worst: a comparison with NaN is false.
    if not error <= episode["worst_error"]:
        episode["worst_error"] = error
    episode["last_step"], episode["steps"], episode["calm_steps"] = step, episode["steps"] + 1, 0
    times = ratio / episode["reported_ratio"]
    if not times >= FAR_WORSE:  # NaN: both are infinite
        return None
    episode["reported_ratio"] = ratio
    text = f"That is {times:.3g} times as far beyond the bound as reported of the episode that began with step"
    return EpisodeChange("worse", f"{text} {episode['first_step']}")


def _count_calm_step(state: ProbErrorState, episode: EpisodeState) -> EpisodeChange | None:
    episode["calm_steps"] += 1
    if episode["calm_steps"] < CALM_STEPS:
        return None
    state["episode"] = None
    first, last, count = episode["first_step"], episode["last_step"], episode["steps"]
    steps = f"step {first} was" if first == last else f"{count} of the steps {first} to {last} were"
    error = f"token_mult_prob_error was at most {episode['worst_error']:.6g}"
    return EpisodeChange("end", f"{steps} beyond the bound ({error}), and the last {CALM_STEPS} steps are within it")
