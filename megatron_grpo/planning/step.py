"""Seconds of a step by phase: generation, log-probabilities, training, refit, and how they follow or overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import Config, KTOConfig
from megatron_grpo.models.heads import POLICY_HEADS
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.costs import Overlap, PassSeconds, PhaseSeconds, sum_phase
from megatron_grpo.planning.generation_batches import GenerationSeconds, Room, find_room, simulate_generation
from megatron_grpo.planning.generation_cost import Decoder, Lengths, build_decoder, size_engine
from megatron_grpo.planning.pipeline import Timeline, run_schedule
from megatron_grpo.planning.refit_summary import time_refit
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.layout_checks import count_gpus

if TYPE_CHECKING:
    from megatron_grpo.planning.trace import RankTrace

_FILL = 0.95
"""Share of a microbatch that packed sequences of different lengths fill."""


_MOST_OF = 0.5
"""Share of a batch's generation from which on its longest response is what limits it."""


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step."""

    phase_s: dict[str, float]
    """Seconds of each phase, in their order."""
    synchronous_s: float
    """Seconds of a step whose phases follow each other."""
    asynchronous_s: float | None
    """Seconds of a step that samples ahead (async_grpo); None: the run does not, or has no engines."""
    tokens: float
    """Tokens of prompts and responses that a step trains on."""
    gpus: int
    refit_s: float
    refit_bytes: int
    assumptions: list[str]
    train: Timeline
    """The pipeline's schedule in one optimizer step, for a picture."""
    limits: list[str] = field(default_factory=list)
    """Sentences that say what the step, generation and training wait for."""

    @property
    def step_s(self) -> float:
        """Seconds of a step of this configuration."""
        return self.synchronous_s if self.asynchronous_s is None else self.asynchronous_s

    @property
    def samples_beside(self) -> bool:
        """True if engines sample on other GPUs while models train."""
        return self.asynchronous_s is not None and "offload" not in self.phase_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens trained on, per second and GPU of the run."""
        return self.tokens / self.step_s / self.gpus


@dataclass(frozen=True)
class _Batch:
    """The equal microbatches of an optimizer step on a replica."""

    microbatches: int
    tokens: float
    """Tokens of a microbatch, relative to the dry run's."""
    context: float
    """Mean tokens that a token attends to, relative to the dry run's."""
    speed: float = 1.0
    """Speed of the passes, relative to those over sequences of equal length (`Efficiency.unequal`)."""


