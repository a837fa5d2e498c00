"""Finds why a side's record differs from the oracle: damage, then suspects in tiers, then its own code again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.verification.doctor.damage import CHANGED, WRITER, find_damage, find_edits
from megatron_grpo.verification.doctor.diagnosis import (
    Distance,
    Finding,
    describe_apart,
    describe_engines,
    find_first_apart,
    find_rollouts_apart,
    group_by_engine,
    is_rounding,
    measure_rounding,
)
from megatron_grpo.verification.doctor.engine_settings import read_engine_settings
from megatron_grpo.verification.doctor.engine_side import run_engine_again
from megatron_grpo.verification.doctor.evidence import Evidence, Weights
from megatron_grpo.verification.doctor.explanation import Search
from megatron_grpo.verification.doctor.law import OPTIONS, Law
from megatron_grpo.verification.doctor.layer_outputs import run_trainer_again
from megatron_grpo.verification.doctor.packs import iterate_packing_suspects, read_packs
from megatron_grpo.verification.doctor.prompt_findings import Prompts
from megatron_grpo.verification.doctor.recorded_figures import replay_in_layout
from megatron_grpo.verification.doctor.suspects.layer_settings import iterate_layer_settings
from megatron_grpo.verification.doctor.suspects.parts import list_tensor_shards
from megatron_grpo.verification.doctor.suspects.permuted import iterate_permutations
from megatron_grpo.verification.doctor.suspects.reordered import (
    iterate_head_orders,
    iterate_orders,
    iterate_token_orders,
)
from megatron_grpo.verification.doctor.suspects.sampling import iterate_prompt_suspects, iterate_sampling_suspects
from megatron_grpo.verification.doctor.suspects.settings import (
    PRECISION,
    iterate_engine_settings,
    iterate_ropes,
    iterate_rounded_weights,
    iterate_routers,
    iterate_settings,
)
from megatron_grpo.verification.doctor.suspects.side import Cause, Group, Side
from megatron_grpo.verification.doctor.suspects.versions import (
    REFIT,
    iterate_adapters,
    iterate_stale_caches,
    iterate_versions,
)
from megatron_grpo.verification.doctor.suspects.weights import (
    iterate_adapter_parts,
    iterate_fine_parts,
    iterate_fine_stale_parts,
    iterate_missing_parts,
    iterate_scaled_parts,
    iterate_stale_parts,
    iterate_stale_sets,
    list_fine_parts,
    list_parts,
)
from megatron_grpo.verification.oracle import Oracle

MOST_VERSIONS = 8
"""Most other versions, the nearest ones, whose single parts are tried."""
NEAREST = 4
"""Most other versions, the nearest ones, whose weights are tried as a whole."""
COMMANDS = {
    "engine": "refit.weight_check_period=1 refit.canary_share=1 compare weights and canary at every refit of a run; "
    "engine=true compares the layers of an engine here",
    "trainer": "python -m megatron_grpo.replay RUN_DIR step=N policy.parallel.tensor=1 (or another layout, or "
    "policy.packing=false) names the first layer that differs",
}
"""By side, the commands that narrow down a difference that no suspect explains."""
OTHER_WEIGHTS = "refit.weight_check_period=1 refit.canary_share=1 name the tensor at the refit that leaves it wrong"
LAYER_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative difference of hidden states that rounding explains, by precision."""
MOST_NAMED = 3  # rollouts that a finding names
SHARDS = (2, 4, 8)
"""Numbers of ranks whose shards of single tensors are tried."""
FEW_EDITS = 2
"""Most changed numbers of a record that are taken for edits before other causes are tried."""


