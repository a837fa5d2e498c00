"""The export command against a checkpoint that another layout wrote."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.export import main
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.run.checkpoint_files import MANIFEST_FILE, STATE_FILE, write_driver_files
from megatron_grpo.trainer.checkpoint import ResultsFile, build_sharded_weights
from megatron_grpo.trainer.model.build import build_model
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.damage import delete, files_of, flip, truncate
from tests.support.older_checkpoint import make_older_run
from tests.support.tiny_models import TinyModel


def save_checkpoint(layout: Layout, folder: Path, output: Path) -> None:
    shape = read_model_shape(folder)
    chunks = build_model(PolicyConfig(parallel=layout.parallel, precision="float32"), shape)
    load_hf_weights(chunks, shape, folder)
    filesystem_async.get_write_results_queue = ResultsFile  # as the trainer's: a manager process takes seconds to start
    dist_checkpointing.save({"model": build_sharded_weights(chunks, None)}, str(output))


def make_run(model: TinyModel, run_dir: Path, layout: Layout) -> Path:
    """A run directory with one checkpoint of the model's own weights; the checkpoint's path."""
    checkpoint = run_dir / "checkpoints" / "step_3"
    (checkpoint / "megatron").mkdir(parents=True)
    config = {"policy": {"model": {"path": str(model.path)}, "precision": "float32"}}
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    run_on_ranks(layout, save_checkpoint, model.path, checkpoint / "megatron")
    write_driver_files(
        checkpoint, 3, {"save_state": {"total_steps": 3}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    return checkpoint


def assert_same_model(output: Path, model: TinyModel) -> None:
    exported = AutoModelForCausalLM.from_pretrained(output).state_dict()
    expected = model.load().state_dict()
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name


# One whose embeddings are tied and one whose padded vocabulary is stored twice.
@pytest.mark.slow  # each command imports torch again
@pytest.mark.parametrize("name", ["qwen3_tied", "llama_untied"])
def test_exported_folder_is_the_trained_model(name: str, tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    checkpoint = make_run(tiny_models[name], tmp_path / "run", Layout(tensor=2, pipeline=2))
    command = [sys.executable, "-m", "megatron_grpo.export", f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]
    process = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert (process.stdout, process.stderr) == (f"wrote {tmp_path / 'out'} from {checkpoint}\n", "")
    assert_same_model(tmp_path / "out", tiny_models[name])
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_a_run_that_started_from_a_hub_model(
    tiny_models: dict[str, TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration has the model's hub name, the model is in the cache, and four ranks wrote the checkpoint."""
    model = tiny_models["qwen3_tied"]
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(model.path, repository / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    checkpoint = make_run(model, tmp_path / "run", Layout(tensor=2, pipeline=2))
    config = {"policy": {"model": {"path": "org/name"}, "precision": "float32"}}
    OmegaConf.save(OmegaConf.create(config), tmp_path / "run" / "config.yaml")
    (tmp_path / "run" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]) == 0
    assert_same_model(tmp_path / "out", model)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


