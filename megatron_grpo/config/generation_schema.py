"""The keys of sampling with vLLM, rollouts and refits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import (
    Fraction,
    NonEmptyText,
    NonNegative,
    PathText,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    Temperature,
    VllmArguments,
)

Penalty = Annotated[float, Field(ge=-2, le=2)]

FILTERS = ("top_p", "top_k", "min_p")
"""Keys of generation that remove unlikely tokens from the distribution."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words")
"""Keys of generation that make some tokens less likely."""

Placement = Literal["separate", "colocated"]
"""Whether engines have devices of their own."""

EngineMemory = Literal["weights", "kv_cache"]
"""Parts of an engine's device memory that are restored separately, under vLLM's names."""

RefitMode = Literal["reshard", "broadcast", "files"]
"""Ways to send the policy's weights to the engines."""


@dataclass(kw_only=True)
class GenerationParallelConfig(Section):
    """Layout of vLLM: engines = data, ranks of an engine = tensor * pipeline."""

    tensor: Positive = 1
    """Ranks that split every weight matrix of an engine."""

    pipeline: Positive = 1
    """Ranks that split the layers of an engine."""

    expert: Positive = 1
    """Ranks that share the experts of a mixture-of-experts model (EP). 1: the matrices of every expert are split over
    the `tensor` ranks; equal to `tensor`: each rank has whole experts. vLLM supports no other values."""

    data: Positive = 1
    """Independent engines; prompts are shared out over them."""

    @property
    def ranks_per_engine(self) -> int:
        """Worker processes of one engine."""
        return self.tensor * self.pipeline


@dataclass(kw_only=True)
class SpeculativeConfig(Section):
    """Speculative decoding by n-grams: where the last tokens occurred before, the tokens that followed them are
    proposed, and those that the model accepts are kept. This keeps the distribution, but not a seed's tokens."""

    num_speculative_tokens: NonNegative = 0
    """Tokens proposed at a time, on GPUs; 0: no speculative decoding."""

    prompt_lookup_min: Positive = 2
    """Shortest n-gram that is looked up."""

    prompt_lookup_max: Positive = 4
    """Longest n-gram that is looked up."""


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
    """Share of each GPU's memory an engine may take while it is awake. Not used on CPU."""

    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Host memory for the KV cache of each rank, CPU only."""

    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prompt beginnings within one weight version."""

    enable_chunked_prefill: bool | None = None
    """Cut long prompts into pieces that share forward passes with responses; null: on GPUs. Not on CPUs."""

    max_num_batched_tokens: Positive | None = None
    """Most tokens of one forward pass, prompts and responses together; null: 4096 on a CPU, and at least the longest
    sequence; on GPUs vLLM's default."""

    batch_invariant: bool = False
    """Use only vLLM kernels with which a response does not depend on the others in its batch; slower, GPUs only."""

    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)


@dataclass(kw_only=True)
class StructuredConfig(Section):
    """The form that every response has; at most one of these. Tokens that do not fit it are never sampled."""

    regex: str | None = None
    """Regular expression that the whole response matches."""

    json_schema: str | None = None
    """JSON schema, as JSON text: the response is a JSON document of this form."""

    choice: Annotated[list[NonEmptyText], Field(min_length=1)] | None = None
    """Allowed responses: every response is one of these texts."""


@dataclass(kw_only=True)
class ServerConfig(Section):
    """vLLM servers that run elsewhere, instead of engines that the run starts; generation.parallel says how they are
    laid out. The environment variable MEGATRON_GRPO_TOKEN holds their token, if they require one."""

    urls: list[str] = field(default_factory=list)
    """URLs of the servers, as http://HOST:PORT, each started with `python -m megatron_grpo.serve`; empty: the run
    starts engines of its own."""

    timeout_s: Seconds = 300.0
    """Seconds that a server may take to answer, at the start of the run and after it became unreachable."""


