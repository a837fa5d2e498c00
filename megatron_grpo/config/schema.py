"""Every configuration key, its type, default and meaning; conf/ only chooses values for what is declared here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.loop_schema import EarlyStopConfig as EarlyStopConfig
from megatron_grpo.config.loop_schema import LoopConfig as LoopConfig
from megatron_grpo.config.loss_schema import LossConfig as LossConfig
from megatron_grpo.config.ppo_schema import MseValueLossConfig as MseValueLossConfig
from megatron_grpo.config.ppo_schema import PPOConfig as PPOConfig
from megatron_grpo.config.reward_schema import AdvantageEstimatorConfig as AdvantageEstimatorConfig
from megatron_grpo.config.reward_schema import RewardScalingConfig as RewardScalingConfig
from megatron_grpo.config.reward_schema import RewardShapingConfig as RewardShapingConfig
from megatron_grpo.config.section import MISSING as MISSING
from megatron_grpo.config.section import Fraction, NonNegative, Positive, Seconds, Section


@dataclass(kw_only=True)
class ModelConfig(Section):
    """Which model is trained."""

    path: str = MISSING
    """What the policy starts from: a folder in Hugging Face format, or a hub name such as Qwen/Qwen3-8B."""


@dataclass(kw_only=True)
class ParallelConfig(Section):
    """How the policy is laid out over ranks: world size = tensor * pipeline * context * data."""

    tensor: Positive = 1
    """Ranks that split every weight matrix (TP). Must divide attention heads and key/value heads."""

    pipeline: Positive = 1
    """Ranks that split the layers (PP). Must divide the number of layers."""

    context: Positive = 1
    """Ranks that split each sequence (CP)."""

    expert: Positive = 1
    """Ranks that split the experts of a mixture-of-experts model (EP)."""

    data: Positive = 1
    """Replicas of the model, each training on its share of the samples (DP)."""

    sequence: bool = False
    """Also split the activations between tensor-parallel regions along the sequence. Needs tensor > 1."""

    @property
    def world_size(self) -> int:
        """Ranks of the policy."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sequence_multiple(self) -> int:
        """What padded lengths are a multiple of: sequence parallelism splits them over the tensor-parallel ranks."""
        return self.tensor if self.sequence else 1


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""

    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay."""

    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0 to lr."""

    decay_steps: Positive | None = None
    """Optimizer steps until min_lr is reached, warm-up included; null: those of max_num_steps steps."""

    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay, applied to matrices only (not to biases and norms)."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""

    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update."""

    distributed: bool = True
    """Shard optimizer state over data-parallel ranks (Megatron-Core's distributed optimizer, as ZeRO-1)."""


@dataclass(kw_only=True)
class PolicyConfig(Section):
    """The Megatron-Core model that is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; gradients are accumulated and reduced in float32."""

    max_total_sequence_length: Positive = 2048
    """Longest prompt plus response in tokens; generation stops there too."""

    microbatch_tokens: Positive = 8192
    """Most tokens, padding included, in one forward/backward pass of one data-parallel rank."""

    train_global_batch_samples: Positive | None = None
    """Samples of one optimizer step; null: all samples of the step. Must divide them."""

    logprob_microbatch_tokens: Positive | None = None
    """The same for passes that only compute log-probabilities; null: microbatch_tokens."""

    logprob_chunk_size: Positive | None = None
    """Tokens whose log-probabilities are computed at once; smaller needs less memory, null is all at once."""

    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""

    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass instead of keeping them."""

    threads: Positive | None = None
    """CPU threads of each rank; null: the machine's cores shared out evenly. Not used on GPUs."""

    timeout_s: Seconds = 1800.0
    """Deadline of one policy phase (log-probabilities, an optimizer step, a checkpoint) and of its collectives."""


@dataclass(kw_only=True)
class ValueModelConfig(Section):
    """What the value model starts from."""

    path: str | None = None
    """A model of the policy's format, whose value head starts at zero; or a reward model (ForSequenceClassification or
    ForTokenClassification with one label), whose score is the head; null: policy.model.path."""


@dataclass(kw_only=True)
class ValueConfig(Section):
    """The value model of PPO: what is null is as in the policy."""

    model: ValueModelConfig = field(default_factory=ValueModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    precision: Literal["float32", "bfloat16"] | None = None
    """Type of weights and activations."""

    microbatch_tokens: Positive | None = None
    """Most tokens, padding included, in one forward/backward pass of one data-parallel rank."""

    train_global_batch_samples: Positive | None = None
    """Samples of one optimizer step; null: all samples of the step. Must divide them."""

    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""


@dataclass(kw_only=True)
class ReferenceConfig(Section):
    """The frozen reference policy: the starting weights in the policy's layout. Loaded only for a KL penalty."""

    offload: bool = False
    """Keep the reference weights in host memory and move them to the device only while they are needed."""


@dataclass(kw_only=True)
class GenerationParallelConfig(Section):
    """How vLLM is laid out: engines = data, ranks of an engine = tensor * pipeline."""

    tensor: Positive = 1
    """Ranks that split every weight matrix of an engine."""

    pipeline: Positive = 1
    """Ranks that split the layers of an engine."""

    data: Positive = 1
    """Independent engines; prompts are shared out over them."""

    @property
    def ranks_per_engine(self) -> int:
        """Worker processes of one engine."""
        return self.tensor * self.pipeline


@dataclass(kw_only=True)
class EngineConfig(Section):
    """vLLM engine settings."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of weights and activations; null: policy.precision."""

    enforce_eager: bool = False
    """Skip graph capture and compilation: slower tokens, faster start."""

    max_num_seqs: Positive = 256
    """Most sequences decoded together by one engine."""

    gpu_memory_utilization: Fraction = 0.9
    """Share of each GPU's memory an engine may take. Not used on CPU."""

    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Host memory for the KV cache of each rank, CPU only."""

    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prompt beginnings within one weight version."""


@dataclass(kw_only=True)
class GenerationConfig(Section):
    """Sampling from the policy with vLLM."""

    parallel: GenerationParallelConfig = field(default_factory=GenerationParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    max_new_tokens: Positive = 1024
    """Longest response in tokens."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Logits are divided by this, in sampling and in training alike; 0 is greedy."""

    top_p: Fraction = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 is no filter. Training looks at the
    whole distribution, so that with a filter `token_mult_prob_error` is above 1."""

    top_k: Positive | None = None
    """Sample from this many likeliest tokens; null is no filter."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, beside the tokenizer's end-of-text token."""

    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a response."""

    timeout_s: Seconds = 1800.0
    """Deadline of one generation phase."""


@dataclass(kw_only=True)
class RefitConfig(Section):
    """Moving the policy's weights into generation after every optimizer step."""

    bucket_mib: Annotated[float, Field(gt=0)] = 256.0
    """Size of the buffer that tensors are packed into before they are sent."""

    timeout_s: Seconds = 600.0
    """Deadline of one refit; past it the run stops with an error that names the ranks that are missing."""


@dataclass(kw_only=True)
class GRPOConfig(LoopConfig):
    """The training loop of GRPO; read with algorithm=grpo."""

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of rewards."""

    normalize_rewards_over: Literal["group", "batch"] = "group"
    """Rewards whose standard deviation that is: of the sample's group, or of all samples of the step."""

    use_leave_one_out_baseline: bool = True
    """Baseline of a sample: mean reward of the *other* samples of its group (true) or of the whole group (false)."""

    adv_estimator: AdvantageEstimatorConfig = field(default_factory=AdvantageEstimatorConfig)

    num_iterations: Positive = 1
    """Passes of the optimizer over the samples of a step (mu)."""


@dataclass(kw_only=True)
class DataConfig(Section):
    """Prompts."""

    train_path: str = MISSING
    """JSONL file of training rows."""

    val_path: str | None = None
    """JSONL file of validation rows; null: no validation."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    answer_key: str | None = "answer"
    """Column with the reference answer that the environment gets; null: there is none, for reward functions."""

    task_name: str = "math"
    """Environment of rows that have no task_name column."""

    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template (true) or use the text as it is (false)."""

    system_prompt: str | None = None
    """System message put before every prompt; needs apply_chat_template."""

    max_input_seq_length: Positive = 1024
    """Rows whose prompt has more tokens are left out, and counted."""

    shuffle: bool = True
    """Visit training rows in an order drawn anew each epoch."""


@dataclass(kw_only=True)
class EnvironmentConfig(Section):
    """One environment: what scores the responses."""

    type: Literal["math", "addition", "reward_functions"] = "math"
    """math: math-verify compares the final answers; addition: the response is exactly the digits of the answer;
    reward_functions: the functions in reward_funcs."""

    reward_funcs: list[str] = field(default_factory=list)
    """Functions by import path (package.module.function), called with prompts, completions and the data's columns."""

    reward_weights: list[float] | None = None
    """Weight of each function's reward in the sum; null: 1 each."""

    correct_func: str | None = None
    """Name of the function in reward_funcs whose reward above 0 makes a response correct (accuracy, imitation); null:
    the only function there is. With several and null, nothing says what is correct, and no response counts as such."""

    num_workers: Positive = 1
    """Ray actors that score in parallel."""

    timeout_s: Seconds = 60.0
    """Deadline for scoring one batch."""

    def weights_by_function(self) -> dict[str, float]:
        """Weight of each reward function, by the last part of its path."""
        names = [path.rpartition(".")[2] for path in self.reward_funcs]
        return dict(zip(names, self.reward_weights or [1.0] * len(names), strict=False))

    def correctness_function(self) -> str | None:
        """The reward function that says whether a response is correct."""
        names = list(self.weights_by_function())
        return names[0] if self.correct_func is None and len(names) == 1 else self.correct_func


@dataclass(kw_only=True)
class ClusterConfig(Section):
    """The machines of the run."""

    num_nodes: Positive = 1
    """Machines."""

    gpus_per_node: NonNegative = 0
    """GPUs of each machine; 0: run on CPU."""

    ray_address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine that ends with the run."""

    startup_timeout_s: Seconds = 900.0
    """Deadline for all processes to be up."""

    peak_tflops_per_device: Annotated[float, Field(gt=0)] | None = None
    """Peak of one policy rank's device, for model_flop_utilization; null: known for common GPUs, else not reported."""


@dataclass(kw_only=True)
class CheckpointingConfig(Section):
    """Checkpoints under run_dir/checkpoints/step_N."""

    enabled: bool = True
    """Whether checkpoints are written."""

    save_period: Positive = 10
    """Steps between checkpoints; the last step is always saved."""

    keep_top_k: Positive | None = None
    """Checkpoints kept, best by metric_name first; the newest is always kept. null keeps all."""

    metric_name: str = "val_accuracy"
    """Metric that ranks checkpoints."""

    higher_is_better: bool = True
    """Direction of metric_name."""

    resume: str = "auto"
    """auto: the newest complete checkpoint of run_dir, if any; none: start over; else the path of a checkpoint."""


@dataclass(kw_only=True)
class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = False
    """Whether metrics go to W&B (needs the wandb package)."""

    project: str = "megatron_grpo"
    """Project name."""

    name: str | None = None
    """Run name; null: the name of the run directory."""


@dataclass(kw_only=True)
class LoggerConfig(Section):
    """What is reported where; metrics.jsonl, summary.json and the plot are always written."""

    tensorboard: bool = True
    """Write TensorBoard events to run_dir/tensorboard."""

    wandb: WandbConfig = field(default_factory=WandbConfig)

    num_val_samples_to_print: NonNegative = 5
    """Validation responses printed each time."""

    progress: bool = True
    """Show the live progress line."""


@dataclass(kw_only=True)
class PrepareConfig(Section):
    """Model and data made before the run, for recipes that need no download."""

    name: Literal["addition"] | None = None
    """addition: a tiny Qwen3 that adds two-digit numbers with about 30% accuracy, and its problems; null: nothing."""

    folder: str = "${oc.env:MEGATRON_GRPO_CACHE,${oc.env:HOME,.}/.cache/megatron_grpo}/${prepare.name}"
    """Where it is made, once; later runs reuse it."""


@dataclass(kw_only=True)
class Config(Section):
    """One run."""

    algorithm: Literal["grpo", "ppo"] = "grpo"
    """What trains the policy: grpo compares the samples of a prompt, ppo asks a value model. Each reads the section of
    its name."""

    name: str = "grpo"
    """Name of the recipe; the first folder under outputs/."""

    run_dir: str = "outputs/${name}/${now:%Y-%m-%d_%H-%M-%S}"
    """Folder of everything the run writes. One that already holds this run resumes it."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    value_loss_fn: MseValueLossConfig = field(default_factory=MseValueLossConfig)
    env: dict[str, EnvironmentConfig] = field(default_factory=lambda: {"math": EnvironmentConfig()})
    """Environments by task name."""

    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)

    @property
    def loop(self) -> LoopConfig:
        """The section of the algorithm that runs."""
        return self.ppo if self.algorithm == "ppo" else self.grpo

    @property
    def value_model(self) -> PolicyConfig | None:
        """The value model as its ranks build and train it; None: the algorithm has none."""
        if self.algorithm != "ppo":
            return None
        value, policy = self.value, self.policy
        return replace(
            policy,
            model=ModelConfig(path=value.model.path or policy.model.path),
            parallel=value.parallel,
            optimizer=value.optimizer,
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
        """Prompts sampled together."""
        return int(self.loop.num_prompts_per_step * self.loop.batch_multiplier)

    @property
    def passes_per_step(self) -> int:
        """Passes of the optimizer over the samples of a step."""
        return self.ppo.ppo_epochs if self.algorithm == "ppo" else self.grpo.num_iterations

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps of the policy on the samples of one step."""
        return self._optimizer_steps(self.policy)

    @property
    def decay_steps(self) -> int:
        """Optimizer steps of the policy's learning-rate schedule."""
        waiting = self.ppo.policy_training_start_step if self.algorithm == "ppo" else 0
        steps = max(self.loop.max_num_steps - waiting, 1)
        return self.policy.optimizer.decay_steps or steps * self.optimizer_steps_per_step

    @property
    def value_decay_steps(self) -> int:
        """Optimizer steps of the value model's learning-rate schedule."""
        assert self.value_model is not None
        return self.value.optimizer.decay_steps or self.loop.max_num_steps * self._optimizer_steps(self.value_model)

    def _optimizer_steps(self, model: PolicyConfig) -> int:
        samples = self.samples_per_step
        return self.passes_per_step * -(-samples // (model.train_global_batch_samples or samples))
