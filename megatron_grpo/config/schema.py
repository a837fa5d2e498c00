"""The schema of a run: its top level; the sections are in the `*_schema.py` files.

conf/ only chooses values for the keys that are declared in them.
"""

# ruff: noqa: F401

from __future__ import annotations

from dataclasses import field, replace
from fractions import Fraction
from typing import Annotated, Literal, TypeVar

from annotated_types import Predicate

from megatron_grpo.config.algorithms import (
    ALGORITHMS,
    Algorithm,
    find_algorithm,
    find_known_section,
    is_algorithm_name,
)
from megatron_grpo.config.chord_schema import ChordConfig
from megatron_grpo.config.data_schema import (
    LABELLED,
    PREFERENCE,
    SCORED,
    SUPERVISED,
    DataConfig,
    EnvironmentConfig,
    SandboxConfig,
)
from megatron_grpo.config.generation_schema import GenerationConfig, RefitConfig, RolloutsConfig
from megatron_grpo.config.launch_schema import LaunchConfig
from megatron_grpo.config.loop_schema import (
    LOOPS,
    AsyncGRPOConfig,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    LoopConfig,
    MseValueLossConfig,
    PPOConfig,
    RewardTrainingConfig,
    SampledLoopConfig,
    SFTConfig,
    TeacherConfig,
)
from megatron_grpo.config.loss_schema import AdvantageEstimatorConfig, LossConfig, RewardScalingConfig
from megatron_grpo.config.optimizer_schema import OptimizerConfig
from megatron_grpo.config.policy_schema import (
    Fp8Config,
    LoraConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    PolicyConfig,
    QuantizationFormat,
    ReferenceConfig,
    ValueConfig,
)
from megatron_grpo.config.run_schema import (
    CheckpointingConfig,
    ClusterConfig,
    DebugConfig,
    LoggerConfig,
    PlanConfig,
    PrepareConfig,
)
from megatron_grpo.config.section import IMPORTS, MISSING, PathText, Section, Starts

T = TypeVar("T")
# The loop of an algorithm; None in runs of the others, which do not have it. No file may say null.
LoopSection = Annotated[T | None, Predicate(lambda section: section is not None)]


AlgorithmName = Annotated[
    str,
    Predicate(is_algorithm_name),
    f"one of {', '.join(ALGORITHMS)}, module:NAME",
    Starts(IMPORTS, ALGORITHMS.__contains__),
]


