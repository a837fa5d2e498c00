"""Trackers of a run, and figures of a step by hand: operations against the count of torch."""

import html
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.data.row_text import format_prompt
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.observability.run_logger import RunLogger, make_sample_row, select_first_of_groups
from megatron_grpo.observability.timing import compute_throughput, count_forward_flops, find_peak_tflops
from megatron_grpo.observability.trackers import TensorBoardTracker
from tests.support.report_runs import byte_tokenizer
from tests.support.trajectories import make_trajectory

HOSTILE = "a | b <script>alert(1)</script> **bold**\nnext `line` [link](https://example.org)"
TIMING = {"total": 0.5, "train": 0.2}


def datum(idx: int, prompt: str | list[dict[str, str]] = "2 + 2 =") -> DatumSpec:
    info = {REFERENCE: "4"}
    rest: dict[str, Any] = {"message_log": [], "length": 1, "loss_multiplier": 1.0, "task_name": "task"}
    return {"extra_env_info": info, "idx": idx, "prompt": prompt, **rest}


def log_two_steps(folder: Path, config: Config, resume_step: int | None = None) -> None:
    logger = RunLogger(folder, config, resume_step)
    first = (resume_step or 0) + 1
    log_step(logger, first)
    config.policy.model.path = str(folder / "model")
    tokenizer = byte_tokenizer(folder / "model") if resume_step is None else None
    ids = [*tokenizer.encode("2 + 2 =").ids, 0, 0] if tokenizer else [0, 0]
    response = make_trajectory(2, prompt_tokens=len(ids) - 2, token_ids=ids, response=HOSTILE, reward=0.5).to_row()
    logger.show_completions(first, [response, response | {"reward": None}])
    log_step(logger, first + 1)
    logger.close()
    logger.close()


def log_step(logger: RunLogger, step: int) -> None:
    logger.log_step(step, {"reward": step / 3, "reward/my.fn:x": 1.0}, TIMING, {"samples_per_s": 4.0})


def content_when_written(store: Path, name: bytes) -> bytes:
    """What a file has once the name is in it, which another process writes; after a minute, whatever it has."""
    deadline = time.monotonic() + 60
    while name not in store.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return store.read_bytes()


@pytest.fixture
def config() -> Config:
    config = Config()
    config.logger.tensorboard = config.logger.progress = False
    return config


