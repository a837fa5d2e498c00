"""Attributes the difference between the log-probabilities of generation and of training in one recorded step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from megatron_grpo.batch.special_tokens import StopConditions, find_stop_conditions
from megatron_grpo.cluster.phases import phase
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.tokenizer_files import read_end_tokens
from megatron_grpo.verification.doctor.causes import OTHER_WEIGHTS, Causes
from megatron_grpo.verification.doctor.damage import find_damage, find_edits
from megatron_grpo.verification.doctor.diagnosis import (
    Diagnosis,
    Distance,
    Finding,
    describe_other_versions,
    drop_repetitions,
    find_repeated_samples,
    find_rollouts_apart,
    find_token_mistakes,
    find_unsampled_stops,
)
from megatron_grpo.verification.doctor.end_reason import read_refused_refit
from megatron_grpo.verification.doctor.engine_settings import list_differing_modes
from megatron_grpo.verification.doctor.evidence import Evidence, Rollout, Weights, read_evidence, select_scored
from megatron_grpo.verification.doctor.law import GREEDY, Law, build_engine_law, build_training_law, compute_residual
from megatron_grpo.verification.doctor.layer_outputs import run_trainer_again
from megatron_grpo.verification.doctor.prompt_findings import Prompts
from megatron_grpo.verification.doctor.recorded_figures import (
    ERROR,
    STALE_EXCESS,
    RecordedFigures,
    find_suspicious_steps,
    is_beyond,
    read_run_figures,
    replay_in_layout,
)
from megatron_grpo.verification.doctor.suspects.side import Side, SideName
from megatron_grpo.verification.doctor.suspects.versions import REFIT

SMALL_EXCESS = 1e-3
"""Error less 1 from which on the figures of run and record are compared."""
CONFIRMED = 0.1
"""Relative difference up to which they agree."""
MORE_TOKENS = 16
"""Factor of the scored tokens in a second attempt, if the run recorded a larger error than the first one shows."""


def examine_run(
    run_dir: Path,
    config: Config,
    model: Path,
    scratch: Path,
    *,
    step: int | None = None,
    tokens: int = 2048,
    engine: bool = False,
    timeout_s: float = 900.0,
) -> Diagnosis:
    """Examine a recorded step.

    Args:
        run_dir: the run's folder.
        config: the run's configuration.
        model: folder of the model that the run started from.
        scratch: folder for exported checkpoints.
        step: number of the step; None: the one whose recorded figures are worst if they are beyond rounding, else the
            newest; of those whose weights are available.
        tokens: most sampled tokens to score.
        engine: start an engine with the same weights if nothing else explains the engine's log-probabilities.
        timeout_s: seconds after which no further cause is tried on a side, and deadline of a replay.

    Raises:
        ValueError: the step cannot be examined; the text says what to do.
        RunError: a model or checkpoint cannot be loaded.
    """
    weights = Weights(run_dir, config, model, read_model_shape(model), scratch)
    figures = read_run_figures(run_dir)
    suspicious = find_suspicious_steps(figures, config.policy.precision, has_older_tokens=config.async_sampling.enabled)

    def examine(most_tokens: int) -> Examination:
        evidence = read_evidence(run_dir, step, suspicious, weights, config, most_tokens)
        examination = Examination(
            run_dir, config, model, weights, evidence, figures, may_start_engine=engine, timeout_s=timeout_s
        )
        examination.run()
        return examination

    # A few tokens are enough for most mistakes. If the run recorded a larger error than they show, the mistake is in
    # rollouts that were not scored, so more are.
    examination = examine(tokens)
    if examination.shows_less_than_recorded and examination.can_score_more:
        examination = examine(MORE_TOKENS * tokens)
    # In asynchronous runs other rollouts of the step may be of other versions; their engine is examined too.
    evidence = examination.evidence
    for version in examination.list_unseen_versions():
        scored = select_scored(evidence.rows, version, config, tokens)
        if version in weights.versions and scored:
            further_evidence = replace(evidence, version=version, rollouts=scored)
            further = Examination(
                run_dir, config, model, weights, further_evidence, figures, may_start_engine=engine, timeout_s=timeout_s
            )
            examination.add_engine_of(version, further)
    examination.compare_with_record(suspicious)
    return examination.diagnosis


class Examination:
    """An examination of one set of tokens; models are loaded when needed."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        model: Path,
        weights: Weights,
        evidence: Evidence,
        figures: Mapping[int, RecordedFigures],
        *,
        may_start_engine: bool,
        timeout_s: float,
    ) -> None:
        self._run_dir, self._config, self._model, self._weights = run_dir, config, model, weights
        self.evidence, self._figures, self._timeout_s = evidence, figures, timeout_s
        self.can_score_more = not evidence.is_whole
        """Whether rollouts of the step were not read, to save time."""
        self.diagnosis = Diagnosis(evidence.step, evidence.version, rollouts=0, tokens=0)
        self._prompts = Prompts(config, model, evidence.rows, self.diagnosis.remarks)
        self._causes = Causes(
            run_dir,
            config,
            weights,
            evidence,
            self._prompts,
            self.diagnosis.remarks,
            may_start_engine=may_start_engine,
            timeout_s=timeout_s,
        )
        if weights.shape.experts is not None:
            self._leave_out_ties()
        self._trainer_version = evidence.version
        recorded = figures.get(evidence.step, RecordedFigures())
        self._recorded = recorded
        self.diagnosis.recorded_error, self.diagnosis.recorded_worst = recorded.error, recorded.worst

    def _leave_out_ties(self) -> None:
        """Leave out tokens for which rounding may have chosen other experts."""
        before = self.evidence.rollouts
        ties = self._causes.load_oracle(self.evidence.version).find_first_ties(self.evidence.tokens)
        after = [rollout.keep_up_to(tie) for rollout, tie in zip(before, ties, strict=True)]
        self._score_fewer(after, "two experts of an earlier token have equal scores")

    def _score_fewer(self, after: list[Rollout], reason: str) -> None:
        """Score fewer tokens and say why, unless none would remain."""
        before = self.evidence.rollouts
        omitted = sum(len(rollout.indices) for rollout in before) - sum(len(rollout.indices) for rollout in after)
        if omitted and any(len(rollout.indices) for rollout in after):
            self.evidence = replace(self.evidence, rollouts=[rollout for rollout in after if len(rollout.indices)])
            self.diagnosis.remarks.append(f"{omitted} tokens were left out: {reason}")

    @phase("the trainer's log-probabilities")
    def _compute_trainer_logprobs(self) -> tuple[int, Tensor]:
        """Find the trainer's version and its log-probabilities, recorded or computed again.

        They are [tokens], float32. Tokens that a filter removes in training are left out of the evidence.
        """
        evidence, version = self.evidence, self.evidence.step - 1
        recorded = evidence.read_column("prev_logprobs")
        # Step N trains version N - 1. If its weights are gone, the trainer computes with those that sampled.
        if version not in self._weights.versions:
            version, recorded = evidence.version, None
        if recorded is None:
            folder = self._weights.find_folder(version)
            recorded, _ = run_trainer_again(self._config, folder, evidence.tokens, hidden=False)
            self.diagnosis.remarks.append("the trainer's log-probabilities were computed again, on one rank")
        removed = recorded.isneginf()
        if not removed.any() or removed.all() or not self._config.generation.has_training_filter:
            return version, recorded
        pieces = removed.split([len(rollout.indices) for rollout in evidence.rollouts])
        after = [rollout.drop_tokens(piece) for rollout, piece in zip(evidence.rollouts, pieces, strict=True)]
        self._score_fewer(after, "the filter of sampling removes them in training, whose loss leaves them out, too")
        return version, recorded[~removed]

    def run(self) -> None:
        """Examine the rollouts, the prompts, the engine and the trainer."""
        version, recorded = self._compute_trainer_logprobs()
        self._trainer_version = version
        diagnosis, evidence, config = self.diagnosis, self.evidence, self._config
        scored = evidence.rollouts
        diagnosis.rollouts, diagnosis.tokens = len(scored), sum(len(rollout.indices) for rollout in scored)
        stop_strings = bool(self._ends.strings)
        samples = config.loop.num_generations_per_prompt if config.logger.rollouts == "all" else None
        diagnosis.findings += find_token_mistakes(evidence, self._stops, stop_strings=stop_strings, samples=samples)
        if self._config.generation.temperature > GREEDY:
            diagnosis.findings += find_repeated_samples(evidence)
        diagnosis.findings += self._prompts.find_mistakes()
        sampled = evidence.read_column("logprobs")
        engine = self._build_side("engine", evidence.version, sampled, build_engine_law(self._config))
        trainer = self._build_side("trainer", version, recorded, build_training_law(self._config))
        diagnosis.gap = Distance.measure(engine.recorded, trainer.recorded)
        diagnosis.error = float(compute_residual(engine.recorded, trainer.recorded).exp().mean())
        self._causes.is_confirmed = self._is_confirmed()
        checkpoint = None if diagnosis.findings else self._find_wrong_checkpoint(engine)
        if checkpoint is None:
            diagnosis.findings += self._reach_verdict(engine, self._config.engine_dtype, evidence.version)
            diagnosis.findings += self._reach_verdict(trainer, self._config.policy.precision, version)
        else:
            diagnosis.findings.append(checkpoint)
        remark, diagnosis.unseen_rollouts = describe_other_versions(evidence)
        diagnosis.remarks += [remark] if remark else []
        # Both sides are correct, so a remaining gap comes from settings that differ between them.
        if not diagnosis.findings:
            diagnosis.findings += self._causes.find_configured_gaps(engine, trainer, diagnosis.sides["engine"][1])
        if version != evidence.version:
            text = f"the trainer had version {version}: this part of the gap is the policy's own change"
            diagnosis.remarks.append(f"tokens were sampled by version {evidence.version}, and {text}")
        diagnosis.findings = drop_repetitions(diagnosis.findings)

    def _is_confirmed(self) -> bool:
        """True if the run computed the record's error itself."""
        error = self.evidence.recorded_error
        if error is None and self._is_comparable and self.evidence.is_whole:
            error = self.diagnosis.error
        if error is None or self._recorded.error is None or not math.isfinite(self._recorded.error):
            return False
        return error - 1 > SMALL_EXCESS and math.isclose(self._recorded.excess, error - 1, rel_tol=CONFIRMED)

    def _find_wrong_checkpoint(self, engine: Side) -> Finding | None:
        """Find that the loaded weights did not sample."""
        if self._trainer_version != self.evidence.version or not self._is_comparable:
            return None
        base = engine.predict()
        distance = Distance.measure(engine.recorded, base)
        limit = self._causes.measure_rounding(engine, base, self._config.engine_dtype, self.evidence.version)
        excess = float(compute_residual(engine.recorded, base).exp().mean()) - 1
        if self.evidence.recorded_error is not None:
            agreed = self.diagnosis.gap.mean < distance.mean / 10
        else:
            # The run's error is a mean over all tokens, of which the scored ones may differ most.
            tokens = sum(len(row["logprobs"]) for row in self.evidence.rows)
            share = len(base) / max(tokens, 1)
            agreed = self._recorded.error is not None and is_beyond(excess * share, self._recorded.excess, limit.mean)
        apart = find_rollouts_apart(engine, base, limit)
        is_wrong = agreed and excess >= SMALL_EXCESS and len(apart) > len(engine.rollouts) / 2
        if not is_wrong or find_damage(engine, base, limit) is not None or find_edits(engine, base, limit) is not None:
            return None
        return self._causes.describe_wrong_checkpoint(engine, distance, limit, self._recorded.error)

    def list_unseen_versions(self) -> list[int]:
        """List the versions of rollouts that have no token of the examined version."""
        rows = [[version for *_, version in row["spans"]] for row in self.evidence.rows]
        return sorted({versions[0] for versions in rows if self.evidence.version not in versions})

    def add_engine_of(self, version: int, further: Examination) -> None:
        """Add what the engine's record shows at the tokens of another version."""
        evidence, diagnosis = further.evidence, self.diagnosis
        side, findings = further.examine_engine(version)
        diagnosis.findings += [
            replace(finding, text=f"{finding.text} (tokens of version {version})") for finding in findings
        ]
        diagnosis.findings = drop_repetitions(diagnosis.findings)
        names = {(rollout.row["group"], rollout.row["sample"]) for rollout in evidence.rollouts}
        unseen = [row for row in evidence.rows if self.evidence.version not in {span[2] for span in row["spans"]}]
        scored = sum((row["group"], row["sample"]) in names for row in unseen)
        diagnosis.unseen_rollouts -= scored
        diagnosis.remarks.append(f"{len(side.recorded)} tokens of version {version} were scored for the engine alone")

    def examine_engine(self, version: int) -> tuple[Side, list[Finding]]:
        """Compare the engine's record with a version of the weights."""
        recorded = self.evidence.read_column("logprobs")
        side = self._build_side("engine", version, recorded, build_engine_law(self._config))
        return side, list(self._reach_verdict(side, self._config.engine_dtype, version))

    @cached_property
    def _ends(self) -> StopConditions:
        generation = self._config.generation
        try:
            return find_stop_conditions(generation, load_tokenizer(self._model), self._model)
        except RunError as error:
            self.diagnosis.remarks.append(f"stop tokens are those of the model's configuration: {error}")
            ids = (*generation.stop_token_ids, *read_end_tokens(self._model))
            return StopConditions(ids, tuple(generation.stop_strings))

    @property
    def _stops(self) -> frozenset[int]:
        return frozenset(self._ends.token_ids)

    def _build_side(self, name: SideName, version: int, recorded: Tensor | None, law: Law) -> Side:
        assert recorded is not None, "generation always records its log-probabilities"
        rollouts, tokens = self.evidence.rollouts, self.evidence.tokens
        return Side(name, self._causes.load_oracle(version), rollouts, tokens, law, recorded)

    def _reach_verdict(self, side: Side, dtype: str, version: int) -> Iterator[Finding]:
        """Explain a side's difference if it is beyond rounding."""
        with phase(f"transformers' log-probabilities for the {side.name}"):
            base = side.predict()
            rounding = self._causes.measure_rounding(side, base, dtype, version)
        distance = Distance.measure(side.recorded, base)
        self.diagnosis.sides[side.name] = distance, rounding
        if distance.is_within(rounding):
            return
        if side.name == "engine":
            stop = find_unsampled_stops(self.evidence, side.recorded, base, self._stops, rounding)
            if stop is not None:
                yield stop
                return
        with phase(f"causes of the {side.name}'s difference"):
            yield from self._causes.explain(side, base, version, rounding, self._stops)

    @property
    def _rounding(self) -> float:
        """Mean difference of log-probabilities that rounding of both sides explains, in nats."""
        return sum(rounding.mean for _, rounding in self.diagnosis.sides.values())

    @property
    def _is_comparable(self) -> bool:
        """True if the scored tokens' error can be compared with the run's.

        It cannot if the trainer's weights are gone, or if some tokens of the step are of another version.
        """
        versions = {version for row in self.evidence.rows for _, _, version in row["spans"]}
        return self._trainer_version == self.evidence.step - 1 and len(versions) == 1

    @property
    def _is_off(self) -> bool:
        """True if the run flagged the step, or its error exceeds staleness."""
        return bool(self._recorded.is_off) or not self._recorded.excess <= STALE_EXCESS

    @property
    def shows_less_than_recorded(self) -> bool:
        """True if the recorded error exceeds that of the scored tokens."""
        if self._recorded.error is None:
            return False
        # If the step recorded both sides' log-probabilities, its error follows from them without any model.
        error = self.evidence.recorded_error
        if error is not None:
            return is_beyond(self._recorded.excess, error - 1, self._rounding)
        if not self._is_comparable:
            return False
        worst = self._recorded.worst
        if worst is not None and worst > 1 and math.isfinite(worst):
            rounding_size = sum(rounding.worst for _, rounding in self.diagnosis.sides.values())
            if is_beyond(math.log(worst), self.diagnosis.gap.worst, rounding_size):
                return True
        return is_beyond(self._recorded.excess, self.diagnosis.error - 1, self._rounding)

    def compare_with_record(self, suspicious: list[int]) -> None:
        """Add a finding if the run measured more than was found.

        `suspicious`: steps whose recorded figures are far from those of the others.
        """
        diagnosis, step, config = self.diagnosis, self.evidence.step, self._config
        if self._recorded.error is None:
            diagnosis.remarks.append(f"the run recorded no {ERROR} of step {step}")
        elif self.shows_less_than_recorded:
            diagnosis.findings.append(self._explain_record())
        elif not self._is_comparable and self._is_off and not diagnosis.findings:
            text = (
                f"the run recorded {ERROR} {self._recorded.error:.6g} at step {step}, more than weights a few steps "
                "old explain, and both sides agree with transformers at the scored tokens"
            )
            key = "checkpointing.save_period=1 keeps the weights of every step, which the other tokens need"
            diagnosis.findings.append(Finding("recorded_error", "layout", text, key))
        version = self.evidence.version
        of_refit = self._figures.get(version, RecordedFigures())
        if of_refit.canary_failed:
            text = (
                f"the canary of the refit to version {version} differed by {of_refit.canary:.3g}, "
                f"more than {of_refit.canary_limit:.3g}"
            )
            diagnosis.findings.append(Finding("canary", "weights", text, OTHER_WEIGHTS))
        reason = read_refused_refit(self._run_dir)
        if reason is not None:
            text = f"the run ended because a check of weights refused a refit: {reason}"
            diagnosis.findings.append(Finding("refused_refit", "weights", text, REFIT))
        diagnosis.remarks += list_differing_modes(self._run_dir, config)
        further_steps = [number for number in suspicious if number != step]
        if further_steps:
            listed = ", ".join(f"{number} ({self._figures[number].error:.6g})" for number in further_steps[:5])
            text = f"the run recorded a larger {ERROR} than usual at step(s) {listed}"
            examined = f"step=N examines one of them, if its rollouts and weights are kept; this was step {step}"
            if diagnosis.findings or step in suspicious:
                diagnosis.remarks.append(f"{text}; {examined}")
            else:
                key = "step=N; logger.rollouts=all and checkpointing.save_period=1 keep what an examination needs"
                diagnosis.findings.append(Finding("recorded_error", "layout", f"{text}; {examined}", key))

    def _explain_record(self) -> Finding:
        """Explain a recorded error that one rank does not compute."""
        diagnosis, config, step = self.diagnosis, self._config, self.evidence.step
        measured = (
            f"the run recorded {ERROR} {self._recorded.error:.6g} (largest {self._recorded.worst or math.nan:.6g})"
        )
        error = self.evidence.recorded_error
        if error is not None:
            text = (
                f"{measured} at step {step}, and the log-probabilities that it recorded have {error:.6g}: "
                "its metrics and its rollouts are not of the same step, or one of them was changed"
            )
            return Finding("damaged_record", "record", text, "record the step again")
        text = (
            f"{measured} at step {step}, and one rank computes {diagnosis.error:.6g} from the same weights and tokens: "
            "the difference needs the run's layout, packing or versions"
        )
        replay = replay_in_layout(self._run_dir, step, config, self._timeout_s)
        name = "layout_differs" if replay.differs else "recorded_error"
        return Finding(name, "layout", f"{text}; {replay.text}", replay.command)
