"""The algorithms: their rows, models and step, and the keys that each of them reads.

`config.method` is the algorithm of a run, and no other file compares its name. An `Algorithm` in a module of the user's
own is one, too: algorithm=my_recipe:ALGORITHM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_grpo.config.data_schema import LABELLED, PREFERENCE, SCORED, SUPERVISED
from megatron_grpo.config.loop_names import find_counterpart, is_shared
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.paths import import_value, is_import_path, list_import_folders

if TYPE_CHECKING:
    from megatron_grpo.config.schema import Config

_LOSS = frozenset(f"loss_fn.{field.name}" for field in dataclasses.fields(LossConfig))
_DIVERGENCE = frozenset({"loss_fn.kl_type", "loss_fn.mixed_kl_weight", "loss_fn.policy_loss_weight"})
_ENVIRONMENT = frozenset({"loss_fn.environment_nll_weight"})
_AVERAGE = frozenset({"loss_fn.token_level_loss", "loss_fn.constant_normalizer_tokens"})
# Keys of rewards, advantages and the policy-gradient loss, with the shared ones under GRPO's name.
_OF_REWARDS = (_LOSS - _DIVERGENCE - _AVERAGE) | {
    *("grpo.advantage_clip_low", "grpo.advantage_clip_high", "grpo.reward_scaling.", "grpo.reward_shaping."),
    *("grpo.normalize_rewards", "grpo.normalize_rewards_over", "grpo.use_leave_one_out_baseline"),
    *("grpo.adv_estimator.", "grpo.turn_credit", "grpo.turn_discount"),
}


def _has_penalty(config: Config) -> bool:
    return config.loss_fn.reference_policy_kl_penalty > 0


def _needs_distance(config: Config) -> bool:
    return config.ppo is not None and not config.ppo.skip_reference_policy_logprobs_calculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What the code around a step has to know of its algorithm."""

    name: str
    section: str
    """Section of the configuration with the keys of its loop."""
    rows: str | None = None
    """Kind of the rows that it learns from; None: it learns from samples."""
    head: Literal["logits", "score"] = "logits"
    """Output of the trained model: logits of the next token, or a score of the conversation."""
    models: frozenset[Literal["value", "teachers"]] = frozenset()
    """Models beside the policy and its reference."""
    needs_reference: Callable[[Config], bool] = _has_penalty
    """True if a run loads a reference policy."""
    uses_rewards: Callable[[Config], bool] = lambda config: True
    """True if rewards change what a run learns."""
    takes_images: bool = False
    """True if prompts may have images."""
    reads: frozenset[str]
    """Keys that some algorithms do not read; a section ends in a point."""
    metrics: frozenset[str] = frozenset()
    """Metrics of its steps alone."""
    leading_metrics: tuple[str, ...] = ("reward", "val_accuracy")
    """Metrics of steps and validations that tell most about a run; its page and its plot begin with them."""
    train: str
    """Import path, module:function, of the loop over its steps, which gets the run."""
    run: str
    """Import path of the type of its runs, a `TrainingRun`."""
    loss: str
    """Import path of its loss; one that reads keys of loss_fn gets the section."""

    @property
    def has_value_model(self) -> bool:
        """True if it trains a value model beside the policy."""
        return "value" in self.models

    @property
    def reads_loss(self) -> bool:
        """True if its loss reads keys of loss_fn."""
        return any(name.startswith("loss_fn.") for name in self.reads)

    def has_read(self, key: str) -> bool:
        """True if it reads a key, whatever the other keys say."""
        section, _, rest = key.partition(".")
        if is_shared(key):
            return rest.partition(".")[0] in LOOPS[self.section].__dataclass_fields__
        return section not in OWN_SECTIONS or is_among(key, self.reads)

    def has_section(self, name: str) -> bool:
        """True if its runs have a section of the configuration."""
        # A recipe's values of loss_fn may stay while its algorithm is exchanged.
        is_own = name in OWN_SECTIONS - {"loss_fn"}
        return not is_own or any(key.startswith(f"{name}.") for key in self.reads)


def is_among(key: str, names: frozenset[str]) -> bool:
    """True if a key, or a section that it is in, is named."""
    return any(key == name or key.startswith(f"{name.removesuffix('.')}.") for name in names)


