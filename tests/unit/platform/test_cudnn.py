"""A process has one cuDNN, that of torch."""

import os
import sys
from pathlib import Path

import pytest

from megatron_grpo.platform.cudnn import HOME, choose_cudnn, require_one_cudnn


def put_library(folder: Path) -> Path:
    library = folder / "lib" / "libcudnn.so.9"
    library.parent.mkdir(parents=True)
    library.touch()
    return library


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed nvidia-cudnn, beside a cuDNN of the system."""
    put_library(tmp_path / "system")
    site = tmp_path / "site"
    put_library(site / "nvidia" / "cudnn")
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delenv(HOME, raising=False)
    return site / "nvidia" / "cudnn"


@pytest.mark.parametrize("of_system", [True, False])
def test_transformer_engine_finds_the_cudnn_of_torch_first(
    of_system: bool, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a module system has set the variable for a cuDNN of its own."""
    if of_system:
        monkeypatch.setenv(HOME, str(tmp_path / "system"))
    choose_cudnn()
    assert os.environ[HOME] == str(wheel)


def test_a_torch_without_a_package_of_cudnn_changes_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    choose_cudnn()
    assert HOME not in os.environ


def test_two_loaded_cudnn_are_refused(tmp_path: Path) -> None:
    first, second = put_library(tmp_path / "torch"), put_library(tmp_path / "system")
    link = tmp_path / "libcudnn.so"
    link.symlink_to(first)
    maps = tmp_path / "maps"
    unrelated = "7f0 r-xp 0 08:01 5 /opt/lib/libcudnn_graph.so.9\n7f1 rw-p 0 00:00 0 \n"
    maps.write_text(unrelated + "".join(f"7f2 r-xp 0 08:01 7 {path}\n" for path in (first, first, link)))
    require_one_cudnn(maps)
    maps.write_text(maps.read_text() + f"7f3 r-xp 0 08:01 9 {second}\n")
    with pytest.raises(RuntimeError, match=f"{second} and {first}"):
        require_one_cudnn(maps)


def test_this_process_has_at_most_one_cudnn() -> None:
    require_one_cudnn()
