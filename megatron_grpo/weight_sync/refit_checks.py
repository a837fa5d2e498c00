"""Runs on the driver: compares engines with the policy, before they serve a version, and decides when.

Weights that arrived intact may still be wrong where they are used. Before the commit, when that check is due, all
weights are compared as the kernels hold them. After the commit and before engines serve, the canary compares
log-probabilities. A failed check is not repeated, because such a fault does not heal by itself.

Adapters that are missing in the published weights escape both: fingerprints of both sides are of published weights, and
what adapters change stays below the canary's allowance for rounding for many steps. So

1. at every refit ranks compare what they publish with what their layers compute (`models/adapter_check.py`);
2. weights of engines are compared until adapters have moved, since before that they equal the base model's;
3. the canary also fails when an engine is nearer to the base model than to the policy.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from megatron_grpo.cluster.process_log import ENGINE_NAME, RANK_NAME
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.generation.engine_canary import CanaryPrompt, CanaryResult
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.weight_sync.fingerprints import find_differing
from megatron_grpo.weight_sync.rank_checks import (
    check_rank_adapters,
    fingerprint_policy,
    score_canary,
    score_canary_without_adapters,
)
from megatron_grpo.weight_sync.refit_calls import RefitCalls, RefitError

logger = logging.getLogger(__name__)

# Tokens of the canary's sequences, unless sequences of the run are shorter. They differ, so that a position or a
# boundary that is taken from a neighbour shows, and each has enough tokens for a median.
CANARY_LENGTHS = (32, 9, 20, 13)

# Canaries of a start that are not limited to their share of the time: the first weights and those of three steps, since
# a refit that goes wrong mostly does so from the first changed weights on.
FIRST_CANARIES = 4
# Comparisons of all weights at a start: of the first weights, and of the first that a step has changed.
FIRST_COMPARISONS = 2


@dataclass(frozen=True, slots=True)
class CanaryBounds:
    """Bounds of the difference that rounding explains, in nats (docs/refit.md)."""

    first: float  # limit until a canary of this run has measured the noise, and the largest limit afterwards
    floor: float  # smallest limit: noise changes with the weights
    margin: float  # limit as a multiple of the measured noise


BOUNDS = {
    "float32": CanaryBounds(1e-3, 1e-4, margin=20.0),
    "tf32": CanaryBounds(0.01, 1e-4, margin=20.0),
    "bfloat16": CanaryBounds(0.5, 0.1, margin=8.0),
    "8 bits": CanaryBounds(1.5, 0.5, margin=5.0),
}

# Limit of a single token, as a multiple of the limit of the median, which has a margin of its own. In float32 the
# largest difference of a canary was 2 to 46 times its median (docs/refit.md); where it is more, what the run measures
# widens the limit, with the same margin.
TOKEN_FACTOR = 10.0

# Share of the first limit below which a difference is rounding, whatever it is nearer to.
ROUNDING_SHARE = 0.01

# Largest difference, relative to the norm, of a tensor that is rounded to bfloat16 on one side: 2^-9.2 is expected.
_CONVERSION_ROUNDING = 2.0**-7


class Canary:
    """The canary's sequences and limits, and when checks are due.

    `rounding` is the difference of a tensor, relative to its norm, that another dtype of engines explains.
    `limits_tokens`: single tokens have a limit too. `has_ties`: near ties of experts may move tokens beyond it.
    """

    def __init__(
        self,
        config: RefitConfig,
        sequences: tuple[tuple[int, ...], ...],
        bounds: CanaryBounds = BOUNDS["tf32"],
        rounding: float = 0.0,
        *,
        limits_tokens: bool = False,
        has_ties: bool = False,
    ) -> None:
        self.sequences, self.rounding = sequences, rounding
        self._limits_tokens, self._has_ties = limits_tokens, has_ties
        self._was_suspect = False  # the last canary had a sequence beyond the limit of tokens
        self._config, self._bounds = config, bounds
        self._noise: float | None = None  # largest difference of a canary after a refit whose weights were right
        self._token_noise = 0.0  # largest difference of a single token then
        self._next_at = -math.inf  # time (monotonic) from which on a refit is followed by the canary
        # Numbers of coming refits that are checked, whatever time has passed.
        self._first_canaries, self._due_comparisons = FIRST_CANARIES, FIRST_COMPARISONS

    @staticmethod
    def from_config(config: Config, shape: ModelShape) -> Canary:
        longest = config.policy.max_total_sequence_length
        placeholders = shape.vision.placeholders if shape.vision else ()
        sequences = draw_canary(config.loop.seed, shape.vocab, longest, placeholders)
        rounding = 0.0 if config.engine_dtype == config.policy.precision else _CONVERSION_ROUNDING
        precision, has_experts = find_coarsest_precision(config), shape.experts is not None
        # Coarser rounding sends tokens to other experts all the time, and has larger tails.
        limits_tokens = precision == "float32" or (precision == "tf32" and not has_experts)
        bounds = BOUNDS[precision]
        return Canary(config.refit, sequences, bounds, rounding, limits_tokens=limits_tokens, has_ties=has_experts)

    @property
    def limit(self) -> float:
        """Largest difference of log-probabilities with which an engine serves, in nats."""
        fixed, bounds = self._config.canary_limit, self._bounds
        if fixed is not None:
            return fixed
        if self._noise is None:
            return bounds.first
        return min(bounds.first, max(bounds.floor, bounds.margin * self._noise))

    @property
    def token_limit(self) -> float:
        """Largest difference of a single token with which an engine serves, in nats."""
        if not self._limits_tokens:
            return math.inf
        first, limit = TOKEN_FACTOR * self._bounds.first, TOKEN_FACTOR * self.limit
        return max(limit, min(first, self._bounds.margin * self._token_noise))

    @property
    def spares_sequence(self) -> bool:
        """Whether tokens of one sequence may be beyond their limit."""
        # Where two experts have nearly the same score, rounding sends a token to another one, which changes this token
        # and those behind it in its sequence. In float32 that is too rare to happen in two sequences, or in two
        # canaries in a row, whose weights differ. A fault stays.
        return self._has_ties and not self._was_suspect

    @property
    def adapter_rounding(self) -> float:
        """Difference in nats that does not show missing adapters."""
        return ROUNDING_SHARE * (self._config.canary_limit or self._bounds.first)

    def is_due(self) -> bool:
        """Whether the canary follows the next refit."""
        has_time = time.monotonic() >= self._next_at or self._config.canary_share == 1
        return self._config.canary and (has_time or self._first_canaries > 0)

    def should_compare_weights(self, version: int, *, new: bool) -> bool:
        """Whether weights are compared; `new`: with links that were just made."""
        period = self._config.weight_check_period
        return period is not None and (new or self._due_comparisons > 0 or version % period == 0)

    def require_checks(self) -> None:
        """Make both checks due at the next refit, unless they are switched off."""
        self._next_at, self._due_comparisons = -math.inf, max(1, self._due_comparisons)

    def record_comparison(self) -> None:
        self._due_comparisons = max(0, self._due_comparisons - 1)

    def record_time(self, seconds: float) -> None:
        """Record the canary's time, which decides when it is due again."""
        self._next_at = time.monotonic() + seconds / self._config.canary_share
        self._first_canaries = max(0, self._first_canaries - 1)

    def record_suspicion(self, is_suspect: bool) -> None:
        """Record whether a sequence was beyond the limit of tokens.

        If so, both checks follow the next refit.
        """
        self._was_suspect = is_suspect
        if is_suspect:
            self.require_checks()

    def record_noise(self, error: float, largest: float = 0.0) -> None:
        """Record the differences of a canary whose weights are right: median and largest."""
        self._noise = max(error, self._noise or 0.0)
        self._token_noise = max(largest, self._token_noise)


