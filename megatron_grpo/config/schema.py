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
from megatron_grpo.config.distillation_schema import DistillationConfig, TeacherConfig
from megatron_grpo.config.generation_schema import GenerationConfig, RefitConfig, RolloutsConfig
from megatron_grpo.config.loop_schema import (
    LOOPS,
    VALIDATION_PREFIX,
    AsyncGRPOConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    LoopConfig,
    MseValueLossConfig,
    PPOConfig,
    RewardTrainingConfig,
    SampledLoopConfig,
    SFTConfig,
)
from megatron_grpo.config.loss_schema import AdvantageEstimatorConfig, LossConfig, RewardScalingConfig
from megatron_grpo.config.policy_schema import (
    Fp8Config,
    LoraConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
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
    """Name of the recipe; the first folder under outputs/."""

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
        return find_algorithm(self.algorithm)

    @property
    def training_loop(self) -> LoopConfig:
        """The loop of the run, which has the section of its algorithm."""
        section = getattr(self, self.loop_name)
        assert isinstance(section, LoopConfig), "every run has the loop of its algorithm"
        return section

    @property
    def sampled_loop(self) -> SampledLoopConfig:
        """The loop of a run that learns from samples."""
        loop = self.training_loop
        assert isinstance(loop, SampledLoopConfig), f"algorithm={self.algorithm} learns from rows"
        return loop

    @property
    def async_sampling(self) -> AsyncGRPOConfig:
        """Sampling while a step trains; off in a run that learns from rows."""
        loop = self.training_loop
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

    def find_teacher(self, task: str) -> str:
        """Find the section of a task's teacher."""
        return f"teachers.{task}" if task in self.teachers else "teacher"

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
    def most_sampled_tokens(self) -> int:
        """Most tokens that the model may sample in a rollout, over its turns."""
        turns = self.training_loop.max_rollout_turns
        longest = self.generation.max_new_tokens
        return longest if turns == 1 else min(turns * longest, self.policy.max_total_sequence_length)

    @property
    def needs_generation(self) -> bool:
        """True if responses are sampled, for steps or only for validation."""
        return self.reads_prompts and getattr(self.training_loop, "val_rewards", True)

    @property
    def reads_prompts(self) -> bool:
        """True if rows of the data are used, not recorded steps."""
        return self.debug.rollouts_from is None

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the engines' weights and activations."""
        return self.generation.engine.dtype or self.policy.precision

    @property
    def coarsest_precision(self) -> Literal["float32", "tf32", "bfloat16", "8 bits"]:
        """Precision that limits how well policy and engines agree."""
        policy, arguments = self.policy, self.generation.engine_args
        in_fp8 = policy.fp8.format != "off" or policy.fp8.simulate
        cache_in_8_bits = str(arguments.get("kv_cache_dtype", "auto")).startswith(("fp8", "int8"))
        if in_fp8 or policy.quantization or arguments.get("quantization") or cache_in_8_bits:
            return "8 bits"
        if "bfloat16" in (policy.precision, self.engine_dtype):
            return "bfloat16"
        # On GPUs and servers attention may multiply float32 numbers with 10 bits of mantissa.
        on_cpu = self.cluster.gpus_per_node == 0 and not self.generation.server.urls
        return "float32" if on_cpu else "tf32"

    def find_prob_error_limit(self, age: int) -> float | None:
        """Find the largest token_mult_prob_error of a step that training accepts; None: any.

        `age` counts updates between the weights that drew the oldest token and the weights that train on it.
        """
        limit = self.refit.prob_error_limit
        # The default is for tokens that both sides compute in the same way from the same weights.
        is_comparable = age == 0 and not self.generation.has_unmatched_sampling
        is_default = limit == RefitConfig().prob_error_limit
        return limit if self.needs_generation and (is_comparable or not is_default) else None

    @property
    def environment_types(self) -> dict[str, str]:
        """Type of each environment, by task name."""
        return {name: environment.type for name, environment in self.env.items()}

    def find_row_kinds(self, *, trains: bool) -> dict[str, str]:
        """Find the required kind of each task's rows, for training or sampling.

        The kind is the type of the environment that scores the responses, or that of the rows to learn from.
        """
        kind = self.row_kind if trains else None
        return dict.fromkeys(self.env, kind) if kind else self.environment_types

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
    def ranked_checkpointing(self) -> CheckpointingConfig:
        """Settings of checkpoints, ranked by reward where the run lacks the default."""
        settings, loop = self.checkpointing, self.training_loop
        validates = self.data.validation_sets and (loop.val_period or loop.val_at_start or loop.val_at_end)
        is_default = settings.metric_name == CheckpointingConfig().metric_name
        if is_default and self.method.rows and not self.needs_generation:
            return replace(settings, metric_name="val_loss" if validates else "loss", higher_is_better=False)
        if is_default and self.env and not self.method.rows and not self.has_correctness:
            return replace(settings, metric_name="val_reward" if validates else "reward", higher_is_better=True)
        if validates or settings.metric_name is None or not settings.metric_name.startswith(VALIDATION_PREFIX):
            return settings
        return replace(settings, metric_name="reward", higher_is_better=True)

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
        is_needed_earlier = self.sampled_loop.seq_logprob_error_threshold is not None or self.loss_fn.use_kl_in_reward
        return self.optimizer_steps_per_step > 1 or is_needed_earlier

    @property
    def imitates_environment(self) -> bool:
        """True if the loss imitates the environment's tokens."""
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
            precision=value.precision or policy.precision,
            microbatch_tokens=value.microbatch_tokens or policy.microbatch_tokens,
            logprob_microbatch_tokens=value.microbatch_tokens or policy.logprob_microbatch_tokens,
            train_global_batch_samples=value.train_global_batch_samples,
            max_grad_norm=value.max_grad_norm,
        )

    @property
    def samples_per_step(self) -> int:
        """Responses that one step trains on."""
        return self.training_loop.num_prompts_per_step * self.training_loop.num_generations_per_prompt

    @property
    def prompts_per_generation_batch(self) -> int:
        """Prompts that are sampled together."""
        loop = self.training_loop
        # In decimal fractions, because 100 * 1.15 is below 115 in floating point.
        multiplier = Fraction(str(loop.batch_multiplier)) if isinstance(loop, SampledLoopConfig) else 1
        return int(loop.num_prompts_per_step * multiplier)

    @property
    def can_lack_rewards(self) -> bool:
        """True if a reward function may raise without failing its rollout."""
        return any(task.on_reward_error == "none" for task in self.env.values())

    @property
    def has_correctness(self) -> bool:
        """True if some environment knows which responses are correct."""
        return any(task.has_correctness for task in self.env.values())

    @property
    def passes_per_step(self) -> int:
        """Passes of the optimizer over the samples of a step."""
        loop = self.training_loop
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
        return self.training_loop.policy_training_start_step if isinstance(self.training_loop, PPOConfig) else 0

    @property
    def decay_steps(self) -> int:
        """Optimizer steps of the policy's learning-rate schedule."""
        # Steps that train only the value model take nothing from the policy's schedule.
        steps = max(self.training_loop.max_num_steps - self.steps_without_policy, 1)
        return self.policy.optimizer.decay_steps or steps * self.optimizer_steps_per_step

    @property
    def value_decay_steps(self) -> int:
        """Optimizer steps of the value model's learning-rate schedule."""
        steps = self.training_loop.max_num_steps * self.value_optimizer_steps_per_step
        return self.value.optimizer.decay_steps or steps

    def _count_optimizer_steps(self, batch_samples: int | None) -> int:
        samples = self.samples_per_step
        return self.passes_per_step * -(-samples // (batch_samples or samples))
