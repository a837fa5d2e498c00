"""Alarms of a run: signs in the history of its figures that training goes wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from megatron_grpo.config.run_schema import AlarmName
from megatron_grpo.observability.run_files import format_json_line, read_lines, write_text

Row = Mapping[str, Any]  # figures of a step or validation, with "step"
ALARMS_FILE = "alarms.jsonl"
FIRST_STEPS = 20  # steps at the beginning that later ones are compared with
WINDOW = 10  # latest steps whose mean counts, so that a single step raises only spikes
KEPT_STEPS = 200  # latest steps that rules look at
RECALLED_STEPS = 4 * WINDOW  # of earlier starts, whose alarms still last

LEAST_ENTROPY_SHARE = 0.05  # of the entropy at the beginning
FALLING_ENTROPY_SHARE = 0.3  # the same, for an entropy that falls while rewards do
MOST_KL = 0.3  # nats a token, when it has also grown by KL_GROWTH within 50 steps
KL_GROWTH = 4.0
MOST_STEADY_KL = 2.0  # nats a token, however slowly it came
MOST_OFF_STEPS = 3  # of WINDOW steps whose probability error leaves the noise
MISMATCH_GROWTH, LEAST_MISMATCH = 10.0, 1e-2  # of gen_kl_error over the first steps, and in nats a token
FLAT_STEPS = 200  # steps without a better reward
FLAT_ERRORS = 2.0  # standard errors that a better reward must gain
SATURATED_SHARE = 0.97  # of the prompts that all samples answer correctly
WITHOUT_SIGNAL_SHARE = 0.9  # of the prompts, which have no learning signal
TRUNCATED_SHARE, TRUNCATED_GROWTH = 0.5, 0.25  # of the responses; growth over the lowest mean so far
SPIKE = 20.0  # times the median gradient norm of the latest steps
FAILED_SHARE = 0.05  # of the rollouts of a step
SLOW_SPEED = 0.8  # of the median of all ranks, in WINDOW steps in succession
HELD_OUT_FALL = 0.1  # of the best held-out figure, in two validations in succession


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign that training goes wrong, seen in this step.

    Example: Alarm(step=120, name="failed_rollouts", text="9% of the rollouts of the last 10 steps failed")
    """

    step: int
    name: AlarmName
    text: str


@dataclass(slots=True)
class History:
    """Figures that rules read: first and latest steps, all validations."""

    samples_per_step: int
    first: list[Row] = field(default_factory=list)
    latest: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    validations: list[Row] = field(default_factory=list)
    lowest_truncation: float = 1.0  # least mean of WINDOW steps so far

    def add_step(self, row: Row) -> None:
        """Add the figures of the next step."""
        if len(self.first) < FIRST_STEPS:
            self.first.append(row)
        self.latest.append(row)
        truncation = self.read_latest("truncation_rate")
        if len(truncation) == WINDOW:
            self.lowest_truncation = min(self.lowest_truncation, fmean(truncation))

    def read_latest(self, name: str, count: int = WINDOW) -> list[float]:
        """Read a figure in the last `count` steps, without those that lack it."""
        rows = islice(self.latest, max(len(self.latest) - count, 0), None)
        return _select(rows, name)

    def read_first(self, name: str) -> list[float]:
        """Read a figure in the first steps; empty until the run has more."""
        return _select(self.first, name) if self.latest and self.latest[-1]["step"] > self.first[-1]["step"] else []


def find_alarms(history: History) -> dict[AlarmName, str]:
    """Find what is wrong after the last step: alarms with their texts."""
    texts = ((name, rule(history)) for name, rule in RULES.items())
    return {name: text for name, text in texts if text is not None}


class AlarmWatch:
    """Raises an alarm when its sign appears.

    It is raised again only after the sign was away for WINDOW steps.
    """

    def __init__(self, samples_per_step: int, ignored: Sequence[AlarmName] = ()) -> None:
        self._history = History(samples_per_step)
        self._ignored = frozenset(ignored)
        self._last_seen: dict[AlarmName, int] = {}

    def observe_step(self, row: Row) -> list[Alarm]:
        """Add a step's figures; return the alarms that begin with it."""
        self._history.add_step(row)
        step, alarms = int(row["step"]), []
        for name, text in find_alarms(self._history).items():
            if step - self._last_seen.get(name, -WINDOW - 1) > WINDOW and name not in self._ignored:
                alarms.append(Alarm(step, name, text))
            self._last_seen[name] = step
        return alarms

    def restore(self, steps: Sequence[Row], validations: Sequence[Row]) -> None:
        """Add the steps and validations of earlier starts, whose alarms were raised then."""
        self._history.validations.extend(validations)
        for row in steps[:-RECALLED_STEPS]:
            self._history.add_step(row)
        for row in steps[-RECALLED_STEPS:]:
            self.observe_step(row)

    def observe_validation(self, row: Row) -> None:
        """Add the figures of a validation, which belong to the next step's alarms."""
        self._history.validations.append(row)


