"""Collects why layouts are refused: the problems that the run's own checks find, each once, with a count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron_grpo.config.errors import Problem

_SHOWN = 8  # most reasons of a message


@dataclass(slots=True)
class Refusals:
    """Problems of refused layouts, and how many layouts have each."""

    counts: Counter[Problem] = field(default_factory=Counter)
    roomiest: tuple[float, Problem] | None = None
    """Least GiB that an engine lacks for the longest sequence, and the problem of its layout; None: none lacks any."""

    def note_lack_of_room(self, gib: float, problem: Problem) -> None:
        """Keep the problem of the engines that lack the least memory."""
        if self.roomiest is None or gib < self.roomiest[0]:
            self.roomiest = gib, problem

    def add(self, refusals: Refusals) -> None:
        """Add the problems of another search for layouts, each once."""
        self.counts.update(refusals.counts.keys())
        if refusals.roomiest is not None:
            self.note_lack_of_room(*refusals.roomiest)

    def refuse(self, problems: Iterable[Problem]) -> bool:
        """Count the problems of a layout; return whether it has any."""
        distinct = set(problems)
        self.counts.update(distinct)
        return bool(distinct)

    def render_lines(self) -> Iterator[str]:
        """Render a line for each problem, those of most layouts first."""
        listed = self.list_problems()[:_SHOWN]
        width = max((len(problem.subject) for problem in listed), default=0)
        yield from (f"  {problem.subject:<{width}}  {problem.text}" for problem in listed)
        rest = len(self.list_problems()) - len(listed)
        if rest:
            yield f"  and {rest} more such reasons"

    def list_problems(self) -> list[Problem]:
        """List each problem once: engines without room first, then the commonest."""
        room = [] if self.roomiest is None else [self.roomiest[1]]
        return [*room, *(problem for problem, _ in self.counts.most_common())]
