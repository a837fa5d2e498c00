"""The keys of the models that are trained."""

from __future__ import annotations

from dataclasses import field
from typing import Literal, get_args

from megatron_grpo.config.adapter_targets import AdapterTargets, MainTarget
from megatron_grpo.config.optimizer_schema import OptimizerConfig
from megatron_grpo.config.section import (
    MISSING,
    FamilyPath,
    MegatronFields,
    NonNegative,
    NonNegativeFloat,
    PathText,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
)


class ParallelConfig(Section):
    """Layout of a model: tensor * pipeline * context * data ranks."""

    tensor: Positive = 1
    """Ranks that split every weight matrix (TP). Must divide the attention heads, and divide or be a multiple of the
    key/value heads."""

    pipeline: Positive = 1
    """Ranks that split the layers (PP)."""

    virtual_pipeline: Positive = 1
    """Model chunks on each pipeline rank (VPP): a smaller bubble, but more messages. Needs pipeline > 1."""

    first_stage_layers: Positive | None = None
    """Layers of the first pipeline rank, which also has the embedding; null: as many as the other ranks have."""

    last_stage_layers: Positive | None = None
    """Layers of the last pipeline rank, which also has the head; null: as many as the other ranks have."""

    count_embedding: bool = False
    """Count the embedding as a layer of the pipeline, so that the first rank gets one layer less."""

    count_loss: bool = False
    """Count the head and the loss as a layer of the pipeline, so that the last rank gets one layer less."""

    context: Positive = 1
    """Ranks that split each sequence (CP)."""

    expert: Positive = 1
    """Ranks that share the experts of a mixture-of-experts model (EP): ranks of tensor * context * data."""

    expert_tensor: Positive = 1
    """Ranks that split every matrix of an expert (ETP). expert * expert_tensor must divide tensor * context * data."""

    data: Positive = 1
    """Replicas of the model, each of which trains on its share of the samples (DP)."""

    sequence: bool = False
    """Also split the activations between tensor-parallel regions. Needs tensor > 1; experts with tensor > 1 need it."""

    @property
    def world_size(self) -> int:
        """Ranks of the model."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def chunk_multiple(self) -> int:
        """Divisor of the length of a packed sequence."""
        # Context parallelism splits a sequence into two chunks a rank.
        return 2 * self.context if self.context > 1 else 1

    @property
    def sequence_multiple(self) -> int:
        """Divisor of the width of a padded microbatch."""
        # Sequence parallelism also splits the share of each context-parallel rank.
        return self.chunk_multiple * (self.tensor if self.sequence else 1)


class FamilySection(Section):
    """How a model's folder is read."""

    family: FamilyPath | None = None
    """Family of your own that reads the model, in each process of the run (docs/extending.md); null: one of the
    package, by config.json."""


class ModelConfig(FamilySection):
    """The model that is trained."""

    path: PathText = MISSING
    """Model that the policy starts from: a folder in Hugging Face format, a hub name such as Qwen/Qwen3-8B, or a
    checkpoint RUN_DIR/checkpoints/step_N (or best, latest)."""


class MoeConfig(Section):
    """Routing of mixture-of-experts models; all off by default."""

    aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss: of each layer, the imbalance of experts within each sequence (1 when all are
    chosen equally often), averaged over the sequences of an optimizer step."""

    z_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the z-loss (ST-MoE): the squared log-sum-exp of the router's logits, averaged over the tokens of each
    sequence, then over sequences; summed over layers."""

    bias_update_rate: NonNegativeFloat = 0.0
    """Change of the router's expert bias (DeepSeek-V3) per optimizer step, towards rarely chosen experts."""

    replay_routing: bool = False
    """Send each token through the experts that the engine chose while it sampled (R3, arXiv 2510.11370), in
    prev_logprobs and training. The router still learns; the reference policy chooses itself."""

    freeze_router: bool = False
    """Leave the routers' weights and biases as they are in the model; everything else is trained."""


QuantizationFormat = Literal["int8", "fp8"]
RecomputeModule = Literal["core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj"]


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the model's weights (LoRA)."""

    rank: NonNegative = 0
    """Rows of each adapter's A, and columns of its B; 0: no adapters, and all weights are trained."""

    alpha: PositiveFloat = 32.0
    """Scale of an adapter: its output is multiplied by alpha / rank."""

    target_modules: AdapterTargets = field(default_factory=lambda: list(get_args(MainTarget)))
    """Layers with an adapter, by Megatron-Core's names or peft's: linear_qkv (q_proj, k_proj and v_proj share its A),
    linear_proj (o_proj), linear_fc1 (gate_proj and up_proj share its A), linear_fc2 (down_proj), both of each expert
    too; of delta nets and Mamba in_proj (whose matrices share its A) and out_proj. all-linear: the first four."""

    @property
    def description(self) -> str:
        """The settings as text; equal for equal adapters."""
        if not self.rank:
            return "policy.lora.rank=0"
        return f"policy.lora.rank={self.rank}, alpha={self.alpha:g}, target_modules=[{','.join(self.target_modules)}]"


