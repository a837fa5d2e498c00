"""Attributes the difference between the log-probabilities of generation and of training in one recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.generation_schema import FILTERS, PENALTIES
from megatron_grpo.config.schema import Config
from megatron_grpo.data.special_tokens import StopConditions, stop_conditions
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.data.tokenizer_files import declared_end_tokens
from megatron_grpo.proof.diagnosis import (
    Distance,
    Finding,
    best_explanation,
    first_apart,
    record_findings,
    rollouts_apart,
    rounding_of,
    stop_token_finding,
    where_apart,
)
from megatron_grpo.proof.engine_side import engine_again
from megatron_grpo.proof.evidence import Evidence, Rollout, Weights, read_evidence
from megatron_grpo.proof.hidden_states import trainer_again
from megatron_grpo.proof.oracle import Law, Oracle, Tokens
from megatron_grpo.proof.prompts import Rendering, configured, others
from megatron_grpo.proof.suspects import (
    PRECISION,
    Cause,
    Prediction,
    Side,
    SideName,
    gate_up_suspects,
    prompt_suspects,
    residual,
    rope_suspects,
    rounded_weight_suspects,
    router_suspects,
    sampling_suspects,
    tensor_suspects,
    version_suspects,
)
from megatron_grpo.weights.families import shape_of_folder


@dataclass(slots=True)
class Diagnosis:
    """The result of an examination."""

    step: int
    version: int
    """Weight version that sampled the tokens."""
    rollouts: int
    tokens: int
    """Rollouts and sampled tokens that were scored."""
    gap: Distance = field(default_factory=lambda: Distance(0.0, 0.0))
    """Distance of the engine's log-probabilities from the trainer's."""
    error: float = 1.0
    """Mean of exp(abs(trainer - engine)), `token_mult_prob_error` of these tokens."""
    sides: dict[str, tuple[Distance, Distance]] = field(default_factory=dict)
    """Distance of each side from the oracle, and the distance that rounding explains."""
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Facts that are not mistakes, and checks that could not be made, with the reason."""


def diagnose(
    run_dir: Path,
    config: Config,
    model: Path,
    scratch: Path,
    *,
    step: int | None = None,
    tokens: int = 2048,
    engine: bool = False,
) -> Diagnosis:
    """Examine a recorded step.

    Args:
        run_dir: the run's folder.
        config: the run's configuration.
        model: folder of the model that the run started from.
        scratch: folder for exported checkpoints.
        step: number of the step; None: the newest one whose weights are available.
        tokens: most sampled tokens to score.
        engine: start an engine with the same weights if nothing else explains the engine's log-probabilities.

    Raises:
        ValueError: the step cannot be examined; the text says what to do.
        RunError: a model or checkpoint cannot be loaded.
    """
    weights = Weights(run_dir, config, model, shape_of_folder(model), scratch)
    evidence = read_evidence(run_dir, step, weights, config, tokens)
    return Examination(config, model, weights, evidence, again=engine).run()


