"""Groups and the store of a refit, and the modules that its workers load."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync import refit_group
from megatron_grpo.weight_sync.file_writer import FileWriter
from megatron_grpo.weight_sync.refit_calls import SETTLE_S
from megatron_grpo.weight_sync.refit_group import (
    FAILURE_CHECK_S,
    NCCL_MAGIC,
    NET_CHANNELS,
    NcclConfig,
    Rendezvous,
    Watch,
    record_failure,
)
from megatron_grpo.weight_sync.transfer_modes import remove_unread, write_manifest
from megatron_grpo.weight_sync.weights_folder import (
    MANIFEST,
    Manifest,
    WrittenTensor,
    compute_digest,
    name_block,
    read_manifest,
)
from tests.support.programs import read_programs


def test_nobody_to_receive_is_an_error_at_the_timeout() -> None:
    _store, rendezvous = _open(timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        refit_group.join_group(rendezvous, 0, 2, torch.device("cpu"))
    assert time.monotonic() - began < 10


def test_a_store_that_was_closed_is_not_sought_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes late to an attempt that has failed is back in time for the next one."""
    assert refit_group.CONNECT_STORE_S < SETTLE_S
    monkeypatch.setattr(refit_group, "CONNECT_STORE_S", 1.0)
    store, rendezvous = _open(timeout_s=60.0)
    del store
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1"):
        rendezvous.connect()
    assert time.monotonic() - began < 20


def test_a_key_may_come_later_than_a_store_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit_group, "CONNECT_STORE_S", 0.5)
    store, rendezvous = _open(timeout_s=60.0)
    reader = rendezvous.connect()
    threading.Timer(1.5, store.set, ("key", "value")).start()
    assert reader.get("key") == b"value"


def test_a_wait_ends_at_the_deadline_and_a_new_one_begins_anew() -> None:
    _store, rendezvous = _open(timeout_s=0.5)
    watch = _watch(rendezvous)
    for _ in range(2):
        watch.restart()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"nothing happened until the deadline of 0\.5 s"):
            watch.wait_until(lambda: False)
        assert 0.5 <= time.monotonic() - began < 5


def test_a_failure_ends_the_waits_of_all_members_and_the_first_one_is_told() -> None:
    store, rendezvous = _open(timeout_s=60.0)
    watches = [_watch(rendezvous) for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(watch.wait_until, lambda: False) for watch in watches[:2]]
        time.sleep(0.1)
        watches[2].report_failure("policy rank 1: the cable is out")
        record_failure(store, "generation engine 0 died")
        for wait in waits:
            with pytest.raises(RuntimeError, match=r"^given up, because policy rank 1: the cable is out$"):
                wait.result(timeout=20 * FAILURE_CHECK_S)


def test_a_closed_store_ends_waits_too() -> None:
    store, rendezvous = _open(timeout_s=60.0)
    watch = _watch(rendezvous)
    del store
    with pytest.raises(RuntimeError):
        watch.wait_until(lambda: False)
    watch.report_failure("nobody is left to be told")


