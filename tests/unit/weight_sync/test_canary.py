"""When the checks after a refit are due, what prompt and limits they have, and what a failed one does to the refit."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megatron_grpo.config.errors import CanaryError
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config, GenerationConfig, LoraConfig, PolicyConfig
from megatron_grpo.generation.engine_canary import CanaryPrompt, CanaryResult
from megatron_grpo.models.adapter_check import AdapterCheck
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.weight_sync.refit_calls import CanaryFailedError, RefitCalls, RefitError
from megatron_grpo.weight_sync.refit_checks import BOUNDS, Canary, CanaryBounds, draw_canary, find_coarsest_precision
from megatron_grpo.weight_sync.transfer_modes import TransferMode, TransferReport
from megatron_grpo.weight_sync.transport import WeightTransport


@pytest.fixture(autouse=True)
def without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes into Ray's store goes to its readers as it is."""
    monkeypatch.setattr(ray, "put", lambda value: value)


def test_the_median_of_the_worst_sequence_decides() -> None:
    prompt = CanaryPrompt(3, ((5, 6, 7, 8), (9, 8, 7)), expected=((-1.0, -2.0, -3.0), (-4.0, -5.0)), limit=0.1)
    equal = (-4.0, -5.0)
    assert prompt.require_agreement([(-1.0, -2.05, -9.0), equal]).error == pytest.approx(0.05), (
        "one token may go to another expert"
    )
    with pytest.raises(CanaryError, match=r"with version 3 of the weights .* differ from the policy's by 0.2 \(median"):
        prompt.require_agreement([(-1.0, -2.2, -3.4), equal])
    with pytest.raises(CanaryError, match=r"0 \(4 tokens\), 0.3 \(3 tokens\)$"):
        prompt.require_agreement([(-1.0, -2.0, -3.0), (-4.3, -5.3)])
    with pytest.raises(CanaryError, match="by inf"):
        prompt.require_agreement([(math.nan, -2.0, -3.0), equal])


def test_an_engine_without_the_adapters_is_told_from_one_with_them() -> None:
    """Both are far within the limit of bfloat16."""
    prompt = CanaryPrompt(
        3, ((5, 6, 7, 8),), expected=((-1.0, -2.0, -3.0),), limit=0.5, rounding=0.005, base=((-1.04, -2.04, -2.96),)
    )
    assert prompt.require_agreement([(-1.01, -2.0, -2.99)]).error == pytest.approx(0.01)
    assert prompt.require_agreement([(-1.02, -2.02, -2.98)]).error == pytest.approx(0.02), (
        "rounding of half the distance"
    )
    assert prompt.require_agreement([(-0.96, -1.96, -3.04)]).error == pytest.approx(0.04), "on the other side"
    with pytest.raises(CanaryError, match=r"by 0.01 and from the policy's by 0.03 \(medians\), so it has no adapters"):
        prompt.require_agreement([(-1.03, -2.03, -2.97)])
    still = replace(prompt, base=((-1.001, -2.001, -3.001),))
    assert still.require_agreement([(-1.001, -2.001, -3.001)]).error == pytest.approx(0.001), (
        "adapters that move nothing yet"
    )


class OneEngine:
    """A policy of two ranks and an engine, whose calls have made-up results."""

    def __init__(self, lora: int = 0) -> None:
        self.config = GenerationConfig()
        shape: Any = SimpleNamespace(layers=0, experts=None)
        policy = PolicyConfig(lora=LoraConfig(rank=lora))
        self.settings = RankSettings(config=policy, shape=shape, folder="", decay_steps=1)
        self.adapters = AdapterCheck([], has_moved=False)
        self.calls: list[str] = []
        self.error = 0.001
        """Difference that the canary finds."""
        self.is_suspect = False

    def share(self, value: Any) -> Any:
        return value

    def submit_to(self, engines: Any, method: Any, *args: Any) -> dict[int, Any]:
        return dict(zip(engines, self.submit(method, *args), strict=True))

    def submit(self, method: Any, *args: Any) -> list[Any]:
        name = method.__name__
        self.calls.append(name)
        results: dict[str, list[Any]] = {
            "score_canary": [None, ((-1.0, -2.0),)],
            "score_canary_without_adapters": [None, ((-1.5, -2.5),)],
            "check_rank_adapters": [AdapterCheck([], has_moved=False), self.adapters],
            "fingerprint_policy": [[{}]],
            "fingerprint_weights": [[]],
            "check_canary": [CanaryResult(self.error, 2 * self.error, self.is_suspect)],
        }
        if name == "check_canary":
            self.prompt = args[0]
        return results.get(name, [None])


