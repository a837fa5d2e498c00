"""The keys of sampling with vLLM, and of how it gets the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import Fraction, Positive, Seconds, Section

RefitMode = Literal["reshard", "broadcast"]
"""How the policy's weights reach generation."""


@dataclass(kw_only=True)
class GenerationParallelConfig(Section):
    """How vLLM is laid out: engines = data, ranks of an engine = tensor * pipeline."""

    tensor: Positive = 1
    """Ranks that split every weight matrix of an engine."""

    pipeline: Positive = 1
    """Ranks that split the layers of an engine."""

    expert: Positive = 1
    """Ranks that share the experts of a mixture-of-experts model, each with whole experts (EP): 1, which splits the
    matrices of every expert as `tensor` does the others, or as many as `tensor`, the only other choice in vLLM."""

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
    """Logits are divided by this, in sampling and in training alike; 0 is greedy, and otherwise at least 0.01."""

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
    """Moving the policy's weights into generation after every step."""

    mode: RefitMode = "reshard"
    """reshard: every rank of an engine gets the slices that it keeps, from the ranks of the policy that have them.
    broadcast: each pipeline stage gathers whole tensors and sends them to all, and every rank cuts out its share."""

    bucket_mib: Annotated[float, Field(gt=0)] = 256.0
    """Size of the buffers that tensors are packed into before they are sent; of each, a rank has two."""

    timeout_s: Seconds = 600.0
    """Deadline of one attempt of a refit; past it the error names the ranks that are missing."""

    retries: Annotated[int, Field(ge=0)] = 1
    """How often a refit that failed is tried again, over links that are made anew. Generation serves nothing meanwhile;
    when the last attempt fails too, the step is saved and the run ends."""
