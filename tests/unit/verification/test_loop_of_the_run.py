"""Doctor reads the loop of the algorithm that ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.schema import Config
from megatron_grpo.run.directory import load_run_config, record_start
from megatron_grpo.verification.doctor import evidence, examination

ROW = {
    "spans": [[1, 3, 4], [3, 5, 3], [5, 6, 4]],
    "token_ids": [7] * 6,
    "logprobs": [0.0] * 5,
    "prev_logprobs": [0.0] * 5,
    "prompt_idx": 0,
    "group": 0,
    "sample": 0,
}


@pytest.fixture(params=["ppo", "grpo", "distillation"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Config]:
    """The configuration of a run of each algorithm, as it is read from its folder."""
    recipe = {"grpo": "quickstart"}.get(request.param, f"quickstart_{request.param}")
    loop = {"distillation": "grpo"}.get(request.param, request.param)

    def read(**keys: Any) -> Config:
        settings = [f"{loop}.async_grpo.{name}={value}" for name, value in keys.items()]
        config = compose_typed([f"+exp={recipe}", f"run_dir={tmp_path}", *settings]).require()
        record_start(tmp_path, config)
        assert yaml.safe_load((tmp_path / "config.yaml").read_text())["algorithm"] == request.param
        return load_run_config(tmp_path, [])

    return read


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_tokens_behind_an_old_cache_are_scored_only_if_it_was_recomputed(
    recorded: Callable[..., Config], is_recomputed: bool
) -> None:
    config = recorded(enabled=True, recompute_kv_cache_after_weight_updates=is_recomputed)
    (rollout,) = evidence.select_scored([ROW], 4, config, most_tokens=100)
    assert rollout.indices.tolist() == ([0, 1, 4] if is_recomputed else [0, 1])


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_steps_are_judged_by_the_limits_of_their_loop(
    recorded: Callable[..., Config], is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class SeenError(Exception):
        pass

    def judge(*_: Any, has_older_tokens: bool) -> None:
        raise SeenError(has_older_tokens)

    config = recorded(enabled=is_asynchronous)
    monkeypatch.setattr(examination, "find_suspicious_steps", judge)
    monkeypatch.setattr(examination, "read_model_shape", lambda model: None)
    with pytest.raises(SeenError) as seen:
        examination.examine_run(tmp_path, config, tmp_path, tmp_path)
    assert seen.value.args == (is_asynchronous,)