class Fp8Config(Section):
    """Matrix products of the layers in FP8.

    Head, norms and attention stay in bfloat16.
    """

    format: Literal["off", "hybrid", "e4m3"] = "off"
    """hybrid: operands in E4M3, gradients in E5M2; e4m3: all in E4M3; off: no FP8."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """Values that share a scale. tensorwise: a tensor; delayed: a tensor, scaled as in earlier steps; blockwise: 128,
    or 128 x 128 weights (compute capability 9.0); mxfp8: 32 (10.0). The first two need 8.9 (docs/precision.md)."""

    parameters: bool = False
    """Keep the layers' matrices only in FP8. Needs optimizer.distributed, whose copy is float32; not with mxfp8."""

    first_layers_bf16: NonNegative = 0
    """Layers at the beginning of the model that stay in bfloat16; not with delayed."""

    last_layers_bf16: NonNegative = 0
    """Layers at the end of the model that stay in bfloat16; not with delayed."""

    amax_history: Positive = 1024
    """With the recipe delayed, the number of earlier steps whose largest values it keeps."""

    amax_algorithm: Literal["max", "most_recent"] = "max"
    """With the recipe delayed, the value that sets a scale: the maximum of the kept values, or the most recent one."""

    simulate: bool = False
    """Round the operands of the layers' products to E4M3 in torch, at the recipe's scales: FP8's effect on
    log-probabilities on any machine, without its speed. Gradients are not rounded. Not with delayed."""

    @property
    def is_on_device(self) -> bool:
        """True if Transformer Engine multiplies in FP8."""
        return self.format != "off" and not self.simulate

    @property
    def is_simulated(self) -> bool:
        """True if operands are rounded in torch."""
        return self.format != "off" and self.simulate

    @property
    def least_capability(self) -> tuple[int, int]:
        """Least compute capability of GPUs for the recipe, as in Transformer Engine."""
        return {"blockwise": (9, 0), "mxfp8": (10, 0)}.get(self.recipe, (8, 9))

    @property
    def block(self) -> int:
        """Divisor of the sizes of a rank's matrices in FP8 products."""
        return {"blockwise": 128, "mxfp8": 32}.get(self.recipe, 16)

    @property
    def token_multiple(self) -> int:
        """Divisor of the tokens of a rank's microbatch."""
        # Tokens are a dimension of the products that compute gradients of weights.
        return self.block if self.is_on_device else 1


class PolicyConfig(Section):
    """The Megatron-Core model that is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)

    quantization: QuantizationFormat | None = None
    """Quantisation-aware training: modelopt rounds the operands of the layers' products to int8 or E4M3 (fp8), for the
    export command's format=quantized (docs/precision.md). null: off."""

    train_vision_tower: bool = False
    """Train the vision tower of a model that sees images too; false: it stays as it is, and refits leave it out."""

    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; gradients are accumulated and reduced in float32."""

    max_total_sequence_length: Positive = 2048
    """Most tokens of prompt and response together; generation stops there too."""

    packing: bool = True
    """Lay the sequences of a microbatch end to end; false: pad each to the longest of its microbatch."""

    microbatch_tokens: Positive = 8192
    """Most tokens, padding included, in one forward/backward pass of one data-parallel rank."""

    train_global_batch_samples: Positive | None = None
    """Samples of one optimizer step; must divide the samples of the step. null: all of them."""

    logprob_microbatch_tokens: Positive | None = None
    """Most tokens of a microbatch in passes that only compute log-probabilities; null: microbatch_tokens."""

    logprob_kernel: Literal["fused", "chunked", "auto"] = "auto"
    """Kernel that turns hidden states into log-probabilities. fused: in Triton; chunked: in torch, always used where
    sampling filters tokens (generation.top_p and others); auto: fused on GPUs with Triton."""

    logprob_chunk_size: Positive | None = None
    """Tokens whose logits the chunked kernel holds at a time; null: as many as take 256 MiB in float32."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Scale gradients down to this global norm; 0: no clipping."""

    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass instead of keeping them."""

    recompute_modules: list[RecomputeModule] = field(default_factory=list)
    """Parts of each layer whose activations are recomputed if activation_checkpointing is off: core_attn, mlp,
    layernorm; in a mixture of experts moe, moe_act, shared_experts; in latent attention mla_up_proj."""

    deterministic: bool = False
    """Use only kernels whose results repeat to the bit; slower on GPUs. An H100 has no such fused attention for
    microbatches with sequences * heads * longest**2 of 2**30 or more: another kernel holds all scores."""

    overlap_grad_reduce: bool | None = None
    """Reduce gradients over data-parallel ranks during the backward pass; null: on GPUs."""

    overlap_param_gather: bool | None = None
    """Gather updated weights only in the next forward pass of training, while it runs. Needs overlap_grad_reduce and
    optimizer.distributed; null: on if both are."""

    gradient_accumulation_fusion: bool | None = None
    """Accumulate weight gradients within their multiplication; needs GPUs and apex's extension; null: on with both."""

    megatron: MegatronFields = field(default_factory=dict)
    """Further fields of Megatron-Core's TransformerConfig, which have no key here; also for the value model."""

    ddp: MegatronFields = field(default_factory=dict)
    """Further fields of Megatron-Core's DistributedDataParallelConfig; also for the value model."""

    megatron_optimizer: MegatronFields = field(default_factory=dict)
    """Further fields of Megatron-Core's OptimizerConfig, types as float32; also for the value model."""

    threads: Positive | None = None
    """CPU threads of each rank; null: its share of the cores, of half of them if engines run too. Not used on GPUs."""

    timeout_s: Seconds = 1800.0
    """Deadline of one policy phase (log-probabilities, an optimizer step, a checkpoint) and of its collectives."""


class ValueModelConfig(FamilySection):
    """The weights that the value model starts from."""

    path: PathText | None = None
    """A model like the policy's, whose value head starts at zero; or a reward model (ForSequenceClassification or
    ForTokenClassification with one label), whose score is the head; null: policy.model.path."""


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
    """Samples of one optimizer step; must divide the samples of the step. null: all, whatever the policy has."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Scale gradients down to this global norm; 0: no clipping."""


class ReferenceConfig(Section):
    """The frozen reference policy: the starting weights in the policy's layout.

    GRPO loads it only for a KL penalty, PPO also to report the distance to it.
    """

    offload: bool = False
    """Keep the reference weights in host memory, and move them to the device only while they are needed."""