@dataclass
class _Model:
    """The traced ranks of a model, with assumptions and limits."""

    config: Config
    ranks: Sequence[RankTrace]
    hardware: Hardware
    overlap: Overlap
    assumptions: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def time_phases(self, name: str) -> list[PhaseSeconds]:
        """Compute the seconds of every pipeline stage in a phase."""
        # Of stages that are alike only the first is traced, so a stage takes the times of the last traced one before.
        phases = {
            rank.stage: sum_phase(rank.report.work, rank.report.passes, name, self.hardware, self.overlap)
            for rank in self.ranks
        }
        stages = range(self.config.policy.parallel.pipeline)
        return [phases[max(traced for traced in phases if traced <= stage)] for stage in stages]

    def form_batch(self, totals: NDArray[np.float64], most_tokens: int) -> _Batch:
        """Divide samples of these lengths into microbatches of at most `most_tokens`."""
        policy = self.config.policy
        longest = min(policy.max_total_sequence_length, most_tokens)
        dry_tokens = most_tokens // longest * longest  # of a microbatch of the dry run
        alike = bool(np.all(totals == totals[0]))
        usable = most_tokens // totals[0] * totals[0] if alike else most_tokens * _FILL
        computed = float(totals.sum())
        if not policy.packing and not alike:  # sequences are padded to the longest, and padding is computed, too
            computed = float(totals.max() * len(totals))
            usable = max(1, most_tokens // totals.max()) * totals.max()
        number = max(1, math.ceil(round(computed / policy.parallel.data / usable, 6)))
        tokens = computed / policy.parallel.data / number
        if policy.parallel.virtual_pipeline > 1:  # interleaved schedules take a multiple of the stages
            number += -number % policy.parallel.pipeline
        # A token attends to half of its sequence on average, so the mean over tokens weighs lengths by themselves.
        context = float((totals**2).sum() / totals.sum()) / longest
        return _Batch(number, tokens / dry_tokens, context, 1.0 if alike else self.hardware.efficiency.unequal)

    def time_forward(self, name: str, totals: NDArray[np.float64]) -> float:
        """Compute the seconds of a phase of forward passes over samples of these lengths."""
        policy = self.config.policy
        batch = self.form_batch(totals, policy.logprob_microbatch_tokens or policy.microbatch_tokens)
        return self.run(self.time_phases(name), batch, forward_only=True).seconds

    def run(self, phases: list[PhaseSeconds], batch: _Batch, *, forward_only: bool) -> Timeline:
        """Replay the pipeline's schedule over the microbatches."""
        parallel = self.config.policy.parallel
        chunks = range(parallel.virtual_pipeline)

        def compute_seconds(is_backward: bool) -> list[list[float]]:
            return [
                [
                    phase.passes.get((chunk, is_backward), PassSeconds()).compute_seconds(batch.tokens, batch.context)
                    / batch.speed
                    for chunk in chunks
                ]
                for phase in phases
            ]

        return run_schedule(
            compute_seconds(False),
            [] if forward_only else compute_seconds(True),
            batch.microbatches,
            send_s=max(phase.send_s for phase in phases) * batch.tokens,
            blocking=parallel.virtual_pipeline == 1,
            forward_only=forward_only,
        )


def find_overlap(config: Config) -> Overlap:
    """Find the messages that a configuration overlaps."""
    policy = config.policy
    gradients = policy.overlap_grad_reduce is not False
    parameters = gradients and policy.optimizer.distributed and policy.overlap_param_gather is not False
    fields = policy.megatron
    return Overlap(
        gradients=gradients,
        parameters=parameters,
        tensor=bool(fields.get("tp_comm_overlap", False)),
        experts=bool(fields.get("overlap_moe_expert_parallel_comm", False)),
        expert_skew=config.plan.expert_skew if config.plan.workload == "rl" else 1.0,
    )


def build_step_times(
    config: Config,
    shape: ModelShape,
    ranks: Sequence[RankTrace],
    hardware: Hardware,
    lengths: Lengths,
    *,
    workload: Literal["rl", "pretrain"] = "rl",
    overlap: Overlap | None = None,
    value_ranks: Sequence[RankTrace] = (),
    teachers: Sequence[tuple[Config, Sequence[RankTrace]]] = (),
) -> StepTimes:
    """Compute the seconds of a step by phase.

    Args:
        config: the run's configuration.
        shape: sizes of the model.
        ranks: the dry run of a rank of each distinct pipeline stage.
        hardware: the GPUs.
        lengths: tokens of the samples of a step; with `pretrain`, of an optimizer step.
        workload: rl: a step of the algorithm; pretrain: one optimizer step on the given sequences.
        overlap: messages that something hides; None: those that the configuration overlaps.
        value_ranks: the dry run of a rank of each distinct pipeline stage of the value model; empty: there is none.
        teachers: for each teacher the configuration, with the teacher as the policy, and ranks as above.

    Raises:
        ValueError: an engine does not fit its GPUs.
    """
    model = _Model(config, ranks, hardware, overlap or find_overlap(config), [lengths.source])
    if workload == "pretrain":
        train, phase_s = _time_learning(model, lengths.totals, 1)
        gpus, tokens = config.policy.parallel.world_size, float(lengths.totals.sum())
        step_s = sum(phase_s.values())
        return StepTimes(phase_s, step_s, None, tokens, gpus, 0.0, 0, model.assumptions, train, model.limits)
    return _time_rl_step(model, shape, lengths, value_ranks, teachers)


def _time_rl_step(
    model: _Model,
    shape: ModelShape,
    lengths: Lengths,
    value_ranks: Sequence[RankTrace],
    teachers: Sequence[tuple[Config, Sequence[RankTrace]]],
) -> StepTimes:
    config, hardware, totals = model.config, model.hardware, lengths.totals
    steps = config.optimizer_steps_per_step
    learnt = _add_demonstrations(model, totals)
    train, learning_s = _time_learning(model, _take_share(learnt, steps // config.passes_per_step), steps)
    has_engines = config.needs_generation and not config.generation.server.urls
    refit_s, refit_bytes = time_refit(config, shape, hardware) if config.needs_generation else (0.0, 0)
    if config.needs_generation and not has_engines:
        model.assumptions.append("generation by generation.server.urls is left out: their GPUs are not known")
    sampling = _time_generation(config, shape, hardware, lengths, model) if has_engines else _Sampling()
    phase_s = {
        **({"generation": sampling.alone_s} if has_engines else {}),
        **_time_logprobs(model, totals),
        **_time_value_model(config, value_ranks, hardware, totals),
        **_time_teachers(teachers, hardware, totals),
        **learning_s,
        **(_time_moves(config, shape, [*model.ranks, *value_ranks], hardware) if has_engines else {}),
        **({"refit": refit_s} if config.needs_generation else {}),
    }
    async_grpo, asynchronous = config.async_sampling, None
    if async_grpo.can_sample_ahead:
        # The slowest of three sets the pace: the trainer, the engines on a stream of batches, and a single batch, which
        # may take as many steps as its samples may be old. On shared GPUs trainer and engines follow each other.
        age, others_s = async_grpo.max_trajectory_age_steps, sum(phase_s.values()) - sampling.alone_s
        batch_name, batch_s = f"a batch's responses, over {age + 1} steps", sampling.alone_s / (age + 1)
        model.assumptions.append(f"samples up to {age} steps old")
        if config.generation.is_colocated:
            asynchronous = others_s + max(sampling.stream_s, batch_s) + sampling.recompute_s
            model.assumptions.append(
                f"engines keep no cache while they sleep: each computes {sampling.in_flight_tokens:,.0f} tokens of "
                f"responses in flight again in every step, in {sampling.recompute_s:.1f} s"
            )
        else:
            paces = {"training": others_s, "engines": sampling.stream_s + refit_s, batch_name: batch_s}
            slowest = max(paces, key=lambda name: paces[name])
            asynchronous = paces[slowest]
            seconds = ", ".join(f"{name} {pace:.1f} s" for name, pace in paces.items())
            model.limits.insert(0, f"the step waits for {slowest} ({seconds})")
    return StepTimes(
        phase_s=phase_s,
        synchronous_s=sum(phase_s.values()),
        asynchronous_s=asynchronous,
        tokens=float(totals.sum()),
        gpus=math.ceil(sum(count_gpus(config).values())),
        refit_s=refit_s,
        refit_bytes=refit_bytes,
        assumptions=model.assumptions,
        train=train,
        limits=model.limits,
    )


def _time_learning(model: _Model, totals: NDArray[np.float64], steps: int) -> tuple[Timeline, dict[str, float]]:
    """Schedule one optimizer step, and compute the seconds of `steps` by phase."""
    phases = model.time_phases("train")
    batch = model.form_batch(totals, model.config.policy.microbatch_tokens)
    schedule = model.run(phases, batch, forward_only=False)
    passes = [seconds for phase in phases for seconds in phase.passes.values()]
    attention = sum(seconds.kinds["attention"] * batch.context for seconds in passes)
    passes_s = sum(seconds.compute_seconds(1.0, batch.context) for seconds in passes)
    if passes_s:
        model.limits.append(f"train: attention takes {attention / passes_s:.0%} of the passes")
    update = max(phase.outside for phase in phases)
    return schedule, {
        "train": steps * (schedule.seconds + _time_exposed(model, phases, batch)),
        "optimizer": steps * update,
    }


def _add_demonstrations(model: _Model, totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add the rows that CHORD learns beside its samples, [samples + rows]."""
    if model.config.demonstration_config is None:
        return totals
    rows = model.config.chord.rows_per_step
    model.assumptions.append(f"{rows} demonstrations a step, as long as the samples")
    return np.append(totals, np.quantile(totals, (np.arange(rows) + 0.5) / rows))


def _take_share(totals: NDArray[np.float64], shares: int) -> NDArray[np.float64]:
    """Take one of equal shares of samples, with all lengths in their proportion."""
    # Samples are listed by length, but a run's optimizer steps get them in an order that lengths do not decide.
    return np.sort(totals)[shares // 2 :: max(1, shares)]


def _time_logprobs(model: _Model, totals: NDArray[np.float64]) -> dict[str, float]:
    config = model.config
    outputs = POLICY_HEADS[config.method.head].field.removeprefix("prev_")
    # The reference has as many responses as the policy: KTO's also those to other prompts.
    reference_passes = config.uses_reference * (2 if isinstance(config.loop, KTOConfig) else 1)
    passes = {outputs: config.policy_passes, "reference": reference_passes}
    seconds = {name: count * model.time_forward(name, totals) for name, count in passes.items() if count}
    return seconds | ({"teacher": model.time_forward(outputs, totals)} if config.teaches_itself else {})


def _time_value_model(
    config: Config, ranks: Sequence[RankTrace], hardware: Hardware, totals: NDArray[np.float64]
) -> dict[str, float]:
    if config.value_model is None or not ranks:
        return {}
    value = replace(config, policy=config.value_model)
    model, steps = _Model(value, ranks, hardware, find_overlap(value)), config.value_optimizer_steps_per_step
    values_s = model.time_forward("values", totals)
    learning_s = _time_learning(model, _take_share(totals, steps // config.passes_per_step), steps)[1]
    return {"values": values_s, "train_value": sum(learning_s.values())}


def _time_teachers(
    teachers: Sequence[tuple[Config, Sequence[RankTrace]]], hardware: Hardware, totals: NDArray[np.float64]
) -> dict[str, float]:
    # One after the other, each for the samples of its tasks, which are taken to be equally many.
    models = [_Model(config, ranks, hardware, find_overlap(config)) for config, ranks in teachers]
    share = _take_share(totals, len(models))
    return {"teachers": sum(model.time_forward("teacher", share) for model in models)} if models else {}


def _time_exposed(model: _Model, phases: list[PhaseSeconds], batch: _Batch) -> float:
    """Seconds of an optimizer step's data-parallel messages that nothing hides."""
    # Gradients are reduced while the last microbatch goes backward, weights are gathered while the first one goes
    # forward; the time beyond these passes is exposed, and at least the share 1 - `Efficiency.hidden` of a message.
    exposed, overlap, hidden = 0.0, model.overlap, model.hardware.efficiency.hidden
    for phase in phases:
        passes = {False: 0.0, True: 0.0}
        for (_, is_backward), seconds in phase.passes.items():
            passes[is_backward] += seconds.compute_seconds(batch.tokens, batch.context)
        exposed_of_rank = 0.0
        for message, overlaps, hiding_s in (
            (phase.gradients, overlap.gradients, passes[True]),
            (phase.parameters, overlap.parameters, passes[False]),
        ):
            exposed_of_rank += max(message - hiding_s, message * (1 - hidden)) if overlaps else message
        exposed = max(exposed, exposed_of_rank)
    return exposed


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Seconds of an engine to sample its share of a step."""

    alone_s: float = 0.0  # of a batch alone
    stream_s: float = 0.0  # of each batch in a stream of batches
    in_flight_tokens: float = 0.0  # of prompts and responses that are not complete, at a moment in the stream
    recompute_s: float = 0.0  # to compute their keys and values again


def _time_generation(
    config: Config, shape: ModelShape, hardware: Hardware, lengths: Lengths, model: _Model
) -> _Sampling:
    generation, responses = config.generation, lengths.responses
    size = size_engine(config, shape, hardware)
    if size.count_sequences(float(lengths.totals.mean())) < 1:
        raise ValueError(
            f"an engine of generation.parallel.tensor={generation.parallel.tensor} has no room for a sequence: weights "
            f"{size.weight_bytes / 2**30:.1f} GiB on each GPU of {hardware.memory_gib:g} GiB; use more ranks"
        )
    decoder, copies = build_decoder(config, shape, hardware), config.loop.num_generations_per_prompt
    engines, room = generation.parallel.data, find_room(config, size)
    # The step waits for the fullest engine, so its share of the responses begins with the longest. Its responses start
    # in random order, because nobody knows their lengths.
    responses_of_engine = np.sort(responses)[::-1][::engines][::-1]
    responses_of_engine = np.random.default_rng(0).permutation(responses_of_engine)
    alone = simulate_generation(decoder, lengths.prompt, responses_of_engine, room, copies)
    text = f"engines decode up to {alone.peak} sequences at once, and {alone.busy:.0f} on average"
    model.assumptions.append(text + (f"; {alone.preempted} lose their room and begin again" if alone.preempted else ""))
    is_full = alone.peak == room.sequences and not alone.preempted
    limit = "generation.engine.max_num_seqs" if is_full else "the KV cache's room"
    waits_for = limit if alone.peak < len(responses_of_engine) or alone.preempted else None
    model.limits.append(_explain_generation(decoder, lengths, alone, waits_for))
    batches = config.async_sampling.max_trajectory_age_steps + 1
    stream = simulate_generation(decoder, lengths.prompt, np.tile(responses_of_engine, batches), room, copies)
    # A response that is looked at in a random moment is a long one, in proportion to its length, and half complete.
    sampled = float((responses_of_engine**2).sum() / responses_of_engine.sum()) / 2
    in_flight = stream.busy * (lengths.prompt / copies + sampled)
    recompute_s = decoder.time_prefill(in_flight, lengths.prompt + sampled)
    return _Sampling(alone.seconds, stream.seconds / batches, in_flight, recompute_s)


def _explain_generation(decoder: Decoder, lengths: Lengths, batch: GenerationSeconds, waits_for: str | None) -> str:
    """Say what a batch of responses waits for.

    `waits_for`: what responses wait for before they begin; None: all are decoded at once.
    """
    longest = lengths.responses.max()
    longest_s = simulate_generation(decoder, lengths.prompt, np.array([longest]), Room(1), 1).seconds
    share = longest_s / batch.seconds
    if share > _MOST_OF:
        return f"generation: the longest response, of {longest:.0f} tokens, takes {share:.0%} of it alone"
    cause = "reading weights and KV cache" if waits_for is None else f"responses wait for {waits_for}"
    return f"generation: {cause}; the longest response, of {longest:.0f} tokens, alone takes {share:.0%} of it"


def _time_moves(config: Config, shape: ModelShape, ranks: Sequence[RankTrace], hardware: Hardware) -> dict[str, float]:
    """Seconds of moves to the host and back, if colocated."""
    if not config.generation.is_colocated:
        return {}
    # The policy goes to the host and comes back. Engines give up weights that the next refit brings; those that get
    # adapters alone keep the base model on the host.
    moved = max(rank.report.end_bytes["train"] - rank.report.end_bytes.get("offload", 0) for rank in ranks)
    moved += size_engine(config, shape, hardware).weight_bytes if config.refit.adapters == "alone" else 0
    return {"offload": moved / hardware.host_bytes_per_s, "onload": moved / hardware.host_bytes_per_s}
