"""The keys of the training loops, and of the teachers of on-policy distillation."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_grpo.config.loss_schema import AdvantageEstimatorConfig, RewardScalingConfig, RewardShapingConfig
from megatron_grpo.config.policy_schema import FamilySection, ParallelConfig
from megatron_grpo.config.section import (
    Address,
    NonNegative,
    NonNegativeFloat,
    PathText,
    Positive,
    PositiveFloat,
    PositiveShare,
    SecretVariable,
    Section,
    Seed,
    Share,
    Steps,
    Temperature,
)

VALIDATION_PREFIX = "val_"
# Metrics of a validation, without VALIDATION_PREFIX.
VALIDATION_METRICS = ("accuracy", "reward", "response_length", "truncation_rate")
# Metric of a validation on rows to learn from, without VALIDATION_PREFIX.
HELD_OUT_LOSS = "loss"


class EarlyStopConfig(Section):
    """End training when a validation metric is good or stops improving."""

    enabled: bool = False
    """Let training end before max_num_steps."""

    metric_name: str = "val_accuracy"
    """Validation metric that decides."""

    higher_is_better: bool = True
    """true: a higher metric_name is an improvement; false: a lower one."""

    threshold: float | None = None
    """End when the metric reaches this; null is off."""

    patience: Positive | None = None
    """End after this many validations in a row without an improvement on the best one; null is off."""

    min_delta: NonNegativeFloat = 0.0
    """A value is an improvement only if it is better than the best one by more than this."""


class AsyncGRPOConfig(Section):
    """Sampling of later steps' prompts while a step trains; docs/generation.md."""

    enabled: bool = False
    """Sample while a step trains and weights change; needs loss_fn.use_importance_sampling_correction."""

    max_trajectory_age_steps: NonNegative = 1
    """Most steps between the weights that sampled a token and the weights that train on it. It limits how many steps
    are sampled in advance, so that no sample becomes older. 0: sample only when a step needs the samples."""

    oversampling_factor: Annotated[float, Field(gt=1)] | None = None
    """Prompts in flight when a step begins = num_prompts_per_step * this, rounded down; the step takes those that
    complete first. Must be below max_trajectory_age_steps + 1. null: in the data's order (docs/generation.md)."""

    recompute_kv_cache_after_weight_updates: bool = True
    """Compute the KV cache of responses in flight again when the weights change, so that each later token is sampled as
    by the new weights alone. false keeps the old cache, which costs nothing."""

    @property
    def can_sample_ahead(self) -> bool:
        """True if engines sample while a step trains."""
        return self.enabled and self.max_trajectory_age_steps > 0


class LoopConfig(Section):
    """The training loop of every algorithm.

    `grpo.KEY`, `ppo.KEY`, `sft.KEY`, `dpo.KEY`, `kto.KEY` and `reward_model.KEY` name one setting, whichever algorithm
    runs.
    """

    num_prompts_per_step: Positive = 32
    """Prompts of one step; with algorithm=sft and kto its rows, with dpo and reward_model its pairs."""

    num_generations_per_prompt: Positive = 16
    """Responses to each prompt; samples of a step = prompts * generations. PPO, with its value model, needs one."""

    max_num_epochs: Positive = 1
    """Passes over the training data after which training ends."""

    max_num_steps: Steps = 1000
    """Steps after which training ends; -1: the steps of max_num_epochs passes over the rows."""

    max_rollout_turns: Positive = 1
    """Most turns of the model in one rollout, with an environment that answers. A rollout also ends when its
    environment ends it, when generation.max_new_tokens cuts off a turn, and at policy.max_total_sequence_length."""

    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)

    val_period: NonNegative = 10
    """Steps between validations; 0 is never."""

    val_delay: NonNegative = 0
    """Steps before the first validation of val_period."""

    val_batch_size: Positive = 256
    """Validation prompts generated together."""

    val_at_start: bool = True
    """Validate before the first step."""

    val_at_end: bool = True
    """Validate after the last step."""

    max_val_samples: Positive | None = 256
    """Most prompts of each validation set; null: all."""

    val_temperature: Temperature = 0.0
    """Sampling temperature of validation; 0 is greedy, which makes accuracies of different steps comparable."""

    seed: Seed = 42
    """Seed of everything random in the run."""

    passes_name: ClassVar[str]
    """Key, without its section, of the number of passes over the samples of a step."""