class Examination:
    """One examination; models are loaded when they are needed."""

    def __init__(self, config: Config, model: Path, weights: Weights, evidence: Evidence, *, again: bool) -> None:
        self._config, self._model, self._weights, self._evidence, self._again = config, model, weights, evidence, again
        self._oracles: dict[tuple[int, torch.dtype], Oracle] = {}
        self._found = Diagnosis(evidence.step, evidence.version, rollouts=0, tokens=0)
        if weights.shape.experts is not None:
            self._leave_out_ties()
        scored = self._evidence.rollouts
        self._found.rollouts, self._found.tokens = len(scored), sum(len(one.kept) for one in scored)

    def _leave_out_ties(self) -> None:
        """Leave out tokens for which rounding in float32 may have chosen other experts."""
        before = self._evidence.rollouts
        ties = self._oracle(self._evidence.version).first_ties(self._evidence.tokens)
        after = [one.up_to(tie) for one, tie in zip(before, ties, strict=True)]
        self._keep(after, "two experts of an earlier token have equal scores")

    def _keep(self, after: list[Rollout], reason: str) -> None:
        """Score fewer tokens of the rollouts, and say why, unless none would be left."""
        lost = sum(len(one.kept) for one in self._evidence.rollouts) - sum(len(one.kept) for one in after)
        if lost and any(len(one.kept) for one in after):
            self._evidence = replace(self._evidence, rollouts=[one for one in after if len(one.kept)])
            self._found.remarks.append(f"{lost} tokens were left out: {reason}")

    def _trainer_logprobs(self) -> tuple[int, Tensor]:
        """Version of the trainer's weights, and its log-probabilities, recorded or computed again, [tokens], float32.

        Tokens that a filter removes in training are left out of the evidence.
        """
        evidence, version = self._evidence, self._evidence.step - 1
        recorded = evidence.column("prev_logprobs")
        if recorded is None or version not in self._weights.versions:
            version, folder = evidence.version, self._weights.folder(evidence.version)
            recorded, _ = trainer_again(self._config, folder, evidence.tokens, hidden=False)
            self._found.remarks.append("the trainer's log-probabilities were computed again, on one rank")
        removed = recorded.isneginf()
        if not removed.any() or removed.all() or not self._config.generation.filters_in_training:
            return version, recorded
        pieces = removed.split([len(one.kept) for one in evidence.rollouts])
        after = [one.without(piece) for one, piece in zip(evidence.rollouts, pieces, strict=True)]
        self._keep(after, "the filter of sampling removes them in training, whose loss leaves them out, too")
        return version, recorded[~removed]

    def run(self) -> Diagnosis:
        """Examine the record, the prompts, the engine and the trainer."""
        version, recorded = self._trainer_logprobs()
        found, evidence = self._found, self._evidence
        stop_strings = bool(self._ends.strings)
        found.findings += record_findings(evidence, self._stops, stop_strings=stop_strings)
        found.findings += self._template_findings()
        engine = self._side("engine", evidence.version, evidence.column("logprobs"), engine_law(self._config))
        found.findings += self._judged(engine, self._config.engine_dtype, evidence.version)
        trainer = self._side("trainer", version, recorded, training_law(self._config))
        found.findings += self._judged(trainer, self._config.policy.precision, version)
        found.gap = Distance.between(engine.recorded, trainer.recorded)
        found.error = float(residual(engine.recorded, trainer.recorded).exp().mean())
        if not found.findings:
            found.findings += self._configured_gaps(engine, trainer)
        if version != evidence.version:
            text = f"the trainer had version {version}: this part of the gap is the policy's own change"
            found.remarks.append(f"tokens were sampled by version {evidence.version}, and {text}")
        found.findings = _one_each(found.findings)
        return found

    @cached_property
    def _ends(self) -> StopConditions:
        """What ends a response of the run."""
        generation = self._config.generation
        try:
            return stop_conditions(generation, load_tokenizer(self._model), self._model)
        except RunError as error:
            self._found.remarks.append(f"stop tokens are those of the model's configuration: {error}")
            ids = (*generation.stop_token_ids, *declared_end_tokens(self._model))
            return StopConditions(ids, tuple(generation.stop_strings))

    @property
    def _stops(self) -> frozenset[int]:
        """Tokens that end a response."""
        return frozenset(self._ends.token_ids)

    def _oracle(self, version: int, dtype: torch.dtype = torch.float32) -> Oracle:
        """The model of a version in transformers; that of the examined version and the latest other one are kept."""
        key, kept = (version, dtype), (self._evidence.version, torch.float32)
        if key not in self._oracles:
            self._oracles = {one: oracle for one, oracle in self._oracles.items() if one == kept}
            self._oracles[key] = Oracle(self._weights.folder(version), dtype)
        return self._oracles[key]

    def _side(self, name: SideName, version: int, recorded: Tensor | None, law: Law) -> Side:
        assert recorded is not None, "generation always records its log-probabilities"
        rollouts, tokens = self._evidence.rollouts, self._evidence.tokens
        return Side(name, self._oracle(version), rollouts, tokens, law, recorded)

    def _judged(self, side: Side, dtype: str, version: int) -> Iterator[Finding]:
        """What is wrong with a side, if its record differs from the oracle by more than rounding."""
        base = side.predict()
        rounded = None if dtype == "float32" else side.predict(oracle=self._oracle(version, torch.bfloat16))
        rounding = rounding_of(base, rounded)
        distance = Distance.between(side.recorded, base)
        self._found.sides[side.name] = distance, rounding
        if distance.within(rounding):
            return
        if side.name == "engine":
            stop = stop_token_finding(self._evidence, side.recorded, base, self._stops, rounding)
            if stop is not None:
                yield stop
                return
        apart = rollouts_apart(side, base, rounding)  # one of several engines may be wrong
        part, base = side.of_rollouts(apart), torch.cat([base.split(side.lengths)[number] for number in apart])
        groups = self._groups(part, base, version)
        finding = best_explanation(part.name, part.recorded, base, groups, rounding)
        finding = finding or self._unexplained(part, base, version)
        if len(apart) < len(side.rollouts):
            text = f"{finding.text} (in {len(apart)} of {len(side.rollouts)} rollouts)"
            finding = replace(finding, text=text)
        yield finding

    def _groups(self, side: Side, base: Tensor, version: int) -> Iterator[Iterable[Prediction]]:
        """Suspects in groups; a group is computed only if none before it explains the record."""
        yield sampling_suspects(side)
        if side.name == "engine":
            yield prompt_suspects(side, self._other_prompts(side.rollouts))
        near = sorted((one for one in self._weights.versions if one != version), key=lambda one: abs(version - one))
        yield version_suspects(side, version, ((one, self._oracle(one)) for one in near[:NEAREST]))
        yield rope_suspects(side)
        yield router_suspects(side)
        yield gate_up_suspects(side)
        yield rounded_weight_suspects(side)
        earlier = [one for one in near if one < version]
        for one in dict.fromkeys([*earlier[:1], *earlier[-1:]]):
            yield tensor_suspects(side, base, self._oracle(one), one)

    def _unexplained(self, side: Side, base: Tensor, version: int) -> Finding:
        """The finding for a record that no suspect explains."""
        before = Distance.between(side.recorded, base)
        generation = self._config.generation
        form = [name for name in ("regex", "json_schema", "choice") if getattr(generation.structured, name) is not None]
        masks = [*(f"structured.{name}" for name in form), *(["bad_words"] if generation.bad_words else [])]
        if side.name == "engine" and masks and bool((side.recorded >= base - 1e-3).all()):
            keys = ", ".join(f"generation.{name}" for name in masks)
            return Finding(
                "structured", "sampling", f"the engine draws only from tokens that {keys} allow", keys, before
            )
        eight_bits = self._eight_bits(side.name)
        if eight_bits:
            keys = ", ".join(eight_bits)
            return Finding("eight_bits", "precision", f"the {side.name} rounds to 8 bits: {keys}", keys, before)
        by_layers = self._by_layers(side, base, version)
        if by_layers is not None:
            return by_layers
        coarse = Distance.between(base, side.predict(oracle=self._oracle(version, torch.bfloat16)))
        if all(one / 3 < seen < 3 * one for one, seen in ((coarse.mean, before.mean), (coarse.worst, before.worst))):
            text = f"the {side.name} differs from float32 as much as a computation in bfloat16 does"
            return Finding("precision", "precision", text, PRECISION, before)
        where = where_apart(side.lengths, side.recorded, base, rounding_of(base, None))
        text = f"no suspect explains the {side.name}: {where}"
        return Finding("unexplained", "unexplained", text, UNKNOWN[side.name], before)

    def _eight_bits(self, side: str) -> list[str]:
        """Keys by which a side keeps or multiplies numbers in 8 bits, whose rounding the oracle does not show."""
        policy, arguments = self._config.policy, self._config.generation.engine_args
        if side == "engine":
            return [f"generation.engine_args.{one}" for one in ("quantization", "kv_cache_dtype") if arguments.get(one)]
        fp8 = ["policy.fp8.format"] if policy.fp8.format != "off" else []
        return [*fp8, *(["policy.quantization"] if policy.quantization else [])]

    def _by_layers(self, side: Side, base: Tensor, version: int) -> Finding | None:
        """A finding from the side's own code, run again with the same weights; None: it was not asked for."""
        if side.name == "engine" and not self._again:
            return None
        folder, tokens, law = self._weights.folder(version), side.tokens, side.law
        if side.name == "engine":  # vLLM computes the log-probabilities of a prompt's tokens from its raw logits
            law = Law()
            logprobs, states = engine_again(self._config, folder, tokens)
        else:
            logprobs, states = trainer_again(self._config, folder, tokens, hidden=True)
        before, again = Distance.between(side.recorded, base), Distance.between(logprobs, side.predict(law=law))
        if again.mean < before.mean / 10:
            text = (
                f"the {side.name} agrees with transformers when it computes again from the weights of version {version}"
            )
            rest = "so it had other weights or another layout in the run"
            return Finding("other_weights", "weights", f"{text}, {rest}", UNKNOWN[side.name], before, again)
        if self._weights.shape.post_norms:  # norms after the halves of a layer belong to different modules
            states = {point: state for point, state in states.items() if point.count(".") == 1}
        apart = first_apart(states, side.oracle.hidden_states(tokens), LAYER_TOLERANCE[self._config.policy.precision])
        if apart is None:
            return None
        point, difference = apart
        text = (
            f"the {side.name} computes {point} otherwise, by {difference:.1e} of its norm: the first hidden state apart"
        )
        cause: Cause = "routing" if point.endswith("router") else "layer"
        return Finding("first_layer", cause, text, UNKNOWN[side.name], before, again)

    def _configured_gaps(self, engine: Side, trainer: Side) -> Iterator[Finding]:
        """Reasons in the configuration for a gap between two sides that are each correct."""
        law, law_of_training = engine.law, trainer.law
        if law != law_of_training:
            before, after = (
                Distance.between(engine.recorded, one)
                for one in (engine.predict(law=law_of_training), engine.predict())
            )
            named = [f"generation.{name}" for name in LAW if getattr(law, name) != getattr(law_of_training, name)]
            text = "sampling removes or penalises tokens, and training sees the whole distribution of the model"
            if not before.within(self._found.sides["engine"][1]):
                yield Finding("sampling_options", "sampling", text, ", ".join(named), before, after)
        types = self._config.engine_dtype, self._config.policy.precision
        if types[0] != types[1]:
            text = f"the engine computes in {types[0]} and the trainer in {types[1]}"
            yield Finding("precision", "precision", text, PRECISION, self._found.gap)

    def _template_findings(self) -> Iterator[Finding]:
        """A finding if the recorded prompts are not those of the data under this configuration."""
        expected = self._configured
        if expected is None:
            return
        rows = {row["prompt_idx"]: row for row in self._evidence.rows}
        wrong = [number for number, row in rows.items() if expected.prompts[number] != _prompt(row)]
        if not wrong:
            return
        alike = [
            one for one in self._others if all(one.prompts.get(number) == _prompt(rows[number]) for number in wrong)
        ]
        found = (
            f"they are those of {alike[0].text}" if alike else "no other template gives them: the data has changed, or"
        )
        text = f"{len(wrong)} of {len(rows)} recorded prompts are not what the configuration makes of the data; {found}"
        yield Finding("wrong_template", "tokens", text, alike[0].key if alike else expected.key)

    @cached_property
    def _configured(self) -> Rendering | None:
        """The prompts as the configuration says; None: they cannot be made again."""
        try:
            if self._config.generation.endpoint.enabled:
                raise ValueError("generation.endpoint.enabled=true: agents write the prompts")
            numbers = sorted({row["prompt_idx"] for row in self._evidence.rows})
            return configured(self._config, self._model, numbers)
        except (ValueError, RunError, OSError) as error:
            self._found.remarks.append(f"prompts were not compared with the data: {error}")
            return None

    @cached_property
    def _others(self) -> list[Rendering]:
        if self._configured is None:
            return []
        return list(others(self._config, self._model, sorted(self._configured.prompts)))

    def _other_prompts(self, rollouts: Sequence[Rollout]) -> dict[str, tuple[str, list[Tokens]]]:
        """By description of another data setting: its key, and the rollouts with the prompts of that setting."""
        settings = [] if self._configured is None else [self._configured, *self._others]
        found = {}
        for one in settings:
            prompts = [one.prompts[rollout.row["prompt_idx"]] for rollout in rollouts]
            if all(prompts):
                sequences = [rollout.behind(prompt) for rollout, prompt in zip(rollouts, prompts, strict=True)]
                found[one.text] = (one.key, sequences)
        return found


