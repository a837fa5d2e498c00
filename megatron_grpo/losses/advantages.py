"""From rewards to advantages: GRPO, RLOO, REINFORCE++, GDPO and others.

Rewards are [groups, samples], floating point, NaN where a sample has no reward. Such a sample is ignored in means and
standard deviations, and its advantage is 0.

`grpo.adv_estimator.name` names a function of this file, or of the user. Parameters with a name of `INPUTS` get tensors;
those with the name of a key of grpo or grpo.adv_estimator get its value; all others are options
(grpo.adv_estimator.options). It returns the advantages, [groups, samples].
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.loss_schema import RewardScalingConfig, RewardShapingConfig
from megatron_grpo.config.paths import list_import_folders
from megatron_grpo.config.schema import GRPOConfig
from megatron_grpo.losses.named_formula import NamedFormula, make_formula

INPUTS = {
    "rewards": "[groups, samples], float32, after scaling and shaping; NaN: no reward",
    "lengths": "[groups, samples], int64: sampled tokens of each response",
    "reward_parts": "[functions, groups, samples], float32: rewards of each function",
    "reward_weights": "[functions], float32: weight of each function",
    "token_penalty": "[lengths.sum()], float32: KL penalty of each token, or None",
    "score_sizes": "[lengths.sum()], float32: squared size of each token's gradient by the logits",
    "task_baselines": "[groups, samples], float64: the task's mean of rewards up to each response",
}
"""Tensors that a function may take, by the name of the parameter; those of the user take the first two."""
USER_INPUTS = ("rewards", "lengths")


def make_estimator(config: GRPOConfig, folders: tuple[str, ...] = ()) -> NamedFormula:
    """Make the configured function; RunError if it cannot be imported, or has other options."""
    settings = config.adv_estimator
    keys = {**vars(config), **vars(settings)}
    return make_formula(
        f"grpo.adv_estimator.name={settings.name}",
        f"{__name__}.{settings.name}" if settings.entry is not None else settings.name,
        inputs=INPUTS if settings.entry is not None else USER_INPUTS,
        keys={key: value for key, value in keys.items() if key not in ("name", "options")},
        options=settings.options,
        folders=(folders or list_import_folders()) if settings.entry is None else (),
    )


def response_advantages(estimator: NamedFormula, rewards: Tensor, lengths: Tensor, **parts: Tensor | None) -> Tensor:
    """Advantages of responses, [groups, samples]; 0 for those without a reward.

    RunError: a function of the user returned another shape, or NaN or infinity.
    """
    advantages: Tensor = estimator(rewards=rewards, lengths=lengths, **parts)
    if not estimator.folders:
        return advantages
    if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape:
        result = f"shape {list(advantages.shape)}" if isinstance(advantages, Tensor) else type(advantages).__name__
        raise RunError(f"{estimator.setting} returned {result}; rewards are [groups, samples], {list(rewards.shape)}")
    # Such a response is not in the loss; NaN would still spread through products with a mask.
    advantages = torch.where(rewards.isnan(), torch.zeros_like(advantages), advantages)
    wrong = ~advantages.isfinite().all(dim=1)
    if wrong.any():
        group = int(wrong.nonzero()[0])
        raise RunError(
            f"{estimator.setting} returned {advantages[group].tolist()} for the rewards {rewards[group].tolist()}"
        )
    return advantages.to(rewards.dtype)


def has_signal(rewards: Tensor) -> Tensor:
    """True for groups whose rewards are not all equal: [groups], bool."""
    has_reward = ~rewards.isnan()
    # Rewards are compared, because the standard deviation of equal rewards may be a rounding error above 0.
    lowest = torch.where(has_reward, rewards, torch.full_like(rewards, torch.inf)).amin(dim=1, keepdim=True)
    return (has_reward & (rewards != lowest)).any(dim=1)


STD_EPSILON = 1e-6  # added to a standard deviation before dividing by it
ROUNDING_SHARE = 1e-4  # a GDPO score below this share of its terms is the rounding error of a sum that is 0
VARIANCE_FLOOR = 1e-8  # lower limit of the variance that REINFORCE++ divides by


def group_mean(rewards: Tensor) -> Tensor:
    """Mean reward of each group, [groups, 1]; 0 without rewards."""
    # At least one: a group without rewards has mean 0 rather than NaN, which would spread through the step.
    return _replace_nan(rewards).sum(dim=1, keepdim=True) / (~rewards.isnan()).sum(dim=1, keepdim=True).clamp(min=1)


def leave_one_out_baseline(rewards: Tensor) -> Tensor:
    """Mean reward of the *other* samples of the group, for each sample.

    RLOO: Ahmadian et al. 2024, section 3. Shape [groups, samples]; 0 when no other sample has a reward.
    """
    filled = _replace_nan(rewards)
    counts = (~rewards.isnan()).sum(dim=1, keepdim=True) - 1
    return (filled.sum(dim=1, keepdim=True) - filled) / counts.clamp(min=1)


def group_std(rewards: Tensor) -> Tensor:
    """Standard deviation of each group, [groups, 1], with divisor n - 1."""
    has_reward = ~rewards.isnan()
    # From centred rewards: the difference of mean square and squared mean loses all digits when rewards hardly differ.
    squares = torch.where(has_reward, rewards - group_mean(rewards), torch.zeros_like(rewards)).square()
    variance = squares.sum(dim=1, keepdim=True) / (has_reward.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    return variance.sqrt()


def group_advantages(rewards: Tensor, *, leave_one_out: bool, normalize: bool, over_batch: bool = False) -> Tensor:
    """Reward minus baseline, optionally over a standard deviation (GRPO, Shao et al. 2024).

    The standard deviation is the unbiased one (divisor n - 1) of the *whole* group, also with the leave-one-out
    baseline: that of the other samples alone would be 0 for a lone success among failures, the sample that matters
    most. All samples of a group are divided by the same number, so advantages keep the order of the rewards.

    Args:
        leave_one_out: baseline is the mean of the other samples (true) or of the whole group (false).
        normalize: divide by the standard deviation plus STD_EPSILON.
        over_batch: take the standard deviation over all rewards of the step (Liu et al. 2025, "Tricks or Traps?"),
            which does not inflate groups whose rewards hardly differ.

    The result is [groups, samples]. A group whose rewards are all equal gets exact zeros, whatever rounding its mean
    suffers. Raises ValueError for another shape, and for fewer than two samples, which leave nothing to compare.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [groups, samples], got shape {tuple(rewards.shape)}")
    if rewards.shape[1] < 2:
        raise ValueError(f"advantages within a group need at least 2 samples per prompt, got {rewards.shape[1]}")
    exact = rewards.double()  # in float32 the mean of large, nearly equal rewards may round to one of them
    advantages = exact - (leave_one_out_baseline(exact) if leave_one_out else group_mean(exact))
    if normalize:
        std = group_std(exact.view(1, -1)) if over_batch else group_std(exact)
        advantages = advantages / (std + STD_EPSILON)
    # Groups of equal rewards get 0: the division by nearly 0 would blow up the rounding error of their mean.
    return _replace_without_signal(rewards, advantages)