class SampledLoopConfig(LoopConfig):
    """Keys of a loop that samples what it learns from."""

    overlong_filtering: bool = False
    """Leave truncated responses out of the loss; they still count in the baseline of their group. With PPO, leave them
    also out of the value model's loss and of the normalisation of advantages."""

    advantage_clip_low: Annotated[float, Field(le=0)] | None = None
    """Advantages below this are raised to it; null means no bound."""

    advantage_clip_high: NonNegativeFloat | None = None
    """Advantages above this are lowered to it; null means no bound."""

    reward_scaling: RewardScalingConfig = field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)

    use_dynamic_sampling: bool = False
    """DAPO: train only on prompts whose samples differ in reward, and sample further prompts until a step is full."""

    batch_multiplier: Annotated[float, Field(ge=1)] = 1.0
    """Prompts sampled together = num_prompts_per_step * this, rounded down; needs use_dynamic_sampling."""

    dynamic_sampling_max_gen_batches: Positive = 10
    """Most generation batches of one step with use_dynamic_sampling; then the run saves and ends with an error."""

    seq_logprob_error_threshold: Annotated[float, Field(gt=1)] | None = None
    """Leave a response out of the loss if its mean of exp(|training - sampling logprob|) is above this; null: off."""

    async_grpo: AsyncGRPOConfig = field(default_factory=AsyncGRPOConfig)

    sync_ref_model: bool = False
    """Move the reference policy towards the policy during training (TR-DPO); needs a KL penalty."""

    ref_model_mixup_alpha: PositiveShare = 0.6
    """Share of the policy in the mixture: reference = alpha * policy + (1 - alpha) * reference."""

    ref_model_sync_steps: Positive = 512
    """Steps between two moves of the reference policy."""


class GRPOConfig(SampledLoopConfig):
    """Keys that only GRPO has; for algorithm=grpo."""

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of rewards."""

    normalize_rewards_over: Literal["group", "batch"] = "group"
    """Rewards whose standard deviation normalize_rewards uses: those of the sample's group, or of the whole step."""

    use_leave_one_out_baseline: bool = True
    """Baseline of a sample: mean reward of the *other* samples of its group (true), or of all (false)."""

    adv_estimator: AdvantageEstimatorConfig = field(default_factory=AdvantageEstimatorConfig)

    turn_credit: Literal["response", "turn"] = "response"
    """Which tokens a turn's reward reaches. response: all of the rollout, whose reward is the sum over its turns,
    discounted to the start. turn: those of the turn and of the turns before it, so each turn has its own advantage
    (docs/algorithms.md)."""

    turn_discount: PositiveShare = 1.0
    """Factor of a turn's reward for each turn before it; only for environments that reward turns."""

    num_iterations: Positive = 1
    """Passes of the optimizer over the samples of a step (mu)."""

    passes_name: ClassVar[str] = "num_iterations"


class PPOAdvantageConfig(Section):
    """How rewards and values become advantages and returns."""

    name: Literal["gae", "raw_reward"] = "gae"
    """gae: generalised advantage estimation; raw_reward: the reward itself, without the value model's estimates."""

    gae_gamma: PositiveShare = 1.0
    """Discount of the next token."""

    gae_lambda: Share = 0.95
    """Lambda of gae: 1 uses the rewards alone (unbiased); a smaller one relies more on the values (less variance)."""

    gae_lambda_policy: Share | None = None
    """Lambda of the policy's advantages; null: gae_lambda."""

    gae_lambda_value: Share | None = None
    """Lambda of the value model's returns; null: gae_lambda. VAPO takes 1."""

    length_adaptive_alpha: NonNegativeFloat | None = None
    """VAPO: lambda of the policy's advantages = 1 - 1 / (this * response length), at least 0; null and 0 are off."""

    normalize_advantages: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over the tokens in the loss of the step."""


class PPOConfig(SampledLoopConfig):
    """Keys that only PPO has; for algorithm=ppo."""

    num_generations_per_prompt: Positive = 1
    """Responses to each prompt; the value model is the baseline, so one is enough."""

    ppo_epochs: Positive = 1
    """Passes of both optimizers over the samples of a step."""

    policy_training_start_step: NonNegative = 0
    """Steps at the beginning that train only the value model (critic warm-up, value pretraining)."""

    adv_estimator: PPOAdvantageConfig = field(default_factory=PPOAdvantageConfig)

    skip_reference_policy_logprobs_calculation: bool = False
    """Do not load a reference policy. false: load it, and report kl_penalty also where it has no weight in the loss."""

    calculate_advantages_on_gpu: bool = False
    """Estimate advantages on the first GPU of the driver, which a rank uses too, instead of on the CPU."""

    passes_name: ClassVar[str] = "ppo_epochs"


class MseValueLossConfig(Section):
    """MseValueLossFn; docs/algorithms.md has the formula."""

    value_clip: NonNegativeFloat | None = 0.2
    """PPO's value clipping: values gain nothing by moving further than this within a step; null and 0 are off."""

    scale: PositiveFloat = 1.0
    """Factor of the loss, and so of its gradient; the reported loss is without it."""


