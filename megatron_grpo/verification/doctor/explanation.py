"""Searches the explanation of a record: the suspect that reproduces it, and others that come near."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_grpo.verification.doctor.diagnosis import Distance, Finding
from megatron_grpo.verification.doctor.law import compute_residual
from megatron_grpo.verification.doctor.suspects.side import Candidate, Group, Side, Suspect

SCREENED = 256
"""Sampled tokens, of the rollouts that differ most, on which all suspects of a group are tried."""
FINALISTS = 8
"""Suspects of a group that are tried on all tokens: those that come closest on the screened ones."""
EXPLAINED = 0.8
"""Least share of the mean difference that a cause has to remove to be named, unless the rest is rounding."""
REPRODUCED = 0.5
"""Least share if the rest is rounding: if the difference is little more than that, wrong causes leave rounding too."""
EQUAL = 2.0
"""Explanations that leave at most this many times the least difference cannot be told apart."""
EXACT = 5e-6
"""Mean difference, in nats, that two programs in float32 leave when they compute the same."""
MENTIONED = 0.2
"""Least share that another explanation removes to be mentioned."""
NEARLY = 0.9
"""Beside a cause that is named, others are mentioned that explain at least this share of what it explains."""
MOST_OTHERS = 4
"""Most other explanations that are mentioned."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A suspect, and the distance of the record from what it predicts."""

    suspect: Suspect
    after: Distance


@dataclass(slots=True)
class Search:
    """Tries suspects on a side's record, and keeps the explanations, closest first."""

    side: Side
    base: Tensor
    """[tokens], float32: the oracle's log-probabilities without a suspect."""
    rounding: Distance
    until: float
    """Time (monotonic) after which no further suspect is tried."""
    explanations: list[Explanation] = field(default_factory=list)
    ran_out_of_time: bool = False
    """Whether suspects were left out because of `until`."""

    @property
    def before(self) -> Distance:
        """Distance of the record from the oracle."""
        return Distance.measure(self.side.recorded, self.base)

    def try_groups(self, groups: Sequence[Group]) -> bool:
        """Try groups of suspects; return whether one reproduces the record."""
        # All suspects are tried on the rollouts that differ most, and the closest of a group on all rollouts.
        part = self._select_part()
        for group in groups:
            tried: list[tuple[Distance, Suspect, Candidate]] = []
            for candidate in group(part):
                suspect, predict = candidate
                tried.append((Distance.measure(part.recorded, predict(part)), suspect, candidate))
                if time.monotonic() > self.until:
                    self.ran_out_of_time = True
                    break
                if len(tried) > 2 * FINALISTS:  # a candidate holds tensors, so those that lost are dropped early
                    tried = _find_closest(tried)
            for distance, suspect, (_, predict) in _find_closest(tried):
                if part is not self.side:
                    distance = Distance.measure(self.side.recorded, predict(self.side))
                self.explanations.append(Explanation(suspect, distance))
        self.explanations.sort(key=lambda explanation: explanation.after.mean)
        return bool(self.explanations) and self._is_reproduced(self.explanations[0])

    def _select_part(self) -> Side:
        """Select the rollouts that differ most, with at least `SCREENED` tokens."""
        lengths = self.side.lengths
        if sum(lengths) <= SCREENED:
            return self.side
        apart = [float(piece.mean()) for piece in compute_residual(self.side.recorded, self.base).split(lengths)]
        chosen: list[int] = []
        for number in sorted(range(len(lengths)), key=lambda number: -apart[number]):
            chosen.append(number)
            if sum(lengths[index] for index in chosen) >= SCREENED:
                break
        return self.side.select_rollouts(sorted(chosen))

    def _share(self, explanation: Explanation) -> float:
        before = self.before.mean
        return max(0.0, 1.0 - explanation.after.mean / before) if before else 0.0

    def _is_reproduced(self, explanation: Explanation) -> bool:
        least = EXPLAINED if explanation.suspect.only_exact else REPRODUCED
        return explanation.after.is_within(self.rounding) and self._share(explanation) >= least

    def conclude(self) -> Finding | None:
        """Make the finding of the best explanation; None: none explains enough."""
        # Of explanations that come equally close the one that assumes least is chosen, and the others are mentioned.
        # Then the one with the fewest tensors: a factor of a matrix before a norm changes nothing, so a part that holds
        # it beside the wrong tensor explains as much as that tensor alone.
        candidates = [
            explanation
            for explanation in self.explanations
            if self._is_reproduced(explanation) or not explanation.suspect.only_exact
        ]
        if not candidates:
            return None
        closest = candidates[0]
        if not self._is_reproduced(closest) and self._share(closest) < EXPLAINED:
            return None
        limit = max(EQUAL * closest.after.mean, EXACT)
        equals = [explanation for explanation in candidates if explanation.after.mean <= limit]
        chosen = min(equals, key=lambda explanation: (explanation.suspect.assumes, explanation.suspect.tensors))
        suspect, name = chosen.suspect, self.side.name
        text = f"the {name} {suspect.text}"
        if not self._is_reproduced(chosen):
            text += "; this explains most of the difference, and something else differs, too"
        mentioned = self.describe_mentioned(chosen)
        return Finding(suspect.name, suspect.cause, text, suspect.key, self.before, chosen.after, mentioned)

    def describe_mentioned(self, chosen: Explanation | None = None) -> list[str]:
        """Describe the next explanations, with the share that each explains."""
        texts: dict[str, float] = {}
        least = MENTIONED if chosen is None else max(MENTIONED, NEARLY * self._share(chosen))
        for explanation in self.explanations:
            share, text = self._share(explanation), explanation.suspect.text
            if share >= least and (chosen is None or text != chosen.suspect.text):
                texts.setdefault(text, share)
        return [f"{text}: {share:.1%}" for text, share in list(texts.items())[:MOST_OTHERS]]


def _find_closest(tried: list[tuple[Distance, Suspect, Candidate]]) -> list[tuple[Distance, Suspect, Candidate]]:
    return sorted(tried, key=lambda entry: entry[0].mean)[:FINALISTS]
