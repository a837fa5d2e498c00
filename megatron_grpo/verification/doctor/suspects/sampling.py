"""Suspects in what the engine was asked for: sampling options and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.evidence import Rollout
from megatron_grpo.verification.doctor.law import GREEDY, Law, Tokens, compute_residual
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect, fit_law

LOGPROBS_MODE = "generation.engine_args.logprobs_mode must be processed_logprobs (the default)"
OPTION_KEY = "generation.{name}; and what else sets it in the engine: generation_config.json, an agent, engine_args"
TEMPERATURES = tuple(float(value) for value in torch.logspace(-1, 1, 41, base=4.0))
"""Temperatures between 1/4 and 4 that are tried before the best one is refined."""
FILTERS: Mapping[str, Sequence[float]] = {
    "top_k": (1, 2, 3, 4, 5, 8, 10, 16, 20, 30, 32, 40, 50, 64, 100, 200),
    "top_p": (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "min_p": (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2),
}
"""Usual values of filters. Log-probabilities change in steps with them, so no grid is refined around the best."""
PENALTIES: Mapping[str, Sequence[float]] = {
    "repetition_penalty": (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0),
    "presence_penalty": (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0),
    "frequency_penalty": (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0),
}
CAPS = (2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
BIASES = (-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
MOST_BIASED_TOGETHER, BIAS_STEPS, LARGEST_BIAS = 8, 12, 30.0
"""Most tokens that are biased together, Gauss-Newton steps for each set of them, and the largest bias."""
EXACT_BIASES = 2e-6
"""Mean difference, in nats, at which no further token is taken for biased."""
MOST_MINIMA, MINIMA = 64, (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Least lengths of responses: every one up to the first number is tried, else these are refined."""
MOST_BIASED = 4
"""Most tokens that are tried with a bias: those with the largest differences."""


def iterate_sampling_suspects(stops: frozenset[int], side: Side) -> Iterator[Candidate]:
    """Yield other distributions over the logits; `stops`: tokens that end a response."""
    for suspect, law in (*_iterate_omissions(side.law), *_fit_option(side), *_find_bias(side, stops)):
        if law != side.law:
            yield suspect, partial(_predict_law, law)


def _predict_law(law: Law, side: Side) -> Tensor:
    return side.predict(law=law)


