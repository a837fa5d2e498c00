"""The keys of the models that are trained: layout, optimizer, batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import MISSING, NonNegative, Positive, Seconds, Section


@dataclass(kw_only=True)
class ModelConfig(Section):
    """Which model is trained."""

    path: str = MISSING
    """What the policy starts from: a folder in Hugging Face format, or a hub name such as Qwen/Qwen3-8B."""


@dataclass(kw_only=True)
class ParallelConfig(Section):
    """How a model is laid out over ranks: world size = tensor * pipeline * context * data."""

    tensor: Positive = 1
    """Ranks that split every weight matrix (TP). Must divide the attention heads; and divide the key/value heads, or be
    a multiple of them."""

    pipeline: Positive = 1
    """Ranks that split the layers (PP)."""

    virtual_pipeline: Positive = 1
    """Parts of the model on each pipeline rank, which microbatches pass in turn (interleaved pipeline, VPP): the
    pipeline fills and empties sooner, and ranks send more often. Needs pipeline > 1."""

    first_stage_layers: Positive | None = None
    """Layers of the first pipeline rank, when it is not to have as many as the others: it has the embedding too."""

    last_stage_layers: Positive | None = None
    """Layers of the last pipeline rank, when it is not to have as many as the others: it has the head too."""

    count_embedding: bool = False
    """Count the embedding as a layer when layers are split over the pipeline: the first rank gets one less."""

    count_loss: bool = False
    """Count the head and the loss as a layer when layers are split over the pipeline: the last rank gets one less."""

    context: Positive = 1
    """Ranks that split each sequence (CP)."""

    expert: Positive = 1
    """Ranks that share the experts of a mixture-of-experts model (EP): ranks of tensor * context * data."""

    expert_tensor: Positive = 1
    """Ranks that split every matrix of an expert (ETP). expert * expert_tensor must divide tensor * context * data."""

    data: Positive = 1
    """Replicas of the model, each training on its share of the samples (DP)."""

    sequence: bool = False
    """Also split the activations between tensor-parallel regions along the sequence. Needs tensor > 1; a mixture of
    experts with tensor > 1 needs it."""

    @property
    def world_size(self) -> int:
        """Ranks of the model."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def chunk_multiple(self) -> int:
        """What the tokens of a packed sequence are a multiple of: two chunks for each context-parallel rank."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def sequence_multiple(self) -> int:
        """What the widths of rectangles are a multiple of: sequence parallelism also splits what a rank holds."""
        return self.chunk_multiple * (self.tensor if self.sequence else 1)


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
class MoeConfig(Section):
    """How the experts of a mixture-of-experts model are chosen and kept in use; off, as reinforcement learning mostly
    has it."""

    aux_loss_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss: of every layer, the level of experts over each sequence (1 when all are chosen
    equally often), averaged over the sequences of an optimizer step."""

    z_loss_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-sum of the router's exponentials (ST-MoE), averaged over the tokens of each sequence,
    then over sequences; summed over layers."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """How far an optimizer step moves the bias with which experts are chosen, towards those that were chosen too
    rarely. Of models with such a bias (DeepSeek-V3) only."""

    replay_routing: bool = False
    """Send each token through the experts that the engine chose while it sampled (R3, arXiv 2510.11370), in
    prev_logprobs and in training. The router still weighs them, and learns; the reference policy chooses for itself."""


@dataclass(kw_only=True)
class PolicyConfig(Section):
    """The Megatron-Core model that is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)

    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; gradients are accumulated and reduced in float32."""

    max_total_sequence_length: Positive = 2048
    """Longest prompt plus response in tokens; generation stops there too."""

    packing: bool = True
    """Lay the sequences of a microbatch end to end; false pads each to the longest of its microbatch."""

    microbatch_tokens: Positive = 8192
    """Most tokens, padding included, in one forward/backward pass of one data-parallel rank."""

    train_global_batch_samples: Positive | None = None
    """Samples of one optimizer step; null: all samples of the step. Must divide them."""

    logprob_microbatch_tokens: Positive | None = None
    """Most tokens of a microbatch, padding included, in passes that only compute log-probabilities; null:
    microbatch_tokens."""

    logprob_kernel: Literal["fused", "chunked", "auto"] = "auto"
    """How hidden states become log-probabilities: fused in Triton, in chunks of tokens in torch; auto: fused on GPUs
    where Triton is installed."""

    logprob_chunk_size: Positive | None = None
    """Tokens whose logits the chunked kernel holds at once; smaller needs less memory, null: as many as make 256 MiB of
    float32."""

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
    """The value model of PPO."""

    model: ValueModelConfig = field(default_factory=ValueModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    precision: Literal["float32", "bfloat16"] | None = None
    """Type of weights and activations; null: as in the policy."""

    microbatch_tokens: Positive | None = None
    """Most tokens, padding included, in one forward/backward pass of one data-parallel rank; null: as in the policy."""

    train_global_batch_samples: Positive | None = None
    """Samples of one optimizer step; null: all samples of the step, whatever the policy has. Must divide them."""

    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""


@dataclass(kw_only=True)
class ReferenceConfig(Section):
    """The frozen reference policy: the starting weights in the policy's layout. GRPO loads it for a KL penalty only,
    PPO also to report the distance to it."""

    offload: bool = False
    """Keep the reference weights in host memory and move them to the device only while they are needed."""