def test_a_call_that_blocks_in_a_library_is_left_behind() -> None:
    store, rendezvous = _open(timeout_s=60.0)
    watch, blocked = _watch(rendezvous), threading.Event()
    assert watch.call(max, 3, 4) == 4
    with pytest.raises(ZeroDivisionError):
        watch.call(lambda: 1 // 0)
    record_failure(store, "generation engine 0 died")
    with pytest.raises(RuntimeError, match="generation engine 0 died"):
        watch.call(blocked.wait)
    blocked.set()


def test_polling_adds_a_tenth_to_a_wait_and_leaves_the_store_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large refit has thousands of turns of a millisecond, and the store has a thousand members."""
    clock = Clock()
    monkeypatch.setattr(refit_group, "time", clock)
    asked_store: Any = AskedStore()
    watch = Watch(asked_store, timeout_s=1000.0)

    def wait(seconds: float) -> tuple[float, int]:
        """Seconds that a wait took, and how often it polled."""
        began, polls = clock.now, 0

        def over() -> bool:
            nonlocal polls
            polls += 1
            return clock.now >= began + seconds

        watch.wait_until(over)
        return clock.now - began, polls

    for seconds in (1e-4, 1e-3, 1e-2):
        waited, polls = wait(seconds)
        assert waited < 1.2 * seconds
        assert polls < 100, "it does not spin"
    assert asked_store.looks == 0
    wait(10.0)
    assert 15 <= asked_store.looks <= 10 / FAILURE_CHECK_S


class Clock:
    """Time that passes in pauses alone."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class AskedStore:
    """A store without a failure; counts how often it is asked for one."""

    looks = 0

    def check(self, _keys: list[str]) -> bool:
        self.looks += 1
        return False


def test_an_abort_over_gloo_ends_what_is_pending_here() -> None:
    _store, rendezvous = _open(timeout_s=60.0)
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(refit_group.join_group, rendezvous, rank, 2, torch.device("cpu")) for rank in range(2)]
        own_group, theirs = (future.result() for future in joined)
    pending = own_group.recv([torch.zeros(8, dtype=torch.uint8)], 1, 0)
    time.sleep(0.1)
    assert not pending.is_completed()
    own_group.abort()
    with pytest.raises(RuntimeError):
        pending.wait()
    theirs.abort()