NEAREST = 4
"""Most other versions, the nearest ones, whose weights are tried as a whole."""
UNKNOWN = {
    "engine": "generation.engine_args, generation.engine; engine=true compares the layers of an engine",
    "trainer": "policy.parallel, policy.precision; python -m megatron_grpo.replay computes the step in another layout",
}
"""Where to look for what no suspect explains, by side."""
LAYER_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative difference of hidden states that rounding explains, by precision."""
LAW = (*FILTERS, *(name for name in PENALTIES if name != "bad_words"))
"""Keys of generation that change the distribution, beside the temperature."""


def engine_law(config: Config) -> Law:
    """The distribution that engines draw from; vLLM ignores filters at temperature 0."""
    names = LAW if config.generation.temperature > 0 else set(LAW).difference(FILTERS)
    return _law(config, ("temperature", *names))


def training_law(config: Config) -> Law:
    """The distribution that the policy's log-probabilities are of in training."""
    return _law(config, ("temperature", *(FILTERS if config.generation.filters_in_training else ())))


def _law(config: Config, names: Sequence[str]) -> Law:
    values = {name: getattr(config.generation, name) for name in names}
    return Law(**values | {"top_k": values.get("top_k") or 0})


def _prompt(row: dict[str, object]) -> list[int]:
    """Tokens before the first response."""
    ids: list[int] = row["token_ids"][: row["spans"][0][0]].tolist()  # type: ignore[index]
    return ids


def _one_each(findings: list[Finding]) -> list[Finding]:
    """Findings without repetitions; of two with one name, the one that explains a distance."""
    kept: dict[str, Finding] = {}
    for one in findings:
        if one.name not in kept or (kept[one.name].before is None and one.before is not None):
            kept[one.name] = one
    return list(kept.values())
