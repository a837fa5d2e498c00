"""The definitions of all loss variants, token by token in Python floats, and random batches to try them on."""

import math
from pathlib import Path

import torch
import yaml
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.loss import GlobalCounts

Row = dict[str, list[float]]
"""One response: for each entry of a batch, the values of its tokens in the loss."""

VARIANTS = yaml.safe_load((Path(__file__).parents[1] / "data" / "loss_configs.yaml").read_text())
CONFIGS = {name: LossConfig(**options) for name, options in VARIANTS["variants"].items()}


def random_batch(seed: int, sequences: int = 6, length: int = 9) -> tuple[Tensor, TokenFields]:
    """float64, with ratios from about 0.3 to 3 and the loss on a span in the middle of each row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(sequences, length, generator=generator, dtype=torch.float64) * scale

    curr = -normal(1.0).abs()
    mask = torch.zeros(sequences, length, dtype=torch.float64)
    positive = torch.zeros_like(mask)
    for row in range(sequences):
        mask[row, 2 : 3 + (row * 3) % (length - 3)] = 1.0  # responses of unlike lengths: averages over them differ
        positive[row, 2:] = float(row % 2)
    tokens = TokenFields(
        loss_mask=mask,
        advantages=normal(1.0),
        prev_logprobs=curr + normal(0.5),
        generation_logprobs=curr + normal(0.5),
        reference_logprobs=curr + normal(0.3),
        entropy=normal(1.0).abs(),
        positive=positive,
    )
    tokens.selected = (normal(1.0) > 0.3).double() * mask
    return curr, tokens


def counts_of(tokens: TokenFields) -> GlobalCounts:
    """Counts of a batch that is the whole step."""
    mask = tokens.loss_mask
    weight = torch.ones_like(mask) if tokens.weight is None else tokens.weight
    return GlobalCounts(
        tokens=float(mask.sum()),
        sequences=float(weight[:, 0][mask.sum(dim=1) > 0].sum()),
        all_sequences=float(weight[:, 0].sum()),
        positive_tokens=float((mask * weight * tokens.positive).sum()),
        token_weight=float((mask * weight).sum() / mask.sum()),
    )


def loop_loss(curr: Tensor, tokens: TokenFields, config: LossConfig) -> float:
    """The definition, token by token."""
    rows = _rows(curr, tokens)
    losses = [[_token_loss(row, t, config) for t in range(len(row["now"]))] for row in rows]
    count = sum(map(len, losses))
    if config.constant_normalizer_tokens is not None:
        total = math.fsum(map(math.fsum, losses)) / (len(curr) * config.constant_normalizer_tokens)
    elif config.token_level_loss:
        total = math.fsum(map(math.fsum, losses)) / count
    else:
        total = math.fsum(math.fsum(loss) / len(loss) for loss in losses) / len(losses)
    total -= config.entropy_coef * math.fsum(value for row in rows for value in row["entropy"]) / count
    imitated = [now for row in rows for now, right in zip(row["now"], row["positive"], strict=True) if right]
    return total - config.positive_example_nll_weight * math.fsum(imitated) / len(imitated)


def _rows(curr: Tensor, tokens: TokenFields) -> list[Row]:
    rows = []
    for row in range(curr.shape[0]):
        inside = [t for t in range(curr.shape[1]) if tokens.loss_mask[row, t] > 0]
        if inside:
            entries = {"now": curr, **tokens.as_dict()}
            rows.append({name: [float(values[row, t]) for t in inside] for name, values in entries.items()})
    return rows


def _token_loss(row: Row, t: int, config: LossConfig) -> float:
    now, old, advantage = row["now"][t], row["prev_logprobs"][t], row["advantages"][t]
    ratio = math.exp(now - old)
    loss = -_correction(row, t, config) * _objective(row, ratio, now, advantage, t, config)
    loss += config.log_ratio_penalty * (now - row["generation_logprobs"][t]) ** 2
    if config.use_kl_in_reward:
        return loss
    difference = now - row["reference_logprobs"][t]
    if config.kl_input_clamp_value is not None:
        difference = min(max(difference, -config.kl_input_clamp_value), config.kl_input_clamp_value)
    kl = {"k1": difference, "k2": difference**2 / 2, "k3": math.exp(-difference) + difference - 1}[
        config.reference_policy_kl_type
    ]
    if config.kl_output_clamp_value is not None:
        kl = min(max(kl, -config.kl_output_clamp_value), config.kl_output_clamp_value)
    if config.use_on_policy_kl_approximation:
        kl *= ratio
    return loss + config.reference_policy_kl_penalty * kl


def _objective(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    if config.disable_ppo_ratio:
        return advantage * now
    if config.objective in METHODS:
        return METHODS[config.objective](row, ratio, now, advantage, t, config)
    if config.sequence_level_importance_ratios:
        ratio = math.prod(math.exp(a - b) for a, b in zip(row["now"], row["prev_logprobs"], strict=True)) ** (
            1 / len(row["now"])
        )
    if config.use_sapo:
        tau = config.sapo_temperature_pos if advantage > 0 else config.sapo_temperature_neg
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    above = config.ratio_clip_min if config.ratio_clip_max is None else config.ratio_clip_max
    clipped = min(max(ratio, 1 - config.ratio_clip_min), 1 + above)
    if config.use_cispo:
        return clipped * advantage * now
    objective = min(ratio * advantage, clipped * advantage)
    if config.ratio_clip_c is not None and advantage < 0:
        objective = max(objective, config.ratio_clip_c * advantage)
    return objective


def _bounds(config: LossConfig) -> tuple[float, float]:
    return config.ratio_clip_min, config.ratio_clip_min if config.ratio_clip_max is None else config.ratio_clip_max


def _clip(ratio: float, advantage: float, config: LossConfig) -> float:
    below, above = _bounds(config)
    return min(ratio * advantage, min(max(ratio, 1 - below), 1 + above) * advantage)


def _binary_divergence(current: float, sampling: float, kind: str) -> float:
    """Divergence of Bernoulli distributions, (sampling || current)."""
    if kind == "dppo_tv":
        return abs(current - sampling)
    # Batches may have probabilities above 1.
    pairs = ((sampling, current), (max(1 - sampling, math.ulp(1.0)), max(1 - current, math.ulp(1.0))))
    return sum(p * math.log(p / q) for p, q in pairs)


def _dppo(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    sampled_at = row["generation_logprobs"][t]
    current, sampling = math.exp(now), math.exp(sampled_at)
    distance = _binary_divergence(current, sampling, config.objective)
    leaves_up = advantage > 0 and current > sampling and distance > config.divergence_clip_max
    leaves_down = advantage <= 0 and current < sampling and distance > config.divergence_clip_min
    if leaves_up or leaves_down:
        return 0.0
    return min(current / sampling, config.ratio_clip_c or math.inf) * advantage * now


def _dro(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    return advantage * now - config.dro_beta / 2 * (now - row["generation_logprobs"][t]) ** 2


def _vespo(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    pairs = zip(row["now"], row["generation_logprobs"], strict=True)
    weight = math.prod(math.exp(a) / math.exp(b) for a, b in pairs)
    good = (config.vespo_k_pos, config.vespo_lambda_pos)
    power, decay = good if advantage >= 0 else (config.vespo_k_neg, config.vespo_lambda_neg)
    return weight**power * math.exp(decay * (1 - weight)) * advantage * now


def _luspo(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    ratios = [math.exp(a - b) for a, b in zip(row["now"], row["prev_logprobs"], strict=True)]
    return len(ratios) * _clip(math.prod(ratios) ** (1 / len(ratios)), advantage, config)


def _gmpo(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    below, above = _bounds(config)
    logs = [a - b for a, b in zip(row["now"], row["prev_logprobs"], strict=True)]
    signs = row["advantages"]
    bounded = [min(log, above) if sign > 0 else max(log, -below) for log, sign in zip(logs, signs, strict=True)]
    return math.exp(math.fsum(bounded) / len(bounded)) * advantage


def _fipo(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    gamma, future = 2 ** (-1 / config.fipo_half_life), 0.0
    for k in range(t, len(row["now"])):
        log = row["now"][k] - row["prev_logprobs"][k]
        if config.ratio_clip_c is None or math.exp(log) <= config.ratio_clip_c:
            future += gamma ** (k - t) * log
    influence = min(max(math.exp(future), 1 - config.fipo_clip_min), 1 + config.fipo_clip_max)
    objective = _clip(ratio, advantage * influence, config)
    if config.ratio_clip_c is not None and advantage < 0:
        objective = max(objective, config.ratio_clip_c * advantage * influence)
    return objective


def _clip_cov(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    return 0.0 if row["selected"][t] else _clip(ratio, advantage, config)


def _kl_cov(row: Row, ratio: float, now: float, advantage: float, t: int, config: LossConfig) -> float:
    penalty = abs(now - row["prev_logprobs"][t]) if row["selected"][t] else 0.0
    return ratio * advantage - config.kl_cov_weight * penalty


METHODS = {
    "dppo_tv": _dppo,
    "dppo_kl": _dppo,
    "dro": _dro,
    "vespo": _vespo,
    "luspo": _luspo,
    "gmpo": _gmpo,
    "fipo": _fipo,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}


def _correction(row: Row, t: int, config: LossConfig) -> float:
    factor = math.prod(_factor(name, row, t, config) for name in config.corrections)
    if not config.use_importance_sampling_correction:
        return factor
    return factor * _factor(config.truncated_importance_sampling_type, row, t, config)


def _factor(kind: str | None, row: Row, t: int, config: LossConfig) -> float:
    ratios = [math.exp(a - b) for a, b in zip(row["prev_logprobs"], row["generation_logprobs"], strict=True)]
    counts_responses = config.sequence_level_importance_ratios or config.objective in ("luspo", "gmpo")
    weight, advantage = math.prod(ratios) if counts_responses else ratios[t], row["advantages"][t]
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    match kind:
        case "tis":
            return min(weight, high)
        case "icepop":
            return weight if low <= weight <= high else 0.0
        case "seq-mask-tis":
            return weight if low <= math.prod(ratios) ** (1 / len(ratios)) <= high else 0.0
        case "seq-tis":
            return min(math.prod(ratios), high)
        case "seq-mask":
            mean = math.prod(ratios) ** (1 / len(ratios))
            return float(config.sequence_mask_min <= mean <= config.sequence_mask_max)
        case "off-policy-mask":
            pairs = zip(row["generation_logprobs"], row["now"], strict=True)
            staleness = math.fsum(a - b for a, b in pairs) / len(ratios)
            return float(advantage >= 0 or staleness <= config.off_policy_mask_threshold)
        case "divergence-mask":
            variation = math.fsum(abs(ratio - 1) for ratio in ratios) / len(ratios) / 2
            return float(variation <= config.divergence_mask_threshold or advantage * math.log(ratios[t]) <= 0)
        case "high-entropy":
            return row["selected"][t]
    return weight
