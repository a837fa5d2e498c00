"""The keys of sampling with vLLM, rollouts and refits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.paths import is_loopback
from megatron_grpo.config.section import (
    Address,
    NonEmptyText,
    NonNegative,
    PathText,
    Positive,
    PositiveFloat,
    PositiveShare,
    Seconds,
    Section,
    Share,
    Starts,
    Temperature,
    VllmArguments,
)

Penalty = Annotated[float, Field(ge=-2, le=2)]

# Keys that remove unlikely tokens from the distribution.
FILTERS = ("top_p", "top_k", "min_p")
# Keys that make some tokens less likely.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words")

Placement = Literal["separate", "colocated"]
# Parts of an engine's device memory that are restored separately, under vLLM's names.
EngineMemory = Literal["weights", "kv_cache"]
RefitMode = Literal["reshard", "broadcast", "files"]


class GenerationParallelConfig(Section):
    """Layout of vLLM: `data` engines of tensor * pipeline ranks each."""

    tensor: Positive = 1
    """Ranks that split every weight matrix of an engine."""

    pipeline: Positive = 1
    """Ranks that split the layers of an engine."""

    expert: Positive = 1
    """Ranks that share the experts of a mixture-of-experts model (EP). 1: the `tensor` ranks split the matrices of
    every expert; equal to `tensor`: each rank has whole experts. vLLM supports no other values."""

    data: Positive = 1
    """Independent engines, which share the prompts."""

    @property
    def ranks_per_engine(self) -> int:
        """Worker processes of one engine."""
        return self.tensor * self.pipeline


class SpeculativeConfig(Section):
    """Speculative decoding: the model checks several proposed tokens in one forward pass.

    The distribution stays the same, but a fixed seed gives other tokens than without it.
    """

    num_speculative_tokens: NonNegative = 0
    """Tokens proposed at a time; 0: no speculative decoding."""

    method: Literal["ngram", "mtp"] = "ngram"
    """ngram: proposes tokens that followed the same n-gram before. mtp: the layers for further tokens in the model's
    own folder (multi-token prediction), which are neither trained nor refitted (docs/generation.md)."""

    prompt_lookup_min: Positive = 2
    """Length of the shortest n-gram that is looked up."""

    prompt_lookup_max: Positive = 4
    """Length of the longest n-gram that is looked up."""

    @property
    def uses_mtp(self) -> bool:
        """True if the model's own layers propose tokens."""
        return self.num_speculative_tokens > 0 and self.method == "mtp"


class EngineConfig(Section):
    """vLLM engine settings."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of weights and activations; null: policy.precision."""

    enforce_eager: bool = False
    """Skip graph capture and compilation: slower tokens, faster start."""

    max_num_seqs: Positive = 256
    """Most sequences that one engine decodes together."""

    gpu_memory_utilization: PositiveShare = 0.9
    """Share of each GPU's memory that an engine may take while it is awake. Not used on CPUs."""

    kv_cache_gib: PositiveFloat = 1.0
    """Host memory for the KV cache of each rank, in GiB. Only on CPUs."""

    enable_prefix_caching: bool = True
    """Reuse the KV cache of common prefixes of prompts, within one version of the weights."""

    enable_chunked_prefill: bool | None = None
    """Cut long prompts into pieces that share forward passes with responses; null: on GPUs. Not on CPUs."""

    max_num_batched_tokens: Positive | None = None
    """Most tokens of one forward pass; null: on CPUs 4096 or the longest sequence; on GPUs 8192."""

    batch_invariant: bool = False
    """Use only vLLM kernels whose results for a response do not depend on the rest of its batch; slower, GPUs only."""

    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)


class StructuredConfig(Section):
    """A form that every response must have; set at most one key.

    Tokens that break the form are never sampled.
    """

    regex: str | None = None
    """Regular expression that the whole response matches."""

    json_schema: str | None = None
    """JSON schema, as JSON text: the response is a JSON document of this form."""

    choice: Annotated[list[NonEmptyText], Field(min_length=1)] | None = None
    """Allowed responses: every response is one of these texts."""


