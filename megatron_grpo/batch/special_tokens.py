"""Tokens that end a response, and the text of a response without the token that ended it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.models.tokenizer_files import declared_end_tokens

if TYPE_CHECKING:
    from megatron_grpo.batch.trajectory import StopReason  # with NumPy, which the check of a configuration does without

PROBE_CONTENT = "\u2402\u2403content\u2403\u2402"
"""Content of the model's message when a chat template is rendered to see what ends the message."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a response beside its greatest length."""

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    """Texts, looked for in the response with its special tokens."""


def find_stop_conditions(generation: GenerationConfig, tokenizer: Any, model: Path) -> StopConditions:
    """Tokens and texts that end the responses of a run, the same for every engine and server.

    A stop string that is one added token of the tokenizer ends responses as a token. If the token is special, the
    string ends them only as that token; otherwise also where the model writes it with other tokens.

    Args:
        generation: the section `generation` of the configuration.
        tokenizer: the model's tokenizer, from transformers.
        model: folder of the model, for the end tokens of its generation_config.json.
    """
    ids, strings = {*generation.stop_token_ids, *declared_end_tokens(model)}, []
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    added = list_added_tokens(tokenizer)
    for text in generation.stop_strings:
        number = added.get(text)
        if number is not None:
            ids.add(number)
        if number is None or not is_special(tokenizer, number):
            strings.append(text)
    return StopConditions(tuple(sorted(ids)), tuple(strings))


def list_added_tokens(tokenizer: Any) -> Mapping[str, int]:
    """Tokens that a tokenizer knows as a whole, special ones among them, with their numbers."""
    tokens: Mapping[str, int] = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return tokens


def is_special(tokenizer: Any, token_id: int) -> bool:
    """Whether a token is left out by a decoder that skips special tokens."""
    return bool(tokenizer.decode([token_id])) and not tokenizer.decode([token_id], skip_special_tokens=True)


def decode_response(tokenizer: Any, token_ids: Sequence[int], stop_reason: StopReason) -> str:
    """Text of a response for rewards, environments, tool parsers, agents and logs.

    A special token at which the response stopped (the end of the text, of the turn, of the call) is left out. All other
    special tokens are kept as they are written, since they carry meaning: the marks of tool calls, of thinking, of
    channels. vLLM's parsers of tool calls need them too.

    Args:
        tokenizer: the model's tokenizer, from transformers.
        token_ids: sampled tokens.
        stop_reason: "stop" if a token or text ended the response, "length" if it was cut.
    """
    ids = list(token_ids)
    if stop_reason == "stop" and ids and is_special(tokenizer, ids[-1]):
        del ids[-1]
    text: str = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    return text


def find_unstopped_turn_end(
    tokenizer: Any, stops: StopConditions, render: Callable[[list[dict[str, str]]], str]
) -> tuple[str, int] | None:
    """The added token with which a chat template ends the model's message, if it ends no response; None: it does.

    Templates may end the last message otherwise than earlier ones (gpt-oss), or end a message only by the next one's
    beginning (GLM), so that either of two tokens has to end a response.

    Args:
        tokenizer: the model's tokenizer, from transformers.
        stops: tokens and texts that end a response.
        render: renders a conversation by the chat template, without a prompt for the next message.
    """
    numbers = {number: token for token, number in list_added_tokens(tokenizer).items()}
    uncovered: list[tuple[str, int]] = []
    for rest in _ends_of_turn(render):
        first = tokenizer(rest, add_special_tokens=False)["input_ids"][:1]
        if any(text in rest for text in stops.strings) or set(first) & set(stops.token_ids):
            return None
        uncovered += [(numbers[token], token) for token in first if token in numbers]
    return uncovered[0] if uncovered else None


def _ends_of_turn(render: Callable[[list[dict[str, str]]], str]) -> Iterator[str]:
    """Texts that follow the model's message: at the end of a conversation, and before the next message."""
    question, answer = {"role": "user", "content": "."}, {"role": "assistant", "content": PROBE_CONTENT}
    for messages in ([question, answer], [question, answer, question]):
        try:
            _, mark, rest = render(messages).rpartition(PROBE_CONTENT)
        except Exception:  # noqa: BLE001 - a template may raise anything, and the prompts of the rows tell its errors
            continue
        if mark and rest.strip():
            yield rest.lstrip()
