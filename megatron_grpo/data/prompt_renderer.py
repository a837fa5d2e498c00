"""Renders and tokenizes the turns of a conversation: first prompts, later turns, calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_grpo.data.chat_template import parse_arguments, render_calls, render_chat

ChatMessage = Mapping[str, Any]
"""A message for a chat template: role, content, and whatever else the template reads."""

MODEL_TURN = "\u2402\u2403here\u2403\u2402"
"""Beginning of a marker in place of the model's turn, which tells where the template's next text begins."""

RESERVED = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "tokenizer_kwargs", "return_dict", "return_tensors", "padding"}
    | {"return_assistant_tokens_mask", "truncation", "max_length"}
)
"""Arguments of `apply_chat_template` that are not variables of a template."""


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How the turns of a task's conversations become text."""

    apply_chat_template: bool = True
    system_prompt: str | None = None
    """System message for conversations without one."""
    chat_template: str | None = None
    """Chat template in Jinja; None: the tokenizer's."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Definitions of tools, for the chat template."""


@dataclass(frozen=True)
class PromptRenderer:
    """Renders and tokenizes the turns of one task's conversations.

    The model's turns are never tokenized again: a later turn is only the text after the sampled tokens. All paths
    (training, validation, evaluation, environments, agents) use this class, so that no path can miss a setting.

    Args:
        tokenizer: a Hugging Face tokenizer.
        format: how conversations are rendered.
    """

    tokenizer: Any
    format: PromptFormat

    @property
    def has_template(self) -> bool:
        """True with the tokenizer's or a configured chat template."""
        return bool(self.format.chat_template or getattr(self.tokenizer, "chat_template", None))

    def render_first_turn(self, prompt: str | Sequence[ChatMessage]) -> str:
        """Render the first prompt; an assistant's last message stays open.

        Args:
            prompt: text, or messages for the chat template.

        Raises:
            ValueError: a message has no readable content, or (of any class) the template refuses the messages.
        """
        if not self.format.apply_chat_template:
            assert isinstance(prompt, str), "messages need a chat template"
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        is_open = messages[-1].get("role") == "assistant"
        return self.render(messages, add_generation_prompt=not is_open, continue_final_message=is_open)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a first prompt whose text is rendered."""
        return self.encode_rendered(text) if self.format.apply_chat_template else self.encode_plain(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a chat template's text with its special tokens."""
        return self._encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a plain prompt behind the tokenizer's special tokens.

        Special tokens after the text would end the sequence before the response, and are left out.
        """
        return self._strip_added(self._encode(text, add_special_tokens=True))

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many prompts at once; needs a fast tokenizer."""
        is_plain = not self.format.apply_chat_template
        encoded = self.tokenizer(
            list(texts), add_special_tokens=is_plain, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return [self._strip_added(ids) for ids in encoded] if is_plain else list(encoded)

    def encode_later_turn(self, messages: Sequence[ChatMessage], last_token: int) -> list[int]:
        """Encode an environment's answer, up to the model's next turn.

        With a chat template these are the end of the model's message, the new messages, and the beginning of the
        model's next message. Without a template they are the texts of the messages.

        Args:
            messages: the environment's answer, at least one message.
            last_token: last token of the model's turn; an end of message that was sampled is not repeated.

        Raises:
            ValueError: the template shows no messages of the model, or (of any class) refuses the new messages.
        """
        if not self.format.apply_chat_template:
            return self.encode_after("\n".join(str(message["content"]) for message in messages), last_token)
        begin: list[ChatMessage] = [{"role": "user", "content": "."}]
        return self.encode_continuation(begin, messages, last_token)

    def encode_continuation(
        self,
        earlier: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        last_token: int,
        *,
        tools: Sequence[ChatMessage] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode a template's text between two model turns.

        Args:
            earlier: the conversation before the model's turn.
            messages: the conversation after it.
            last_token: last token of the model's turn.
            tools, variables: see `render`.

        Raises:
            ValueError: the template does not show the model's message, or (of any class) refuses the conversation.
        """
        mark = f"{MODEL_TURN}{secrets.token_hex(8)}"  # drawn at random, because messages may hold any text
        conversation = [*earlier, {"role": "assistant", "content": mark}, *messages]
        try:
            _, is_shown, after = self.render(conversation, tools=tools, variables=variables).rpartition(mark)
        except Exception:
            if not _has_tool_results(messages):
                raise
            is_shown, after = "", ""
        if not is_shown and _has_tool_results(messages):
            after = self._render_after_calls(earlier, messages, tools, variables)
        elif not is_shown:
            raise ValueError("the chat template leaves out the model's last message")
        return self.encode_after(after, last_token)

    def _render_after_calls(
        self,
        earlier: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """Render the text after a turn of tool calls.

        Some templates show results only after calls that they can read.
        """
        results = [message for message in messages if message.get("role") == "tool"]
        calls = [
            {
                "id": message.get("tool_call_id", ""),
                "type": "function",
                "function": {"name": message.get("name", ""), "arguments": {}},
            }
            for message in results
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        before = self.render([*earlier, turn], tools=tools, variables=variables, add_generation_prompt=False)
        text = self.render([*earlier, turn, *messages], tools=tools, variables=variables)
        if not text.startswith(before):
            raise ValueError("the chat template changes a turn of tool calls once their results follow")
        return text[len(before) :]

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ChatMessage] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation up to the model's next turn.

        Args:
            messages: the conversation; without a system message it gets the system prompt of the settings.
            tools: definitions of tools; None: the settings' definitions.
            variables: further variables of the template, which replace the settings'.
            add_generation_prompt: whether the model's next turn begins at the end.
            continue_final_message: whether the last message stays open instead.

        Raises:
            ValueError: there is no chat template, or the content of a message cannot be read.
            Exception: the template's own error, of any class.
        """
        if not self.has_template:
            raise ValueError("the tokenizer has no chat template; set data.apply_chat_template=false for plain prompts")
        conversation = [self._normalize(message, number) for number, message in enumerate(messages, start=1)]
        system = self.format.system_prompt
        if system is not None and conversation[0].get("role") not in ("system", "developer"):
            conversation.insert(0, {"role": "system", "content": system})
        definitions = self.format.tools if tools is None else tools
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": self.format.chat_template,
            "tools": [dict(definition) for definition in definitions] if definitions else None,
            **self.format.chat_template_kwargs,
            **(variables or {}),
        }
        if any("tool_calls" in message for message in conversation):
            return render_calls(self.tokenizer, conversation, **options)
        return render_chat(self.tokenizer, conversation, **options)

    def encode_after(self, text: str, last_token: int) -> list[int]:
        """Encode a text that follows a sampled token.

        Args:
            text: text after the model's turn.
            last_token: the sampled token. If it is the special token that ends the message in `text`, the text goes on
                behind it.

        Returns:
            Tokens without the blank and the special tokens that begin a text.
        """
        end = self._special_texts.get(last_token)
        if end is None:
            return self._encode_without_blank(text)
        ahead, is_end, behind = text.partition(end)
        if is_end and not ahead.strip():
            text = behind
        # Tokenized together with the token before it, because each tokenizer treats blanks next to special tokens in
        # another way.
        ids = self._encode(end + text)
        return ids[1:] if ids[:1] == [last_token] else self._encode_without_blank(text)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _encode_without_blank(self, text: str) -> list[int]:
        """Encode a text in the middle of a conversation."""
        core = self._core_without_blank
        if core is None:
            return self._encode(text)
        offsets = (text.find(token) for token in self._special_texts.values())
        begin = min((offset for offset in offsets if offset >= 0), default=None)
        # Behind a special token the tokenizer is right again: its blank is part of every prompt.
        ids = list(core.encode(text[:begin], add_special_tokens=False).ids)
        return ids if begin is None else ids + self._encode(text[begin:])

    def _strip_added(self, ids: list[int]) -> list[int]:
        """Strip special tokens after a prompt, and repeated ones before."""
        before, after = self._added_tokens
        if after and ids[len(ids) - len(after) :] == after:
            ids = ids[: len(ids) - len(after)]
        if before and ids[: 2 * len(before)] == 2 * before:
            ids = ids[len(before) :]
        return ids

    @cached_property
    def _special_texts(self) -> dict[int, str]:
        return {token: str(text) for token, text in getattr(self.tokenizer, "added_tokens_decoder", {}).items()}

    @cached_property
    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer puts around a text."""
        bare, full = self._encode("a"), self._encode("a", add_special_tokens=True)
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    @cached_property
    def _core_without_blank(self) -> Any:
        return copy_without_blank(getattr(self.tokenizer, "backend_tokenizer", None))

    def _normalize(self, message: ChatMessage, number: int) -> dict[str, Any]:
        plain = {name: value for name, value in message.items() if value is not None}
        calls = plain.get("tool_calls")
        if isinstance(calls, list) and calls:
            plain["tool_calls"] = [parse_arguments(call) for call in calls]
        elif "tool_calls" in plain:
            del plain["tool_calls"]
        content = plain.get("content")
        if content is None and plain.get("tool_calls"):
            plain["content"] = None
        elif "content" not in message:
            plain["content"] = ""
        elif isinstance(content, list) and not (self._can_read_parts and are_text_parts(content)):
            plain["content"] = join_text_parts(content, number)
        elif not isinstance(content, str | list):
            kind = "null" if content is None else type(content).__name__
            raise ValueError(f"message {number} has {kind} as its content; give text")
        return plain

    @cached_property
    def _can_read_parts(self) -> bool:
        # A template that cannot read parts writes the list as Python would, or leaves it out.
        content = [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]
        options: dict[str, Any] = dict(self.format.chat_template_kwargs)
        if self.format.chat_template is not None:
            options["chat_template"] = self.format.chat_template
        try:
            text = render_chat(self.tokenizer, [{"role": "user", "content": content}], **options)
        except Exception:  # noqa: BLE001 - a template may raise anything about content that it does not expect
            return False
        return "first part" in text and "second part" in text and "'type'" not in text and '"type"' not in text


def join_content(content: Any) -> str:
    """Join a message's content, which may be parts or null."""
    return "" if content is None else join_text_parts(content, 1) if isinstance(content, list) else str(content)


def join_text_parts(parts: Sequence[Any], number: int) -> str:
    """Join text parts with line breaks, as vLLM's server does.

    Args:
        parts: {"type": "text", "text": ...} each, or texts.
        number: number of the message, for the error.

    Raises:
        ValueError: a part is not text.
    """
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ValueError(f"message {number} has a content part of type {kind!r}; only text parts can be read")
        texts.append(text)
    return "\n".join(texts)


def are_text_parts(content: Any) -> bool:
    """True for a non-empty list of {"type": "text", "text": ...}."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    )


def _has_tool_results(messages: Sequence[ChatMessage]) -> bool:
    return any(message.get("role") == "tool" for message in messages)


def copy_without_blank(core: Any) -> Any:
    """Copy a tokenizer's core without its blank before texts.

    SentencePiece models mark the beginning of a word by a blank, and their tokenizers put a blank before any text, as
    at the beginning of a document. In the middle of a conversation nobody wrote that blank.
    """
    parts = [] if core is None else [part for part in (core.normalizer, core.pre_tokenizer) if part is not None]
    if not any(map(_has_blank_prefix, (json.loads(part.__getstate__()) for part in parts))):
        return None
    settings = json.loads(core.to_str())
    settings["normalizer"] = _remove_blank(settings["normalizer"])
    settings["pre_tokenizer"] = _remove_blank(settings["pre_tokenizer"])
    return type(core).from_str(json.dumps(settings))


def _has_blank_prefix(part: Any) -> bool:
    return bool(_remove_blank(part) != part)


def _remove_blank(part: Any) -> Any:
    """Remove the blank of a serialized normalizer or pre-tokenizer."""
    if part is None:
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        members = [_remove_blank(member) for member in part[name]]
        return {**part, name: [member for member in members if member is not None]}
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part.get("add_prefix_space") else part
