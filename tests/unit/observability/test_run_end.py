"""What the logger of a run writes about its end, and what it tells the driver's log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.summary import RunEnd

TIMING = {"generation": 0.2, "train": 0.1, "total": 0.4}


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[RunLogger]:
    config = Config()
    config.logger.tensorboard = False
    logger = RunLogger(tmp_path, config)
    logger.log_start(startup_s=2.5, parts={"ray": 1.5, "engine": 2.0})
    for step in (1, 2):
        logger.log_step(step, {"reward": 0.5}, TIMING, {})
    yield logger
    logger.close()


def test_a_run_that_ends_early_says_why(logger: RunLogger, tmp_path: Path) -> None:
    logger.end_early("early_stop", "val_accuracy is 0.9")
    logger.finish()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"]) == ("early_stop", "val_accuracy is 0.9")
    assert summary["steps"] == 2


def test_a_run_that_makes_all_its_steps_has_no_reason(logger: RunLogger, tmp_path: Path) -> None:
    logger.finish()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"]) == ("completed", None)


def test_a_failure_is_written_with_all_that_is_known(logger: RunLogger, tmp_path: Path) -> None:
    logger.write_summary(RunEnd("failed", "the engine died"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"], summary["steps"]) == ("failed", "the engine died", 2)
    assert summary["startup_s"] == 2.5
    assert summary["startup_parts_s"] == {"ray": 1.5, "engine": 2.0}
    assert summary["step_s"] == pytest.approx(0.4, abs=0.1)
    assert 0 <= summary["train_s"] < 60


def test_what_is_printed_is_in_the_driver_s_log(logger: RunLogger, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "megatron_grpo"):
        logger.note("100% of the data is used up")
        logger.log_step(3, {"reward": 0.5}, {"total": 0.0}, {})
    said, step = [record.getMessage() for record in caplog.records]
    assert said == "100% of the data is used up"
    assert step.startswith("step 3 took 0.0")
