"""Refits through a folder in one process: the driver's, policy's and workers' halves, and models that are dicts.

What vLLM makes of the tensors is shown in tests/integration/test_refit_files.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import GenerationConfig, RefitConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.weight_sync.boxes import pack_boxes
from megatron_grpo.weight_sync.file_writer import FileWriter
from megatron_grpo.weight_sync.refit_calls import AttemptError, RefitCalls, RefitError
from megatron_grpo.weight_sync.transfer_modes import FilesMode, write_manifest
from megatron_grpo.weight_sync.transport import WeightTransport
from megatron_grpo.weight_sync.weights_folder import FileReceiver, Manifest, read_manifest
from tests.support.refit_models import DENSE, made_up_worker

QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
STAGES = ((QUERY, KEY), (UP, NORM))
"""Names of the tensors of each pipeline stage."""

SIZE = (64, 64)
BYTES = 4 * 64 * 64
"""Of a tensor: many times the header of a file."""


class Model:
    """Keeps what it is given; `fails` makes it stop at a tensor."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.loaded: list[str] = []
        self.fails = ""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded = []
        for name, tensor in tensors:
            if name == self.fails:
                raise RuntimeError("out of memory")
            self.loaded.append(name)
            self.weights[name] = tensor.clone()


class Policy:
    """Two stages, of which rank 0 and 2 write."""

    settings = SimpleNamespace(shape=parse_model_shape(DENSE))

    def __init__(self) -> None:
        self.weights = {name: torch.randn(SIZE) for stage in STAGES for name in stage}
        self.writers: list[FileWriter] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if function.__name__ == "connect_folder":
            self.writers = [FileWriter(*args) for _ in range(4)]
            return [None] * 4
        part, rewrite, _ = args
        return [
            writer.write(self._tensors(rank), part, rank, rewrite=rewrite) for rank, writer in enumerate(self.writers)
        ]

    def _tensors(self, rank: int) -> Iterator[tuple[str, Tensor | None]]:
        for name in STAGES[rank // 2]:
            yield name, self.weights[name] if rank % 2 == 0 else None


class Generation:
    """Engines of one worker each, as vLLM's workers call a receiver; what they answer is what went wrong, or None."""

    def __init__(self, engines: int) -> None:
        self.config = GenerationConfig(parallel=GenerationParallelConfig(data=engines))
        self.models = [Model() for _ in range(engines)]
        self.receivers: dict[int, Any] = {}
        self.connected: list[int] = []
        self.served: list[int | None] = [None] * engines
        self.between: Callable[[], None] = lambda: None
        """Called before a version is received."""

    def submit_to(self, engines: Sequence[int], method: Callable[..., Any], *args: Any) -> dict[int, Any]:
        if method == Engine.receive_weights:
            self.between()
            return {number: self._receive(number, *args) for number in engines}
        for number in engines:
            if method == Engine.connect_weights:
                self.connected.append(number)
                self.receivers[number] = _receiver(self.models[number], args[1])
            else:
                self.served[number] = args[0]
        return dict.fromkeys(engines)

    def replace(self, losses: Mapping[int, str]) -> None:
        for number in losses:
            self.models[number], self.served[number] = Model(), None

    def _receive(self, number: int, version: int) -> str | None:
        receiver = self.receivers[number]
        try:
            receiver.receive(version)
        except (ValueError, RuntimeError) as error:
            receiver.abandon()
            return f"worker {number}: {error}"
        return None


class InProcess(RefitCalls):
    """Calls answer at once."""

    def wait(self, sends: Any, receives: Mapping[int, Any], deadline: float, phase_name: str) -> list[Any]:
        if any(receives.values()):
            raise AttemptError("; ".join(answer for answer in receives.values() if answer), {})
        return sends


class Loading:
    """In the place of what vLLM's layers need around loading."""

    def __init__(self, worker: Any, _: Any) -> None:
        self.begin = self.finish = self.abandon = lambda: None
        self.load = worker.model_runner.get_model().load_weights


@pytest.fixture(autouse=True)
def no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.weight_sync.weights_folder.make_loader", Loading)


def _receiver(model: Model, shared: Mapping[str, str]) -> FileReceiver:
    return FileReceiver(made_up_worker(model), shared)


@pytest.fixture
def make_transport(tmp_path: Path) -> tuple[WeightTransport, Policy, Generation]:
    policy, generation = Policy(), Generation(engines=2)
    config = RefitConfig(mode="files", bucket_mib=0.0001, retries=1)
    calls = InProcess(policy, generation)  # type: ignore[arg-type]
    calls.engine_boxes = [pack_boxes([])]  # nothing is compared
    transport = WeightTransport(calls, FilesMode(calls, config, tmp_path / "run"), config)
    transport.connect()
    return transport, policy, generation


def test_every_engine_gets_every_tensor_and_afterwards_what_changed(make_transport: Any) -> None:
    transport, policy, generation = make_transport
    report = transport.publish(1)
    assert (report.tensors, report.bytes_sent, report.retries) == (4, 4 * BYTES, 0)
    _serve(generation, policy, version=1)

    assert transport.publish(2).tensors == 0
    assert generation.served == [2, 2]

    policy.weights[KEY] = torch.randn(SIZE)
    report = transport.publish(3)
    assert (report.tensors, report.bytes_sent, report.buckets) == (1, BYTES, 1)
    assert generation.models[0].loaded == [QUERY, KEY], "vLLM joins the two, so both are read"
    _serve(generation, policy, version=3)


def test_an_engine_that_comes_later_reads_everything(make_transport: Any) -> None:
    transport, policy, _ = make_transport
    transport.publish(1)
    policy.weights[NORM] = torch.randn(SIZE)
    transport.publish(2)
    shared = {"folder": str(transport._mode.folder), "session": transport._mode.session}
    model = Model()
    receiver = _receiver(model, shared)
    receiver.receive(2)
    assert all(torch.equal(model.weights[name], policy.weights[name]) for name in policy.weights)


def test_a_damaged_file_is_found_before_the_model_is_touched_and_is_written_again(make_transport: Any) -> None:
    transport, policy, generation = make_transport
    transport.publish(1)
    before = {name: tensor.clone() for name, tensor in generation.models[0].weights.items()}
    policy.weights[UP] = torch.randn(SIZE)
    reads = []

    def damage() -> None:
        if not reads:
            reads.append(generation.models[0].weights)
            file = max(transport._mode.folder.glob("*/*.safetensors"))
            data = bytearray(file.read_bytes())
            data[-1] ^= 16
            file.write_bytes(data)
        elif len(reads) == 1:  # the second attempt: what the first has left
            reads.append(all(torch.equal(generation.models[0].weights[name], before[name]) for name in before))

    generation.between = damage
    report = transport.publish(2)
    assert report.retries == 1
    assert reads[1] is True
    assert report.tensors == 4, "everything is written again"
    _serve(generation, policy, version=2)


def test_after_a_model_failed_in_the_middle_everything_is_read_again(make_transport: Any) -> None:
    transport, policy, generation = make_transport
    transport._config = replace(transport._config, retries=0)
    transport.publish(1)
    for name in policy.weights:
        policy.weights[name] = torch.randn(SIZE)
    generation.models[1].fails = UP
    with pytest.raises(RefitError, match="worker 1: out of memory"):
        transport.publish(2)
    assert generation.served == [1, 1]
    generation.models[1].fails = ""
    transport.publish(3)
    _serve(generation, policy, version=3)


def test_an_engine_that_was_replaced_gets_the_version_alone(make_transport: Any) -> None:
    transport, policy, generation = make_transport
    transport.publish(1)
    policy.weights[NORM] = torch.randn(SIZE)
    transport.publish(2)
    generation.connected.clear()
    transport.restore({1: "it died"})
    assert generation.connected == [1]
    _serve(generation, policy, version=2)
    policy.weights[UP] = torch.randn(SIZE)
    report = transport.publish(3)
    assert report.tensors == 1, "files are as they were"
    assert report.replaced == ("generation engine 1 was replaced: it died",)
    _serve(generation, policy, version=3)


def test_connecting_again_begins_anew(make_transport: Any) -> None:
    transport, policy, generation = make_transport
    transport.publish(1)
    generation.connected.clear()
    transport.connect()
    assert generation.connected == [0, 1]
    assert transport.publish(2).tensors == 4
    _serve(generation, policy, version=2)


def test_what_is_superseded_goes_and_does_not_pile_up(make_transport: Any) -> None:
    transport, policy, _ = make_transport
    transport._mode.bucket_bytes = 10**6  # a stage in one file, of which a part lives on
    transport.connect()
    wholes = 0
    for version in range(1, 30):
        policy.weights[KEY] = torch.randn(SIZE)
        wholes += transport.publish(version).tensors == 4
        stored_bytes = sum(
            tensor.nbytes for file in transport._mode.folder.glob("*/*") for tensor in load_file(file).values()
        )
        assert stored_bytes <= 3 * sum(tensor.nbytes for tensor in policy.weights.values())
    assert 1 <= wholes < 20
    transport.close()
    assert not transport._mode.folder.exists()
    transport.close()


def test_another_runs_folder_and_another_version_are_refused(make_transport: Any) -> None:
    transport, _, generation = make_transport
    transport.publish(1)
    assert "holds version 1, not 2" in str(generation._receive(0, 2))
    manifest = read_manifest(transport._mode.folder)
    write_manifest(transport._mode.folder, Manifest("another", 2, manifest.tensors))
    assert "another run writes to" in str(generation._receive(0, 2))


def test_runs_have_folders_of_their_own(tmp_path: Path) -> None:
    def folder(run_dir: str, directory: str | None) -> Path:
        config = RefitConfig(mode="files", directory=directory)
        return FilesMode(RefitCalls(None, None), config, Path(run_dir)).folder  # type: ignore[arg-type]

    assert folder("/a/run", None) == Path("/a/run/refit")
    shared = {folder(run, "/shared") for run in ("/a/run", "/b/run")}
    assert len(shared) == 2
    assert {path.parent for path in shared} == {Path("/shared")}


def _serve(generation: Generation, policy: Policy, version: int) -> None:
    assert generation.served == [version] * 2
    for model in generation.models:
        assert model.weights.keys() == policy.weights.keys()
        assert all(torch.equal(model.weights[name], policy.weights[name]) for name in policy.weights)
