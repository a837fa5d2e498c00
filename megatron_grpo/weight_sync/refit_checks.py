"""Runs on the driver: compares engines with the policy, before they serve a version.

Weights that arrived intact may still be wrong where they are used. Before the commit, when that check is due, all
weights are compared as the kernels hold them. After the commit and before engines serve, the canary compares
log-probabilities. A failed check is not repeated, because such a fault does not heal by itself.

Neither check finds an adapter that is missing in the weights which the policy publishes. The fingerprints of both sides
are then the base model's, since both are taken of published weights. The canary compares what the policy computes, with
its adapters, but allows what rounding may explain, and adapters move log-probabilities by less for many steps, in
bfloat16 perhaps for ever. So at every refit the policy's ranks compare the weights that they publish with what their
layers compute (`models/adapter_check.py`); weights of engines are compared until adapters have moved, since before they
equal the base model's; and the canary also tells an engine that is nearer to the base model than to the policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import ray

from megatron_grpo.cluster.process_names import ENGINE_NAME, RANK_NAME
from megatron_grpo.generation.engine_canary import CanaryPrompt
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.weight_layouts import split_engine
from megatron_grpo.weight_sync.canary import Canary
from megatron_grpo.weight_sync.fingerprints import find_differing
from megatron_grpo.weight_sync.policy_fingerprints import fingerprint_policy
from megatron_grpo.weight_sync.rank_checks import check_rank_adapters, score_canary, score_canary_without_adapters
from megatron_grpo.weight_sync.refit_calls import RefitCalls, RefitError


class RefitChecks:
    """The checks of one run's refits; without a canary there are none."""

    def __init__(self, calls: RefitCalls, canary: Canary | None) -> None:
        self._calls, self._canary = calls, canary
        self._scores: list[ray.ObjectRef] | None = None
        """The policy's log-probabilities of the canary, by rank; None: the canary is not due."""
        self._base_scores: list[ray.ObjectRef] = []
        """Log-probabilities of the canary without the policy's adapters, by rank; empty without adapters."""
        self._adapters: list[ray.ObjectRef] = []
        """The check of the policy's adapters (`check_rank_adapters`), by rank; empty if it has none."""
        self._must_compare = True
        """Whether links were made since weights were compared, or adapters were still zero then."""
        self._are_equal = False
        """Whether engines are known to have the policy's weights of the version that was committed last."""
        self._figures: dict[str, float] = {}

    @property
    def awaits_canary(self) -> bool:
        """Whether engines may serve the current version only after the canary."""
        return self._scores is not None

    def require_next(self) -> None:
        """Make all checks due at the next refit."""
        if self._canary is not None:
            self._canary.require_checks()

    def expect_new_links(self) -> None:
        """Compare weights at the next commit, since links are new."""
        self._must_compare = True

    def begin(self) -> None:
        """Let the policy compute its side of due checks, behind its sending."""
        self._scores, self._base_scores, self._adapters = None, [], []
        if self._canary is None:
            return
        calls, has_adapters = self._calls, self._calls.policy.settings.config.lora.rank > 0
        if has_adapters:
            self._adapters = calls.call_ranks(check_rank_adapters)
        if self._canary.is_due():
            self._scores = calls.call_ranks(score_canary, self._canary.sequences)
            if has_adapters:
                self._base_scores = calls.call_ranks(score_canary_without_adapters, self._canary.sequences)

    def require_equal_weights(self, version: int, engines: Sequence[int], deadline: float) -> None:
        """Compare adapters, and if that is due all weights, before a version is committed.

        Raises:
            RefitError: engines hold other weights than the policy, or the policy published wrong ones.
            AttemptError: a process failed, or the deadline passed.
        """
        have_moved = self._require_adapters(version, deadline)
        self._are_equal = version == 0  # the weights of the model folder, which engines had loaded themselves
        if self._canary is None or not self._canary.should_compare_weights(version, new=self._must_compare):
            return
        began = time.monotonic()
        differences = self.find_differences(engines, deadline)
        self._figures["weight_check_s"] = time.monotonic() - began
        if differences:
            raise RefitError(f"version {version} is not served: {'; '.join(differences)}")
        self._canary.record_comparison()
        self._must_compare, self._are_equal = not have_moved, True

    def _require_adapters(self, version: int, deadline: float) -> bool:
        """Require that published weights are the adapted layers'; return whether adapters have moved."""
        checks = self._calls.wait(self._adapters, {}, deadline, "comparing adapters")
        faults = [f"{RANK_NAME(rank)}: {text}" for rank, check in enumerate(checks) for text in check.faults]
        if faults:
            raise RefitError(f"version {version} is not served: {'; '.join(faults)}")
        return not checks or any(check.has_moved for check in checks)

    def run_canary(self, version: int, engines: Sequence[int], timeout_s: float) -> None:
        """Compare log-probabilities of the canary, whereupon engines serve.

        Raises:
            CanaryFailedError: an engine does not compute what the policy does; it does not serve.
            AttemptError: a process failed, or the time is up.
        """
        canary, scores = self._canary, self._scores
        assert canary is not None, "a canary is due"
        assert scores is not None, "begin() comes first"
        began = time.monotonic()
        deadline, limit = began + timeout_s, canary.limit
        answers = self._calls.wait([*scores, *self._base_scores], {}, deadline, "the policy's canary")
        expected = next(answer for answer in answers if answer is not None)
        base = next((answer for answer in answers[len(scores) :] if answer is not None), None)
        prompt = CanaryPrompt(version, canary.sequences, expected, limit, canary.adapter_rounding, base)
        calls = self._calls.call_engines(engines, Engine.check_canary, prompt)
        errors = self._calls.wait([], calls, deadline, f"canary of version {version}")
        self._scores = None
        seconds = time.monotonic() - began
        canary.record_time(seconds)
        if self._are_equal:
            canary.record_noise(max(errors))
        self._figures |= {"canary_logprob_error": max(errors), "canary_limit": limit, "canary_s": seconds}

    def find_differences(self, engines: Sequence[int], deadline: float) -> list[str]:
        """Describe the tensors of engines that differ beyond rounding."""
        shape = self._calls.policy.settings.shape
        shards = split_engine(self._calls.generation.config.parallel, shape)
        stages = self._calls.call_ranks(fingerprint_policy, shards)
        calls = self._calls.call_engines(engines, Engine.fingerprint_weights)
        answers = self._calls.wait(stages, calls, deadline, "comparing weights")
        parts = answers[: len(stages)]
        expected = [
            {name: values for part in parts for name, values in part[rank].items()} for rank in range(len(shards))
        ]
        rounding = self._canary.rounding if self._canary is not None else 0.0
        texts = []
        for engine, workers in zip(calls, answers[len(stages) :], strict=True):
            for rank, actual in enumerate(workers):
                worker = f"{ENGINE_NAME(engine)}, worker {rank}"
                for name, error in find_differing(expected[rank], actual, rounding).items():
                    texts.append(f"{worker}: {name} differs from the policy's by {error:.2g} of its norm")
        return texts

    def take_figures(self) -> Mapping[str, float]:
        """Take the figures of the checks since the last call."""
        figures, self._figures = self._figures, {}
        return figures