class Config(Section):
    """The configuration of one run."""

    algorithm: AlgorithmName = "grpo"
    """grpo compares the samples of a prompt, ppo uses a value model, sft learns the responses of rows, dpo pairs of
    responses, kto single responses with a label, reward_model scores of pairs. In grpo's loop, distillation follows a
    teacher, self_distillation the policy with a hint, and chord learns demonstrations besides. Each has a section of
    its name. One of your own is module:NAME (docs/extending.md)."""

    name: str = "grpo"
    """Name of the recipe, and of the first folder under outputs/; on a command line without a recipe that of the
    algorithm."""

    run_dir: PathText = "outputs/${name}/${now:%Y-%m-%d_%H-%M-%S}"
    """Folder of everything that the run writes. In the folder of an earlier start the run resumes."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers of single tasks, by the name of the task; other tasks have `teacher`."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    grpo: LoopSection[GRPOConfig] = None
    ppo: LoopSection[PPOConfig] = None
    sft: LoopSection[SFTConfig] = None
    dpo: LoopSection[DPOConfig] = None
    kto: LoopSection[KTOConfig] = None
    reward_model: LoopSection[RewardTrainingConfig] = None
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    chord: ChordConfig = field(default_factory=ChordConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    value_loss_fn: MseValueLossConfig = field(default_factory=MseValueLossConfig)
    env: dict[str, EnvironmentConfig] = field(default_factory=lambda: {"math": EnvironmentConfig()})
    """Environments by task name."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        # A recorded algorithm may be code that nobody trusts, so it is not imported: its loop is the one that is set.
        recorded = next((loop for loop in LOOPS if getattr(self, loop) is not None), "grpo")
        section = find_known_section(self.algorithm) or recorded
        if getattr(self, section) is None:
            setattr(self, section, LOOPS[section]())

    @property
    def method(self) -> Algorithm:
        """The algorithm that runs."""
        return find_algorithm(self.algorithm, self.run_dir)

    @property
    def loop(self) -> LoopConfig:
        """The loop of the run, which has the section of its algorithm."""
        section = getattr(self, self.loop_name)
        assert isinstance(section, LoopConfig), "every run has the loop of its algorithm"
        return section

    @property
    def sampled_loop(self) -> SampledLoopConfig:
        """The loop of a run that learns from samples."""
        loop = self.loop
        assert isinstance(loop, SampledLoopConfig), f"algorithm={self.algorithm} learns from rows"
        return loop

    @property
    def async_sampling(self) -> AsyncGRPOConfig:
        """Sampling while a step trains; off in a run that learns from rows."""
        loop = self.loop
        return loop.async_grpo if isinstance(loop, SampledLoopConfig) else AsyncGRPOConfig()

    @property
    def loop_name(self) -> str:
        """Section of the algorithm's loop; distillation has that of GRPO."""
        return self.method.section

    @property
    def uses_rewards(self) -> bool:
        """True if the policy learns from rewards; distillation alone does without."""
        return self.method.uses_rewards(self)

    @property
    def named_teachers(self) -> dict[str, TeacherConfig]:
        """Teachers of the run, by their section; empty: the algorithm has none."""
        if "teachers" not in self.method.models:
            return {}
        has_common = any(task not in self.teachers for task in self.env) or not self.teachers
        return ({"teacher": self.teacher} if has_common else {}) | {
            f"teachers.{task}": teacher for task, teacher in self.teachers.items()
        }

    @property
    def teacher_models(self) -> dict[str, PolicyConfig]:
        """Settings of the teachers' ranks, by section; servers have none."""
        policy = self.policy
        return {
            section: replace(
                policy,
                model=ModelConfig(path=teacher.model.path or MISSING),
                parallel=teacher.parallel,
                lora=LoraConfig(),
                fp8=Fp8Config(),
                moe=MoeConfig(),
                quantization=None,
                logprob_microbatch_tokens=teacher.microbatch_tokens or policy.logprob_microbatch_tokens,
            )
            for section, teacher in self.named_teachers.items()
            if teacher.server_url is None
        }

    @property
    def families(self) -> dict[str, str]:
        """Families of the user's code, by key."""
        models = {"policy": self.policy.model, "value": self.value.model}
        sections = models | {section: teacher.model for section, teacher in self.named_teachers.items()}
        return {f"{name}.model.family": model.family for name, model in sections.items() if model.family is not None}

    @property
    def most_sampled_tokens(self) -> int:
        """Most tokens that the model may sample in a rollout, over its turns."""
        turns = self.loop.max_rollout_turns
        longest = self.generation.max_new_tokens
        return longest if turns == 1 else min(turns * longest, self.policy.max_total_sequence_length)

    @property
    def needs_generation(self) -> bool:
        """True if responses are sampled, for steps or only for validation."""
        samples = not self.method.rows or (getattr(self.loop, "val_rewards", False) and self.data.validation_sets)
        return self.reads_prompts and bool(samples)

    @property
    def reads_prompts(self) -> bool:
        """True if rows of the data are used, not recorded steps."""
        return self.debug.rollouts_from is None

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the engines' weights and activations."""
        return self.generation.engine.dtype or self.policy.precision

    @property
    def teaches_itself(self) -> bool:
        """True if the policy is its own teacher."""
        return self.method.has_read("distillation.hint_prompt")

    @property
    def demonstration_config(self) -> Config | None:
        """Settings that demonstrations are read with; None: no demonstrations."""
        if not self.method.has_section("chord"):
            return None
        data = replace(
            self.data,
            train_path=self.chord.train_path or MISSING,
            train_split=self.chord.train_split,
            response_key=self.chord.response_key,
            processor=None,
            train_sets={},
            from_rollouts=None,
        )
        return replace(self, algorithm="sft", data=data)

    @property
    def row_kind(self) -> str | None:
        """Kind of the rows; None: the run samples."""
        kind = self.method.rows
        return PREFERENCE if kind == LABELLED and self.data.label_key is None else kind

    @property
    def has_pairs(self) -> bool:
        """True if rows are pairs of responses."""
        return self.row_kind in (PREFERENCE, SCORED)

    @property
    def has_checkpoints(self) -> bool:
        """True if the run writes checkpoints."""
        return self.checkpointing.enabled and self.debug.train

    @property
    def uses_reference(self) -> bool:
        """True if a reference policy is loaded."""
        return self.method.needs_reference(self)

    @property
    def needs_prev_logprobs(self) -> bool:
        """True if a separate pass computes log-probabilities before training."""
        if self.method.rows:
            return self.method.rows != SUPERVISED  # whole responses are compared before they are learnt
        # A single optimizer step on the samples computes them itself, unless an option needs them earlier.
        is_filtered = self.sampled_loop.seq_logprob_error_threshold is not None
        is_needed_earlier = is_filtered or self.loss_fn.use_kl_in_reward or self.loss_fn.selects_by_covariance
        return self.optimizer_steps_per_step > 1 or is_needed_earlier

    @property
    def needs_entropies(self) -> bool:
        """True if a separate pass computes entropies before training."""
        return not self.method.rows and self.loss_fn.selection == "highest_entropy"

    @property
    def needs_score_sizes(self) -> bool:
        """True if two passes compute the sizes of gradients by logits."""
        return isinstance(self.loop, GRPOConfig) and self.loop.adv_estimator.needs_score_sizes

    @property
    def policy_passes(self) -> int:
        """Forward passes of a step's samples through the policy before it learns."""
        # KTO also computes the log-probabilities of as many responses to other prompts.
        logprobs = self.needs_prev_logprobs * (2 if isinstance(self.loop, KTOConfig) else 1)
        return logprobs + self.needs_entropies + 2 * self.needs_score_sizes

    @property
    def imitates_environment(self) -> bool:
        """True if the loss has the environment's tokens."""
        return self.method.has_read("loss_fn.environment_nll_weight") and self.loss_fn.environment_nll_weight > 0

    @property
    def value_model(self) -> PolicyConfig | None:
        """Settings of the value model's ranks; None: the algorithm has none."""
        if not self.method.has_value_model:
            return None
        value, policy = self.value, self.policy
        return replace(
            policy,
            model=ModelConfig(path=value.model.path or policy.model.path),
            parallel=value.parallel,
            optimizer=value.optimizer,
            lora=LoraConfig(),
            fp8=Fp8Config(),
            quantization=None,
            train_vision_tower=False,
            precision=value.precision or policy.precision,
            microbatch_tokens=value.microbatch_tokens or policy.microbatch_tokens,
            logprob_microbatch_tokens=value.microbatch_tokens or policy.logprob_microbatch_tokens,
            train_global_batch_samples=value.train_global_batch_samples,
            max_grad_norm=value.max_grad_norm,
        )

    @property
    def samples_per_step(self) -> int:
        """Responses that one step trains on."""
        return self.loop.num_prompts_per_step * self.loop.num_generations_per_prompt

    @property
    def prompts_per_generation_batch(self) -> int:
        """Prompts that are sampled together."""
        loop = self.loop
        # In decimal fractions, because 100 * 1.15 is below 115 in floating point.
        multiplier = Fraction(str(loop.batch_multiplier)) if isinstance(loop, SampledLoopConfig) else 1
        return int(loop.num_prompts_per_step * multiplier)

    @property
    def has_correctness(self) -> bool:
        """True if some environment knows which responses are correct."""
        return any(task.has_correctness for task in self.env.values())

    @property
    def passes_per_step(self) -> int:
        """Passes of the optimizer over the samples of a step."""
        loop = self.loop
        return 1 if self.method.rows else int(getattr(loop, loop.passes_name))

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps of the policy on the samples of one step."""
        return self._count_optimizer_steps(self.policy.train_global_batch_samples)

    @property
    def value_optimizer_steps_per_step(self) -> int:
        """Optimizer steps of the value model on one step's samples."""
        return self._count_optimizer_steps(self.value.train_global_batch_samples)

    @property
    def steps_without_policy(self) -> int:
        """Steps at the beginning in which the policy does not learn."""
        return self.loop.policy_training_start_step if isinstance(self.loop, PPOConfig) else 0

    @property
    def decay_steps(self) -> int:
        """Optimizer steps of the policy's learning-rate schedule."""
        # Steps that train only the value model take nothing from the policy's schedule.
        steps = max(self.loop.max_num_steps - self.steps_without_policy, 1)
        return self.policy.optimizer.decay_steps or steps * self.optimizer_steps_per_step

    @property
    def value_decay_steps(self) -> int:
        """Optimizer steps of the value model's learning-rate schedule."""
        return self.value.optimizer.decay_steps or self.loop.max_num_steps * self.value_optimizer_steps_per_step

    def _count_optimizer_steps(self, batch_samples: int | None) -> int:
        samples = self.samples_per_step
        return self.passes_per_step * -(-samples // (batch_samples or samples))