def test_over_nccl_the_communicator_of_all_members_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch makes one for each pair, and inside of a send."""
    _store, rendezvous = _open(timeout_s=60.0)
    calls: list[Any] = []

    fields = NcclConfig(size=ctypes.sizeof(NcclConfig), magic=NCCL_MAGIC)

    class Nccl:
        def __init__(self, _store: Any, rank: int, size: int, _options: Any) -> None:
            calls.append((rank, size, os.environ["TORCH_NCCL_BLOCKING_WAIT"]))

        @staticmethod
        def Options() -> Any:  # noqa: N802  # as in torch
            return SimpleNamespace(config=SimpleNamespace(unsafe_get_ptr=lambda: ctypes.addressof(fields)))

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(device)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    refit_group.join_group(rendezvous, 1, 3, torch.device("cuda", 0))
    assert calls == [(1, 3, "1"), torch.device("cuda", 0)]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert fields.nChannelsPerNetPeer == NET_CHANNELS


@pytest.mark.parametrize(("size", "magic"), [(ctypes.sizeof(NcclConfig) - 4, NCCL_MAGIC), (1000, 0)])
def test_a_configuration_of_another_nccl_is_left_as_it_is(size: int, magic: int) -> None:
    fields = NcclConfig(size=size, magic=magic)
    refit_group.set_net_channels(SimpleNamespace(unsafe_get_ptr=lambda: ctypes.addressof(fields)))
    refit_group.set_net_channels(SimpleNamespace())
    assert fields.nChannelsPerNetPeer == 0


def _watch(rendezvous: Rendezvous) -> Watch:
    return Watch(rendezvous.connect(), rendezvous.timeout_s)


def _open(timeout_s: float) -> tuple[Any, Rendezvous]:
    store = open_store("127.0.0.1", timeout_s)
    return store, Rendezvous(host="127.0.0.1", port=store.port, receivers=1, timeout_s=timeout_s)


NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_a_digest_is_of_every_bit_and_of_what_it_means(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert compute_digest(tensor) == compute_digest(tensor.clone())
    changed = tensor.clone()
    changed.reshape(-1).view(torch.uint8)[-1] ^= 1
    assert compute_digest(changed) != compute_digest(tensor)
    assert compute_digest(tensor[None]) != compute_digest(tensor)


def test_equal_bytes_of_another_type_have_another_digest() -> None:
    tensor = torch.randn(4)
    assert compute_digest(tensor) != compute_digest(tensor.view(torch.int32))


def test_a_version_has_the_changed_tensors_only_and_older_files_go(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, bucket_bytes=100)
    values = {name: torch.randn(10) for name in NAMES}  # 40 bytes: two of them in a file

    first = writer.write(values.items(), "1", 0, rewrite=False)
    assert len({written.file for written in first.values()}) == 3
    _is_readable(tmp_path, first, values)

    values[NAMES[1]] = torch.randn(10)
    values[NAMES[4]] = torch.randn(10)
    second = writer.write(values.items(), "2", 0, rewrite=False)
    assert [name for name in NAMES if second[name].file.startswith("2/")] == [NAMES[1], NAMES[4]]
    _is_readable(tmp_path, second, values)

    for name in NAMES[:2]:  # now nothing of the first file is wanted any more
        values[name] = torch.randn(10)
    third = writer.write(values.items(), "3", 0, rewrite=False)
    remove_unread(tmp_path, Manifest("run", 3, third))
    _is_readable(tmp_path, third, values)
    remaining_files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert remaining_files == ["rank-0-0001.safetensors", "rank-0-0002.safetensors"]

    fourth = writer.write(values.items(), "4", 0, rewrite=True)
    assert all(written.file.startswith("4/") for written in fourth.values())
    remove_unread(tmp_path, Manifest("run", 4, fourth))
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_after_a_failure_everything_is_written_again(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, bucket_bytes=50)
    values = {name: torch.randn(10) for name in NAMES}
    writer.write(values.items(), "1", 0, rewrite=False)

    def failing() -> Iterator[tuple[str, Tensor | None]]:
        yield from list(values.items())[:2]
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        writer.write(failing(), "2", 0, rewrite=False)
    again = writer.write(values.items(), "3", 0, rewrite=False)
    assert all(written.file.startswith("3/") for written in again.values())


def test_ranks_that_have_no_tensors_write_nothing(tmp_path: Path) -> None:
    assert FileWriter(tmp_path, 100).write([(name, None) for name in NAMES], "1", 1, rewrite=False) == {}
    assert not any((tmp_path / "1").iterdir())


def test_a_manifest_is_read_as_it_was_written_and_damage_shows(tmp_path: Path) -> None:
    manifest = Manifest("run", 7, {"a": WrittenTensor("1/x", "00ff", 12)})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST], "no temporary file is left"
    text = (tmp_path / MANIFEST).read_text()
    for position in range(0, len(text), 7):
        damaged = text[:position] + chr(ord(text[position]) ^ 1) + text[position + 1 :]
        (tmp_path / MANIFEST).write_text(damaged)
        try:
            is_equal = json.loads(damaged) == json.loads(text)  # a space between the parts
        except ValueError:
            is_equal = False
        if not is_equal:
            with pytest.raises(ValueError, match="is damaged"):
                read_manifest(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"cannot be read: No such file .* refit\.directory has to be a folder that"):
        read_manifest(tmp_path)


def test_what_is_loaded_is_whole_layers() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.2.mlp.experts.0.up_proj.weight",
        "model.norm.weight",
    ]

    def loaded(changed: str) -> list[int]:
        return [number for number, name in enumerate(names) if name_block(name) == name_block(changed)]

    assert loaded(names[0]) == [0]
    assert loaded(names[1]) == [1, 2]
    assert loaded(names[3]) == [3]
    assert loaded(names[5]) == [5, 6], "the router and the experts of a layer"
    assert loaded(names[8]) == [8]


def _is_readable(folder: Path, stored: dict[str, WrittenTensor], values: dict[str, Tensor]) -> None:
    assert list(stored) == list(values)
    for name, written in stored.items():
        read = load_file(folder / written.file)[name]
        assert torch.equal(read, values[name])
        assert compute_digest(read) == written.digest
        assert written.nbytes == read.nbytes


MOST_MODULES = 25

LOAD = read_programs("worker_imports")["load"]


SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("broadcast", "files")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reshard", *SLOW])
def test_a_worker_loads_few_modules(mode: str) -> None:
    command = [sys.executable, "-c", LOAD, mode]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    modules = result.stdout.split()
    assert "megatron_grpo.weight_sync.engine_worker" in modules
    assert "megatron_grpo.weight_sync.placeholder_loader" in modules, "vLLM finds the loader by its name alone"
    assert len(modules) <= MOST_MODULES, modules