class Answered(RefitCalls):
    """Calls that have ended."""

    refused = False

    def wait(self, sends: Any, receives: Any, deadline: float, phase_name: str) -> list[Any]:
        if self.refused and phase_name.startswith("canary"):
            raise CanaryFailedError("engine 0 must not serve")
        return [*sends, *receives.values()]


class Idle(TransferMode):
    def connect(self, engines: tuple[int, ...], *, anew: bool) -> None:
        """Nothing to connect."""

    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        on_sent()
        return TransferReport(version, bytes_sent=1, tensors=1, buckets=1)


class Scripted(WeightTransport):
    def __init__(self, engine: Any, config: RefitConfig, canary: Canary) -> None:
        self.answered = Answered(engine, engine)
        super().__init__(self.answered, Idle(self.answered, config), config, canary)

    def refit(self, version: int) -> TransferReport:
        return self.admit(self.publish(version))


def test_engines_are_admitted_after_the_commit_and_a_failed_canary_is_not_tried_again() -> None:
    engine: Any = OneEngine()
    config = RefitConfig(canary_share=1.0, weight_check_period=None, retries=3)
    transport = Scripted(engine, config, Canary(config, ((1, 2, 3),)))
    report = transport.refit(1)
    assert engine.calls == ["score_canary", "commit_weights", "check_canary"]
    assert report.checks["canary_logprob_error"] == 0.001
    assert report.checks["canary_token_error"] == 0.002
    engine.calls.clear()
    transport.answered.refused = True
    with pytest.raises(CanaryFailedError, match="must not serve"):
        transport.refit(2)
    assert engine.calls.count("commit_weights") == 1


