"""The attempts of a refit, with links and transfers that are made up: what is tried again, and what is replaced."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import GetTimeoutError

from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.generation_schema import GenerationParallelConfig, RefitConfig
from megatron_grpo.config.schema import GenerationConfig, PolicyConfig
from megatron_grpo.generation.engine_interface import LoaderTrace
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.weight_sync import transfer_modes
from megatron_grpo.weight_sync.boxes import pack_boxes
from megatron_grpo.weight_sync.refit_calls import AttemptError, PolicyLostError, RefitCalls, RefitError
from megatron_grpo.weight_sync.transfer_modes import LinkMode, TransferMode, TransferReport
from megatron_grpo.weight_sync.transport import WeightTransport
from tests.support.engine_table import table_boxes

BAD = AttemptError("a bit was flipped", {})


def make_loss(*engines: int) -> AttemptError:
    return AttemptError("no answer", {engine: f"engine {engine} died" for engine in engines})


class FakeGeneration:
    """Engines that are replaced as often as `left` says."""

    def __init__(self, attempts_left: int = 9) -> None:
        self.config = GenerationConfig(parallel=GenerationParallelConfig(tensor=2, data=3))
        self.left = attempts_left
        self.replaced: list[list[int]] = []

    def submit_to(self, engines: Sequence[int], _method: Any, *_args: Any) -> dict[int, Any]:
        return dict.fromkeys(engines)

    def replace(self, losses: Mapping[int, str]) -> None:
        if not self.left:
            raise RunError("; ".join(losses.values()) + "; that was the last one")
        self.left -= 1
        self.replaced.append(list(losses))


class Answered(RefitCalls):
    """Calls that have ended."""

    def wait(self, sends: Any, receives: Mapping[int, Any], deadline: float, phase_name: str) -> list[Any]:
        return [*sends, *receives.values()]


class Scripted(TransferMode):
    """Each transfer takes the next of `outcomes`: an error, or None for one that works; links always work."""

    def __init__(self, calls: RefitCalls, config: RefitConfig, *outcomes: Exception | None) -> None:
        super().__init__(calls, config)
        self.outcomes = list(outcomes)
        self.log: list[tuple[Any, ...]] = []

    def connect(self, engines: tuple[int, ...], *, anew: bool) -> None:
        self.log.append(("links", engines))

    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        self.log.append((version, engines))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        on_sent()
        return TransferReport(version, bytes_sent=1, tensors=1, buckets=1)


def make_transport(
    generation: FakeGeneration, *outcomes: Exception | None, retries: int = 1
) -> tuple[WeightTransport, Scripted]:
    faked: Any = generation
    calls, config = Answered(faked, faked), RefitConfig(retries=retries)
    mode = Scripted(calls, config, *outcomes)
    return WeightTransport(calls, mode, config), mode


ALL = (0, 1, 2)


def test_links_are_made_once_and_anew_after_a_failure() -> None:
    transport, mode = make_transport(FakeGeneration(), None, None, BAD)
    transport.connect()
    for version in (1, 2):
        assert transport.publish(version).retries == 0
    assert transport.publish(3).retries == 1
    links = ("links", ALL)
    assert mode.log == [links, (1, ALL), (2, ALL), (3, ALL), links, (3, ALL)]


def test_an_attempt_that_costs_an_engine_is_no_retry() -> None:
    generation = FakeGeneration()
    transport, _ = make_transport(generation, make_loss(1), make_loss(0, 2), retries=0)
    report = transport.publish(4)
    assert generation.replaced == [[1], [0, 2]]
    assert report.retries == 2
    assert report.replaced == tuple(
        f"generation engine {engine} was replaced: engine {engine} died" for engine in (1, 0, 2)
    )
    assert transport.publish(5).replaced == (), "they are told once"


def test_retries_are_counted_beside_replacements() -> None:
    transport, _ = make_transport(FakeGeneration(), BAD, make_loss(1), BAD, retries=1)
    with pytest.raises(
        RefitError, match=r"^a bit was flipped; tried again: no answer; tried again: a bit was flipped$"
    ):
        transport.publish(4)


def test_an_engine_that_is_not_replaced_any_more_ends_the_refit() -> None:
    transport, _ = make_transport(FakeGeneration(attempts_left=1), make_loss(1), make_loss(1))
    with pytest.raises(RefitError, match=r"^engine 1 died; that was the last one$"):
        transport.publish(4)


def test_nothing_is_tried_without_the_whole_policy() -> None:
    transport, mode = make_transport(FakeGeneration(), PolicyLostError("policy rank 1 is gone"), retries=5)
    with pytest.raises(PolicyLostError):
        transport.publish(4)
    assert [entry for entry in mode.log if entry[0] == 4] == [(4, ALL)]


def test_engines_that_were_lost_in_between_get_what_was_published_last_and_the_others_nothing() -> None:
    generation = FakeGeneration()
    transport, mode = make_transport(generation, None, BAD)
    transport.publish(7)
    transport.restore({2: "it died over a response", 0: "so did this"})
    assert generation.replaced == [[2, 0]]
    links = ("links", (0, 2))
    assert mode.log[2:] == [links, (7, (0, 2)), links, (7, (0, 2))]
    report = transport.publish(8)
    assert mode.log[-2:] == [("links", ALL), (8, ALL)], "links to two engines are not links to three"
    assert (report.retries, len(report.replaced)) == (0, 2)


@pytest.mark.parametrize(("attempts_left", "outcomes"), [(0, [None]), (1, [None, BAD, BAD]), (1, [None, make_loss(1)])])
def test_what_cannot_be_restored_is_no_failure_of_what_is_trained(attempts_left: int, outcomes: list[Any]) -> None:
    transport, _ = make_transport(FakeGeneration(attempts_left), *outcomes)
    transport.publish(7)
    with pytest.raises(SamplingError):
        transport.restore({1: "it died over a response"})


def test_an_engine_that_joins_gets_the_version_alone_and_one_that_leaves_none() -> None:
    transport, mode = make_transport(FakeGeneration())
    transport.publish(7)
    transport.join(5, 7)
    assert mode.log[-2:] == [("links", (5,)), (7, (5,))]
    transport.publish(8)
    assert mode.log[-2:] == [("links", (*ALL, 5)), (8, (*ALL, 5))]
    transport.leave(1)
    transport.publish(9)
    assert mode.log[-2:] == [("links", (0, 2, 5)), (9, (0, 2, 5))]


def test_an_engine_that_cannot_join_costs_the_others_nothing() -> None:
    transport, mode = make_transport(FakeGeneration(attempts_left=0), None, BAD, BAD)
    transport.publish(7)
    with pytest.raises(RefitError, match="a bit was flipped; tried again: a bit was flipped"):
        transport.join(5, 7)
    assert transport.publish(8).retries == 0
    assert mode.log[-2:] == [("links", ALL), (8, ALL)]


class FailingStore:
    """A store that is opened, and then does not answer."""

    host, port = "127.0.0.1", 1

    def set(self, key: str, value: str) -> None:
        raise torch.distributed.DistStoreError(f"wait timeout after 1ms, key: {key}\nException raised from doWait")


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize(
    ("address", "store", "text"),
    [
        # An address of no machine (RFC 5737), as of a node whose network has changed.
        ("203.0.113.1", None, r"OSError: .*assign requested address"),
        (GetTimeoutError("no answer"), None, "GetTimeoutError: no answer"),
        (
            "127.0.0.1",
            torch.distributed.DistNetworkError("The client socket timed out"),
            "DistNetworkError: The client",
        ),
        ("127.0.0.1", FailingStore(), "DistStoreError: wait timeout after 1ms, key: plan$"),
    ],
    ids=["address", "ray", "open", "write"],
)
def test_links_without_a_store_are_tried_again_and_end_as_a_refit_does(
    address: Any, store: Any, text: str, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def find_address() -> str:
        attempts.append(address)
        if isinstance(address, Exception):
            raise address
        return str(address)

    def open_fake_store(host: str, timeout_s: float) -> Any:
        if isinstance(store, Exception):
            raise store
        return store

    monkeypatch.setattr(transfer_modes, "find_node_address", find_address)
    if store is not None:
        monkeypatch.setattr(transfer_modes, "open_store", open_fake_store)
    shape = read_model_shape("tests/data/hf_configs/qwen3_8b")
    policy: Any = SimpleNamespace(settings=SimpleNamespace(config=PolicyConfig(), shape=shape, ranks_per_machine=None))
    generation: Any = FakeGeneration()
    calls, config = Answered(policy, generation), RefitConfig(retries=retries)
    calls.engine_boxes = [pack_boxes(boxes) for boxes in table_boxes(generation.config.parallel, shape)]
    transport = WeightTransport(calls, LinkMode(calls, config), config)
    with pytest.raises(RefitError, match=rf"^the store of the refit failed: {text}"):
        transport.connect()
    attempts.clear()
    with pytest.raises(RefitError, match=text):
        transport.publish(4)
    assert len(attempts) == retries + 1
    assert not generation.replaced


@pytest.mark.parametrize("converts", [False, True])
def test_engines_that_convert_layers_get_one_after_another(converts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_model_shape("tests/data/hf_configs/qwen3_8b")
    orders = []

    class Traced(Answered):
        def wait(self, sends: Any, receives: Mapping[int, Any], deadline: float, phase_name: str) -> list[Any]:
            boxes = [pack_boxes(boxes) for boxes in table_boxes(self.generation.config.parallel, shape)]
            workers = [LoaderTrace(digest="", boxes=text, converts=False) for text in boxes]
            workers[-1]["converts"] = converts
            return [workers for _ in receives]

    def plan(*_arguments: Any, by_layer: bool, **_keywords: Any) -> None:
        orders.append(by_layer)
        raise ValueError("far enough")

    monkeypatch.setattr(transfer_modes, "plan_messages", plan)
    policy: Any = SimpleNamespace(settings=SimpleNamespace(config=PolicyConfig(), shape=shape, ranks_per_machine=None))
    generation: Any = FakeGeneration()
    mode = LinkMode(Traced(policy, generation), RefitConfig())
    with pytest.raises(AttemptError, match="far enough"):
        mode.connect((0, 1, 2), anew=True)
    assert orders == [converts]