@dataclass(kw_only=True)
class EndpointConfig(Section):
    """An OpenAI-compatible endpoint in front of the engines, through which agents make the turns of rollouts."""

    enabled: bool = False
    """Whether the endpoint is started."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs a token, in the environment variable
    MEGATRON_GRPO_TOKEN."""

    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port to listen on; every further rollout worker takes the next one. 0: any free ports."""


@dataclass(kw_only=True)
class GenerationConfig(Section):
    """Sampling from the policy with vLLM."""

    parallel: GenerationParallelConfig = field(default_factory=GenerationParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)

    placement: Placement = "separate"
    """separate: engines have GPUs of their own. colocated: they share those of the policy, in turn. Engines sleep while
    models train, and the models are in host memory while engines sample; one GPU is enough for a run."""

    max_new_tokens: Positive = 1024
    """Longest response in tokens."""

    temperature: Temperature = 1.0
    """Logits are divided by this, in sampling and in training alike. vLLM takes none above 2, and none between 0 and
    0.01."""

    top_p: Fraction = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 means no filter. Training renormalises
    its log-probabilities over the tokens that the filter keeps (docs/generation.md)."""

    top_k: Positive | None = None
    """Sample from this many likeliest tokens; null means no filter. Training does as with top_p."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from the tokens with at least this share of the likeliest one's probability; 0 means no filter. Training
    does as with top_p."""

    repetition_penalty: PositiveFloat = 1.0
    """Logits of tokens that the prompt or the response has already are divided by this if they are positive, and
    multiplied otherwise; 1 means no penalty."""

    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the response has already."""

    frequency_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens, once for each time that the response has them already."""

    bad_words: list[NonEmptyText] = field(default_factory=list)
    """Texts that are never sampled: the last token of a text is excluded when the response ends in its other tokens."""

    structured: StructuredConfig = field(default_factory=StructuredConfig)

    stop_token_ids: list[NonNegative] = field(default_factory=list)
    """Tokens that end a response, beside the end tokens of the tokenizer and of the model's generation_config.json."""

    stop_strings: list[NonEmptyText] = field(default_factory=list)
    """Texts that end a response; a text that is one token of the tokenizer ends it as a token, special ones too."""

    generation_batch_size: Positive | None = None
    """Most responses that are decoded together, over all engines; the others wait. null: engine.max_num_seqs in each
    engine."""

    timeout_s: Seconds = 1800.0
    """Deadline of one generation phase."""

    engine_restarts: NonNegative = 2
    """How often each engine is replaced in a run when one of its processes dies, or hangs past a deadline, while it
    samples or receives weights: a new engine starts, gets the current weights, and the lost responses are sampled
    again. After that, with 0, or with `placement: colocated`, the steps so far are saved and the run ends."""

    engine_args: VllmArguments = field(default_factory=dict)
    """Further arguments of vLLM's engine that have no key of their own here."""

    @property
    def is_colocated(self) -> bool:
        """Whether engines share the devices of the models in training."""
        return self.placement == "colocated"

    def select_changed(self, names: Iterable[str]) -> list[str]:
        """Those of some keys whose values are not the defaults."""
        defaults = GenerationConfig()
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]

    @property
    def has_unmatched_sampling(self) -> bool:
        """Whether penalties or a required form change probabilities in a way that training does not repeat."""
        return bool(self.select_changed(PENALTIES)) or self.structured != StructuredConfig()

    @property
    def has_training_filter(self) -> bool:
        """Whether training renormalises over the tokens that top_p, top_k and min_p keep.

        Not beside penalties or a required form: they change the logits before the filter, and training does not know
        them. Nor at temperature 0, where vLLM ignores filters.
        """
        return bool(self.select_changed(FILTERS)) and not self.has_unmatched_sampling and self.temperature > 0

    @property
    def sequences_per_engine(self) -> int:
        """Most responses that one engine decodes together."""
        if self.generation_batch_size is None:
            return self.engine.max_num_seqs
        return -(-self.generation_batch_size // self.parallel.data)


@dataclass(kw_only=True)
class RefitConfig(Section):
    """Moving the policy's weights into generation after every step."""

    mode: RefitMode = "reshard"
    """reshard: every rank of an engine gets the slices that it needs, from the ranks of the policy that have them.
    broadcast: every rank of an engine gets its own copy of the whole model, of which vLLM's loaders keep its share.
    files: each pipeline stage writes the tensors that have changed into a folder, and every rank reads them there; for
    engines that share no network with the policy."""

    directory: PathText | None = None
    """With mode=files, the folder that policy and engines share, under the same path; several runs may share it too.
    null: `refit` in run_dir."""

    bucket_mib: Annotated[float, Field(gt=0)] = 64.0
    """Size of each of a rank's two buffers, into which weights are packed before they are sent. At 50 GB/s, 64 MiB take
    1.3 ms, many times the fixed cost of a message; larger buffers take more memory and overlap less."""

    fp8_blocks: bool = False
    """With reshard, for engines with `generation.engine_args.quantization=fp8_per_block`: the policy's ranks round the
    layers' matrices to FP8 with a scale for every 128 x 128 numbers, half the bytes of bfloat16. false: matrices are
    sent unrounded, and each engine rounds them."""

    shared_memory: bool = True
    """Except with files, on CPUs: processes of one machine exchange messages in shared memory, where the system allows
    it; false: they send them as between machines."""

    timeout_s: Seconds = 600.0
    """Deadline of one attempt of a refit; past it the error names the ranks that are missing."""

    canary: bool = True
    """After a refit, each engine and the policy compute the log-probabilities of a few fixed sequences in one batch. An
    engine serves the new weights only if they agree; else the run ends."""

    canary_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Largest share of the time that the canary takes: after the first four, a canary of s seconds is followed by at
    least s / canary_share seconds without one, in which refits are not checked. 1: after every refit."""

    canary_limit: Annotated[float, Field(gt=0)] | None = None
    """Largest difference of log-probabilities, in nats (the median of the worst sequence), with which an engine serves.
    null: it follows the noise that the first refits measure, and is at most 0.001 in float32 on CPUs, 0.01 in float32
    on GPUs, 0.5 in bfloat16, 1.5 where either side quantises."""

    prob_error_limit: Annotated[float, Field(gt=1)] | None = 2.0
    """Largest token_mult_prob_error of a step, without its worst token, that the run learns from. Past it the run ends
    before it learns, with the step's rollouts and a checkpoint of the steps before. The default is applied only where
    both sides should agree: not to tokens of older weights (asynchronous runs), nor with penalties, bad_words or a
    required form. Nor is any limit with debug.rollouts_from. null: there is none."""

    weight_check_period: Positive | None = 100
    """Steps between two comparisons of all weights, as the engines' kernels hold them, with the policy's. There is one
    in the first two refits too, and where an engine was replaced. A tensor that differs ends the run. null: never."""

    retries: Annotated[int, Field(ge=0)] = 1
    """How often a failed refit is tried again, over new links. Generation serves nothing meanwhile; when the last
    attempt fails too, the step is saved and the run ends."""


@dataclass(kw_only=True)
class RolloutsConfig(Section):
    """Rollouts: generation, turns and scoring of the samples of a prompt."""

    num_workers: Positive | None = None
    """Processes that run rollouts; null: one for every 8 engines, at least one."""

    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of a step's rollouts that may fail (raise or time out, after one retry); beyond it the run stops
    with the reason, its finished steps saved."""

    timeout_s: Seconds = 800.0
    """Deadline of one rollout: all its turns and its scoring."""
