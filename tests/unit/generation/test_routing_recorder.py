"""What a CPU engine's worker returns of made-up forward passes, and what vLLM's scheduler makes of it."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron_grpo.generation.vllm_requests import pack_experts
from megatron_grpo.models.routed_experts import RoutedForm

pytest.importorskip("vllm")

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

from megatron_grpo.generation.cpu_worker import RoutingRecorder

LAYERS = (0, 2)
FORM = RoutedForm(layers=LAYERS, top_k=2, experts=256)


@dataclass
class Request:
    """As vLLM's Request: tokens are numbers."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    computed: int = 0
    """Tokens that are in the cache."""
    block_hashes: list[bytes] = field(default_factory=list)
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(routed_experts_prompt_start=0))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class Engine:
    """A scheduler's side of vLLM, and a worker whose experts tell the token and the version of the weights."""

    def __init__(self, *requests: Request) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.connector, self.recorder = AuxOutputSchedulerConnector(), RoutingRecorder(nn.Identity())
        self.returned: dict[str, list[Any]] = {name: [] for name in self.requests}
        self.version = 0

    def step(self, *names: str) -> None:
        """Compute all tokens of these requests that are not in the cache, and sample one of each."""
        counts = {name: len(self.requests[name].tokens) - self.requests[name].computed for name in names}
        old = [name for name in names if self.requests[name].num_output_tokens]
        scheduled = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old, num_computed_tokens=[self.requests[name].computed for name in old]
            ),
        )
        scheduled.aux_output_connector_metadata = self.connector.build_connector_meta(scheduled, self.requests)  # type: ignore[arg-type]  # made-up requests
        flat = [token for name in names for token in self.requests[name].tokens[self.requests[name].computed :]]
        for layer in LAYERS:
            padded = [*experts_of(flat, layer, self.version), [7, 7]]
            self.recorder._capture(layer, torch.tensor(padded))
        output = self.recorder.end_pass(scheduled, ["gone", *names])
        for name in names:
            request = self.requests[name]
            request.computed = len(request.tokens)
            request.tokens.append(10 * len(request.tokens))
            self.returned[name].append(self.connector.take_output(request, output))  # type: ignore[arg-type]  # as above

    def drop_cache(self) -> None:
        """As a refit does under requests in flight; the next step computes all of their tokens."""
        self.connector.reset()
        for request in self.requests.values():
            request.computed = 0

    def read(self, name: str) -> list[Any]:
        """[tokens but the last, layers, 2]."""
        packed = pack_experts(FORM, np.concatenate(self.returned[name]), len(self.requests[name].tokens))
        assert not isinstance(packed, str), packed
        return FORM.unpack(packed).tolist()


def experts_of(tokens: list[int], layer: int, version: int) -> list[list[int]]:
    """[tokens, 2]."""
    return [[token + layer, 100 + 50 * version + layer] for token in tokens]


def expected_routing(tokens: list[int], versions: list[int]) -> list[Any]:
    """[tokens, layers, 2]."""
    pairs = zip(tokens, versions, strict=True)
    return [[experts_of([token], layer, version)[0] for layer in LAYERS] for token, version in pairs]


def test_passes_are_shared_out_over_requests() -> None:
    engine = Engine(Request("a", [1, 2, 3], 3), Request("b", [9], 1))
    engine.step("a", "b")
    engine.step("b", "a")
    engine.step("b")
    assert engine.read("a") == expected_routing([1, 2, 3, 30], [0] * 4)
    assert engine.read("b") == expected_routing([9, 10, 20], [0] * 3)


def test_tokens_keep_the_experts_of_the_pass_that_drew_the_next_one() -> None:
    """After the update the new weights compute all earlier tokens again, and draw from the last one."""
    engine = Engine(Request("a", [1, 2, 3], 3), Request("b", [4, 5], 2))
    engine.step("a", "b")
    engine.step("a", "b")
    engine.drop_cache()
    engine.version = 1
    engine.step("b", "a")
    engine.step("a")
    assert engine.read("a") == expected_routing([1, 2, 3, 30, 40, 50], [0, 0, 0, 0, 1, 1])
    assert engine.read("b") == expected_routing([4, 5, 20, 30], [0, 0, 0, 1])


def test_a_cache_that_is_kept_continues_the_record() -> None:
    engine = Engine(Request("a", [1, 2, 3], 3))
    engine.step("a")
    engine.version = 1
    engine.step("a")
    assert engine.read("a") == expected_routing([1, 2, 3, 30], [0, 0, 0, 1])


def test_a_record_with_a_gap_makes_no_response() -> None:
    two = np.zeros((2, 3, 2), np.uint8)
    assert pack_experts(FORM, two, 4) == "vLLM recorded the experts of 2 tokens, and 3 were processed"
    assert pack_experts(FORM, None, 4) == "vLLM recorded the experts of 0 tokens, and 3 were processed"
    assert pack_experts(FORM, two, 3).shape == (2, FORM.token_bytes)  # type: ignore[union-attr]  # nothing is missing