def make_row(alarm: Alarm) -> dict[str, Any]:
    """Make the line of an alarm in ALARMS_FILE."""
    return asdict(alarm)


def read_alarms(run_dir: Path) -> list[dict[str, Any]]:
    """Read the alarms of a run, oldest first; ValueError: its file is damaged."""
    path = run_dir / ALARMS_FILE
    return [check_row(row, f"{path}:{number}") for number, row in enumerate(read_lines(path), start=1)]


def check_row(row: Mapping[str, Any], line: str) -> dict[str, Any]:
    """Return the line of an alarm; ValueError: it is none.

    `line`: file and number of the line, for the message.
    """
    if type(row.get("step")) is not int or not all(isinstance(row.get(key), str) for key in ("name", "text")):
        raise ValueError(f"{line} is damaged: it is not the line of an alarm")
    return {key: row[key] for key in ("step", "name", "text")}


def cut_alarms(run_dir: Path, last_step: int) -> None:
    """Remove the alarms of later steps."""
    rows = [row for row in read_alarms(run_dir) if row["step"] <= last_step]
    write_text(run_dir / ALARMS_FILE, "".join(map(format_json_line, rows)))


def _select(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]


def _check_entropy(history: History) -> str | None:
    name = "entropy" if history.read_latest("entropy") else "approx_entropy"
    first, now = history.read_first(name), history.read_latest(name)
    if len(first) < FIRST_STEPS or len(now) < WINDOW or fmean(first) <= 0:
        return None
    share = fmean(now) / fmean(first)
    # Entropy falls in every run that learns: it is a collapse if nothing is left, or if rewards fall with it.
    is_falling = fmean(history.read_latest("reward") or [0.0]) < fmean(history.read_first("reward") or [0.0])
    has_learnt = fmean(history.read_latest("groups_all_right") or [0.0]) > SATURATED_SHARE
    if has_learnt or share > (FALLING_ENTROPY_SHARE if is_falling else LEAST_ENTROPY_SHARE):
        return None
    return f"{name} is {fmean(now):.3g}, {share:.1%} of that of the first {FIRST_STEPS} steps: samples become equal"


def _check_kl(history: History) -> str | None:
    now, before = history.read_latest("kl_penalty"), history.read_latest("kl_penalty", 50)[:-WINDOW]
    if len(now) < WINDOW or len(before) < WINDOW:
        return None
    mean, earlier = fmean(now), max(median(before), 1e-9)
    if mean > MOST_STEADY_KL:
        return f"kl_penalty is {mean:.3g} nats a token: the policy is far from its reference"
    if mean > MOST_KL and mean > KL_GROWTH * earlier:
        return (
            f"kl_penalty is {mean:.3g} nats a token, {mean / earlier:.0f} times that of the {len(before)} steps before"
        )
    return None


def _check_mismatch(history: History) -> str | None:
    off = history.read_latest("token_mult_prob_error_off")
    if sum(off) >= MOST_OFF_STEPS:
        return f"training and generation disagree more than noise explains in {sum(off):.0f} of {len(off)} steps"
    first, now = history.read_first("gen_kl_error"), history.read_latest("gen_kl_error")
    if len(first) < FIRST_STEPS or len(now) < WINDOW:
        return None
    mean, beginning = fmean(now), max(fmean(first), 1e-9)
    if mean > LEAST_MISMATCH and mean > MISMATCH_GROWTH * beginning:
        return f"gen_kl_error is {mean:.2g}, {mean / beginning:.0f} times that of the first {FIRST_STEPS} steps"
    return None


