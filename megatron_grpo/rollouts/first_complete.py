"""Which of the prompts under way a step trains on: those that are complete first, before any becomes too old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Group = TypeVar("Group")


@dataclass(slots=True)
class _Begun(Generic[Group]):
    """A prompt that is being sampled, or has been."""

    row: int
    version: int
    """Of the weights that generation had when it was begun."""
    group: Group | None = None
    """What came of it; None: not yet complete."""
    left_over: bool = False
    """Whether a step has taken a later prompt before it."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[Group]):
    """What a step gets."""

    groups: list[Group]
    """In the order of their prompts in the data."""
    resumed: int
    """Groups that an earlier step has left over: they went on under the weights that it published."""
    left_over: int
    """Prompts that were begun before the last one that is taken, and go on."""


class FirstComplete(Generic[Group]):
    """Prompts under way, of which a step takes `prompts_per_take` that are complete, the oldest ones first.

    A prompt that was begun with the weights of version w is taken for the step that learns with w + max_age_steps at
    the latest. So that no step has more of them to take than it can: those that have to be gone within the next k
    steps are never more than k steps take. A step waits where too few of the oldest are complete for that.
    """

    def __init__(self, prompts_per_take: int, max_age_steps: int) -> None:
        """
        Args:
            prompts_per_take: prompts that are taken together; every step takes at least once.
            max_age_steps: most steps from the weights with which a prompt is begun to those that learn from it.
        """
        self._per_take, self._max_age = prompts_per_take, max_age_steps
        self._begun: dict[int, _Begun[Group]] = {}
        """By number, in the order of the data."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def rows(self) -> list[int]:
        """Rows of the prompts that no step has taken, in the order of the data."""
        return [one.row for one in self._begun.values()]

    @property
    def complete(self) -> int:
        """Prompts that are complete and that no step has taken."""
        return sum(one.group is not None for one in self._begun.values())

    def add(self, row: int, version: int) -> int:
        """A prompt is begun, with the weights of this version.

        Returns:
            A number for it.
        """
        assert len(self._begun) < self._per_take * (self._max_age + 1), "what is sampled further ahead becomes too old"
        self._begun[self._next] = _Begun(row, version)
        self._next += 1
        return self._next - 1

    def put(self, number: int, group: Group) -> None:
        """This is what came of a prompt."""
        self._begun[number].group = group

    def take(self, version: int) -> Taken[Group] | None:
        """What a step trains on that learns with the weights of this version; None: too little is complete yet."""
        complete = [number for number, one in self._begun.items() if one.group is not None]
        if len(complete) < self._per_take or not self._in_time(version):
            return None
        numbers = complete[: self._per_take]
        taken = [self._begun.pop(number) for number in numbers]
        left_over = [one for number, one in self._begun.items() if number < numbers[-1]]
        for one in left_over:
            one.left_over = True
        assert all(0 <= version - one.version <= self._max_age for one in taken), (version, taken)
        groups = [one.group for one in taken if one.group is not None]
        return Taken(groups, sum(one.left_over for one in taken), len(left_over))

    def _in_time(self, version: int) -> bool:
        """Whether what remains, when the oldest complete ones are taken, can be taken in time by the steps to come."""
        for last in range(version, version + self._max_age):
            due = [one for one in self._begun.values() if one.version + self._max_age <= last]
            later = self._per_take * (last - version)
            if len(due) - later > sum(one.group is not None for one in due):
                return False
        return True