def grpo(
    rewards: Tensor,
    *,
    use_leave_one_out_baseline: bool,
    normalize_rewards: bool,
    normalize_rewards_over: Literal["group", "batch"],
) -> Tensor:
    """`group_advantages` by the names of the configuration's keys."""
    return group_advantages(
        rewards,
        leave_one_out=use_leave_one_out_baseline,
        normalize=normalize_rewards,
        over_batch=normalize_rewards_over == "batch",
    )


def clip_advantages(advantages: Tensor, config: SampledLoopConfig) -> Tensor:
    """Clip advantages to the configured bounds."""
    if config.advantage_clip_low is None and config.advantage_clip_high is None:  # clamp() refuses two Nones
        return advantages
    return advantages.clamp(config.advantage_clip_low, config.advantage_clip_high)


def gdpo_scores(parts: Tensor, weights: Tensor) -> Tensor:
    """GDPO's advantages up to scale: the weighted sum of normalised rewards.

    `parts`: [functions, groups, samples]; NaN where a function gave no reward, which adds nothing to the sample and is
    left out of the group's mean and standard deviation. `weights`: [functions]: factor of each normalised reward.

    The result, [groups, samples], has exact zeros in a group without a signal: no function tells its samples apart, or
    the functions' terms cancel out up to rounding. Raises ValueError if a group has fewer than two samples.
    """
    normalized = torch.stack([group_advantages(part, leave_one_out=False, normalize=True) for part in parts])
    terms = normalized * weights[:, None, None]
    # Terms that cancel leave a rounding error, which the normalisation over the step would turn into a signal.
    scores, magnitude = terms.sum(dim=0), terms.abs().sum(dim=0).amax(dim=1, keepdim=True)
    return torch.where(
        scores.abs().amax(dim=1, keepdim=True) > ROUNDING_SHARE * magnitude, scores, torch.zeros_like(scores)
    )


