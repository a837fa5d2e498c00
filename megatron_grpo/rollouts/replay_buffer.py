"""What is sampled ahead of the step that trains: in which order it is used, and how much of it there may be."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class ReplayBuffer(Generic[Batch]):
    """Generation batches, under way or complete, in the order of their prompts; the first one is used first.

    A batch is added when the batches before it are at most `max_age_steps`. Every step takes at least one, so its turn
    comes within as many steps, and no token of it, all of which are drawn from then on, is older when it is trained on.
    So nothing has to be thrown away, and the prompts are used in the order of the data whatever ends first.
    """

    def __init__(self, max_age_steps: int) -> None:
        """
        Args:
            max_age_steps: most steps from the weights at which a batch begins to the weights that learn from it.
        """
        self.max_age_steps = max_age_steps
        self._batches: deque[tuple[Batch, int]] = deque()
        """With the version of the weights at which each was begun."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def batches(self) -> list[Batch]:
        """All that is in the buffer, the next to be used first."""
        return [batch for batch, _ in self._batches]

    @property
    def has_room(self) -> bool:
        """Whether another batch may be begun when a step is about to take one."""
        return len(self._batches) <= self.max_age_steps

    def add(self, batch: Batch, version: int) -> None:
        """Put a batch behind the others.

        Args:
            batch: whatever stands for it.
            version: of the weights that generation has when the batch is begun.
        """
        assert self.has_room, "what is sampled further ahead becomes too old"
        self._batches.append((batch, version))

    def take(self, version: int) -> Batch:
        """The next batch, for a step that learns with the weights of this version."""
        batch, begun_at = self._batches.popleft()
        assert 0 <= version - begun_at <= self.max_age_steps, (version, begun_at)
        return batch
