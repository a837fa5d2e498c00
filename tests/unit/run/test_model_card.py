"""The card of an exported model, and the folder's way to the hub."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from megatron_grpo.config.errors import RunError
from megatron_grpo.export import main
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.directory import record_start
from megatron_grpo.run.exports import push_to_hub
from tests.support.checkpoints import save


@pytest.fixture
def checkpoint(tmp_path: Path, base_overrides: list[str]) -> Path:
    """The checkpoint of a run, with metrics."""
    checkpoint = save(tmp_path / "run", 7, score=0.25).locate(7)
    record_start(tmp_path / "run", compose_config([*base_overrides, "checkpointing=none"]))
    return checkpoint


def test_a_folder_is_sent_with_its_card(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **rest: calls.append((name, rest)))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **rest: calls.append(("upload", rest)))
    output = tmp_path / "out"
    output.mkdir()
    output.chmod(0o750)
    assert (
        push_to_hub(output, "org/mine", "Qwen/Qwen3-0.6B", checkpoint, adapters=False)
        == "https://huggingface.co/org/mine"
    )
    assert calls == [
        ("org/mine", {"private": True, "exist_ok": True}),
        ("upload", {"repo_id": "org/mine", "folder_path": output, "commit_message": "Upload the model"}),
    ]
    card = ModelCard.load(output / "README.md")
    assert (output / "README.md").stat().st_mode & 0o777 == 0o640
    assert (card.data.base_model, card.data.library_name) == ("Qwen/Qwen3-0.6B", "transformers")
    assert card.data.tags == ["megatron_grpo", "grpo", "reinforcement-learning"]
    assert "with GRPO by megatron_grpo,\n7 steps on" in card.text
    assert "| val_accuracy | 0.25 |" in card.text


def test_a_hub_that_is_not_reached_is_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(HfApi, "create_repo", fail)
    with pytest.raises(RunError, match=f"^push_to_hub=org/mine: no route; {tmp_path} has the model$"):
        push_to_hub(tmp_path, "org/mine", "base", checkpoint, adapters=True)


def test_a_name_is_looked_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint=/nowhere", "output=/nothing", "push_to_hub=a b"]) == 2
    assert "push_to_hub=a b is not a name on the hub; give ORGANISATION/NAME" in capsys.readouterr().err
