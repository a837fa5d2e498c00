"""Which columns the rows have that reward functions are called with, as far as that is known before the run starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.examine import examined
from megatron_grpo.data.prepared import PREPARED_PROMPTS
from megatron_grpo.data.specs import task_spec
from megatron_grpo.models.source import made_before_the_run


def columns_known(config: Config, sets: Sequence[DatasetConfig] | None = None) -> Callable[[str], set[str] | None]:
    """A function of a task's name that gives the columns of its rows in some sets; None: in those of the run together.

    Its answer is None where nobody has looked at the rows: while streaming, or when a set cannot be read, which is told
    elsewhere; or when no row is for the task.
    """
    looked_at = [*config.data.training.values(), *config.data.validation.values()] if sets is None else sets

    def columns_of(task: str) -> set[str] | None:
        if config.data.streaming and sets is None:
            return None
        environments = {name: env.type for name, env in config.env.items()}
        found: set[str] = set()
        for one in looked_at:
            if made_before_the_run(config, one.path):
                assert config.prepare.name is not None
                made = PREPARED_PROMPTS[config.prepare.name]
                found |= set(made.columns) if task in made.tasks else set()
                continue
            looked = examined(one, config.data, environments)
            if looked.source is None:
                return None
            found |= looked.report.columns.get(task, set())
        if not found:
            return None
        has_answer = task_spec(config.data, task).answer_key is not None
        return found | ({"answer"} if has_answer else set())

    return columns_of
