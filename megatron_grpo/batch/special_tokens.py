"""Tokens that end a response, and the response's text without that token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.models.tokenizer_files import read_end_tokens

if TYPE_CHECKING:
    from megatron_grpo.batch.trajectory import StopReason  # with NumPy, which the check of a configuration does without

# Content of the model's message when a chat template is rendered to see what ends the message.
_PROBE_CONTENT = "\u2402\u2403content\u2403\u2402"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Tokens and texts that end a response."""

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()  # texts to find in the response with its special tokens


def find_stop_conditions(generation: GenerationConfig, tokenizer: Any, model: Path) -> StopConditions:
    """Find the tokens and texts that end a run's responses.

    A stop string that is an added token of the tokenizer ends responses as a token. If the token is special, the string
    ends them only as that token; otherwise also where the model writes it with other tokens. The folder `model` has the
    end tokens of generation_config.json.
    """
    ids, strings = {*generation.stop_token_ids, *read_end_tokens(model)}, []
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    added = list_added_tokens(tokenizer)
    for text in generation.stop_strings:
        token_id = added.get(text)
        if token_id is not None:
            ids.add(token_id)
        if token_id is None or not is_special(tokenizer, token_id):
            strings.append(text)
    return StopConditions(tuple(sorted(ids)), tuple(strings))


def list_added_tokens(tokenizer: Any) -> Mapping[str, int]:
    """List a tokenizer's added tokens, special ones too, by text."""
    tokens: Mapping[str, int] = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return tokens


def is_special(tokenizer: Any, token_id: int) -> bool:
    """True for a token that decoders can skip."""
    return bool(tokenizer.decode([token_id])) and not tokenizer.decode([token_id], skip_special_tokens=True)


def decode_response(tokenizer: Any, token_ids: Sequence[int], stop_reason: StopReason) -> str:
    """Decode a response without the special token that ended it.

    A special token at which the response stopped (the end of the text, of the turn, of the call) is left out. All other
    special tokens stay, since they carry meaning: the marks of tool calls, of thinking, of channels. vLLM's parsers of
    tool calls need them too.
    """
    ids = list(token_ids)
    if stop_reason == "stop" and ids and is_special(tokenizer, ids[-1]):
        del ids[-1]
    text: str = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    return text


def find_unstopped_turn_end(
    tokenizer: Any, stops: StopConditions, render: Callable[[list[dict[str, str]]], str]
) -> tuple[str, int] | None:
    """Find an added token that ends messages but not responses.

    `render` renders a conversation by the chat template, without a prompt for the next message. Returns the token's
    text and id; None: responses end where messages do.
    """
    added_texts = {token_id: text for text, token_id in list_added_tokens(tokenizer).items()}
    unstopped: list[tuple[str, int]] = []
    question, answer = {"role": "user", "content": "."}, {"role": "assistant", "content": _PROBE_CONTENT}
    # Templates may end the last message otherwise than earlier messages (gpt-oss), or end a message only by the
    # beginning of the next (GLM), so that either of two tokens has to end a response.
    for messages in ([question, answer], [question, answer, question]):
        try:
            _, probe, rest = render(messages).rpartition(_PROBE_CONTENT)
        except Exception:  # noqa: BLE001 - a template may raise anything; rendering the rows' prompts reports it
            continue
        rest = rest.lstrip()
        if not probe or not rest:
            continue
        first = tokenizer(rest, add_special_tokens=False)["input_ids"][:1]
        if any(text in rest for text in stops.strings) or set(first) & set(stops.token_ids):
            return None
        unstopped += [(added_texts[token_id], token_id) for token_id in first if token_id in added_texts]
    return unstopped[0] if unstopped else None
