"""A whole training of any algorithm with fakes for processes, and the keys of its configuration that it reads."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.schema import Config
from megatron_grpo.config.section import Section
from megatron_grpo.data.processors import DatumSpec
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import make_run
from tests.support.grpo_run import SHAPE
from tests.support.trajectories import make_trajectory

PAIRS = ["data.response_key=null"]
RUNS = {
    "grpo": ["+exp=quickstart"],
    "async": ["+exp=quickstart_async"],
    "ppo": ["+exp=quickstart_ppo"],
    "sft": ["+exp=quickstart_sft"],
    "dpo": ["+exp=quickstart_sft", "algorithm=dpo", *PAIRS],
    "simpo": ["+exp=quickstart_sft", "algorithm=dpo", "dpo.loss_type=simpo", *PAIRS],
    "kto": ["+exp=quickstart_sft", "algorithm=kto"],
    "kto on pairs": [
        *("+exp=quickstart_sft", "algorithm=kto", *PAIRS),
        *("kto.num_generations_per_prompt=2", "data.label_key=null"),
    ],
    "reward_model": ["+exp=quickstart_sft", "algorithm=reward_model", *PAIRS],
    "chord": ["+exp=quickstart_chord"],
    "self-distillation": ["+exp=quickstart_self_distillation"],
    "distillation": ["+exp=quickstart_distillation"],
    "distillation and rewards": [
        "+exp=quickstart_distillation",
        "loss_fn.policy_loss_weight=1",
        "grpo.num_generations_per_prompt=4",
    ],
}
"""Command lines of every algorithm."""
STEPS = 2


class Rows:
    """A loader of two batches an epoch, of rows to sample from or to learn from."""

    epoch = 0

    def __init__(self, prompts: int, *, has_pairs: bool) -> None:
        self.prompts, self.has_pairs = prompts, has_pairs

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        for _ in range(2):
            yield [self.make_row(number) for number in range(self.prompts)]
        self.epoch += 1

    def make_row(self, number: int) -> DatumSpec:
        question: Any = {"role": "user", "content": "1+1=", "token_ids": [3, 4]}
        answers: list[Any] = [{"role": "assistant", "content": text, "token_ids": [5, 6]} for text in ("2", "3")]
        row: Any = {"message_log": [question, answers[0]], "length": 4, "extra_env_info": {}, "loss_multiplier": 1.0}
        row |= {"idx": number, "task_name": "addition", "prompt": "1+1="}
        return row | ({"rejected": [question, answers[1]]} if self.has_pairs else {"label": number == 0})

    def load_waiting_batches(self) -> list[list[DatumSpec]]:
        return []

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def observe(self, outcomes: object) -> None:
        """Choose no other rows."""


def answer(prompts: Sequence[DatumSpec], samples: int) -> list[list[Trajectory]]:
    """Responses of two turns, of which every other one is right."""
    return [
        [
            make_trajectory(
                4,
                prompt_idx=prompt["idx"],
                group=group,
                sample=sample,
                task_name="addition",
                reward=float((group + sample) % 2),
                correct=bool((group + sample) % 2),
                turn_rewards=[0.0, float((group + sample) % 2)],
                turn_tokens=[2, 2],
            )
            for sample in range(samples)
        ]
        for group, prompt in enumerate(prompts)
    ]


def train_on_fakes(config: Config, folder: Path) -> Any:
    """Train for two steps with the loop that the algorithm's value names, on two prompts or rows; needs `fake_ray`."""
    loop, method = config.loop, config.method
    loop.num_prompts_per_step, loop.max_num_steps, loop.max_num_epochs = 2, STEPS, 3
    loop.val_period = min(loop.val_period, 1)
    if not method.rows:
        loop.num_generations_per_prompt = max(2, min(loop.num_generations_per_prompt, 4))
    config.async_sampling.enabled = False  # its buffer is made by the set-up
    config.checkpointing.enabled = False
    config.policy.train_global_batch_samples = config.value.train_global_batch_samples = None
    run = make_run(config, folder, FakeRollouts(answer), SHAPE, [])
    run.loader = Rows(2, has_pairs=config.has_pairs)
    if config.demonstration_config is not None:
        run.demonstrations = [run.loader.make_row(number) for number in range(3)]
    if config.teaches_itself:
        run.hinted_prompts = [run.loader.make_row(number) for number in range(2)]
    run.val_prompts = [run.loader.make_row(7)]
    run.logger = SimpleNamespace(run_dir=folder, stop_reason=None, alarms=[])
    for name in ("note", "note_once", "end_early", "log_validation", "show_samples"):
        setattr(run.logger, name, lambda *_: None)
    run.logged = []
    run.logger.log_step = lambda step, metrics, *_: run.logged.append(metrics)
    uploads = SimpleNamespace(finish=lambda: None)
    run.checkpointer = SimpleNamespace(list_steps=list, finish=lambda: None, advance=lambda: None, save_s={})
    run.checkpointer.is_due, run.checkpointer.uploads = lambda step: False, uploads
    resolve_name(method.train)(run)
    return run


@contextmanager
def record_reads(config: Config) -> Iterator[set[str]]:
    """Record the keys of a configuration that the body reads."""
    prefixes = dict(_list_sections(config, ""))
    keys: set[str] = set()

    def read(section: Any, name: str) -> Any:
        prefix = prefixes.get(id(section))
        if prefix is not None and name in type(section).__dataclass_fields__:
            keys.add(prefix + name)
        return object.__getattribute__(section, name)

    Section.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield keys
    finally:
        del Section.__getattribute__


def _list_sections(section: Any, prefix: str) -> Iterator[tuple[int, str]]:
    yield id(section), prefix
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _list_sections(value, f"{prefix}{field.name}.")
