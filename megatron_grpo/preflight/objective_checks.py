"""Checks of the objective that a run has, and of the keys that it reads."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import to_text
from megatron_grpo.config.formulas import CORRECTIONS, OBJECTIVES
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.schema import Config, GRPOConfig
from megatron_grpo.preflight.rules import Rule

# Keys that some objectives read, the switches apart; and keys that some masks read.
_OBJECTIVE_KEYS = frozenset().union(*(entry.keys for entry in OBJECTIVES.values()))
_MASKS = {name: entry for name, entry in CORRECTIONS.items() if not entry.is_weight}


def check_objective(config: Config) -> Iterator[Rule]:
    """Check the objective, its switches and its options."""
    loss = config.loss_fn
    key, entry = _find_objective_key(loss), loss.objective_entry
    # A forced ratio goes with every objective that has one.
    switches = [switch for switch, name in loss.objective_switches if name != "on_policy" or loss.disable_ppo_ratio]
    text = "a run has one objective; leave one of them out"
    for switch in switches[1:]:
        yield (
            True,
            f"loss_fn.{switches[0]}=",
            f"excludes loss_fn.{switch}: {text}",
        )
    is_contradiction = switches and loss.objective not in (LossConfig().objective, loss.chosen_objective)
    text = f"excludes loss_fn.{key}, which is loss_fn.objective={loss.chosen_objective}; leave one of them out"
    yield is_contradiction, "loss_fn.objective=", text
    reads = entry.keys if entry is not None else _OBJECTIVE_KEYS
    text = f"bounds the clipped objective, and loss_fn.{key}={getattr(loss, key)} is another; use null"
    is_unbounded = "ratio_clip_c" not in reads and not loss.is_on_policy
    yield loss.ratio_clip_c is not None and is_unbounded, "loss_fn.ratio_clip_c=", text
    steps = config.optimizer_steps_per_step
    text = f"is correct for one optimizer step per sample; this configuration makes {steps}"
    subject = "loss_fn.force_on_policy_ratio=" if loss.force_on_policy_ratio else "loss_fn.objective="
    yield loss.is_on_policy and steps > 1, subject, f"{text}. Set PASSES=1 and one minibatch"
    text = "needs loss_fn.token_level_loss=false: an average over tokens would weigh a response by its length"
    yield loss.averages_responses and loss.token_level_loss, f"loss_fn.{key}=", text
    if entry is not None:
        names = ", ".join(f"loss_fn.{name}" for name in sorted(reads))
        text = f"is for a function of your own; loss_fn.objective={loss.chosen_objective} reads {names or 'no key'}"
        for name, value in loss.objective_options.items():
            yield True, f"loss_fn.objective_options.{name}={to_text(value)}", text
    loop = config.loop
    if isinstance(loop, GRPOConfig) and loop.adv_estimator.entry is not None:
        text = f"is for a function of your own, and grpo.adv_estimator.name={loop.adv_estimator.name} is none"
        for name, value in loop.adv_estimator.options.items():
            yield True, f"grpo.adv_estimator.options.{name}={to_text(value)}", text


def check_objective_cautions(config: Config) -> Iterator[Rule]:
    """Find objectives that are allowed and may not be intended."""
    steps, loss = config.optimizer_steps_per_step, config.loss_fn
    text = (
        f"does not correct for the policy's updates, and this configuration makes {steps} optimizer steps on the same "
        "samples; REINFORCE takes one: set PASSES=1 and one minibatch"
    )
    yield loss.chosen_objective == "reinforce" and steps > 1, f"loss_fn.{_find_objective_key(loss)}=", text


def _find_objective_key(loss: LossConfig) -> str:
    """Find the key of loss_fn that chooses the objective."""
    return loss.objective_switches[0][0] if loss.objective_switches else "objective"


def list_idle_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys of the objective that change nothing, each with the reason."""
    loss, entry = config.loss_fn, config.loss_fn.objective_entry
    for mask in _MASKS.keys() - {*loss.corrections}:
        yield from ((f"loss_fn.{name}", f"needs loss_fn.corrections=[{mask}]") for name in _MASKS[mask].keys)
    if entry is None:
        return
    key = f"loss_fn.{_find_objective_key(loss)}"
    if config.optimizer_steps_per_step == 1 and entry.acts_on_ratio:
        text = (
            "acts on ratios away from 1, and with one optimizer step on a sample all ratios are 1; give more with "
            "policy.train_global_batch_samples below the samples of a step, or with PASSES above 1"
        )
        if loss.chosen_objective == "reinforce":
            yield (
                key,
                "with one optimizer step on a sample all ratios are 1, and the gradient is that of REINFORCE anyway",
            )
        elif loss.chosen_objective != "on_policy" and not (loss.averages_responses and loss.has_weights):
            yield key, text
        for name in sorted(entry.keys):
            yield f"loss_fn.{name}", text
    if loss.is_on_policy and not config.needs_prev_logprobs:
        text = "with one optimizer step on a sample the policy is the old one anyway"
        yield from ((name, text) for name in ("loss_fn.objective", "loss_fn.force_on_policy_ratio"))
    for name in sorted(_OBJECTIVE_KEYS - entry.keys):
        readers = [objective for objective, reader in OBJECTIVES.items() if name in reader.keys]
        yield f"loss_fn.{name}", f"needs loss_fn.objective={' or '.join(readers)}"
