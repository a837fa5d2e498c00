"""Changes of rollouts after a run: by an edit of the record, or as a healthy run leaves them in another form."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted.plants import Rollouts

EditRollouts = Callable[[Rollouts], Rollouts]


def of_row(number: int, change: Callable[[Trajectory], Trajectory]) -> EditRollouts:
    """The rollouts with one of them changed."""
    return lambda rollouts: [change(rollout) if index == number else rollout for index, rollout in enumerate(rollouts)]


def other_token(rollout: Trajectory) -> Trajectory:
    """The sampled token at index 5 is another."""
    ids = rollout.token_ids.copy()
    ids[rollout.spans[0].start + 5] = 30 + (ids[rollout.spans[0].start + 5] - 29) % 60
    return replace(rollout, token_ids=ids)


def other_numbers(rollout: Trajectory) -> Trajectory:
    """Every sampled token has the next number, as with another vocabulary."""
    ids, start = rollout.token_ids.copy(), rollout.spans[0].start
    ids[start:] = np.minimum(ids[start:] + 1, 97)
    return replace(rollout, token_ids=ids)


def exchanged_tokens(rollout: Trajectory) -> Trajectory:
    """Two neighbouring tokens in each other's place."""
    ids, start = rollout.token_ids.copy(), rollout.spans[0].start
    first = next(at for at in range(start + 3, len(ids) - 1) if ids[at] != ids[at + 1])
    ids[first], ids[first + 1] = ids[first + 1], ids[first]
    return replace(rollout, token_ids=ids)


def other_prompt(rollout: Trajectory) -> Trajectory:
    ids = rollout.token_ids.copy()
    ids[3:6] = ids[6:9]
    return replace(rollout, token_ids=ids)


def other_logprob(rollout: Trajectory) -> Trajectory:
    """The log-probability of the sampled token at index 5 is another."""
    logprobs = rollout.logprobs.copy()
    logprobs[5] -= 0.7
    return replace(rollout, logprobs=logprobs)


def shifted_row(rollout: Trajectory) -> Trajectory:
    return replace(rollout, logprobs=np.roll(rollout.logprobs, 1))


def not_a_number(rollout: Trajectory) -> Trajectory:
    logprobs = rollout.logprobs.copy()
    logprobs[4] = np.nan
    return replace(rollout, logprobs=logprobs)


def late_spans(rollout: Trajectory) -> Trajectory:
    """The span begins a token late, and the prompt is a token longer."""
    ((start, end, version),) = rollout.spans
    return replace(rollout, spans=[Span(start + 1, end, version)], logprobs=rollout.logprobs[:-1])


def exchanged_logprobs(rollouts: Rollouts) -> Rollouts:
    """Rollouts of row 0 and of row 3, sample 1 of each, with each other's log-probabilities."""
    first, second = rollouts[1], rollouts[7]
    changed = list(rollouts)
    shorter = min(len(first.logprobs), len(second.logprobs))
    for index, to, source in ((1, first, second), (7, second, first)):
        logprobs = to.logprobs.copy()
        logprobs[:shorter] = source.logprobs[:shorter]
        changed[index] = replace(to, logprobs=logprobs)
    return changed


def two_digits(rollouts: Rollouts) -> Rollouts:
    return [replace(rollout, logprobs=rollout.logprobs.round(2)) for rollout in rollouts]


def clip_logprobs(rollouts: Rollouts) -> Rollouts:
    return [replace(rollout, logprobs=np.maximum(rollout.logprobs, -4.0)) for rollout in rollouts]


def of_base_ten(rollouts: Rollouts) -> Rollouts:
    return [replace(rollout, logprobs=rollout.logprobs / np.float32(np.log(10))) for rollout in rollouts]


def rotate_logprobs(rollouts: Rollouts) -> Rollouts:
    """Every rollout of 12 tokens has the log-probabilities of the next such one."""
    full_rows = [index for index, rollout in enumerate(rollouts) if len(rollout.logprobs) == 12]
    changed = list(rollouts)
    for index, source in zip(full_rows, [*full_rows[1:], full_rows[0]], strict=True):
        changed[index] = replace(rollouts[index], logprobs=rollouts[source].logprobs)
    return changed


def repeat_last(rollouts: Rollouts) -> Rollouts:
    """The last rollout is the one before it again."""
    return [*rollouts[:-1], rollouts[-2]]


def without_last(rollouts: Rollouts) -> Rollouts:
    return rollouts[:-1]


def spans_of_version_before(rollouts: Rollouts) -> Rollouts:
    return [
        replace(rollout, spans=[span._replace(version=span.version - 1) for span in rollout.spans])
        for rollout in rollouts
    ]


def end_early(rollout: Trajectory, end: int, reason: str) -> Trajectory:
    """A rollout of one span that ended at an earlier token."""
    ((start, _, version),) = rollout.spans
    span, logprobs = Span(start, end, version), rollout.logprobs[: end - start]
    return replace(rollout, token_ids=rollout.token_ids[:end], logprobs=logprobs, spans=[span], stop_reason=reason)


def limit_responses(length: int) -> EditRollouts:
    """Responses that a limit of their length ends."""
    return lambda rollouts: [
        rollout
        if rollout.spans[0].end <= rollout.spans[0].start + length
        else end_early(rollout, rollout.spans[0].start + length, "length")
        for rollout in rollouts
    ]


def stopped_at(token: int) -> EditRollouts:
    """Responses that end at the first such token."""

    def stop(rollout: Trajectory) -> Trajectory:
        positions = np.flatnonzero(rollout.token_ids[rollout.spans[0].start :] == token)
        return end_early(rollout, rollout.spans[0].start + int(positions[0]) + 1, "stop") if len(positions) else rollout

    return lambda rollouts: [stop(rollout) for rollout in rollouts]


def fail_two(rollouts: Rollouts) -> Rollouts:
    """An environment failed on two rollouts."""
    return [
        replace(rollout, failure="the environment failed") if index in (2, 5) else rollout
        for index, rollout in enumerate(rollouts)
    ]


def of_two_engines(rollouts: Rollouts) -> Rollouts:
    return [replace(rollout, engine=index % 2) for index, rollout in enumerate(rollouts)]