_OWN = "megatron_grpo.algorithms"
_LOSSES = "megatron_grpo.losses"
_PAIRS = f"{_LOSSES}.preference:SequenceGradientLossFn"
ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name="grpo",
            section="grpo",
            takes_images=True,
            reads=frozenset({"grpo."}) | (_LOSS - _DIVERGENCE),
            train=f"{_OWN}.grpo:grpo_train",
            run=f"{_OWN}.context:GRPORun",
            loss=f"{_LOSSES}.policy_loss:ClippedPGLossFn",
        ),
        Algorithm(
            name="ppo",
            section="ppo",
            takes_images=True,
            models=frozenset({"value"}),
            # The distance to the reference is reported even without a penalty.
            needs_reference=lambda config: _needs_distance(config) or _has_penalty(config),
            reads=frozenset({"ppo.", "value.", "value_loss_fn."}) | (_LOSS - _DIVERGENCE),
            metrics=frozenset(
                {"value_loss", "value_grad_norm", "value_learning_rate", "value_mean", "return_mean"}
                | {"explained_variance", "value_clip_fraction"}
            ),
            leading_metrics=("reward", "val_accuracy", "value_loss", "explained_variance"),
            train=f"{_OWN}.ppo:ppo_train",
            run=f"{_OWN}.context:PPORun",
            loss=f"{_LOSSES}.policy_loss:ClippedPGLossFn",
        ),
        Algorithm(
            name="sft",
            section="sft",
            takes_images=True,
            rows=SUPERVISED,
            needs_reference=lambda config: False,
            reads=frozenset({"sft."}),
            leading_metrics=("loss", "val_loss", "val_accuracy", "val_reward"),
            train=f"{_OWN}.sft:sft_train",
            run=f"{_OWN}.supervised:SupervisedRun",
            loss=f"{_LOSSES}.likelihood:NLLLossFn",
        ),
        Algorithm(
            name="dpo",
            section="dpo",
            takes_images=True,
            rows=PREFERENCE,
            needs_reference=lambda config: config.dpo is None or config.dpo.loss_type != "simpo",
            reads=frozenset({"dpo."}),
            metrics=frozenset(
                {
                    "preference_loss",
                    "sft_loss",
                    "preference_accuracy",
                    "margin",
                    "rewards_chosen_mean",
                    "rewards_rejected_mean",
                }
            ),
            leading_metrics=(
                "loss",
                "val_loss",
                "preference_accuracy",
                "margin",
                "rewards_chosen_mean",
                "val_accuracy",
            ),
            train=f"{_OWN}.dpo:dpo_train",
            run=f"{_OWN}.dpo:PreferenceRun",
            loss=_PAIRS,
        ),
        Algorithm(
            name="kto",
            section="kto",
            rows=LABELLED,
            needs_reference=lambda config: True,
            reads=frozenset({"kto."}),
            metrics=frozenset(
                {"preference_accuracy", "reference_point", "desirable_share"}
                | {"rewards_chosen_mean", "rewards_rejected_mean"}
            ),
            leading_metrics=("loss", "val_loss", "preference_accuracy", "reference_point", "rewards_chosen_mean"),
            train=f"{_OWN}.kto:kto_train",
            run=f"{_OWN}.kto:KTORun",
            loss=_PAIRS,
        ),
        Algorithm(
            name="reward_model",
            section="reward_model",
            rows=SCORED,
            head="score",
            needs_reference=lambda config: False,
            reads=frozenset({"reward_model."}),
            metrics=frozenset(
                {"accuracy", "margin", "mean_reward", "min_reward", "max_reward"}
                | {"rewards_chosen_mean", "rewards_rejected_mean"}
            ),
            leading_metrics=("loss", "val_loss", "accuracy", "margin", "rewards_chosen_mean"),
            train=f"{_OWN}.dpo:reward_model_train",
            run=f"{_OWN}.dpo:RewardModelRun",
            loss=_PAIRS,
        ),
        Algorithm(
            name="chord",
            section="grpo",
            reads=frozenset({"grpo.", "chord."}) | (_LOSS - _DIVERGENCE - _ENVIRONMENT),
            metrics=frozenset({"demonstration_nll", "demonstration_weight"}),
            train=f"{_OWN}.chord:chord_train",
            run=f"{_OWN}.chord:ChordRun",
            loss=f"{_LOSSES}.chord_loss:ChordLossFn",
        ),
        Algorithm(
            name="distillation",
            section="grpo",
            models=frozenset({"teachers"}),
            needs_reference=lambda config: config.uses_rewards and _has_penalty(config),
            uses_rewards=lambda config: config.loss_fn.policy_loss_weight > 0,
            reads=frozenset({"grpo.", "distillation.topk_logits_k", "teacher.", "teachers."}) | (_LOSS - _ENVIRONMENT),
            metrics=frozenset({"teacher_divergence"}),
            leading_metrics=("teacher_divergence", "reward", "val_accuracy"),
            train=f"{_OWN}.distillation:distillation_train",
            run=f"{_OWN}.distillation:DistillationRun",
            loss=f"{_LOSSES}.distillation_loss:DistillationLossFn",
        ),
        Algorithm(
            name="self_distillation",
            section="grpo",
            needs_reference=lambda config: config.uses_rewards and _has_penalty(config),
            uses_rewards=lambda config: config.loss_fn.policy_loss_weight > 0,
            reads=frozenset({"grpo.", "distillation."}) | (_LOSS - _ENVIRONMENT),
            metrics=frozenset({"teacher_divergence"}),
            train=f"{_OWN}.self_distillation:self_distillation_train",
            run=f"{_OWN}.self_distillation:SelfDistillationRun",
            loss=f"{_LOSSES}.distillation_loss:DistillationLossFn",
        ),
    )
}
# Sections with keys that some algorithms do not read.
OWN_SECTIONS = {name.partition(".")[0] for algorithm in ALGORITHMS.values() for name in algorithm.reads}
_IMPORTED: dict[str, Algorithm] = {}


