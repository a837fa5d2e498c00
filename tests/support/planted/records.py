"""Changes of rollouts after a run: by an edit of the record, or as a healthy run leaves them in another form."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted.plants import Rollouts

EditRollouts = Callable[[Rollouts], Rollouts]


def of_row(number: int, change: Callable[[Trajectory], Trajectory]) -> EditRollouts:
    """The rollouts with one of them changed."""
    return lambda rollouts: [change(one) if place == number else one for place, one in enumerate(rollouts)]


def other_token(one: Trajectory) -> Trajectory:
    """The sampled token at index 5 is another."""
    ids = one.token_ids.copy()
    ids[one.spans[0].start + 5] = 30 + (ids[one.spans[0].start + 5] - 29) % 60
    return replace(one, token_ids=ids)


def other_numbers(one: Trajectory) -> Trajectory:
    """Every sampled token has the next number, as with another vocabulary."""
    ids, start = one.token_ids.copy(), one.spans[0].start
    ids[start:] = np.minimum(ids[start:] + 1, 97)
    return replace(one, token_ids=ids)


def exchanged_tokens(one: Trajectory) -> Trajectory:
    """Two neighbouring tokens in each other's place."""
    ids, start = one.token_ids.copy(), one.spans[0].start
    first = next(at for at in range(start + 3, len(ids) - 1) if ids[at] != ids[at + 1])
    ids[first], ids[first + 1] = ids[first + 1], ids[first]
    return replace(one, token_ids=ids)


def other_prompt(one: Trajectory) -> Trajectory:
    ids = one.token_ids.copy()
    ids[3:6] = ids[6:9]
    return replace(one, token_ids=ids)


def other_logprob(one: Trajectory) -> Trajectory:
    """The log-probability of the sampled token at index 5 is another."""
    logprobs = one.logprobs.copy()
    logprobs[5] -= 0.7
    return replace(one, logprobs=logprobs)


def shifted_row(one: Trajectory) -> Trajectory:
    return replace(one, logprobs=np.roll(one.logprobs, 1))


def not_a_number(one: Trajectory) -> Trajectory:
    logprobs = one.logprobs.copy()
    logprobs[4] = np.nan
    return replace(one, logprobs=logprobs)


def late_spans(one: Trajectory) -> Trajectory:
    """The span begins a token late, and the prompt is a token longer."""
    ((start, end, version),) = one.spans
    return replace(one, spans=[Span(start + 1, end, version)], logprobs=one.logprobs[:-1])


def exchanged_logprobs(rollouts: Rollouts) -> Rollouts:
    """Rollouts of row 0 and of row 3, sample 1 of each, with each other's log-probabilities."""
    one, other = rollouts[1], rollouts[7]
    changed = list(rollouts)
    shorter = min(len(one.logprobs), len(other.logprobs))
    for place, to, source in ((1, one, other), (7, other, one)):
        logprobs = to.logprobs.copy()
        logprobs[:shorter] = source.logprobs[:shorter]
        changed[place] = replace(to, logprobs=logprobs)
    return changed


def two_digits(rollouts: Rollouts) -> Rollouts:
    return [replace(one, logprobs=one.logprobs.round(2)) for one in rollouts]


def clipped(rollouts: Rollouts) -> Rollouts:
    return [replace(one, logprobs=np.maximum(one.logprobs, -4.0)) for one in rollouts]


def of_base_ten(rollouts: Rollouts) -> Rollouts:
    return [replace(one, logprobs=one.logprobs / np.float32(np.log(10))) for one in rollouts]


def rotated(rollouts: Rollouts) -> Rollouts:
    """Every rollout of 12 tokens has the log-probabilities of the next such one."""
    whole = [place for place, one in enumerate(rollouts) if len(one.logprobs) == 12]
    changed = list(rollouts)
    for place, source in zip(whole, [*whole[1:], whole[0]], strict=True):
        changed[place] = replace(rollouts[place], logprobs=rollouts[source].logprobs)
    return changed


def repeated(rollouts: Rollouts) -> Rollouts:
    """The last rollout is the one before it again."""
    return [*rollouts[:-1], rollouts[-2]]


def without_last(rollouts: Rollouts) -> Rollouts:
    return rollouts[:-1]


def spans_of_version_before(rollouts: Rollouts) -> Rollouts:
    return [replace(one, spans=[span._replace(version=span.version - 1) for span in one.spans]) for one in rollouts]


def ended(one: Trajectory, end: int, reason: str) -> Trajectory:
    """A rollout of one span that ended at an earlier token."""
    ((start, _, version),) = one.spans
    span, logprobs = Span(start, end, version), one.logprobs[: end - start]
    return replace(one, token_ids=one.token_ids[:end], logprobs=logprobs, spans=[span], stop_reason=reason)


def shortened(length: int) -> EditRollouts:
    """Responses that a limit of their length ends."""
    return lambda rollouts: [
        one if one.spans[0].end <= one.spans[0].start + length else ended(one, one.spans[0].start + length, "length")
        for one in rollouts
    ]


def stopped_at(token: int) -> EditRollouts:
    """Responses that end at the first such token."""

    def stop(one: Trajectory) -> Trajectory:
        places = np.flatnonzero(one.token_ids[one.spans[0].start :] == token)
        return ended(one, one.spans[0].start + int(places[0]) + 1, "stop") if len(places) else one

    return lambda rollouts: [stop(one) for one in rollouts]


def failed(rollouts: Rollouts) -> Rollouts:
    """An environment failed on two rollouts."""
    return [
        replace(one, failure="the environment failed") if place in (2, 5) else one for place, one in enumerate(rollouts)
    ]


def of_two_engines(rollouts: Rollouts) -> Rollouts:
    return [replace(one, engine=place % 2) for place, one in enumerate(rollouts)]