class ServerConfig(Section):
    """vLLM servers that run elsewhere, in place of the run's own engines.

    generation.parallel is their layout. If they require a token, it is in the environment variable MEGATRON_GRPO_TOKEN.
    """

    urls: list[Address] = field(default_factory=list)
    """URLs (http://HOST:PORT) of servers that `python -m megatron_grpo.serve` started; empty: the run's own engines."""

    timeout_s: Seconds = 300.0
    """Deadline of a server's answer, at the start of the run and after it became unreachable."""


class EndpointConfig(Section):
    """An OpenAI-compatible endpoint through which agents make the turns of rollouts."""

    enabled: bool = False
    """Start the endpoint."""

    host: Annotated[str, Starts("opens the endpoint to other machines", is_loopback)] = "127.0.0.1"
    """Address to listen on. If other machines reach it, set a token in MEGATRON_GRPO_TOKEN (environment)."""

    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the first rollout worker; each further worker takes the next port. 0: free ports."""

    tool_parser: str | None = None
    """vLLM's parser of tool calls, by its name in `vllm serve --tool-call-parser`. null: calls stay in the text."""

    reasoning_parser: str | None = None
    """vLLM's parser of reasoning, by its name in `vllm serve --reasoning-parser`. null: reasoning stays in the text."""

    max_calls: Positive = 1000
    """Most calls of one rollout that are sampled; further ones are refused."""

    max_segments: Positive = 256
    """Most segments of one rollout; a call that would begin a further one is refused (docs/agents.md)."""

    text_cpu_s: Seconds = 5.0
    """Most processor time, in seconds, to render a call's messages, or to read the tool calls of a response."""

    text_memory_mib: Positive = 1024
    """Most memory, in MiB, that rendering a call or reading a response may take."""