def find_coarsest_precision(config: Config) -> Literal["float32", "tf32", "bfloat16", "8 bits"]:
    """Precision that limits how well policy and engines agree."""
    policy, arguments = config.policy, config.generation.engine_args
    in_fp8 = policy.fp8.format != "off" or policy.fp8.simulate
    cache_in_8_bits = str(arguments.get("kv_cache_dtype", "auto")).startswith(("fp8", "int8"))
    if in_fp8 or policy.quantization or arguments.get("quantization") or cache_in_8_bits:
        return "8 bits"
    if "bfloat16" in (policy.precision, config.engine_dtype):
        return "bfloat16"
    # On GPUs and servers attention may multiply float32 numbers with 10 bits of mantissa.
    on_cpu = config.cluster.gpus_per_node == 0 and not config.generation.server.urls
    return "float32" if on_cpu else "tf32"


def draw_canary(
    seed: int, vocabulary: int, longest: int, placeholders: Collection[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Draw sequences of random token ids, which use many embeddings and experts.

    `longest`: most tokens of a prompt and its response; the canary's response has one token. `placeholders` of images
    are left out, because no image would fill them.
    """
    draw, tokens = random.Random(seed), [token for token in range(vocabulary) if token not in placeholders]
    return tuple(tuple(draw.choices(tokens, k=min(length, longest - 1))) for length in CANARY_LENGTHS)


class RefitChecks:
    """The checks of a run's refits; none without a canary."""

    def __init__(self, calls: RefitCalls, canary: Canary | None, *, adapters_alone: bool = False) -> None:
        self.canary, self._calls = canary, calls
        self._adapters_alone = adapters_alone  # engines hold the base model, and adapters beside it
        # The policy's answers by rank; None and empty: not due, or there are no adapters.
        self._scores: list[ray.ObjectRef] | None = None
        self._base_scores: list[ray.ObjectRef] = []
        self._adapters: list[ray.ObjectRef] = []
        self.must_compare = True  # links were made since weights were compared, or adapters were still zero then
        self._are_equal = False  # engines are known to have the policy's weights of the version committed last
        self._figures: dict[str, float] = {}

    @property
    def awaits_canary(self) -> bool:
        """Whether engines may serve the current version only after the canary."""
        return self._scores is not None

    def begin(self) -> None:
        """Let the policy compute its side of due checks, after sending."""
        self._scores, self._base_scores, self._adapters = None, [], []
        if self.canary is None:
            return
        calls, has_adapters = self._calls, self._calls.policy.settings.config.lora.rank > 0
        if has_adapters and not self._adapters_alone:
            self._adapters = calls.policy.submit(check_rank_adapters)
        if self.canary.is_due():
            self._scores = calls.policy.submit(score_canary, self.canary.sequences)
            if has_adapters:
                self._base_scores = calls.policy.submit(score_canary_without_adapters, self.canary.sequences)

    def require_equal_weights(self, version: int, engines: Sequence[int], deadline: float) -> None:
        """Compare adapters, and if due all weights, before a commit.

        Raises:
            RefitError: engines hold other weights than the policy, or the policy published wrong ones.
        """
        checks = self._calls.wait(self._adapters, {}, deadline, "comparing adapters")
        faults = [f"{RANK_NAME(rank)}: {text}" for rank, check in enumerate(checks) for text in check.faults]
        if faults:
            raise RefitError(f"version {version} is not served: {'; '.join(faults)}")
        self._are_equal = False
        if self.canary is None or not self.canary.should_compare_weights(version, new=self.must_compare):
            return
        began = time.monotonic()
        differences = self.find_differences(engines, deadline)
        self._figures["weight_check_s"] = time.monotonic() - began
        if differences:
            raise RefitError(f"version {version} is not served: {'; '.join(differences)}")
        self.canary.record_comparison()
        self._are_equal = True
        self.must_compare = bool(checks) and not any(check.has_moved for check in checks)

    def run_canary(self, version: int, engines: Sequence[int], timeout_s: float) -> None:
        """Let engines serve if they agree on the canary; else CanaryFailedError."""
        canary, scores = self.canary, self._scores
        assert canary is not None, "a canary is due"
        assert scores is not None, "begin() comes first"
        began = time.monotonic()
        deadline, limit = began + timeout_s, canary.limit
        answers = self._calls.wait([*scores, *self._base_scores], {}, deadline, "the policy's canary")
        expected = next(answer for answer in answers if answer is not None)
        base = next((answer for answer in answers[len(scores) :] if answer is not None), None)
        prompt = CanaryPrompt(
            version,
            canary.sequences,
            expected,
            limit,
            token_limit=canary.token_limit,
            spares_sequence=canary.spares_sequence,
            rounding=canary.adapter_rounding,
            base=base,
        )
        calls = self._calls.generation.submit_to(engines, Engine.check_canary, prompt)
        results = self._calls.wait([], calls, deadline, f"canary of version {version}")
        self._scores = None
        seconds = time.monotonic() - began
        canary.record_time(seconds)
        self._figures |= {"canary_limit": limit, "canary_s": seconds}
        self._record_results(version, dict(zip(calls, results, strict=True)))

    def _record_results(self, version: int, results: Mapping[int, CanaryResult]) -> None:
        """Record the results of engines, none of which differs: it would have raised."""
        assert self.canary is not None, "a canary is due"
        skipped = [ENGINE_NAME(engine) for engine, result in results.items() if math.isnan(result.error)]
        if skipped:
            text = "vLLM did not compute the canary (see the engine's log), so that version %d was not compared"
            logger.warning("%s: " + text, ", ".join(skipped), version)
        suspects = [ENGINE_NAME(engine) for engine, result in results.items() if result.is_suspect]
        if suspects:
            text = "tokens of one sequence of the canary differ beyond rounding with version %d, by a near tie of "
            text += "experts or by a fault: the next refit compares all weights and the canary again"
            logger.warning("%s: " + text, ", ".join(suspects), version)
        computed = [result for result in results.values() if not math.isnan(result.error)]
        if computed:
            error = max(result.error for result in computed)
            self._figures["canary_logprob_error"] = error
            largest = max(result.largest for result in computed)
            self._figures["canary_token_error"] = largest
            self.canary.record_suspicion(bool(suspects))
            if self._are_equal:
                self.canary.record_noise(error, 0.0 if suspects else largest)

    def find_differences(self, engines: Sequence[int], deadline: float) -> list[str]:
        """Describe the tensors of engines that differ beyond rounding."""
        boxes: Any = ray.put(self._calls.engine_boxes)  # once, not for every rank
        stages = self._calls.policy.submit(fingerprint_policy, boxes, self._adapters_alone)
        calls = self._calls.generation.submit_to(engines, Engine.fingerprint_weights)
        answers = self._calls.wait(stages, calls, deadline, "comparing weights")
        expected = [ChainMap(*parts) for parts in zip(*answers[: len(stages)], strict=True)]
        rounding = self.canary.rounding if self.canary is not None else 0.0
        texts = []
        for engine, workers in zip(calls, answers[len(stages) :], strict=True):
            for rank, actual in enumerate(workers):
                worker = f"{ENGINE_NAME(engine)}, worker {rank}"
                for name, error in find_differing(expected[rank], actual, rounding).items():
                    texts.append(f"{worker}: {name} differs from the policy's by {error:.2g} of its norm")
        return texts

    def take_figures(self) -> Mapping[str, float]:
        figures, self._figures = self._figures, {}
        return figures