def _iterate_omissions(law: Law) -> Iterator[tuple[Suspect, Law]]:
    """Yield the configured distribution without some of its options."""
    key = f"generation.temperature={law.temperature:g}"
    yield (
        Suspect("temperature", "sampling", f"does not divide logits by {key}", f"{key}; {LOGPROBS_MODE}"),
        replace(law, temperature=1.0),
    )
    yield (
        Suspect("sampling_filters", "sampling", "ignores top_p, top_k and min_p", LOGPROBS_MODE),
        replace(law, top_k=0, top_p=1.0, min_p=0.0),
    )
    names = "repetition_penalty, presence_penalty and frequency_penalty"
    yield (
        Suspect("sampling_penalties", "sampling", f"ignores {names}", LOGPROBS_MODE),
        replace(law, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
    )
    yield Suspect("raw_logprobs", "sampling", "reports log-probabilities of the raw logits", LOGPROBS_MODE), Law()
    text = "rounds logits to bfloat16"
    yield Suspect("rounded_logits", "precision", text, "generation.engine.dtype"), replace(law, rounds_logits=True)


def _fit_option(side: Side) -> Iterator[tuple[Suspect, Law]]:
    """Yield the configured distribution with the best value of one option."""
    law = side.law
    best = fit_law(side, TEMPERATURES, lambda number: replace(law, temperature=number))
    # The head multiplies the last norm, so a factor of norm, head or temperature gives the same log-probabilities.
    equivalent = (
        f"which is the same as model.norm.weight or the head (lm_head.weight) times {law.temperature / best:.4g}"
    )
    key = f"generation.temperature={law.temperature:g}"
    text = f"has temperature {best:.4g}, and generation.temperature={law.temperature:g} is configured, {equivalent}"
    yield Suspect("temperature", "sampling", text, key, assumes=2), replace(law, temperature=best)
    # A soft cap, as in Gemma 2, bends logits by tanh before anything else.
    best = fit_law(side, CAPS, lambda number: replace(law, cap=number))
    text = f"bends logits to a soft cap of {best:.4g}"
    key = "final_logit_softcapping of config.json in policy.model.path, and generation.engine_args.hf_overrides"
    yield Suspect("model_setting", "layer", text, key, assumes=2), replace(law, cap=best)
    for names, name_of_finding in ((FILTERS, "sampling_filters"), (PENALTIES, "sampling_penalties")):
        for name, values in names.items():
            rounds = 1 if names is FILTERS else 8
            best = fit_law(side, values, partial(_with_option, law, name), rounds)
            text = f"samples with {name}={best:.4g}, and generation.{name}={getattr(law, name):g} is configured"
            suspect = Suspect(name_of_finding, "sampling", text, OPTION_KEY.format(name=name), assumes=2)
            yield suspect, _with_option(law, name, best)


def _with_option(law: Law, name: str, number: float) -> Law:
    option: Any = round(number) if name == "top_k" else number
    return replace(law, **{name: option})


def _find_bias(side: Side, stops: frozenset[int]) -> Iterator[tuple[Suspect, Law]]:
    """Yield biases on a token's logit, and tokens that are never drawn."""
    law, key = side.law, OPTION_KEY.format(name="stop_token_ids")
    if stops:
        text = "never draws the tokens that end a response (min_tokens, ignore_eos)"
        banned = tuple((token, -torch.inf) for token in sorted(stops))
        yield Suspect("token_bias", "sampling", text, key), replace(law, bias=banned)
        # min_tokens bans the ends of a response in its first tokens alone.
        ends = tuple(sorted(stops))
        longest = max((int((tokens.chosen - tokens.begins).max()) + 1 for tokens in side.tokens), default=1)
        lengths = range(longest + 1) if longest <= MOST_MINIMA else sorted({*MINIMA, longest})
        best = fit_law(side, lengths, partial(_with_minimum, law, ends), rounds=1 if longest <= MOST_MINIMA else 8)
        text = (
            f"never draws the tokens that end a response in its first {round(best)} tokens (min_tokens={round(best)})"
        )
        suspect = Suspect("token_bias", "sampling", text, "generation.engine_args, min_tokens", assumes=2)
        yield suspect, _with_minimum(law, ends, best)
    # A bias changes the biased token's own log-probability most, so only sampled tokens that differ are tried.
    base = side.predict()
    apart = compute_residual(side.recorded, base)
    sampled = torch.cat([tokens.ids[tokens.chosen] for tokens in side.tokens])
    worst = list(dict.fromkeys(sampled[apart.argsort(descending=True)].tolist()))[:MOST_BIASED]
    for token in worst:
        number = fit_law(side, BIASES, partial(_with_bias, law, token))
        equivalent = f"which is the same as a wrong row {token} of the head's bias"
        text = f"adds {number:.4g} to the logit of token {token}, {equivalent}"
        suspect = Suspect("token_bias", "sampling", text, OPTION_KEY.format(name="logit_bias"), assumes=2)
        yield suspect, _with_bias(law, token, number)
    biases = _fit_biases(side, base, sampled)
    if len(biases) > 1:
        text = " and ".join(f"{number:.4g} to the logit of token {token}" for token, number in biases)
        # Several fitted numbers explain most of a few tokens, whatever the cause is.
        key = OPTION_KEY.format(name="logit_bias")
        suspect = Suspect("token_bias", "sampling", f"adds {text}", key, assumes=1 + len(biases), only_exact=True)
        yield suspect, replace(law, bias=tuple(biases))
    token = _find_banned_token(side, base)
    text = f"never draws token {token}"
    yield (
        Suspect("token_bias", "sampling", text, "generation.bad_words", assumes=2),
        replace(law, bias=((token, -torch.inf),)),
    )


def _with_bias(law: Law, token: int, number: float) -> Law:
    return replace(law, bias=((token, number),))


def _with_minimum(law: Law, ends: tuple[int, ...], number: float) -> Law:
    return replace(law, banned=ends, banned_until=round(number))


def _fit_biases(side: Side, base: Tensor, sampled: Tensor) -> list[tuple[int, float]]:
    """Fit biases of several tokens together: pairs of token and bias."""
    # With biases b the log-probability of the drawn token y changes by b_y - log(sum of p_v exp(b_v)), so its
    # derivative by b_v is 1 at y less the biased probability of v. The token whose derivative fits the rest of the
    # differences best is added, and the biases of all chosen tokens are fitted again by Gauss-Newton steps.
    gap = side.recorded - base
    if not gap.isfinite().all():
        return []
    probabilities = torch.cat(side.oracle.compute_probabilities(side.tokens, side.law)).double()
    drawn = torch.nn.functional.one_hot(sampled, probabilities.shape[1]).double()
    biases, chosen = torch.zeros(probabilities.shape[1], dtype=torch.float64), list[int]()

    def compute_slopes() -> tuple[Tensor, Tensor]:
        tilted = probabilities * biases.exp()
        sums = tilted.sum(-1)
        return gap - drawn @ biases + sums.log(), drawn - tilted / sums[:, None]

    for _ in range(MOST_BIASED_TOGETHER):
        rest, slopes = compute_slopes()
        if float(rest.abs().mean()) < EXACT_BIASES:
            break
        fits = (rest @ slopes).abs() / slopes.square().sum(0).sqrt().clamp(min=1e-12)
        chosen.append(int(fits.argmax()))
        chosen = list(dict.fromkeys(chosen))
        for _ in range(BIAS_STEPS):
            rest, slopes = compute_slopes()
            step = torch.linalg.lstsq(slopes[:, chosen], rest[:, None], driver="gelsd").solution[:, 0]
            biases[chosen] = (biases[chosen] + step.clamp(-2.0, 2.0)).clamp(-LARGEST_BIAS, LARGEST_BIAS)
    temperature = side.law.temperature if side.law.temperature > GREEDY else 1.0  # biases precede the temperature
    return [(token, float(biases[token]) * temperature) for token in sorted(chosen)]


def _find_banned_token(side: Side, base: Tensor) -> int:
    # Without a token of probability p every other log-probability rises by -log(1 - p).
    probabilities = torch.cat(
        [row for tokens in side.tokens for row in side.oracle.compute_probabilities([tokens], side.law)]
    )
    residual = (side.recorded - base)[:, None] + torch.log1p(-probabilities.clamp(max=1 - 1e-6))
    return int(residual.abs().mean(0).argmin())


OtherPrompts = Callable[[Sequence[Rollout]], Mapping[str, tuple[str, Sequence[Tokens]]]]
"""From rollouts to sequences with other prompts: by description, the key that chooses the prompts and the sequences."""
MOST_LENGTHS = 12  # to which prompts are cut


def iterate_prompt_suspects(other_prompts: OtherPrompts, side: Side) -> Iterator[Candidate]:
    """Yield other prompts before the same responses."""
    for text, (key, _) in other_prompts(side.rollouts).items():
        suspect = Suspect("wrong_template", "tokens", f"has seen another prompt: {text}", key)
        yield suspect, partial(_with_prompts, other_prompts, text)
    yield from _cut_prompts(side)


def _with_prompts(other_prompts: OtherPrompts, text: str, side: Side) -> Tensor:
    return side.predict(tokens=other_prompts(side.rollouts)[text][1])


def _cut_prompts(side: Side) -> Iterator[Candidate]:
    """Yield prompts that lack tokens, or have their first token twice."""
    lengths = [int(rollout.row["spans"][0][0]) for rollout in side.rollouts]
    key = "data.max_input_seq_length, generation.engine_args.max_model_len, and the tokenizer's special tokens"
    cuts: dict[str, Callable[[list[int]], list[int]]] = {
        "without its first token": lambda ids: ids[1:],
        "with its first token twice": lambda ids: [*ids[:1], *ids],
        "without its last token": lambda ids: ids[:-1],
    }
    steps = sorted({2**power for power in range(3, 17)} | {length - 1 for length in lengths} - {0})
    for length in [step for step in steps if step < max(lengths)][-MOST_LENGTHS:]:
        cuts[f"cut to its last {length} tokens"] = itemgetter(slice(-length, None))
        cuts[f"cut to its first {length} tokens"] = itemgetter(slice(length))
    for text, cut in cuts.items():
        suspect = Suspect("cut_prompt", "tokens", f"has seen the prompt {text}", key)
        yield suspect, partial(_with_cut_prompts, cut)


def _with_cut_prompts(cut: Callable[[list[int]], list[int]], side: Side) -> Tensor:
    return side.predict(tokens=[_cut_prompt(rollout, cut) for rollout in side.rollouts])


def _cut_prompt(rollout: Rollout, cut: Callable[[list[int]], list[int]]) -> Tokens:
    first = int(rollout.row["spans"][0][0])
    prompt = cut(rollout.tokens.ids[:first].tolist())
    return rollout.replace_prompt(prompt) if prompt else rollout.tokens  # an empty prompt predicts nothing