def test_a_canary_that_no_engine_computed_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = OneEngine()
    engine.error = math.nan
    config = RefitConfig(canary_share=1.0, weight_check_period=None)
    canary = Canary(config, ((1, 2, 3),))
    report = Scripted(engine, config, canary).refit(0)
    assert "canary_logprob_error" not in report.checks
    assert canary.limit == BOUNDS["tf32"].first, "nothing was measured"
    assert "generation engine 0: vLLM did not compute the canary" in caplog.text


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of a second more at each look, so that a canary takes seconds."""
    monkeypatch.setattr(time, "monotonic", count().__next__)


@pytest.mark.usefixtures("ticking")
def test_a_suspect_sequence_is_spared_once_and_both_checks_follow(caplog: pytest.LogCaptureFixture) -> None:
    """A near tie of experts is gone with the next weights, and a fault is not."""
    engine: Any = OneEngine()
    config = RefitConfig(canary_share=1e-6, weight_check_period=1000)
    transport = Scripted(engine, config, Canary(config, ((1, 2, 3),), limits_tokens=True, has_ties=True))
    spared, compared = [], []
    for version in range(9):
        engine.is_suspect, engine.prompt = version in (2, 3), None
        transport.refit(version)
        spared.append(engine.prompt and engine.prompt.spares_sequence)
        compared.append("fingerprint_weights" in engine.calls)
        engine.calls.clear()
    assert spared == [True, True, True, False, False, None, None, None, None]
    assert compared == [True, True, False, True, True, False, False, False, False]
    assert "generation engine 0: tokens of one sequence of the canary differ" in caplog.text


@pytest.mark.slow
def test_engines_are_compared_until_adapters_have_moved() -> None:
    """Before, the base model is right."""
    for lora, compared in ((0, [0, 1, 6]), (4, [0, 1, 2, 6])):
        engine: Any = OneEngine(lora)
        config = RefitConfig(canary=False, weight_check_period=6)
        transport = Scripted(engine, config, Canary(config, ((1, 2, 3),)))
        versions = []
        for version in range(8):
            engine.adapters = AdapterCheck([], has_moved=version >= 2)
            transport.refit(version)
            versions += [version] * engine.calls.count("fingerprint_weights")
            assert engine.calls.count("check_rank_adapters") == (lora > 0)
            engine.calls.clear()
        assert versions == compared


def test_adapters_that_are_left_out_end_the_refit_before_its_commit() -> None:
    engine: Any = OneEngine(lora=4)
    engine.adapters = AdapterCheck(
        ["model.layers.0.self_attn.o_proj.weight: published without the layer's adapter"], True
    )
    config = RefitConfig(canary=False, weight_check_period=None, retries=3)
    transport = Scripted(engine, config, Canary(config, ((1, 2, 3),)))
    with pytest.raises(RefitError, match=r"^version 1 is not served: policy rank 1: model\.layers\.0.*o_proj.*without"):
        transport.publish(1)
    assert engine.calls == ["check_rank_adapters"]


def test_the_canary_has_the_base_models_log_probabilities_too() -> None:
    engine: Any = OneEngine(lora=4)
    config = RefitConfig(canary_share=1.0, weight_check_period=None)
    Scripted(engine, config, Canary(config, ((1, 2, 3),))).refit(1)
    assert (engine.prompt.expected, engine.prompt.base) == (((-1.0, -2.0),), ((-1.5, -2.5),))
    engine = OneEngine()
    Scripted(engine, config, Canary(config, ((1, 2, 3),))).refit(1)
    assert engine.prompt.base is None


def test_engines_on_the_policys_devices_wait_for_the_memory_of_their_caches() -> None:
    engine: Any = OneEngine()
    engine.config = GenerationConfig(placement="colocated")
    config = RefitConfig(canary_share=1.0, weight_check_period=None)
    transport = Scripted(engine, config, Canary(config, ((1, 2, 3),)))
    report = transport.publish(1)
    assert "check_canary" not in engine.calls
    transport.admit(report)
    assert engine.calls[-1] == "check_canary"
    transport.admit(report)
    assert engine.calls.count("check_canary") == 1


def test_the_sequences_follow_from_the_seed_and_fit_the_model() -> None:
    assert draw_canary(1, 1000, 2048) == draw_canary(1, 1000, 2048) != draw_canary(2, 1000, 2048)
    sequences = draw_canary(1, 7, 20)
    assert max(map(len, sequences)) == 19, "one token is sampled"
    assert {token for sequence in sequences for token in sequence} <= set(range(7))
    assert all({4, 6}.isdisjoint(sequence) for sequence in draw_canary(1, 7, 20, (4, 6))), "no image fills placeholders"
    lengths = [len(sequence) for sequence in draw_canary(1, 1000, 2048)]
    assert len(set(lengths)) == len(lengths) >= 3, "a boundary that is taken from a neighbour is wrong"


def test_the_canary_keeps_to_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    canary = Canary(RefitConfig(canary_share=0.01), ((1, 2),))
    followed = []
    for step in range(24):
        now[0] += 0.5
        if canary.is_due():
            followed.append(step)
            canary.record_time(0.02)  # 1% of four steps
    assert followed == [0, 1, 2, 3, 7, 11, 15, 19, 23], "the first weights, and those of three steps, at once"
    now[0] += 1000
    assert canary.is_due()
    canary.record_time(0.02)
    assert not canary.is_due(), "long phases without refits leave no time over"
    always = Canary(RefitConfig(canary_share=1.0), ((1, 2),))
    always.record_time(1e6)
    assert always.is_due()
    assert not Canary(RefitConfig(canary=False), ((1, 2),)).is_due()


def test_weights_are_compared_at_first_and_at_a_period() -> None:
    canary = Canary(RefitConfig(weight_check_period=5), ((1, 2),))
    followed = []
    for version in range(12):
        if canary.should_compare_weights(version, new=version == 3):
            followed.append(version)
            canary.record_comparison()
    assert followed == [0, 1, 3, 5, 10], "the first weights, the first that have changed, those of a new engine"
    assert not Canary(RefitConfig(weight_check_period=None), ((1, 2),)).should_compare_weights(0, new=True)


@pytest.mark.usefixtures("ticking")
def test_checks_that_are_required_follow_the_next_refit() -> None:
    engine: Any = OneEngine()
    config = RefitConfig(canary_share=1e-6, weight_check_period=1000)
    transport = Scripted(engine, config, Canary(config, ((1, 2, 3),)))
    followed = []
    for version in range(9):
        if version == 6:
            transport.require_checks()
        transport.refit(version)
        followed.append(("check_canary" in engine.calls, "fingerprint_weights" in engine.calls))
        engine.calls.clear()
    assert followed[:4] == [(True, True), (True, True), (True, False), (True, False)]
    assert followed[4:] == [(False, False), (False, False), (True, True), (False, False), (False, False)]
    off = RefitConfig(canary=False, weight_check_period=None)
    transport = Scripted(engine, off, Canary(off, ((1, 2, 3),)))
    transport.require_checks()
    transport.publish(1)
    assert engine.calls == ["commit_weights"], "checks that the user has switched off stay off"


@pytest.mark.slow
def test_the_limit_follows_the_noise_of_refits_whose_weights_are_right() -> None:
    engine: Any = OneEngine()
    config = RefitConfig(canary_share=1.0, weight_check_period=5)
    transport = Scripted(engine, config, Canary(config, ((1, 2, 3),), CanaryBounds(0.01, 1e-4, margin=20.0)))
    limits = []
    for version, engine.error in enumerate([1e-6, 2e-6, 5e-5, 1e-5, 1e-6, 3e-5, 1e-6]):
        transport.refit(version)
        limits.append(engine.prompt.limit)
    assert limits[0] == 0.01, "nothing is measured yet"
    assert limits[1:6] == [1e-4] * 5, "a difference is noise only where all weights were compared, or are the folder's"
    assert limits[6] == pytest.approx(20 * 3e-5)
    fixed = RefitConfig(canary_limit=0.2)
    canary = Canary(fixed, ((1, 2),))
    canary.record_noise(1e-6)
    assert canary.limit == 0.2


def test_a_resumed_run_whose_weights_are_not_compared_keeps_the_first_limit() -> None:
    engine: Any = OneEngine()
    config = RefitConfig(canary_share=1.0, weight_check_period=None)
    transport = Scripted(engine, config, Canary(config, ((1, 2, 3),), CanaryBounds(0.01, 1e-4, margin=20.0)))
    for version in (7, 8):
        transport.refit(version)
        assert engine.prompt.limit == 0.01


def choose_bounds(config: Config) -> CanaryBounds:
    return BOUNDS[find_coarsest_precision(config)]


def test_the_limit_is_that_of_the_coarser_side() -> None:
    config = Config()
    exact: Any = replace(config, policy=replace(config.policy, precision="float32"))
    assert choose_bounds(exact).first < choose_bounds(config).first
    engine = replace(config.generation.engine, dtype="bfloat16")
    assert choose_bounds(replace(exact, generation=replace(config.generation, engine=engine))) == choose_bounds(config)
    for arguments in ({"quantization": "fp8_per_block"}, {"kv_cache_dtype": "fp8_e4m3"}):
        quantised = replace(config.generation, engine_args=arguments)
        assert choose_bounds(replace(config, generation=quantised)).first > choose_bounds(config).first
    on_cpu = replace(exact, cluster=replace(exact.cluster, gpus_per_node=0))
    assert choose_bounds(on_cpu).first < 4e-3 < choose_bounds(exact).first, "attention on GPUs may multiply in TF32"
