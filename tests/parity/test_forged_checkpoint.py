"""Files of a checkpoint that would run code if they were unpickled without a list: export and resume refuse them."""

import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_grpo.config.errors import RunError
from megatron_grpo.export import main
from megatron_grpo.run.checkpoint_files import MANIFEST_FILE, write_driver_files
from megatron_grpo.trainer.plain_pickles import check_layer_state
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_background_save import make_engine
from tests.parity.test_export import make_run
from tests.support.tiny_models import TinyModel


class Canary:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def save_object(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def forge_metadata(folder: Path, canary: Canary) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(canary))
    return f"{folder}/.metadata names posix.mkdir"


def forge_inside_metadata(folder: Path, canary: Canary) -> str:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = canary
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return f"{folder}/.metadata names posix.mkdir"


def forge_common(folder: Path, canary: Canary) -> str:
    """Write the file of Megatron-Core before 0.19, which is read where it exists."""
    (folder / "common.pt").write_bytes(save_object({"layout": canary}))
    return f"{folder}/common.pt names posix.mkdir"


def replace_objects(folder: Path, canary: Canary, *, common: bool) -> None:
    """Put the canary in place of the entry that ranks share, or of every other object but tensors."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    content = save_object([canary])
    for index, info in metadata.storage_data.items():
        is_object = isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
        if is_object and index.fqn.startswith("common_state") is common:
            file = folder / info.relative_path
            info.offset, info.length = file.stat().st_size, len(content)
            with file.open("ab") as end:
                end.write(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def forge_common_entry(folder: Path, canary: Canary) -> str:
    replace_objects(folder, canary, common=True)
    return "its entry common_state/shard_0_1 names posix.mkdir"


def forge_object(folder: Path, canary: Canary) -> str:
    replace_objects(folder, canary, common=False)
    return "names posix.mkdir"


def forge_tensor(folder: Path, canary: Canary) -> str:
    """Put the canary in the place of every tensor."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    content = save_object(canary)
    for index, info in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            file = folder / info.relative_path
            info.offset, info.length = file.stat().st_size, len(content)
            with file.open("ab") as end:
                end.write(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return "one of its tensors names posix.mkdir"


FORGERIES: list[Callable[[Path, Canary], str]] = [
    forge_metadata,
    forge_inside_metadata,
    forge_common,
    forge_common_entry,
    forge_object,
    forge_tensor,
]


def load_on_rank(_: Layout, model: TinyModel, folder: Path) -> str:
    try:
        make_engine(Layout(), model).checkpoint.load(str(folder))
    except RunError as error:
        return str(error)
    return "was loaded"


def save_on_rank(_: Layout, model: TinyModel, folder: Path) -> None:
    make_engine(Layout(), model).checkpoint.save(str(folder))


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_export_runs_no_code_of_a_checkpoint(
    forge: Callable[[Path, Canary], str],
    tiny_models: dict[str, TinyModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = make_run(tiny_models["qwen3_tied"], tmp_path / "run", Layout())
    named = forge(checkpoint / "megatron", Canary(tmp_path / "canary"))
    (checkpoint / MANIFEST_FILE).unlink()
    write_driver_files(
        checkpoint, 3, {"save_state": {"total_steps": 3}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]) != 0
    message = capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "out").exists()
    assert named in message
    assert "take the file from the run" in message
    assert "Traceback" not in message


def test_a_resume_runs_no_code_of_a_checkpoint(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["qwen3_tied"]
    origin = tmp_path / "origin"
    origin.mkdir()
    run_on_ranks(Layout(), save_on_rank, model, origin)
    assert run_on_ranks(Layout(), load_on_rank, model, origin) == ["was loaded"]
    files = {file.name: file.read_bytes() for file in origin.iterdir()}
    for forge in FORGERIES:
        for file in origin.iterdir():
            file.unlink()
        for name, content in files.items():
            (origin / name).write_bytes(content)
        named = forge(origin, Canary(tmp_path / "canary"))
        (message,) = run_on_ranks(Layout(), load_on_rank, model, origin)
        assert not (tmp_path / "canary").exists()
        assert message.startswith(f"{origin} cannot be loaded: ")
        assert named in message
        assert "take the file from the run" in message


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Transformer Engine's module of recipes, with one recipe."""
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("transformer_engine.common.recipe")
    exec("class DelayedScaling: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def pack_object(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def test_the_state_of_a_layer_is_what_was_pickled(recipes: ModuleType) -> None:
    state = {"recipe": recipes.DelayedScaling(), "scale_fwd": torch.rand(3), "extra_fp8_variables": {"num_gemms": 1}}
    again = pickle.loads(check_layer_state("a", pack_object(state)).numpy().tobytes())
    assert type(again["recipe"]) is recipes.DelayedScaling
    assert torch.equal(again["scale_fwd"], state["scale_fwd"])
    assert again["extra_fp8_variables"] == {"num_gemms": 1}
    assert check_layer_state("a", torch.empty(0, dtype=torch.uint8)).numel() == 0


class LegacyTensor(Canary):
    """What a tensor is pickled as, with a canary for its storage."""

    def __reduce__(self) -> Any:
        file = io.BytesIO()
        torch.save(Canary(self.folder), file, _use_new_zipfile_serialization=False)
        return torch.storage._load_from_bytes, (file.getvalue(),)


def load_from_bytes(_: bytes) -> None:
    """As torch names it, and Megatron-Core before 0.19."""


load_from_bytes.__module__, load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("kind", [Canary, LegacyTensor])
def test_the_state_of_a_layer_runs_no_code(
    kind: type[Canary], older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if older:
            patch.setattr(torch.storage, "_load_from_bytes", load_from_bytes)
        state = pack_object({"scale_fwd": kind(tmp_path / "canary")})
    with pytest.raises((RunError, pickle.UnpicklingError), match=r"posix\.mkdir"):
        check_layer_state("decoder.layers.0._extra_state", state)
    assert not (tmp_path / "canary").exists()