class GenerationConfig(Section):
    """Sampling from the policy with vLLM."""

    parallel: GenerationParallelConfig = field(default_factory=GenerationParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)

    placement: Placement = "separate"
    """separate: engines have their own GPUs. colocated: engines and policy use the same GPUs in turn, the engines
    asleep or the models in host memory; one GPU is enough for a run."""

    max_new_tokens: Positive = 1024
    """Longest response in tokens."""

    temperature: Temperature = 1.0
    """Divisor of the logits, in sampling and in training; vLLM takes 0.01 to 2, and 0 for greedy sampling."""

    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 means no filter. Training renormalises
    its log-probabilities over the tokens that the filter keeps (docs/generation.md)."""

    top_k: Positive | None = None
    """Sample from this many likeliest tokens; null means no filter. Training renormalises as with top_p."""

    min_p: Share = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability; 0: no filter. See top_p."""

    repetition_penalty: PositiveFloat = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and response so far; 1: no penalty."""

    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the response already has."""

    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token once for each time that the response already has it."""

    bad_words: list[NonEmptyText] = field(default_factory=list)
    """Texts that are never sampled: a token that would complete one is excluded."""

    structured: StructuredConfig = field(default_factory=StructuredConfig)

    stop_token_ids: list[NonNegative] = field(default_factory=list)
    """Tokens that end a response, beside the end tokens of the tokenizer and of the model's generation_config.json."""

    stop_strings: list[NonEmptyText] = field(default_factory=list)
    """Texts that end a response; a text that is one token of the tokenizer ends it as a token, special ones too."""

    generation_batch_size: Positive | None = None
    """Most responses that all engines together decode at a time; null: engine.max_num_seqs in each engine."""

    timeout_s: Seconds = 1800.0
    """Deadline of one generation phase."""

    engine_restarts: NonNegative = 2
    """How often each engine is replaced when one of its processes dies or hangs, and its responses are sampled again.
    After that, or at once with `placement: colocated`, the run saves its steps and ends."""

    elastic: bool = False
    """Start engines on nodes that join the Ray cluster (cluster.ray_address) while the run goes on, and let those on
    nodes that drain leave (docs/operations.md)."""

    engine_args: VllmArguments = field(default_factory=dict)
    """Further arguments of vLLM's engine, which have no key here."""

    @property
    def is_colocated(self) -> bool:
        """True if engines share the devices of the models in training."""
        return self.placement == "colocated"

    def select_changed(self, names: Iterable[str]) -> list[str]:
        """Select the keys whose values are not the defaults."""
        defaults = GenerationConfig()
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]

    @property
    def has_unmatched_sampling(self) -> bool:
        """True if penalties or a required form change probabilities in sampling alone."""
        return bool(self.select_changed(PENALTIES)) or self.structured != StructuredConfig()

    @property
    def has_training_filter(self) -> bool:
        """True if training renormalises over the tokens that filters keep."""
        # Penalties and a required form change the logits before the filter, and training does not know them; at
        # temperature 0 vLLM ignores filters.
        return bool(self.select_changed(FILTERS)) and not self.has_unmatched_sampling and self.temperature > 0

    @property
    def sequences_per_engine(self) -> int:
        """Most responses that one engine decodes together."""
        if self.generation_batch_size is None:
            return self.engine.max_num_seqs
        return -(-self.generation_batch_size // self.parallel.data)


class RefitConfig(Section):
    """How the policy's weights get into the engines after every step."""

    mode: RefitMode = "reshard"
    """reshard: each rank of an engine gets the slices that it needs. broadcast: each gets the whole model. files: over
    a folder, for engines that share no network with the policy (docs/refit.md)."""

    directory: PathText | None = None
    """With mode=files, the folder that policy and engines share, under the same path; null: `refit` in run_dir."""

    adapters: Literal["merged", "alone"] = "merged"
    """With policy.lora, what is sent. merged: the weights with adapters added. alone: only the adapters, into a slot
    beside the base model, which engines read from policy.model.path (docs/precision.md)."""

    bucket_mib: PositiveFloat = 64.0
    """Size of a rank's two send buffers; 64 MiB take 1.3 ms at 50 GB/s. Larger ones take memory and overlap less."""

    fp8_blocks: bool = False
    """With reshard and `generation.engine_args.quantization=fp8_per_block`, the policy's ranks round the layers'
    matrices to FP8, half the bytes of bfloat16. false: each engine rounds them."""

    shared_memory: bool = True
    """On CPUs, messages between processes of a machine go through shared memory where the system allows it."""

    timeout_s: Seconds = 600.0
    """Deadline of one attempt of a refit; the error then names the ranks that are missing."""

    canary: bool = True
    """Engines serve new weights only if a few fixed sequences get the policy's log-probabilities; else the run ends."""

    canary_share: PositiveShare = 0.01
    """Largest share of the run's time for the canary. After the first four, a canary of s seconds is followed by at
    least s / canary_share seconds without a canary. 1: a canary after every refit."""

    canary_limit: PositiveFloat | None = None
    """Largest difference of log-probabilities that the canary accepts, in nats: the median over the tokens of the worst
    sequence. In float32 single tokens may differ by ten times as much. null: from the noise of the first refits, at
    most 0.001 to 1.5 by precision (docs/refit.md)."""

    prob_error_limit: Annotated[float, Field(gt=1)] | None = 2.0
    """token_mult_prob_error of a step, without its worst token, above which the run saves and ends before learning from
    it. The default does not apply where both sides differ by intent (docs/observing.md). null: no limit."""

    weight_check_period: Positive | None = 100
    """Steps between two comparisons of all weights, as the engines' kernels hold them, with the policy's. The first two
    refits and each replaced engine are also compared. A tensor that differs ends the run. null: never."""

    retries: NonNegative = 1
    """How often a failed refit is tried again, over new connections; then the step is saved and the run ends."""


class RolloutsConfig(Section):
    """Rollouts: generation, turns and scoring of the samples of a prompt."""

    num_workers: Positive | None = None
    """Processes that run rollouts; null: one for every 8 engines, at least one."""

    max_failed_fraction: Share = 0.1
    """Largest share of a step's rollouts that may fail (after one retry); above it the run saves and ends."""

    timeout_s: Seconds = 800.0
    """Deadline of one rollout: all its turns and its scoring."""

    keep_finished: bool = False
    """Keep finished rollouts that no checkpoint has learnt from in run_dir/finished_samples, for the next start of the
    run: for agents and turns that take long (docs/checkpoints.md)."""
