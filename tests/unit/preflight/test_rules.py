"""Conditions of the rules name settings that exist, and every key is read, refused or remarked on."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

import megatron_grpo
from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.keys import fill_placeholders, is_met, load_tables
from megatron_grpo.config.loop_names import list_readers, translate_key
from megatron_grpo.config.schema import Config, LossConfig
from megatron_grpo.losses.distillation_loss import DistillationLossFn
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.preflight.config_checks import find_problems
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.remarks import find_remarks
from megatron_grpo.preflight.rules import CONFLICTS, find_broken_rules, list_conflicts

PACKAGE = Path(megatron_grpo.__file__).parent
ADVANTAGES = {"losses/advantages.py", "algorithms/step_advantages.py", "algorithms/token_functions.py"}
"""Files that only algorithms with rewards go through."""
PAIRS = ["data.response_key=null"]
RUNS = {
    "grpo": ["+exp=quickstart"],
    "async": ["+exp=quickstart_async"],
    "ppo": ["+exp=quickstart_ppo"],
    "sft": ["+exp=quickstart_sft"],
    "dpo": ["+exp=quickstart_sft", "algorithm=dpo", *PAIRS],
    "reward_model": ["+exp=quickstart_sft", "algorithm=reward_model", *PAIRS],
    "distillation": ["+exp=quickstart_distillation"],
    "distillation and rewards": [
        "+exp=quickstart_distillation",
        "loss_fn.policy_loss_weight=1",
        "grpo.num_generations_per_prompt=4",
    ],
}


def list_values(hint: Any, value: Any) -> list[Any]:
    """Other values that a type may have, the likeliest first."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return list_values(arguments[0], value)
    if origin is Literal:
        return [choice for choice in arguments if choice != value]
    if origin in (types.UnionType, typing.Union):
        return [setting for argument in arguments for setting in list_values(argument, value)]
    if hint is bool:
        return [not value]
    number = 0 if value is None or isinstance(value, str) else value
    numbers = [number + 1, 2, 3] if hint is int else [number + 0.25, number / 2, 0.5, 1.5, -0.5]
    texts = ["val_reward"] if hint is str else []
    return [setting for setting in (numbers if hint in (int, float) else texts) if setting != value]


def list_leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(type(section), include_extras=True)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from list_leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], value


def change_keys(config: Config) -> Iterator[tuple[str, Config]]:
    """Every key of the loss and the loop with another valid value, one at a time."""
    for section in ("loss_fn", config.loop_name):
        for key, hint, value in list_leaves(getattr(config, section), f"{section}."):
            for setting in list_values(hint, value):
                try:
                    TypeAdapter(hint).validate_python(setting)
                except ValidationError:
                    continue
                changed: Any = copy.deepcopy(config)
                *sections, name = key.split(".")
                setattr(functools.reduce(getattr, sections, changed), name, setting)
                yield key, changed
                break
            else:
                pytest.fail(f"{key} has no other value")


def find_messages(config: Config) -> set[tuple[str, str]]:
    return {(message.subject, message.text) for message in (*find_problems(config, None), *find_remarks(config))}