def is_algorithm_name(name: str) -> bool:
    """True for the name of an algorithm of this package, or an import path."""
    return name in ALGORITHMS or is_import_path(name)


def find_algorithm(name: str, run_dir: str | None = None) -> Algorithm:
    """Find an algorithm by its name, or import it by its path.

    `run_dir` is the folder of a trusted run, whose code may have the module. ValueError: it cannot be imported, or is
    no `Algorithm`; the text continues a message of the setting.
    """
    algorithm = ALGORITHMS.get(name) or _IMPORTED.get(name)
    if algorithm is None:
        algorithm = import_value(name, list_import_folders(run_dir, [name]))
        if not isinstance(algorithm, Algorithm):
            raise ValueError("is not a megatron_grpo.config.algorithms.Algorithm")
        sections = {row.section for row in ALGORITHMS.values()}
        if algorithm.section not in sections:
            raise ValueError(f"has section={algorithm.section}; a loop is one of {', '.join(sorted(sections))}")
        _IMPORTED[name] = algorithm
    return algorithm


def find_known_section(name: str) -> str | None:
    """Find the section of an algorithm's loop; None: it would have to be imported."""
    algorithm = ALGORITHMS.get(name) or _IMPORTED.get(name)
    return None if algorithm is None else algorithm.section


def choose_imported(name: object) -> str:
    """Return the name of an algorithm if it needs no import, else grpo."""
    return str(name) if name in ALGORITHMS or name in _IMPORTED else "grpo"


def is_foreign_to(algorithm: Algorithm, key: str) -> bool:
    """True for a key that only other algorithms read."""
    # A recipe's values of loss_fn may stay while its algorithm is exchanged.
    return not key.startswith("loss_fn.") and not algorithm.has_read(key)


def find_reader(key: str) -> str:
    """Find the first algorithm that reads a key."""
    return next(algorithm.name for algorithm in ALGORITHMS.values() if algorithm.has_read(key))


def explain_foreign_key(key: str, algorithm: Algorithm) -> str:
    """Explain that only other algorithms read a key."""
    if is_shared(key):
        text = f"is about samples that a step learns from, and algorithm={algorithm.name} learns from rows"
        return f"{text}; leave it out"
    advice = "; the value model is PPO's baseline" if algorithm.has_value_model else ""
    if counterpart := find_counterpart(algorithm.section, key):
        advice = f"; give {counterpart}"
    return f"is for algorithm={find_reader(key)}, and this run has algorithm={algorithm.name}{advice}"


def explain_unread(config: Config, key: str) -> str | None:
    """Explain why a run does not read a key; None: its algorithm reads it."""
    if not config.method.has_read(key):
        return explain_foreign_key(key, config.method)
    if not config.uses_rewards and is_among(key, _OF_REWARDS):
        return "is of rewards and of the policy-gradient loss, and loss_fn.policy_loss_weight=0 leaves both out"
    return None