def gdpo(reward_parts: Tensor, reward_weights: Tensor) -> Tensor:
    """GDPO's advantages: scores normalised over all samples of the step.

    GDPO (Liu et al. 2026, "Group reward-Decoupled Normalization Policy Optimization"): normalising the sum instead, as
    GRPO does, gives combinations of one sum the same advantage, and lets the reward of largest spread drown others.

    `reward_parts` and `reward_weights`: as `gdpo_scores`. The result, [groups, samples], has mean 0 and standard
    deviation 1 over the samples that some function scored, 0 for the others; zeros everywhere when no group has a
    signal.
    """
    scores, is_scored = gdpo_scores(reward_parts, reward_weights), ~reward_parts.isnan().all(dim=0)
    # One row: the step is one group of all responses. NaN keeps responses without a score out of its mean.
    whole_step = torch.where(is_scored, scores, torch.full_like(scores, torch.nan)).view(1, -1)
    return group_advantages(whole_step, leave_one_out=False, normalize=True).view_as(scores)


def maxrl(rewards: Tensor) -> Tensor:
    """Reward minus the group's mean, over the mean.

    MaxRL (Tajwar et al. 2026, arXiv:2602.02710), 0 where the mean is not above 0. With rewards of 0 and 1 its
    expectation is the gradient of the log-likelihood of success, up to the order of the group's size, so that hard
    prompts weigh more.
    """
    mean = group_mean(rewards.double())
    advantages = (rewards - mean) / mean.clamp(min=STD_EPSILON)
    return _replace_without_signal(rewards, torch.where(mean > STD_EPSILON, advantages, torch.zeros_like(advantages)))


def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the group's mean, weighted by lengths.

    OPO (Hao et al. 2025, arXiv:2505.23585): the baseline of least variance, if the squared gradient of a
    response grows with its length. `lengths`: [groups, samples], int64: sampled tokens of each response.
    """
    weights = torch.where(rewards.isnan(), 0, lengths).double()
    baseline = (weights * _replace_nan(rewards.double())).sum(dim=1, keepdim=True)
    return _replace_without_signal(rewards, rewards - baseline / weights.sum(dim=1, keepdim=True).clamp(min=1))


def pass_at_k(rewards: Tensor, *, pass_k: int) -> Tensor:
    """Advantages of the best of k responses (Chen et al. 2025, arXiv:2508.10751).

    A set of k responses has the reward of its best one. Its advantage is relative to mean and standard deviation over
    all sets of the group; a response's is the mean over the sets that it is in. For rewards of 0 and 1 these are the
    paper's closed forms; for others the same by their order. A group with fewer than k rewards gets 0.
    """
    rows = [_best_of_sets(group, pass_k) for group in rewards.double()]
    return _replace_without_signal(rewards, torch.stack(rows))


def _best_of_sets(rewards: Tensor, size: int) -> Tensor:
    """Advantages of a group's responses, [samples], float64; NaN without a reward."""
    advantages = torch.full_like(rewards, torch.nan)
    order = rewards.argsort(stable=True)[: int((~rewards.isnan()).sum())]  # NaN comes last
    count = len(order)
    if count < size:
        return advantages
    ranked = rewards[order]
    # Shares of sets whose best is the response of a rank: all others of the set are below it.
    lower = torch.tensor([math.comb(rank, size - 1) for rank in range(count)], dtype=torch.float64)
    best = lower / math.comb(count, size)
    mean = (best * ranked).sum()
    std = (best * (ranked - mean).square()).sum().sqrt()
    # The same among the sets with a given response: a higher one is best, or the response itself.
    with_given = math.comb(count - 1, size - 1)
    higher = torch.tensor([math.comb(rank - 1, size - 2) if rank else 0 for rank in range(count)], dtype=torch.float64)
    above = (higher * ranked).flip(0).cumsum(0).flip(0) - higher * ranked
    advantages[order] = ((above + lower * ranked) / with_given - mean) / (std + STD_EPSILON)
    return advantages