def test_tensorboard_shows_samples_as_text(tmp_path: Path, config: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData  # noqa: F401  # the plugin that reads it

    config.logger.tensorboard = True
    log_two_steps(tmp_path, config)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("train/completions/text_summary")
    head, rule, first, second = event.tensor_proto.string_val[0].decode().splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") == 8
    assert "<" not in first + second
    assert "**" not in first
    assert "2 &#43; 2 =" in first
    assert event.step == 1


def test_tensorboard_shows_a_cell_as_it_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path, None)
    tracker.log_table(1, "train/completions", [{"response": 'it\'s "#1" &amp; <b>\rnext\r\nlast'}])
    tracker.close(False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("train/completions/text_summary")
    *_, cell = event.tensor_proto.string_val[0].decode().split("\n")
    assert "<" not in cell
    assert html.unescape(cell) == '| it\'s "#1" &amp; <b>⏎next⏎last |'


def test_wandb_keeps_figures_and_tables_offline(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    config.logger.wandb.enabled, config.logger.wandb.mode = True, "offline"
    log_two_steps(tmp_path, config)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (store,) = folder.glob("*.wandb")
    content = content_when_written(store, b"train/reward")
    for name in (b"train/reward", b"train/completions", b"timing/total"):
        assert name in content
    (table,) = folder.glob("files/media/table/train/completions_*.table.json")
    rows = json.loads(table.read_text())
    assert rows["columns"][:2] == ["prompt", "response"]
    assert [row[:2] for row in rows["data"]] == [["2 + 2 =", HOSTILE]] * 2
    assert wandb.run is None, "the run is closed"


def test_swanlab_keeps_figures_tables_and_the_state_of_a_run_offline(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package asks for an older protobuf than vLLM, so it is not among the packages of the tests."""
    swanlab, states = pytest.importorskip("swanlab"), []
    finish = swanlab.finish
    monkeypatch.setattr(swanlab, "finish", lambda state: (states.append(state), finish(state)))
    config.logger.swanlab.enabled, config.logger.swanlab.mode, config.logger.swanlab.name = True, "offline", "mine"
    log_failing_run(tmp_path, config, (1, 2))
    log_two_steps(tmp_path, config, resume_step=2)
    stores = sorted((tmp_path / "swanlab").glob("run-*/*.swanlab"))
    contents = [store.read_bytes() for store in stores]
    assert len({store.name for store in stores}) == 1, "a resumed run continues"
    assert all(b"train/reward" in content and b"mine" in content for content in contents)
    assert b"train/completions" in contents[-1]
    assert states == ["crashed", "success"]


def leveldb_records(log: bytes, begin: int) -> Iterator[bytes]:
    """The records of a log in LevelDB's format.

    A record is in pieces with a header of 7 bytes, which no border of 32 KiB cuts.
    `begin`: place of the log in its file, from whose beginning the borders are counted.
    """
    position, record = 0, b""
    while position + 7 <= len(log):
        block_rest = 2**15 - (position + begin) % 2**15
        if block_rest < 7:
            position += block_rest
            continue
        length, kind = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        if position + 7 + length > len(log):  # still being written
            return
        record += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last piece
            yield record
            record = b""


def log_failing_run(folder: Path, config: Config, steps: tuple[int, ...], resume_step: int | None = None) -> None:
    """A run that logs these steps and fails."""

    def run() -> None:
        with ExitStack() as stack:
            logger = RunLogger(folder, config, resume_step)
            stack.push(logger.__exit__)
            for step in steps:
                log_step(logger, step)
            raise RunError("an engine died")

    with pytest.raises(RunError):
        run()


def test_mlflow_keeps_figures_tables_and_the_configuration_of_a_run_that_failed_and_went_on(
    tmp_path: Path, config: Config
) -> None:
    import mlflow

    config.logger.mlflow.enabled, config.logger.mlflow.name = True, "mine"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")

    def find_run() -> Any:
        (run,) = client.search_runs([client.get_experiment_by_name("megatron_grpo").experiment_id])
        return run

    log_failing_run(tmp_path, config, (1, 2, 3))
    assert (find_run().info.run_name, find_run().info.status) == ("mine", "FAILED")
    logger = RunLogger(tmp_path, config, resume_step=2)
    assert (find_run().info.run_name, find_run().info.status) == ("mine", "RUNNING")
    logger.close()
    config.grpo.max_num_steps = 7  # a parameter cannot change, and a resumed run may
    log_two_steps(tmp_path, config, resume_step=2)
    run = find_run()
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert {metric.step: metric.value for metric in history} == {step: step / 3 for step in (1, 2, 3, 4)}
    assert run.data.metrics["train/reward/my.fn_x"] == 1.0
    assert run.data.params["policy.parallel.tensor"] == "1"
    (table,) = client.list_artifacts(run.info.run_id, "train/completions")
    assert table.path == "train/completions/step_3.json"


def test_wandb_keeps_repeated_steps_and_is_told_that_a_run_failed(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    config.logger.wandb.enabled, config.logger.wandb.mode = True, "offline"
    log_failing_run(tmp_path, config, (1, 2, 3, 2, 3))
    (store,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    steps, codes, deadline = [], [], time.monotonic() + 60
    while not codes and time.monotonic() < deadline:  # another process writes them, the exit code last
        records = [Record.FromString(data) for data in leveldb_records(store.read_bytes()[7:], begin=7)]
        codes = [record.exit.exit_code for record in records if record.HasField("exit")]
        time.sleep(0.1)
    for record in records:
        named = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        if "train/reward" in named:
            steps.append((json.loads(named["step"]), json.loads(named["train/reward"])))
    assert steps == [(step, step / 3) for step in (1, 2, 3, 2, 3)]
    assert codes == [1]


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def fail(tracker: object, step: int, values: object) -> None:
        calls.append(step)
        raise FileNotFoundError("no folder tensorboard")

    monkeypatch.setattr(TensorBoardTracker, "log", fail)
    config.logger.tensorboard = True
    logger = RunLogger(tmp_path, config)
    for step in (1, 2):
        log_step(logger, step)
    logger.close()
    assert calls == [1]
    text = "TensorBoard gets no more figures, and the run goes on: FileNotFoundError: no folder tensorboard"
    assert capsys.readouterr().out.count(text) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_row_of_a_table_by_hand() -> None:
    turns = [{"role": "user", "content": "x" * 5000}, {"role": "user", "content": "end"}]
    trajectory_row = make_trajectory(3, response="y" * 5000, reward=None, correct=None).to_row() | {
        "advantages": [1.0, 2.0, 6.0]
    }
    row = make_sample_row(format_prompt(datum(1, turns)), trajectory_row)
    assert (len(row["prompt"]), len(row["response"])) == (2000, 2000)
    assert row["prompt"].endswith("\nuser: end")
    assert (row["advantage"], row["tokens"], row["reward"]) == (3.0, 3, None)
    assert make_sample_row("", trajectory_row | {"advantages": None})["advantage"] is None


def test_samples_are_of_different_prompts() -> None:
    rows = ({"group": number // 3, "sample": number % 3} for number in range(12))
    assert [(row["group"], row["sample"]) for row in select_first_of_groups(rows, 2)] == [(0, 0), (1, 0)]
    assert len(select_first_of_groups(iter([{"group": 0}]), 5)) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_forward_flops_are_those_that_torch_counts(tied: bool, tmp_path: Path) -> None:
    """torch counts attention over whole squares; ours over the pairs that a causal model needs."""
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=61,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    model, lengths = Qwen3ForCausalLM(config).eval(), [5, 17, 9]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in lengths:
            model(torch.zeros(1, length, dtype=torch.int64))
    squares_beyond_pairs = sum(n * n - n * (n + 1) // 2 for n in lengths)
    expected = counter.get_total_flops() - 4 * 3 * 4 * 12 * squares_beyond_pairs
    assert count_forward_flops(shape, lengths) == expected


def test_throughput_does_not_depend_on_how_sequences_are_laid_out(tmp_path: Path) -> None:
    Qwen3Config(architectures=["Qwen3ForCausalLM"], hidden_size=64, vocab_size=100).save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    timing = {"train": 0.5, "total": 2.0}
    figures = compute_throughput(shape, [10, 30], timing, passes=1, devices=4, peak=2.0)
    assert (figures["samples_per_s"], figures["tokens_per_s"]) == (1.0, 20.0)
    tflops = 3 * (count_forward_flops(shape, [10]) + count_forward_flops(shape, [30])) / 1e12
    assert figures["train_tflops_per_device"] == pytest.approx(tflops / 0.5 / 4)
    assert figures["model_flop_utilization"] == pytest.approx(tflops / 0.5 / 4 / 2.0)
    twice = compute_throughput(shape, [30, 10], timing, passes=2, devices=4, peak=None)
    assert twice["train_tflops_per_device"] == pytest.approx(2 * figures["train_tflops_per_device"])
    assert "model_flop_utilization" not in twice


@pytest.mark.parametrize(
    ("device", "precision", "configured", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", None, 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", None, 756.0),
        ("NVIDIA H100 NVL", "bfloat16", None, 835.0),
        ("NVIDIA H200 NVL", "bfloat16", None, 835.0),
        ("NVIDIA GB200", "bfloat16", None, 2500.0),
        ("NVIDIA B200", "bfloat16", None, 2250.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", None, 312.0),
        ("NVIDIA H100 80GB HBM3", "float32", None, None),
        ("cpu", "bfloat16", None, None),
        ("cpu", "float32", 0.2, 0.2),
    ],
)
def test_the_longest_name_that_fits_counts(
    device: str, precision: str, configured: float | None, expected: float | None
) -> None:
    assert find_peak_tflops(device, precision, configured) == expected


def test_rl_insight_gets_figures_and_how_a_run_ended(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package needs a running Ray and a server, so its functions are replaced by ones of the same signature."""
    calls: list[tuple[Any, ...]] = []
    client = ModuleType("rl_insight")

    def init(project: str | None = None, experiment_name: str | None = None, config: Any = None) -> None:
        calls.append(("init", project, experiment_name, config))

    def metric_gauge(name: str, value: float, documentation: str = "", **labels: Any) -> None:
        assert re.fullmatch(r"[a-zA-Z0-9_]+", name), "Prometheus refuses other names"
        calls.append((name, value))

    vars(client).update(init=init, metric_gauge=metric_gauge, finish=lambda: calls.append(("finish",)))
    monkeypatch.setitem(sys.modules, "rl_insight", client)
    config.logger.rl_insight.enabled, config.logger.rl_insight.server_url = True, "http://127.0.0.1:18080"
    logger = RunLogger(tmp_path / "run", config)
    log_step(logger, 3)
    logger.close(failed=True)
    assert calls[0] == ("init", "megatron_grpo", "run", {"server": {"url": "http://127.0.0.1:18080"}})
    assert ("train_reward", 1.0) in calls
    assert ("step", 3.0) in calls
    assert calls[-2:] == [("run_failed", 1.0), ("finish",)]


@pytest.mark.parametrize(("failed", "outcome"), [(False, b"completed"), (True, b"failed")])
def test_tensorboard_shows_how_a_run_ended(tmp_path: Path, failed: bool, outcome: bytes) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    TensorBoardTracker(tmp_path, None).close(failed)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("run/outcome/text_summary")
    assert event.tensor_proto.string_val[0] == outcome