@functools.cache
def list_attributes(*, with_advantages: bool) -> frozenset[str]:
    """Attributes that the package reads where a run goes through, the properties of its configuration included."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        is_check = (
            path.startswith(("preflight/", "planning/", "verification/", "config/")) and path != "config/schema.py"
        )
        if not is_check and (with_advantages or path not in ADVANTAGES):
            tree = ast.parse(file.read_text())
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            of_getattr = [call.args[1] for call in calls if ast.unparse(call.func) == "getattr"]
            names |= {name.value for name in of_getattr if isinstance(name, ast.Constant)}
    return frozenset(names)


def learn(config: Config) -> list[torch.Tensor]:
    """Loss and gradient of the run's loss class on fixed tokens."""
    numbers = torch.Generator().manual_seed(3)

    def draw() -> torch.Tensor:
        return -2.5 * torch.rand(4, 6, generator=numbers) - 0.2

    loss: LossConfig = config.loss_fn
    curr = draw().requires_grad_()
    mask = (torch.arange(6) < torch.tensor([6, 5, 3, 2])[:, None]).float()
    fields: dict[str, Any] = {
        "loss_mask": mask,
        "generation_logprobs": draw(),
        "advantages": (draw() + 0.7) * 4,
        "prev_logprobs": draw() if config.needs_prev_logprobs else None,
        "reference_logprobs": draw() if config.uses_reference else None,
        "entropy": -curr * curr.exp(),
        "positive": mask * torch.tensor([[1.0], [0.0], [1.0], [0.0]]),
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    counts = GlobalCounts(
        tokens=float(mask.sum()), sequences=4.0, all_sequences=4.0, positive_tokens=float(fields["positive"].sum())
    )
    is_distilled = config.algorithm == "distillation"
    if is_distilled:
        fields["divergence"] = curr.square()
    total, _ = (DistillationLossFn if is_distilled else ClippedPGLossFn)(loss)(curr, TokenFields(**fields), counts)
    return [total.detach(), torch.autograd.grad(total, curr)[0]]


def is_read(key: str, config: Config, changed: Config) -> bool:
    section, _, name = key.partition(".")
    samples = not config.training_loop.is_supervised
    if section == "loss_fn":
        # The divergence is computed by the ranks, from these two; test_loss_metrics.py has their values.
        if key in ("loss_fn.kl_type", "loss_fn.mixed_kl_weight"):
            return config.algorithm == "distillation"
        return samples and any(
            not torch.equal(before, after) for before, after in zip(learn(config), learn(changed), strict=True)
        )
    if samples and name == config.training_loop.passes_name:  # read under this name, which the section has
        return changed.passes_per_step != config.passes_per_step
    return name.rpartition(".")[2] in list_attributes(with_advantages=samples and config.uses_rewards)


@pytest.mark.parametrize("run", RUNS)
def test_every_key_is_read_refused_or_remarked_on(run: str) -> None:
    config = compose_typed(RUNS[run]).config
    assert config is not None
    config.cluster.gpus_per_node = 0
    before = find_messages(config)
    silent = [
        key
        for key, changed in change_keys(config)
        if not find_messages(changed) - before and not is_read(key, config, changed)
    ]
    assert not silent


SWITCHES = load_tables("switches.yaml")
CONDITIONS = [*(row for table in CONFLICTS.values() for row in table), *SWITCHES["needs"], *SWITCHES["unused"]]


@pytest.fixture(scope="module", params=["quickstart", "quickstart_ppo"])
def config(request: pytest.FixtureRequest) -> Config:
    return compose_config([f"+exp={request.param}"])


def test_every_condition_can_be_evaluated(config: Config) -> None:
    for row in CONDITIONS:
        for condition in row.split(" and "):
            is_met(config, condition)


def test_every_value_in_a_text_exists(config: Config) -> None:
    for table in CONFLICTS.values():
        for text in table.values():
            for key in re.findall(r"{([^}]*)}", fill_placeholders(config, text)):
                if config.algorithm in list_readers(key):
                    attrgetter(translate_key(config.algorithm, key))(config)


def test_a_conflict_names_the_first_key_with_its_value_and_fills_its_text(config: Config) -> None:
    config.generation.engine.dtype, config.refit.fp8_blocks, config.refit.mode = "bfloat16", True, "files"
    (problem,) = find_broken_rules(config, list_conflicts(config, "fp8_blocks"))
    assert problem.subject == "refit.fp8_blocks=True"
    assert "refit.mode=files sends tensors as vLLM's loader reads them; use reshard" in problem.text


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("loss_fn.use_sapo=false", True),
        ("loss_fn.use_sapo!=false", False),
        ("loss_fn.sapo_temperature_pos=1", True),
        ("policy.lora.rank above 0", False),
        ("policy.lora.rank below 1", True),
        ("no debug.rollouts_from", True),
        ("debug.rollouts_from", False),
        ("no generation.server.urls and loss_fn.use_sapo=true", False),
        ("debug.rollouts_from above 1", False),
        ("policy.lora.alpha at least 32", True),
        ("policy.lora.alpha at most 31", False),
        ("policy.optimizer.min_lr below policy.optimizer.lr", True),
        ("policy.optimizer.warmup_steps at least policy.optimizer.decay_steps", False),
        ("grpo.num_prompts_per_step equals grpo.val_period", False),
        ("ppo.ppo_epochs=1", False),
        ("policy.fp8.recipe=delayed|tensorwise", True),
        ("policy.fp8.recipe!=delayed|tensorwise", False),
    ],
)
def test_the_forms_of_a_condition(condition: str, holds: bool) -> None:
    assert is_met(Config(), condition) == holds
