"""A run of fakes around the real steps: what samples, learns, publishes and writes only says that it did."""

from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from megatron_grpo.algorithms.context import SamplingRun, TrainingRun, make_save_state
from megatron_grpo.algorithms.placement import Placement
from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.batch.rollout_files import StepFacts
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.weight_sync.transfer_modes import TransferReport
from tests.support.fake_models import FakePolicy, FakeTeacher, FakeValue
from tests.support.fake_rollouts import FakeRollouts

SETTINGS = SamplingSettings(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(1,))


class FakeDumps:
    """Rollouts that are never written; their beginning and end are logged."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.groups: dict[int, list[SampledGroup]] = {}
        """By step, what was to be written."""
        self.facts: dict[int, StepFacts] = {}
        """By step, what was to be said beside it."""
        self.held: list[tuple[int, list[SampledGroup], StepFacts]] = []
        """The step that would be written if it failed now; none, once its writing has begun."""

    def hold(self, step: int, groups: list[SampledGroup], batch: Any, facts: StepFacts) -> None:
        self.held = [(step, groups, facts)]

    def begin(self) -> None:
        step, groups, facts = self.held.pop()
        self.log.append(f"dump {step} begins")
        assert step not in self.groups, "the rollouts of a step are written once"
        self.groups[step], self.facts[step] = groups, facts

    def finish(self, step: int) -> None:
        self.log.append(f"dump {step} is there")

    def write_validation(self, step: int, groups: list[SampledGroup], period: int) -> None:
        pass

    def is_sampled(self, step: int) -> bool:
        return False

    def write_all(self) -> None:
        self.log += [f"dump {step} is left" for step, _, _ in self.held]


def make_sampling_run(
    config: Config, folder: Path, rollouts: FakeRollouts, log: list[str] | None = None
) -> SamplingRun:
    """A run that has not begun and only samples; `folder` is the run's."""
    parts: dict[str, Any] = {
        "config": config,
        "placement": Placement(),
        "rollouts": rollouts,
        "settings": SETTINGS,
        "dumps": FakeDumps([] if log is None else log),
        "run_dir": folder,
        "loader": SimpleNamespace(state_dict=lambda: {"epoch": 0}, observe=lambda outcomes: None),
        "val_prompts": [],
        "logger": None,
        "checkpointer": None,
        "state": make_save_state(),
        "batch_cache": [],
    }
    return SamplingRun(**parts)


def make_run(config: Config, folder: Path, rollouts: FakeRollouts, shape: ModelShape, log: list[str]) -> Any:
    """A run of the algorithm's type that has not begun; what its parts do is in the log."""

    def publish(version: int) -> Any:
        log.append(f"version {version}")
        return TransferReport(version, bytes_sent=8, tensors=1, buckets=1, seconds=0.0)

    transport: Any = SimpleNamespace(
        publish=publish, admit=lambda report: report, require_checks=lambda: log.append("checks are due")
    )
    value: Any = None if config.value_model is None else FakeValue(shape, log)
    models: Any = SimpleNamespace(
        policy=FakePolicy(shape, log), value=value, teachers={name: FakeTeacher() for name in config.named_teachers}
    )
    data: Any = SimpleNamespace(val_rows=[], demonstrations=[], hinted_prompts=None)
    run_type: type[TrainingRun] = resolve_name(config.method.run)
    run: Any = run_type.build(make_sampling_run(config, folder, rollouts, log), models, transport, data)
    run.checkpointer = SimpleNamespace(list_steps=list)
    return run