class RowsLoopConfig(LoopConfig):
    """The training loop of algorithms that learn from rows."""

    passes_name: ClassVar[str] = "max_num_epochs"


class SampledRowsLoopConfig(RowsLoopConfig):
    """The training loop of policies that learn from rows."""

    val_rewards: bool = False
    """Sample responses to the validation prompts and score them, as GRPO does; this starts engines. The held-out loss
    (val_loss) needs none."""


class SFTConfig(SampledRowsLoopConfig):
    """Keys that only supervised fine-tuning has; for algorithm=sft."""

    num_generations_per_prompt: Positive = 1
    """A row is one sequence, so 1."""


class DPOConfig(SampledRowsLoopConfig):
    """Keys that only preference training has; for algorithm=dpo."""

    num_generations_per_prompt: Positive = 2
    """A row is a pair of sequences, so 2."""

    reference_policy_kl_penalty: PositiveFloat = 0.05
    """Strength of the pull towards the reference policy (beta)."""

    loss_type: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    """Loss of a pair: sigmoid as in DPO, the squared distance of IPO, or simpo, which averages log-probabilities over
    tokens and needs no reference policy."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that the responses of a pair are the wrong way round; for loss_type=sigmoid and simpo."""

    target_margin: NonNegativeFloat = 0.5
    """Margin that the chosen response's reward should have (gamma); for loss_type=simpo."""

    preference_loss_weight: NonNegativeFloat = 1.0
    """Weight of the pairs' loss."""

    preference_average_log_probs: bool = False
    """Divide the log-probability of a response by its tokens in the pairs' loss; TRL's ipo does."""

    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of the chosen responses."""

    sft_average_log_probs: bool = False
    """Divide the log-probability of a response by its tokens in that likelihood."""


class KTOConfig(SampledRowsLoopConfig):
    """Keys that only KTO has; for algorithm=kto."""

    num_generations_per_prompt: Positive = 1
    """A row is one sequence, so 1; with data.label_key=null it is a pair, so 2."""

    reference_policy_kl_penalty: PositiveFloat = 0.1
    """Strength of the pull towards the reference policy (beta)."""

    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable responses in the loss. With n_d desirable and n_u other rows, the authors choose the weights
    so that desirable_weight * n_d is 1 to 1.5 times undesirable_weight * n_u."""

    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of the other responses in the loss."""


class RewardTrainingConfig(RowsLoopConfig):
    """Keys that only the training of reward models has; for algorithm=reward_model."""

    num_generations_per_prompt: Positive = 2
    """A row is a pair of sequences, so 2."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores in the loss, which keeps scores near 0 (Eisenstein et al. 2023)."""

    val_rewards: ClassVar[bool] = False


# The loops of algorithms; each has a section of its name, and distillation that of GRPO.
LOOPS: dict[str, type[LoopConfig]] = {
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "reward_model": RewardTrainingConfig,
}


class TeacherModelConfig(FamilySection):
    """The weights of a teacher."""

    path: PathText | None = None
    """Folder or hub name of a model of any family, with the policy's tokenizer; required unless server_url is given."""


class TeacherConfig(Section):
    """A frozen model that scores the tokens which the policy sampled; for algorithm=distillation."""

    model: TeacherModelConfig = field(default_factory=TeacherModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    microbatch_tokens: Positive | None = None
    """Most tokens, padding included, in a forward pass of one data-parallel rank; null: as in the policy's passes for
    log-probabilities."""

    server_url: Address | None = None
    """Address of an OpenAI-compatible vLLM server that has the teacher, http://HOST:PORT: its prompt_logprobs replace
    ranks of the run. Needs distillation.topk_logits_k. null: the run's own ranks have it."""

    api_key_variable: SecretVariable | None = None
    """Environment variable with the API key of server_url; null: it needs none. The run's own token is never sent."""


class DistillationConfig(Section):
    """How the policy is compared with its teacher; GRPO has the loop."""

    topk_logits_k: Positive | None = None
    """Tokens of the teacher at each position, its likeliest; all others are one further entry, the tail. null: the
    teacher's whole distribution, from its hidden states."""

    hint_prompt: str | None = None
    """With algorithm=self_distillation, the text of the teacher's prompt, as in data.prompt_file, which it replaces: {}
    stands for the row's prompt, {NAME} for a column, such as a demonstration or feedback that only the teacher sees."""