def rae(rewards: Tensor, task_baselines: Tensor) -> Tensor:
    """Reward minus the running mean of its task; 0 without a reward.

    Role-conditioned advantage estimation of SPIRAL (Liu et al. 2025, arXiv:2506.24119): in self-play each role of a
    game has a baseline, b <- decay b + (1 - decay) R before A = R - b (`update_task_baselines`). A role is a task here.
    """
    return _replace_nan(rewards - task_baselines).to(rewards.dtype)


def update_task_baselines(baselines: dict[str, float], tasks: list[str], rewards: Tensor, decay: float) -> Tensor:
    """Add rewards to the running means of their tasks, which begin at 0.

    `tasks` has the task of each group, `rewards` is [groups, samples]; NaN changes nothing. Returns the mean after each
    reward, [groups, samples], float64; `baselines` has the last ones.
    """
    means = torch.zeros(rewards.shape, dtype=torch.float64)
    for group, (task, row) in enumerate(zip(tasks, rewards.tolist(), strict=True)):
        for sample, reward in enumerate(row):
            if not math.isnan(reward):
                baselines[task] = decay * baselines.get(task, 0.0) + (1 - decay) * reward
            means[group, sample] = baselines.get(task, 0.0)
    return means


def otb(rewards: Tensor, lengths: Tensor, token_penalty: Tensor | None, score_sizes: Tensor) -> Tensor:
    """Return of each token minus the group's optimal baseline at it.

    The optimal token baseline (Li et al. 2026, arXiv:2602.07078): B_t = sum of G_t W_t over sum of W_t over the group's
    responses that have a token t, W_t the sum of `score_sizes` up to t. It has the least variance if gradients by
    logits stand for those by weights. G_t is the reward minus the KL penalties from t on. A token that no other
    response reaches has the advantage 0. The result is [lengths.sum()].
    """
    counts, exact = lengths.flatten().tolist(), _replace_nan(rewards.double()).flatten()
    returns = exact.repeat_interleave(lengths.flatten())
    if token_penalty is not None:
        returns = returns - reward_to_go(token_penalty.double(), counts)
    is_scored = (~rewards.isnan()).flatten().repeat_interleave(lengths.flatten())
    sizes = torch.where(is_scored, score_sizes.double(), 0.0)
    energy = torch.cat([piece.cumsum(0) for piece in sizes.split(counts)])
    # A number for each position of each group.
    positions = torch.cat([torch.arange(count) for count in counts])
    group = torch.arange(len(rewards)).repeat_interleave(lengths.sum(dim=1))
    width = max(max(counts), 1)
    index = group * width + positions
    sums = torch.zeros(2, len(rewards) * width, dtype=torch.float64)
    sums[0].index_add_(0, index, returns * energy)
    sums[1].index_add_(0, index, energy)
    baseline = sums[0] / sums[1].clamp(min=torch.finfo(torch.float64).tiny)
    advantages = torch.where(is_scored & (sums[1][index] > 0), returns - baseline[index], 0.0)
    # Responses of equal return leave only the rounding error of their mean.
    is_noise = advantages.abs() <= ROUNDING_SHARE**2 * returns.abs()
    return torch.where(is_noise, 0.0, advantages).to(rewards.dtype)


def _replace_without_signal(rewards: Tensor, advantages: Tensor) -> Tensor:
    """Set advantages without a reward, or of equal rewards, to 0."""
    zeros = torch.zeros_like(advantages)
    return torch.where(has_signal(rewards)[:, None], _replace_nan(advantages), zeros).to(rewards.dtype)


def compute_turn_returns(rewards: Tensor, discount: float) -> Tensor:
    """Discounted return from each turn on: G_t = r_t + discount * G_(t+1).

    Sutton and Barto 2018, eq. 3.9. `rewards`: [turns, groups, samples]; NaN for turns that a sample does not have, as
    in the result.
    """
    returns, later = [], torch.zeros_like(rewards[0])
    for reward in rewards.flip(0):
        later = _replace_nan(reward) + discount * later
        returns.append(torch.where(reward.isnan(), torch.full_like(later, torch.nan), later))
    return torch.stack(returns).flip(0)


def compute_turn_advantages(estimator: NamedFormula, returns: Tensor) -> Tensor:
    """Advantage of each turn: its return, relative to its group's at this turn.

    Turn-level credit of MT-GRPO (Zeng et al. 2025, "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level
    Credit Assignment"), for any number of turns and with returns. The baseline and the standard deviation of a turn are
    those of the samples that have this turn; 0 for a turn that no other sample has. [turns, groups, samples].
    """
    return torch.stack([estimator(rewards=turn) for turn in returns])


