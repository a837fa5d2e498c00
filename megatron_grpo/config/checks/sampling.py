"""Checks of sampling: filters, penalties, structured output, speculation, servers and the endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.generation_schema import EndpointConfig, EngineConfig, GenerationConfig, StructuredConfig
from megatron_grpo.config.paths import TOKEN_VARIABLE, is_loopback, token, url_problem
from megatron_grpo.config.schema import Config

_FILTERS = ("top_p", "top_k", "min_p")
"""Keys of generation that remove unlikely tokens from the distribution."""
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words")
"""Keys of generation that make some tokens less likely."""


def sampling_problems(config: Config) -> Iterator[Problem]:
    """Keys of sampling that exclude each other, or that vLLM would refuse at the first request."""
    yield from request_problems(config.generation)
    yield from _left_out(config)
    yield from _filters(config)


def request_problems(generation: GenerationConfig) -> Iterator[Problem]:
    """Keys of sampling that exclude each other, in training and in evaluation."""
    negative = next((token for token in generation.stop_token_ids if token < 0), None)
    if negative is not None:
        yield Problem("generation.stop_token_ids", f"has {negative}, and tokens are numbered from 0")
    if "" in generation.stop_strings:
        yield Problem("generation.stop_strings", "holds an empty text, which would end every response at once")
    if "" in generation.bad_words:
        yield Problem("generation.bad_words", "holds an empty text, which nobody can sample")
    yield from _structure(generation.structured)
    yield from _at_once(generation)
    yield from _speculation(generation)


def filter_cautions(config: Config) -> Iterator[Problem]:
    """Penalties beside an option that drops tokens whose probabilities differ between engine and trainer."""
    drops = _drops(config)
    if drops is None:
        return
    for name in _changed(config.generation, _PENALTIES):
        text = (
            "changes the probabilities that tokens are sampled with, and training looks at the whole distribution: "
            f"{drops} leaves tokens out for that difference, too"
        )
        yield Problem(f"generation.{name}={shown(getattr(config.generation, name))}", text)


def _filters(config: Config) -> Iterator[Problem]:
    """Filters beside an option that compares the probabilities of engine and trainer."""
    corrects = config.loss_fn.use_importance_sampling_correction
    compares = "loss_fn.use_importance_sampling_correction=True" if corrects else _drops(config)
    if compares is None:
        return
    for name in _changed(config.generation, _FILTERS):
        text = (
            "leaves tokens out that training counts with: every token that is sampled is likelier there, and "
            f"{compares} would take that for a difference between the two frameworks; use "
            f"{shown(getattr(GenerationConfig(), name))}, or leave that option out"
        )
        yield Problem(f"generation.{name}={shown(getattr(config.generation, name))}", text)


def _changed(generation: GenerationConfig, names: tuple[str, ...]) -> list[str]:
    """The keys that differ from their defaults."""
    default = GenerationConfig()
    return [name for name in names if getattr(generation, name) != getattr(default, name)]


def _drops(config: Config) -> str | None:
    """The option that drops tokens on which engine and trainer disagree; None: there is none."""
    kind = config.loss_fn.truncated_importance_sampling_type
    if kind in ("icepop", "seq-mask-tis"):
        return f"loss_fn.truncated_importance_sampling_type={kind}"
    threshold = config.loop.seq_logprob_error_threshold
    return None if threshold is None else f"{config.algorithm}.seq_logprob_error_threshold={threshold:g}"


def _structure(structured: StructuredConfig) -> Iterator[Problem]:
    given = [name for name, value in vars(structured).items() if value is not None]
    if len(given) > 1:
        others = " and ".join(f"generation.structured.{name}" for name in given[1:])
        yield Problem(f"generation.structured.{given[0]}", f"excludes {others}: a response has one form")
    if structured.choice is not None and not all(structured.choice or [""]):
        text = "must hold at least one text, and no empty one"
        yield Problem(f"generation.structured.choice={shown(structured.choice)}", text)
    if structured.json_schema is not None:
        try:
            schema = json.loads(structured.json_schema)
        except ValueError as error:
            schema, text = None, f"is no JSON text: {error}"
        else:
            text = 'must be a JSON object, such as {"type": "object"}'
        if not isinstance(schema, dict):
            yield Problem(f"generation.structured.json_schema={shown(structured.json_schema)}", text)
    if structured.regex is not None:
        try:
            re.compile(structured.regex)
        except re.error as error:
            text = f"is no regular expression: {error}"
            yield Problem(f"generation.structured.regex={shown(structured.regex)}", text)


def _left_out(config: Config) -> Iterator[Problem]:
    drops = _drops(config)
    if config.generation.structured == StructuredConfig() or drops is None:
        return
    text = (
        "leaves out what the model itself would have sampled with another probability, and the form gives many tokens "
        "a probability of 1; use null, or another type than icepop and seq-mask-tis, beside generation.structured"
    )
    yield Problem(drops, text)


def _at_once(generation: GenerationConfig) -> Iterator[Problem]:
    size, engines = generation.generation_batch_size, generation.parallel.data
    if size is None:
        return
    subject = f"generation.generation_batch_size={size}"
    if size < engines:
        yield Problem(subject, f"leaves some of the {engines} engines without a response; give {engines} or more")
    if generation.engine.max_num_seqs != EngineConfig().max_num_seqs:
        text = f"and generation.engine.max_num_seqs={generation.engine.max_num_seqs} say the same; give one of them"
        yield Problem(subject, text)


def _speculation(generation: GenerationConfig) -> Iterator[Problem]:
    speculative = generation.engine.speculative
    if speculative.num_speculative_tokens == 0:
        return
    prefix = "generation.engine.speculative"
    if speculative.prompt_lookup_min > speculative.prompt_lookup_max:
        text = f"must not be above {prefix}.prompt_lookup_max={speculative.prompt_lookup_max}"
        yield Problem(f"{prefix}.prompt_lookup_min={speculative.prompt_lookup_min}", text)
    if generation.min_p > 0:
        text = "vLLM has no min_p with speculative decoding; use 0 for one of them"
        yield Problem(f"generation.min_p={generation.min_p:g}", text)


def server_problems(config: Config) -> Iterator[Problem]:
    """Settings that do not fit generation.server.urls or generation.endpoint.

    Whether servers answer is checked when the run starts.
    """
    yield from _endpoint(config.generation.endpoint, config.cluster.num_nodes)
    for name, environment in config.env.items():
        if environment.agent_func is not None and not config.generation.endpoint.enabled:
            text = "asks the model where nobody answers; give generation.endpoint.enabled=true"
            yield Problem(f"env.{name}.agent_func={environment.agent_func}", text)
    generation, urls = config.generation, config.generation.server.urls
    subject = f"generation.server.urls={shown(urls)}"
    for url in urls:
        reason = url_problem(url)
        if reason is not None:
            yield Problem(f"generation.server.urls={shown(url)}", reason)
    if not urls:
        return
    if len(set(urls)) < len(urls):
        yield Problem(subject, "names a server twice")
    if generation.parallel.data != len(urls):
        text = f"is the number of engines, and there are {len(urls)} servers; give {len(urls)}"
        yield Problem(f"generation.parallel.data={generation.parallel.data}", text)
    if config.generation.colocated:
        text = "shares GPUs with the run's own engines, and servers (generation.server.urls) have theirs; use separate"
        yield Problem("generation.placement=colocated", text)
    if config.policy.moe.replay_routing:
        yield Problem("policy.moe.replay_routing=True", "a server returns no routed experts; use false")


def _endpoint(endpoint: EndpointConfig, nodes: int) -> Iterator[Problem]:
    if not endpoint.enabled:
        return
    if is_loopback(endpoint.host):
        if nodes > 1:
            text = f"is reached from one node, and agents run on {nodes}; use 0.0.0.0, and a token in {TOKEN_VARIABLE}"
            yield Problem(f"generation.endpoint.host={endpoint.host}", text)
    elif token() is None:
        text = (
            "lets whoever reaches it write what the run is trained on; put a token into the environment variable "
            f"{TOKEN_VARIABLE}, or use 127.0.0.1"
        )
        yield Problem(f"generation.endpoint.host={endpoint.host}", text)