def _check_flat_reward(history: History) -> str | None:
    rewards, first = history.read_latest("reward", FLAT_STEPS), history.read_first("reward")
    is_learning = any(history.read_latest("optimizer_steps", FLAT_STEPS))
    if len(rewards) < FLAT_STEPS or len(first) < FIRST_STEPS or not is_learning:
        return None
    latest = rewards[-FLAT_STEPS // 4 :]
    gain = fmean(latest) - fmean(first)
    error = math.hypot(stdev(first) / math.sqrt(len(first)), stdev(latest) / math.sqrt(len(latest)))
    if gain > FLAT_ERRORS * error:
        return None
    return f"reward is {fmean(latest):.3g} after {FLAT_STEPS} steps or more, as in the first {FIRST_STEPS} steps"


def _check_saturated_reward(history: History) -> str | None:
    shares = history.read_latest("groups_all_right", 2 * WINDOW)
    if len(shares) < 2 * WINDOW or fmean(shares) < SATURATED_SHARE:
        return None
    return f"all samples are correct for {fmean(shares):.0%} of the prompts: nothing is left to learn from them"


def _check_signal(history: History) -> str | None:
    shares = history.read_latest("groups_without_signal", 2 * WINDOW)
    if len(shares) < 2 * WINDOW or fmean(shares) < WITHOUT_SIGNAL_SHARE:
        return None
    return f"{fmean(shares):.0%} of the prompts have samples of equal reward, from which nothing is learnt"


def _check_lengths(history: History) -> str | None:
    shares = history.read_latest("truncation_rate")
    if len(shares) < WINDOW:
        return None
    mean = fmean(shares)
    if mean < TRUNCATED_SHARE and mean < history.lowest_truncation + TRUNCATED_GROWTH:
        return None
    return (
        f"{mean:.0%} of the responses are cut off at the length limit (lowest so far {history.lowest_truncation:.0%})"
    )


def _check_gradients(history: History) -> str | None:
    norms = history.read_latest("grad_norm", 50)
    if len(norms) < FIRST_STEPS or history.latest[-1].get("grad_norm") is None:
        return None
    usual = median(norms[:-1])
    if not usual or norms[-1] <= SPIKE * usual:
        return None
    return (
        f"grad_norm is {norms[-1]:.3g}, {norms[-1] / usual:.0f} times the median of the {len(norms) - 1} steps before"
    )


def _check_failures(history: History) -> str | None:
    counts = history.read_latest("failed_rollouts")
    share = fmean(counts) / history.samples_per_step if counts else 0.0
    if len(counts) < WINDOW or share < FAILED_SHARE:
        return None
    return f"{share:.0%} of the rollouts of the last {WINDOW} steps failed"


def _check_slow_rank(history: History) -> str | None:
    speeds, ranks = history.read_latest("slowest_rank_speed"), history.read_latest("slowest_rank")
    if len(speeds) < WINDOW or max(speeds) > SLOW_SPEED or len(set(ranks)) > 1:
        return None
    return (
        f"rank {ranks[0]:.0f} of the policy has computed at {median(speeds):.0%} of the others' speed for {WINDOW} "
        f"steps; logs/heartbeats/policy_rank_{ranks[0]:.0f}.json names its node"
    )


def _check_held_out(history: History) -> str | None:
    present = [name for name in ("val_accuracy", "val_reward") if _select(history.validations, name)]
    rows = [row for row in history.validations if present and row.get(present[0]) is not None]
    if len(rows) < 4:
        return None
    values, name = [float(row[present[0]]) for row in rows], present[0]
    best = max(values[:-2])
    has_fallen = best > 0 and max(values[-2:]) < (1 - HELD_OUT_FALL) * best
    rewards = history.read_latest("reward", KEPT_STEPS)
    is_rising = len(rewards) >= 2 * WINDOW and fmean(rewards[-WINDOW:]) > fmean(rewards[: len(rewards) // 2])
    if not has_fallen or not is_rising:
        return None
    return f"{name} has fallen from {best:.3g} to {values[-1]:.3g} while the reward of training rises"


RULES: dict[AlarmName, Callable[[History], str | None]] = {
    "entropy_collapse": _check_entropy,
    "kl_growth": _check_kl,
    "mismatch_growth": _check_mismatch,
    "reward_flat": _check_flat_reward,
    "reward_saturated": _check_saturated_reward,
    "groups_without_signal": _check_signal,
    "lengths_at_limit": _check_lengths,
    "gradient_spike": _check_gradients,
    "failed_rollouts": _check_failures,
    "slow_rank": _check_slow_rank,
    "held_out_falls": _check_held_out,
}
"""Rules by the name of their alarm: the text if its sign is there after the last step, else None."""
