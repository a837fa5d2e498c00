"""Environments of NeMo RL, and actors, in place of one of our own: what the message says to change."""

import sys
from types import ModuleType
from typing import Any

import pytest
import ray

from megatron_grpo.config.errors import RunError
from megatron_grpo.environments.registry import import_environment_class


class MathLike:
    """The methods of NeMo RL's EnvironmentInterface."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> Any: ...

    def global_post_process_and_metrics(self, batch: Any) -> Any: ...


class Plain:
    def step(self, action: Any) -> Any: ...


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (MathLike, "; docs/python.md says how to carry an environment of NeMo RL over"),
        (ray.remote(MathLike), "; take ray.remote away: the run starts the processes of environments itself"),
        (ray.remote(num_cpus=2)(Plain), "; take ray.remote away: the run starts the processes of environments itself"),
        (ray.remote(lambda: None), "; take ray.remote away: the run starts the processes of environments itself"),
        (Plain, "is not a subclass of megatron_grpo.environments.interface.Environment"),
    ],
    ids=["interface", "actor class", "actor class with options", "task", "any class"],
)
def test_another_interface_is_named(monkeypatch: pytest.MonkeyPatch, loader: Any, text: str) -> None:
    module = ModuleType("foreign_environments")
    module.Mine = loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RunError) as raised:
        import_environment_class("foreign_environments:Mine")
    assert str(raised.value).startswith("is not a subclass of megatron_grpo.environments.interface.Environment")
    assert text in str(raised.value)
