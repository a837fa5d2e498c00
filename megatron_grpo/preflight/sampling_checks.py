"""Checks of sampling: filters, penalties, structured output, speculation, servers, endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from megatron_grpo.config.errors import to_text
from megatron_grpo.config.generation_schema import (
    FILTERS,
    PENALTIES,
    EndpointConfig,
    EngineConfig,
    GenerationConfig,
    StructuredConfig,
)
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.paths import TOKEN_VARIABLE, check_url, is_loopback, read_token
from megatron_grpo.config.schema import Config
from megatron_grpo.environments.vllm_parsers import read_parser_names
from megatron_grpo.preflight.rules import Rule

# Corrections that leave out tokens on which the frameworks disagree.
_DROPPING = frozenset({"icepop", "seq-mask-tis", "seq-mask", "off-policy-mask", "divergence-mask"})


def check_requests(config: Config) -> Iterator[Rule]:
    """Check keys of sampling against each other and against vLLM."""
    yield from _check_structure(config.generation.structured)
    generation, speculative = config.generation, config.generation.engine.speculative
    is_speculative = speculative.num_speculative_tokens > 0
    text = "vLLM has no min_p with speculative decoding; use 0 for one of them"
    yield generation.min_p > 0 and is_speculative, "generation.min_p=", text
    size, engines, default = generation.generation_batch_size, generation.parallel.data, EngineConfig().max_num_seqs
    text = f"leaves some of the {engines} engines without a response; give {engines} or more"
    yield size is not None and size < engines, "generation.generation_batch_size=", text
    text = f"and generation.engine.max_num_seqs={generation.engine.max_num_seqs} both limit how many responses are"
    text += " decoded at once; give one of them"
    is_given_twice = size is not None and generation.engine.max_num_seqs != default
    yield is_given_twice, "generation.generation_batch_size=", text
    longest = speculative.prompt_lookup_max
    text = f"must not be above generation.engine.speculative.prompt_lookup_max={longest}"
    is_empty = is_speculative and speculative.method == "ngram" and speculative.prompt_lookup_min > longest
    yield is_empty, "generation.engine.speculative.prompt_lookup_min=", text
    processors = config.generation.engine_args.get("logits_processors")
    text = "vLLM has no logits processors with speculative decoding; leave them out, or use"
    text += " generation.engine.speculative.num_speculative_tokens=0"
    subject = f"generation.engine_args.logits_processors={to_text(processors)}"
    yield processors and is_speculative, subject, text


def check_filter_cautions(config: Config) -> Iterator[Rule]:
    """Remark on filters that training cannot repeat, and penalties beside dropping options."""
    generation = config.generation
    dropping_option, hiding_key = _find_dropping_option(config), _find_hiding_key(generation)
    text = f"is a filter that training does not repeat, because {hiding_key} changes the logits before it: training"
    text += " looks at the whole distribution, and token_mult_prob_error is above 1"
    for name in generation.select_changed(FILTERS):
        yield hiding_key, f"generation.{name}=", text
    text = "changes the probabilities that tokens are sampled with, and training looks at the whole distribution:"
    text += f" {dropping_option} leaves tokens out for that difference, too"
    for name in generation.select_changed(PENALTIES):
        yield dropping_option, f"generation.{name}=", text


def check_filters(config: Config) -> Iterator[Rule]:
    """Check structured output and filters beside options that compare engine and trainer."""
    generation = config.generation
    dropping_option, hiding_key = _find_dropping_option(config), _find_hiding_key(generation)
    # The required form leaves one possible token at many positions.
    text = "leaves out tokens that sampling and training give other probabilities, and the form gives many tokens a"
    text += " probability of 1; use null, or another type than icepop and seq-mask-tis, beside generation.structured"
    yield dropping_option and generation.structured != StructuredConfig(), dropping_option or "", text
    # Training renormalises over the tokens that a filter keeps only if it can repeat the filter on the same logits.
    comparing_option = _find_comparing_option(config.loss_fn) or dropping_option
    for name in generation.select_changed(FILTERS):
        default = to_text(getattr(GenerationConfig(), name))
        text = f"is a filter that training does not repeat beside {hiding_key}, which changes the logits before it, and"
        text += f" {comparing_option} would take that for a difference between the two frameworks; use {default}, or"
        text += " leave that option out"
        yield comparing_option and hiding_key, f"generation.{name}=", text


def _find_hiding_key(generation: GenerationConfig) -> str:
    """Find the key that keeps training from repeating a filter; "": none."""
    penalties = generation.select_changed(PENALTIES)
    if generation.temperature == 0 or not (penalties or generation.structured != StructuredConfig()):
        return ""
    return f"generation.{penalties[0]}" if penalties else "generation.structured"


def _find_comparing_option(loss: LossConfig) -> str | None:
    """Find the option (KEY=VALUE) by which the loss compares the frameworks."""
    if loss.use_importance_sampling_correction:
        return "loss_fn.use_importance_sampling_correction=True"
    if loss.corrects_sampling and loss.chosen_weight is None:
        return f"loss_fn.objective={loss.chosen_objective}"
    if loss.log_ratio_penalty:
        return f"loss_fn.log_ratio_penalty={loss.log_ratio_penalty:g}"
    compares = loss.chosen_corrections and loss.chosen_corrections != ("high-entropy",)
    return f"loss_fn.corrections={to_text(loss.corrections)}" if compares else None


def _find_dropping_option(config: Config) -> str | None:
    """Find the option (KEY=VALUE) that drops tokens on which frameworks disagree."""
    loss = config.loss_fn
    if loss.truncated_importance_sampling_type in _DROPPING:
        return f"loss_fn.truncated_importance_sampling_type={loss.truncated_importance_sampling_type}"
    if _DROPPING & {*loss.corrections}:
        return f"loss_fn.corrections={to_text(loss.corrections)}"
    threshold = getattr(config.loop, "seq_logprob_error_threshold", None)
    return None if threshold is None else f"{config.loop_name}.seq_logprob_error_threshold={threshold:g}"


def _check_structure(structured: StructuredConfig) -> Iterator[Rule]:
    prefix = "generation.structured"
    keys = [f"{prefix}.{name}" for name, value in vars(structured).items() if value is not None]
    yield len(keys) > 1, next(iter(keys), ""), f"excludes {' and '.join(keys[1:])}: a response has one form"
    if structured.json_schema is not None:
        try:
            schema = json.loads(structured.json_schema)
        except ValueError as error:
            yield True, f"{prefix}.json_schema=", f"is not a JSON text: {error}"
        else:
            text = 'must be a JSON object, such as {"type": "object"}'
            yield not isinstance(schema, dict), f"{prefix}.json_schema=", text
    if structured.regex is not None:
        try:
            re.compile(structured.regex)
        except re.error as error:
            yield True, f"{prefix}.regex=", f"is not a regular expression: {error}"


def _check_parsers(endpoint: EndpointConfig) -> Iterator[Rule]:
    # vLLM lists the names in its source; without its files the start of a rollout worker reports a wrong name.
    parsers = (
        ("tool_parser", endpoint.tool_parser, "tool_parsers"),
        ("reasoning_parser", endpoint.reasoning_parser, "reasoning"),
    )
    for key, name, folder in parsers:
        names = read_parser_names(folder) if name is not None else frozenset()
        text = f"is not a parser of vLLM; choose one of {', '.join(sorted(names))}"
        yield bool(names) and name not in names, f"generation.endpoint.{key}=", text


def check_servers(config: Config) -> Iterator[Rule]:
    """Check generation.server.urls and generation.endpoint, without asking the servers."""
    endpoint, nodes = config.generation.endpoint, config.cluster.num_nodes
    is_local = is_loopback(endpoint.host)
    text = f"is reached from one node, and agents run on {nodes}; use 0.0.0.0, and a token in {TOKEN_VARIABLE}"
    yield endpoint.enabled and is_local and nodes > 1, "generation.endpoint.host=", text
    yield from _check_parsers(endpoint)
    is_open = endpoint.enabled and not is_local and read_token() is None
    text = "lets every client that reaches it write what the run is trained on;"
    text += f" put a token into the environment variable {TOKEN_VARIABLE}, or use 127.0.0.1"
    yield is_open, "generation.endpoint.host=", text
    for name, environment in config.env.items():
        text = "asks the model through the endpoint, which is off; give generation.endpoint.enabled=true"
        is_unanswered = environment.agent_func is not None and not endpoint.enabled
        yield is_unanswered, f"env.{name}.agent_func={environment.agent_func}", text
    urls, engines = config.generation.server.urls, config.generation.parallel.data
    for url in urls:
        reason = check_url(url)
        yield reason, f"generation.server.urls={to_text(url)}", reason or ""
    yield len(set(urls)) < len(urls), "generation.server.urls=", "names a server twice"
    text = f"is the number of engines, and there are {len(urls)} servers; give {len(urls)}"
    yield urls and engines != len(urls), "generation.parallel.data=", text
    text = "shares GPUs with the run's own engines, and servers (generation.server.urls) have theirs; use separate"
    yield config.generation.is_colocated and urls, "generation.placement=", text
