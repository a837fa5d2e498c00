"""Texts of the rules name settings that exist, and every key is read, refused or remarked on."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

import megatron_grpo
from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.keys import find_key, is_section, read_keys
from megatron_grpo.config.loop_schema import GRPOConfig, SampledLoopConfig
from megatron_grpo.config.schema import Config, LossConfig
from megatron_grpo.losses.loss import GlobalCounts, make_loss
from megatron_grpo.preflight.config_checks import find_problems
from megatron_grpo.preflight.remarks import find_remarks
from megatron_grpo.preflight.rules import find_broken_rules
from tests.support.fake_rollouts import FakeRay
from tests.support.faked_training import RUNS, record_reads, train_on_fakes

PACKAGE = Path(megatron_grpo.__file__).parent
# Keys of the loss are read if they change its values; the loss reads switches that then have no effect.
LOSS_KEYS = {f"loss_fn.{field.name}" for field in dataclasses.fields(LossConfig)}


def list_values(hint: Any, value: Any) -> list[Any]:
    """Other values that a type may have, the likeliest first."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return list_values(arguments[0], value)
    if origin is Literal:
        return [choice for choice in arguments if choice != value]
    if origin in (types.UnionType, typing.Union):
        return [setting for argument in arguments for setting in list_values(argument, value)]
    if origin is list:
        return [[choice] for choice in list_values(arguments[0], None)]
    if hint is bool:
        return [not value]
    if origin is dict:
        return [{"power": 2}]
    number = 0 if value is None or isinstance(value, str) else value
    numbers = [number + 1, 2, 3] if hint is int else [number + 0.25, number / 2, 0.5, 1.5, -0.5]
    texts = ["val_reward", "cispo", "reinforce_plus_plus"] if hint is str else []
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
    """Every key of the loss, the loop and further models with another valid value, one at a time."""
    sections = {name.partition(".")[0] for name in config.method.reads} - {"teachers"}
    for section in sorted({"loss_fn", config.loop_name} | sections):
        for key, hint, value in list_leaves(getattr(config, section), f"{section}."):
            if key.startswith(("value.optimizer.", "value.parallel.", "teacher.parallel.")):
                continue  # the ranks of every model read their settings with one code
            if key.endswith(".model.family"):
                continue  # it names a module of the user's
            for setting in list_values(hint, value):
                try:
                    TypeAdapter(hint).validate_python(setting)
                except ValidationError:
                    continue
                changed: Any = copy.deepcopy(config)
                *parents, name = key.split(".")
                setattr(functools.reduce(getattr, parents, changed), name, setting)
                yield key, changed
                break
            else:
                pytest.fail(f"{key} has no other value")


def find_messages(config: Config) -> set[tuple[str, str]]:
    return {(message.subject, message.text) for message in (*find_problems(config, None), *find_remarks(config))}


SET_UP = (
    *("run/", "data/", "rollouts/", "generation/", "trainer/", "cluster/"),
    *("algorithms/setup.py", "algorithms/sample_buffer.py"),
)
"""Files of the set-up, which every run goes through, and of the processes that it starts."""


@functools.cache
def list_attributes() -> frozenset[str]:
    """Attributes that the set-up reads, the properties of the configuration included."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).as_posix().startswith((*SET_UP, "config/schema.py")):
            tree = ast.parse(file.read_text())
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            of_getattr = [call.args[1] for call in calls if ast.unparse(call.func) == "getattr"]
            names |= {name.value for name in of_getattr if isinstance(name, ast.Constant)}
    return frozenset(names)


def list_read_keys(config: Config, folder: Path) -> set[str]:
    """Keys that two steps of a training with fakes for processes read."""
    copied = copy.deepcopy(config)
    with record_reads(copied) as keys:
        train_on_fakes(copied, folder)
    return keys


def learn(config: Config) -> list[torch.Tensor]:
    """Loss and gradient of the run's loss class on fixed tokens."""
    numbers = torch.Generator().manual_seed(3)

    def draw() -> torch.Tensor:
        return -2.5 * torch.rand(4, 6, generator=numbers) - 0.2

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
    fields |= {"divergence": curr.square()} if "teacher_divergence" in config.method.metrics else {}
    total, _ = make_loss(config)(curr, TokenFields(**fields), counts)
    return [total.detach(), torch.autograd.grad(total, curr)[0]]


def is_read(key: str, config: Config, changed: Config, folder: Path) -> bool:
    section, _, name = key.partition(".")
    if section == "loss_fn":
        # The divergence is computed by the ranks, from these two; test_loss_metrics.py has their values.
        if key in ("loss_fn.kl_type", "loss_fn.mixed_kl_weight"):
            return "teacher_divergence" in config.method.metrics
        return config.method.reads_loss and any(
            not torch.equal(before, after) for before, after in zip(learn(config), learn(changed), strict=True)
        )
    if name == config.loop.passes_name and not config.method.rows:
        return changed.passes_per_step != config.passes_per_step
    # The function of the advantages gets its keys by the names of its parameters (test_formulas.py).
    loop = config.loop
    entry = loop.adv_estimator.entry if isinstance(loop, GRPOConfig) else None
    if entry is not None and name.rpartition(".")[2] in entry.reads:
        return True
    own_names = type(config.loop).__dataclass_fields__.keys() - SampledLoopConfig.__dataclass_fields__.keys()
    is_own = name.partition(".")[0] in own_names
    return key in list_read_keys(changed, folder) or (not is_own and name.rpartition(".")[2] in list_attributes())


@pytest.mark.parametrize("run", RUNS)
def test_every_key_is_read_refused_or_remarked_on(run: str, tmp_path: Path, fake_ray: FakeRay) -> None:
    config = compose_typed(RUNS[run]).config
    assert config is not None
    config.cluster.gpus_per_node = 0
    before, read_keys = find_messages(config), list_read_keys(config, tmp_path)
    silent = [
        key
        for key, changed in change_keys(config)
        if key not in read_keys - LOSS_KEYS
        and not find_messages(changed) - before
        and not is_read(key, config, changed, tmp_path)
    ]
    assert not silent


def list_texts() -> Iterator[str]:
    """Texts of the checks, without docstrings and without the values that are filled in."""
    for file in (PACKAGE / "preflight").glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
        yield from (constant.value for constant in constants if isinstance(constant.value, str))


def test_every_key_that_a_check_names_exists() -> None:
    sections = "|".join(["LOOP", *(field.name for field in dataclasses.fields(Config))])
    pattern = re.compile(rf"(?<![\w./-])(?:{sections})(?:\.\w+)+")
    names = {name.replace("LOOP", "grpo") for text in list_texts() for name in pattern.findall(text)}
    # A name that ends in an underscore is the beginning of several.
    unknown = [name for name in names if not name.endswith("_") and not find_key(name) and not is_section(name)]
    beginnings = tuple(name for name in names if name.endswith("_"))
    assert len(names) > 200
    assert unknown == []
    assert all(any(key.startswith(beginning) for key in read_keys()) for beginning in beginnings)


def test_a_problem_names_the_key_with_its_value_and_the_algorithm_s_names() -> None:
    config = Config(algorithm="ppo")
    config.ppo.val_period = 0
    (problem,) = find_broken_rules(config, [(True, "LOOP.val_period=", "is 0; set PASSES"), (False, "env", "")])
    assert (problem.subject, problem.text) == ("ppo.val_period=0", "is 0; set ppo.ppo_epochs")