@pytest.fixture
def run_dir(tiny_models: dict[str, TinyModel], tmp_path: Path) -> Path:
    """A run directory whose checkpoint is as it was written, but not by Megatron-Core."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_3"
    (checkpoint / "megatron").mkdir(parents=True)
    for name in ("metadata.json", ".metadata", "__0_0.distcp"):
        (checkpoint / "megatron" / name).write_text("{}")
    write_driver_files(
        checkpoint, 3, {"save_state": {"total_steps": 3}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    config = {"policy": {"model": {"path": str(tiny_models["qwen3_tied"].path)}, "precision": "float32"}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    return folder


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message that a command line gets; exit code 2."""
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def test_mistakes_get_one_message(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, output = f"checkpoint={run_dir}/checkpoints/step_3", f"output={tmp_path}/out"
    assert "checkpoint=PATH is missing" in mistake(capsys, output)
    assert "ouput=x is not an argument; did you mean output=?" in mistake(capsys, checkpoint, "ouput=x")
    assert "does not exist" in mistake(capsys, f"checkpoint={tmp_path}/none", output)
    assert "is not a checkpoint" in mistake(capsys, f"checkpoint={run_dir}/checkpoints", output)
    assert "already exists" in mistake(capsys, checkpoint, f"output={run_dir}")
    (run_dir / "config.yaml").write_text("policy: {precision: float32}")
    assert "policy.model.path" in mistake(capsys, checkpoint, output)
    (run_dir / "config.yaml").write_text("policy: [")
    assert "not valid YAML" in mistake(capsys, checkpoint, output)
    for text in ("", "policy: {model: 3}", "policy: 3", "policy: {model: {path: 3}, precision: float32}", "[1]"):
        (run_dir / "config.yaml").write_text(text)
        assert str(run_dir / "config.yaml") in mistake(capsys, checkpoint, output)
    settings = f"policy: {{model: {{path: {tmp_path}/gone}}, precision: float32}}"
    (run_dir / "config.yaml").write_text(settings)
    assert f"policy.model.path in {run_dir}/config.yaml, is not there" in mistake(capsys, checkpoint, output)
    (run_dir / "config.yaml").unlink()
    assert "has to stay in its run directory" in mistake(capsys, checkpoint, output)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_loaded_leaves_nothing_behind(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = mistake(capsys, f"checkpoint={run_dir}/checkpoints/step_3", f"output={tmp_path}/out")
    assert f"{run_dir}/checkpoints/step_3/megatron cannot be loaded as" in message
    assert message.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("damage", [flip, truncate, delete], ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_and_the_file_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    checkpoint = run_dir / "checkpoints" / "step_3"
    for name in files_of(checkpoint):
        content = (checkpoint / name).read_bytes()
        damage(checkpoint / name)
        message = mistake(capsys, f"checkpoint={checkpoint}", f"output={tmp_path}/out")
        assert message.startswith(f"export: {checkpoint / name} is ")
        (checkpoint / name).write_bytes(content)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("common.pt", b"garbage" * 99),
        ("common.pt", b"\x80\x04."),
        (".metadata", b"?"),
        ("metadata.json", b"{}"),
        ("__0_0.distcp", b"PK\x03\x04" * 99),
    ],
)
def test_without_digests_garbage_is_one_message_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes
) -> None:
    checkpoint = make_older_run(tmp_path / "run").checkpoint
    capsys.readouterr()  # transformers' progress
    (checkpoint / MANIFEST_FILE).unlink()
    (checkpoint / STATE_FILE).write_text('{"save_state": {"total_steps": 3}, "metrics": {}}')
    (checkpoint / "megatron" / file).write_bytes(content)
    message = mistake(capsys, f"checkpoint={checkpoint}", f"output={tmp_path}/out")
    assert "written by an earlier version, without digests" in message.splitlines()[0]
    assert f"{checkpoint}/megatron cannot be loaded" in message.splitlines()[1]
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize("output", ["/proc/out", "/proc/a/b", "FILE/out", "x" * 250, "a/" + "x" * 300])
def test_an_output_that_cannot_be_written_is_told_before_anything_is_read(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    (run_dir / "checkpoints" / "step_3" / "manifest.json").unlink()  # told too late for this one
    message = mistake(capsys, f"checkpoint={run_dir}/checkpoints/step_3", f"output={output}")
    assert message.startswith(f"export: output={output} cannot be written: ")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "FILE"}


def test_a_disk_that_fills_up_is_one_message(
    tiny_models: dict[str, TinyModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoint = make_run(tiny_models["qwen3_tied"], tmp_path / "run", Layout())
    monkeypatch.setattr("megatron_grpo.models.hf_folder.save_file", full)
    message = mistake(capsys, f"checkpoint={checkpoint}", f"output={tmp_path}/new/out")
    assert f"output={tmp_path}/new/out cannot be written: [Errno 28] No space left on device" in message
    assert not (tmp_path / "new" / "out").exists()