class Causes:
    """Searches the cause of a side's difference; models are loaded when needed.

    Args:
        run_dir: the run's folder.
        config: the run's configuration.
        weights: weights of the run's versions.
        evidence: the recorded rollouts of the step.
        prompts: their prompts, made again.
        remarks: gets what could not be tried.
        may_start_engine: compute with a new engine if nothing explains the engine's record.
        timeout_s: seconds after which no further cause is tried on a side.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        weights: Weights,
        evidence: Evidence,
        prompts: Prompts,
        remarks: list[str],
        *,
        may_start_engine: bool,
        timeout_s: float,
    ) -> None:
        self._run_dir, self._config, self._weights, self._prompts = run_dir, config, weights, prompts
        self._step, self._version, self._remarks = evidence.step, evidence.version, remarks
        self._may_start_engine, self._timeout_s = may_start_engine, timeout_s
        self.is_confirmed = False
        """Whether the run itself computed the error that the record shows, so that it was not edited."""
        self._oracles: dict[tuple[int, torch.dtype], Oracle] = {}

    def load_oracle(self, version: int, dtype: torch.dtype = torch.float32) -> Oracle:
        """Load a version in transformers; the examined and latest ones stay loaded."""
        key, keys_to_keep = (version, dtype), (self._version, torch.float32)
        if key not in self._oracles:
            self._oracles = {
                loaded_key: oracle for loaded_key, oracle in self._oracles.items() if loaded_key == keys_to_keep
            }
            self._oracles[key] = Oracle(self._weights.find_folder(version), dtype)
        return self._oracles[key]

    def measure_rounding(self, side: Side, base: Tensor, dtype: str, version: int) -> Distance:
        """Measure the distance that rounding in the side's type explains."""
        if dtype == "float32":
            return measure_rounding(base, None)
        return measure_rounding(base, side.predict(oracle=self.load_oracle(version, torch.bfloat16)))

    def explain(
        self, side: Side, base: Tensor, version: int, rounding: Distance, stops: frozenset[int]
    ) -> list[Finding]:
        """Explain a record that differs from the oracle beyond rounding.

        Args:
            side: the record.
            base: [tokens], float32: the oracle's log-probabilities.
            version: the version of the side's weights.
            rounding: distance that rounding explains.
            stops: tokens that end a response.
        """
        # One of several engines may be wrong, so only the rollouts that differ have to be explained.
        apart = find_rollouts_apart(side, base, rounding)
        explain = partial(self._explain_rollouts, side, base, version, rounding, stops)
        finding = explain(apart)
        groups = list(group_by_engine(apart, side.rollouts).values()) if side.name == "engine" else []
        # Engines may be wrong in different ways, so that nothing explains all of them.
        if finding.cause == "unexplained" and len(groups) > 1:
            findings = [explain(numbers) for numbers in groups]
            if any(part.cause != "unexplained" for part in findings):
                return findings
        return [finding]

    def _explain_rollouts(
        self,
        side: Side,
        base: Tensor,
        version: int,
        rounding: Distance,
        stops: frozenset[int],
        apart: Sequence[int],
    ) -> Finding:
        """Explain the rollouts `apart` of a record; arguments are those of `explain`."""
        part, base = side.select_rollouts(apart), torch.cat([base.split(side.lengths)[number] for number in apart])
        damage = find_damage(part, base, rounding)
        if self.is_confirmed and damage is not None and damage.key == CHANGED:
            damage = replace(damage, key=WRITER)  # the run computed with them, so nobody edited them
        finding = damage or self._explain_side(part, base, version, rounding, stops)
        if len(apart) == len(side.rollouts):
            return finding
        names = "; ".join(rollout.name for rollout in part.rollouts) if len(apart) <= MOST_NAMED else ""
        where = f"in {len(apart)} of {len(side.rollouts)} rollouts{': ' * bool(names)}{names}"
        engines = list(group_by_engine(apart, side.rollouts)) if side.name == "engine" else []
        if engines == list(group_by_engine(range(len(side.rollouts)), side.rollouts)):
            engines = []  # all engines sampled some of them
        where += describe_engines(engines, len(apart), side.rollouts)
        return replace(finding, text=f"{finding.text} ({where})", engines=engines)

    def describe_wrong_checkpoint(
        self, engine: Side, distance: Distance, rounding: Distance, error: float | None
    ) -> Finding:
        """Describe weights that did not sample.

        The version that did is named if it is another one of the run.
        """
        version = self._version
        name = f"checkpoint step_{version}" if version else "the model of policy.model.path"
        measured = "" if error is None else f"; the run recorded an error of {error:.6g}"
        text = (
            f"the weights of version {version} that were loaded here ({name}) did not sample these tokens: engine and "
            f"trainer agreed in the run, and these weights give other log-probabilities{measured}"
        )
        after = None
        for number in self._list_nearest_versions(version)[:MOST_VERSIONS]:
            nearby = Distance.measure(engine.recorded, engine.predict(oracle=self.load_oracle(number)))
            if nearby.is_within(rounding):
                source = f"checkpoint step_{number}" if number else "the model of policy.model.path"
                text, after = f"{text}; those of version {number} ({source}) did, so the folders are mixed up", nearby
                break
        key = f"{name}: put back the folder that the run wrote, or say policy.model.path=FOLDER of the run's model"
        return Finding("wrong_checkpoint", "record", text, key, distance, after)

    def find_configured_gaps(self, engine: Side, trainer: Side, rounding: Distance) -> Iterator[Finding]:
        """Find reasons in the configuration for a gap between correct sides.

        `rounding`: what rounding explains of the engine's distance from the oracle.
        """
        law, law_of_training = engine.law, trainer.law
        if law != law_of_training:
            before, after = (
                Distance.measure(engine.recorded, predicted)
                for predicted in (engine.predict(law=law_of_training), engine.predict())
            )
            named = [f"generation.{name}" for name in OPTIONS if getattr(law, name) != getattr(law_of_training, name)]
            text = "sampling removes or penalises tokens, and training sees the whole distribution of the model"
            if not before.is_within(rounding):
                yield Finding("sampling_options", "sampling", text, ", ".join(named), before, after)
        types = self._config.engine_dtype, self._config.policy.precision
        if types[0] != types[1]:
            text = f"the engine computes in {types[0]} and the trainer in {types[1]}"
            yield Finding(
                "precision", "precision", text, PRECISION, Distance.measure(engine.recorded, trainer.recorded)
            )

    def _explain_side(
        self, side: Side, base: Tensor, version: int, rounding: Distance, stops: frozenset[int]
    ) -> Finding:
        # One or two changed numbers are surely edits; more may come from another cause, so suspects are tried before.
        edits = None if self.is_confirmed else find_edits(side, base, rounding)
        if edits is not None and edits[1] <= FEW_EDITS:
            return edits[0]
        search = Search(side, base, rounding, time.monotonic() + self._timeout_s)
        for groups in self._list_tiers(side, version, stops):
            if search.try_groups(groups):
                break
        if search.ran_out_of_time:
            text = f"not every cause was tried on the {side.name} within timeout_s={self._timeout_s:g}"
            self._remarks.append(text)
        finding = search.conclude()
        # A refit moves weights into engines, so its key is no remedy for the trainer.
        if finding is not None and side.name == "trainer" and REFIT in finding.key:
            finding = replace(finding, key=self._name_command(side))
        if finding is None and edits is not None:
            finding = edits[0]
        return finding or self._describe_unexplained(side, base, version, search.describe_mentioned())

    def _list_tiers(self, side: Side, version: int, stops: frozenset[int]) -> Iterator[list[Group]]:
        """Yield tiers of suspects, each tried if none before reproduces the record."""
        # Cheap and likely causes come first, whole models and options; then parts of the weights, whose many thousand
        # combinations would explain by chance what a simple cause explains exactly.
        nearest = self._list_nearest_versions(version)[:NEAREST]
        has_adapters = self._config.policy.lora.rank > 0
        first: list[Group] = [partial(iterate_sampling_suspects, stops)]
        if side.name == "engine":
            settings = read_engine_settings(self._run_dir, self._config, side.oracle.model.config)
            first += [
                partial(iterate_engine_settings, settings),
                partial(iterate_prompt_suspects, self._prompts.build_other_sequences),
                partial(iterate_stale_caches, version, nearest, self.load_oracle),
            ]
        else:
            packs = read_packs(self._run_dir, self._step, self._config, self._weights.shape)
            first += [partial(iterate_packing_suspects, packs)]
        first += [partial(iterate_versions, version, nearest, self.load_oracle, has_adapters)]
        if has_adapters and version != 0:
            first += [partial(iterate_adapters, self.load_oracle)]
        yield first
        yield [iterate_ropes, iterate_settings, iterate_routers, iterate_rounded_weights]
        policy, generation = self._config.policy.parallel, self._config.generation.parallel
        pipelines = [policy.pipeline, generation.pipeline]
        parts = list_parts(side.oracle, pipelines, [policy.tensor, generation.tensor, policy.expert, generation.expert])
        near = self._list_nearest_versions(version)
        # The version before is what a refit leaves behind; the farthest one differs most, so little is mistaken for it.
        earlier = list(dict.fromkeys([*near[:1], *near[-1:]]))
        texts = {number: self._describe_version(number, has_adapters) for number in earlier}
        stale = [
            partial(iterate_stale_parts, parts, partial(self.load_oracle, number), texts[number]) for number in earlier
        ]
        yield [*stale, partial(iterate_missing_parts, parts), iterate_permutations]
        # A tensor stands beside the fine parts that hold it, which explain as much if their others have no effect.
        fine = [*parts, *list_fine_parts(side.oracle, pipelines)]
        older = near[:MOST_VERSIONS]
        named = [(partial(self.load_oracle, number), self._describe_version(number, has_adapters)) for number in older]
        adapters = [partial(iterate_adapter_parts, fine, partial(self.load_oracle, 0))]
        yield [
            *(partial(iterate_fine_stale_parts, fine, load, text) for load, text in named),
            partial(iterate_fine_parts, fine),
            *(adapters if has_adapters and version != 0 else []),
        ]
        yield [partial(iterate_scaled_parts, parts), iterate_layer_settings]
        # Of few heads some shards are factors of the same products, so these come after.
        shards = list(list_tensor_shards(side.oracle.list_tensors(), SHARDS))
        yield [
            *(partial(iterate_fine_stale_parts, shards, load, text) for load, text in named),
            partial(iterate_fine_parts, shards),
        ]
        yield [iterate_head_orders, iterate_token_orders, iterate_orders]
        yield [
            partial(iterate_stale_sets, parts, partial(self.load_oracle, number), texts[number]) for number in earlier
        ]

    def _list_nearest_versions(self, version: int) -> list[int]:
        versions = [number for number in self._weights.versions if number != version]
        return sorted(versions, key=lambda number: (abs(version - number), number > version))

    @staticmethod
    def _describe_version(version: int, has_adapters: bool) -> str:
        return "the base model, without its adapter" if has_adapters and version == 0 else f"version {version}"

    def _describe_unexplained(self, side: Side, base: Tensor, version: int, near_causes: list[str]) -> Finding:
        before = Distance.measure(side.recorded, base)
        for find in (self._find_structured, self._find_eight_bits, self._find_rounding, self._compare_layers):
            finding = find(side, base, version)
            if finding is not None:
                return replace(finding, before=before, others=near_causes)
        where = describe_apart(side.lengths, side.recorded, base, measure_rounding(base, None))
        text = f"no suspect explains the {side.name}: {where}"
        return Finding("unexplained", "unexplained", text, self._name_command(side), before, others=near_causes)

    def _name_command(self, side: Side) -> str:
        return COMMANDS[side.name].replace("RUN_DIR step=N", f"{self._run_dir} step={self._step}")

    def _find_structured(self, side: Side, base: Tensor, _version: int) -> Finding | None:
        """Find that the engine draws from fewer tokens, as configured."""
        generation = self._config.generation
        forms = ("regex", "json_schema", "choice")
        form = [f"structured.{name}" for name in forms if getattr(generation.structured, name) is not None]
        masks = [*form, *(["bad_words"] if generation.bad_words else [])]
        if side.name == "trainer" or not masks or not bool((side.recorded >= base - 1e-3).all()):
            return None
        keys = ", ".join(f"generation.{name}" for name in masks)
        return Finding("structured", "sampling", f"the engine draws only from tokens that {keys} allow", keys)

    def _find_eight_bits(self, side: Side, _base: Tensor, _version: int) -> Finding | None:
        # The oracle does not imitate 8-bit rounding, so here the configuration is the only evidence.
        policy, arguments = self._config.policy, self._config.generation.engine_args
        if side.name == "engine":
            names = ("quantization", "kv_cache_dtype")
            keys = [f"generation.engine_args.{name}" for name in names if _is_eight_bits(arguments.get(name))]
        else:
            keys = ["policy.fp8.format"] if policy.fp8.format != "off" else []
            keys += ["policy.quantization"] if policy.quantization else []
        if not keys:
            return None
        listed = ", ".join(keys)
        return Finding("eight_bits", "precision", f"the {side.name} rounds to 8 bits: {listed}", listed)

    def _find_rounding(self, side: Side, base: Tensor, version: int) -> Finding | None:
        coarse = side.predict(oracle=self.load_oracle(version, torch.bfloat16))
        if not is_rounding(side, base, coarse):
            return None
        text = (
            f"the {side.name} differs from float32 as a computation in bfloat16 does: in every rollout, to both sides, "
            "and in the same direction at the same tokens"
        )
        return Finding("precision", "precision", text, PRECISION, after=Distance.measure(side.recorded, coarse))

    def _compare_layers(self, side: Side, base: Tensor, version: int) -> Finding | None:
        """Run the side's own code again and compare layers.

        None: not asked for, or it failed (a remark says so), or no layer differs.
        """
        if side.name == "engine" and not self._may_start_engine:
            return None
        folder, tokens, law = self._weights.find_folder(version), side.tokens, side.law
        try:
            if side.name == "engine":  # vLLM computes the log-probabilities of a prompt's tokens from its raw logits
                law = Law()
                logprobs, states = run_engine_again(self._config, folder, tokens)
            else:
                logprobs, states = run_trainer_again(self._config, folder, tokens, hidden=True)
        except RunError as error:
            self._remarks.append(f"the layers of the {side.name} were not compared: {error}")
            return None
        before, again = Distance.measure(side.recorded, base), Distance.measure(logprobs, side.predict(law=law))
        name = side.name
        if again.mean < before.mean / 10:
            # The code is right, so the run gave it other weights or another layout.
            text = f"the {name} agrees with transformers when it computes again from the weights of version {version}"
            if name == "engine":
                rest = "so it had other weights or another layout in the run"
                return Finding("other_weights", "weights", f"{text}, {rest}", OTHER_WEIGHTS, after=again)
            replay = replay_in_layout(self._run_dir, self._step, self._config, self._timeout_s)
            rest = f"so its layout, packing or program in the run made the difference; {replay.text}"
            return Finding("other_layout", "layout", f"{text} on one rank, {rest}", replay.command, after=again)
        if self._weights.shape.post_norms:  # norms after the halves of a layer belong to different modules
            states = {point: state for point, state in states.items() if point.count(".") == 1}
        apart = find_first_apart(
            states, side.oracle.compute_hidden_states(tokens), LAYER_TOLERANCE[self._config.policy.precision]
        )
        if apart is None:
            return None
        point, difference = apart
        text = f"the {name} computes {point} differently, by {difference:.1e} of its norm; earlier states agree"
        cause: Cause = "routing" if point.endswith("router") else "layer"
        return Finding("first_layer", cause, text, self._name_command(side), after=again)


def _is_eight_bits(value: Any) -> bool:
    # vLLM's names of such types: fp8, int8, w8a8, mxfp4, mxfp8 and so on.
    return value is not None and any(text in str(value) for text in ("8", "mx"))