def _replace_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.zeros_like(values), values)


def reward_to_go(token_rewards: Tensor, lengths: list[int]) -> Tensor:
    """Undiscounted sum of each token's reward and all later ones, [sum(lengths)]."""
    # Summed from the end within each response: subtracting a running total from the sum would lose the last digits.
    return torch.cat([piece.flip(0).cumsum(0).flip(0) for piece in token_rewards.split(lengths)])


def reinforce_plus_plus(
    rewards: Tensor, lengths: Tensor, token_penalty: Tensor | None, *, minus_baseline: bool
) -> Tensor:
    """Advantages of REINFORCE++: returns, normalised over a step's tokens (Hu et al. 2025).

    The return of token t is the response's reward minus the KL penalties of t and all later tokens. Mean and variance
    are taken over the tokens of all responses, the variance with divisor n and not below VARIANCE_FLOOR.

    Args:
        lengths: [groups, samples], int64: tokens of each response.
        token_penalty: [lengths.sum()], as is the result: subtracted for each token, coefficient included.
        minus_baseline: subtract the mean reward of the group first ("REINFORCE++ with baseline").
    """
    is_scored, exact = ~rewards.isnan(), rewards.double()  # in float32 the squares of large rewards are infinite
    if minus_baseline:
        exact = group_advantages(exact, leave_one_out=False, normalize=False)
    counts = lengths.flatten()
    returns = _replace_nan(exact).flatten().repeat_interleave(counts)
    if token_penalty is not None:
        returns = returns - reward_to_go(token_penalty.to(returns.dtype), counts.tolist())
    token_is_scored, advantages = is_scored.flatten().repeat_interleave(counts), torch.zeros_like(returns)
    inside = returns[token_is_scored]
    if (inside != inside[:1]).any():  # equal returns carry no signal, and rounding errors must not become one
        centered = inside - inside.mean()
        advantages[token_is_scored] = centered * centered.square().mean().clamp(min=VARIANCE_FLOOR).rsqrt()
    return advantages.to(rewards.dtype)


def scale_rewards(rewards: Tensor, config: RewardScalingConfig) -> Tensor:
    """Clamp rewards to [source_min, source_max], then map them to [target_min, target_max].

    Without `config.enabled` the rewards, of any shape, are unchanged. ValueError: the source interval is empty.
    """
    if not config.enabled:
        return rewards
    if config.source_max <= config.source_min:
        values = f"source_max={config.source_max} must be above source_min={config.source_min}"
        raise ValueError(f"grpo.reward_scaling.{values}")
    # Clamped before the map: a target interval may be reversed (target_max below target_min), the source may not.
    slope = (config.target_max - config.target_min) / (config.source_max - config.source_min)
    return config.target_min + (rewards.clamp(config.source_min, config.source_max) - config.source_min) * slope


def shape_rewards(
    rewards: Tensor, response_tokens: Tensor, truncated: Tensor, config: RewardShapingConfig, most_tokens: int
) -> Tensor:
    """DAPO's soft overlong punishment, or the stop-properly penalty.

    Overlong (Yu et al. 2025, eq. 13), with L = max_response_length, B = overlong_buffer_length and length n::

        reward - overlong_buffer_penalty * clamp((n - (L - B)) / B, 0, 1)

    Stop properly: a positive reward of a truncated response is multiplied by stop_properly_penalty_coef. A negative one
    stays, because a factor below 1 would reward running into the limit.

    `response_tokens`, int64, and `truncated`, bool (a length limit cut the response off), are [groups, samples], as is
    the result; `most_tokens` is L when the configuration has none.
    """
    if not config.enabled:
        return rewards
    if config.stop_properly_penalty_coef is not None:
        punished = truncated & (rewards > 0)
        rewards = torch.where(punished, rewards * config.stop_properly_penalty_coef, rewards)
    if config.overlong_buffer_length is not None:
        free = (config.max_response_length or most_tokens) - config.overlong_buffer_length
        excess = ((response_tokens - free) / config.overlong_buffer_length).clamp(0, 1)
        rewards = rewards - config.overlong_buffer_penalty * excess.to(rewards.dtype)
    return rewards
