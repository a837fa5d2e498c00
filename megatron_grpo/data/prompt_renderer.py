"""Renders and tokenizes the turns of a conversation: first prompts, later turns, calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from megatron_grpo.data.chat_messages import (
    ASSISTANT,
    OTHER_NAMES,
    REASONING,
    ChatMessage,
    is_open,
    normalize_message,
    require_continuable,
)
from megatron_grpo.data.chat_template import render_calls, render_chat
from megatron_grpo.data.image_rows import has_images

# Beginning of a marker that stands for the model's turn: the template's text after it is the text to encode.
MODEL_TURN = "\u2402\u2403here\u2403\u2402"

RESERVED = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "tokenizer_kwargs", "return_dict", "return_tensors", "padding"}
    | {"return_assistant_tokens_mask", "truncation", "max_length"}
)
"""Arguments of `apply_chat_template` that are not variables of a template."""


# Key in the config.json of an exported reward model, with the settings of PromptFormat that its scores depend on.
FORMAT_KEY = "conversation_format"


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How the turns of a task's conversations become text."""

    apply_chat_template: bool = True
    system_prompt: str | None = None  # system message for conversations without one
    chat_template: str | None = None  # chat template in Jinja; None: the tokenizer's
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    takes_images: bool = False  # whether the model is given the images of messages; otherwise they are refused


@dataclass(frozen=True)
class PromptRenderer:
    """Renders and tokenizes the turns of one task's conversations.

    The model's turns are never tokenized again: a later turn is only the text after the sampled tokens. All paths
    (training, validation, evaluation, environments, agents) use this class, so that no path can miss a setting.
    Templates refuse messages with errors of any class.
    """

    tokenizer: Any
    format: PromptFormat

    @property
    def has_template(self) -> bool:
        """True with the tokenizer's or a configured chat template."""
        return bool(self.format.chat_template or getattr(self.tokenizer, "chat_template", None))

    def render_first_turn(self, prompt: str | Sequence[ChatMessage], tools: Sequence[ChatMessage] | None = None) -> str:
        """Render the first prompt; an assistant's last message stays open."""
        if not self.format.apply_chat_template:
            assert isinstance(prompt, str), "messages need a chat template"
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.render_open(messages, tools=tools)

    def render_open(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ChatMessage] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a prompt (`render`); an assistant's last message stays open."""
        goes_on = is_open(messages)
        return self.render(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a first prompt whose text is rendered."""
        return self.encode_rendered(text) if self.format.apply_chat_template else self.encode_plain(text)

    def encode_rendered(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a text; a chat template's has its special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def encode_plain(self, text: str) -> list[int]:
        """Encode a plain prompt behind the tokenizer's special tokens.

        Special tokens after the text would end the sequence before the response, and are left out.
        """
        return self._strip_added(self.encode_rendered(text, add_special_tokens=True))

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
        model's next message. Without a template they are the texts of the messages. `last_token` is the last of the
        model's turn; an end of message that was sampled is not repeated.

        ValueError: the template shows no messages of the model.
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

        `earlier`: messages before the model's first turn; `messages`: those after it, up to its second turn;
        `last_token`: last token of the first turn. ValueError: the template does not show the model's message.
        """
        mark = self.make_mark()
        conversation = [*earlier, {"role": "assistant", "content": mark}, *messages]
        has_results = any(message.get("role") == "tool" for message in messages)
        render = partial(self.render, tools=tools, variables=variables)
        try:
            _, mark_in_text, after = render(conversation).rpartition(mark)
        except Exception:
            if not has_results:
                raise
            mark_in_text, after = "", ""
        if has_results and (not mark_in_text or self._shows_results_after_calls_alone):
            after = _render_results(render, earlier, messages)
        elif not mark_in_text:
            raise ValueError("the chat template leaves out the model's last message")
        return self.encode_after(after, last_token)

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
            messages: without a system message the settings' system prompt is added.
            tools: definitions of tools; None: the settings' definitions.
            variables: further variables of the template, which replace the settings'.
            add_generation_prompt: whether the model's next turn begins at the end.
            continue_final_message: whether the last message stays open instead.

        Raises:
            ValueError: there is no chat template, or the content of a message cannot be read.
        """
        if not self.has_template:
            raise ValueError("the tokenizer has no chat template; set data.apply_chat_template=false for plain prompts")
        conversation = [self.read(message, number) for number, message in enumerate(messages, start=1)]
        if continue_final_message:
            require_continuable(conversation)
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

    def read(self, message: ChatMessage, number: int = 1) -> dict[str, Any]:
        """Read a message in the form, and by the role, that the template knows."""
        content = message.get("content")
        is_kept = isinstance(content, list) and (
            self.format.takes_images if has_images(content) else self._can_read_parts
        )
        plain = normalize_message(message, number, keeps_parts=is_kept)
        # Thoughts keep their names, and get those that the template reads.
        source = str(self.format.chat_template or getattr(self.tokenizer, "chat_template", ""))
        for name in REASONING:
            if name in plain and name not in message and name not in source:
                del plain[name]
        role = plain.get("role")
        return {**plain, "role": OTHER_NAMES[role]} if role in OTHER_NAMES and role in self._unread_roles else plain

    @staticmethod
    def make_mark() -> str:
        """Make a text that stands for a turn."""
        # Drawn at random, because messages may hold any text.
        return f"{MODEL_TURN}{secrets.token_hex(8)}"

    def find_first_special(self, text: str) -> str | None:
        """Find the first special token in a text; None: it has none."""
        tokens = [token for token in self._special_texts.values() if token and token in text]
        return min(tokens, key=lambda token: (text.index(token), -len(token)), default=None)

    def has_special_end(self, text: str) -> bool:
        """True if a special token ends a text."""
        return text.endswith(tuple(token for token in self._special_texts.values() if token))

    def has_control_end(self, text: str) -> bool:
        """True if a control token ends a text.

        Added tokens of a model's own text, as </tool_call>, are none.
        """
        return text.endswith(self._control_texts)

    def find_control_beginning(self, text: str) -> str:
        """Find the control token that begins a text.

        Blanks before it belong to the result, which is empty if no such token begins the text.
        """
        bare = text.lstrip()
        token = max((token for token in self._control_texts if bare.startswith(token)), key=len, default=None)
        return text[: len(text) - len(bare)] + token if token else ""

    def encode_after(self, text: str, last_token: int) -> list[int]:
        """Encode a text that follows a sampled token.

        If `text` begins with that token (the end of a message), it is not repeated. The tokens lack the blank and the
        special tokens that begin a text.
        """
        end = self._special_texts.get(last_token)
        if end is None:
            return self._encode_without_blank(text)
        before, end_in_text, after = text.partition(end)
        if end_in_text and not before.strip():
            text = after
        # Tokenized together with the token before it, because tokenizers differ in blanks next to special tokens.
        ids = self.encode_rendered(end + text)
        return ids[1:] if ids[:1] == [last_token] else self._encode_without_blank(text)

    def _encode_without_blank(self, text: str) -> list[int]:
        core = self._core_without_blank
        if core is None:
            return self.encode_rendered(text)
        offsets = (text.find(token) for token in self._special_texts.values())
        begin = min((offset for offset in offsets if offset >= 0), default=None)
        # Behind a special token the tokenizer is right again: its blank is part of every prompt.
        ids = list(core.encode(text[:begin], add_special_tokens=False).ids)
        return ids if begin is None else ids + self.encode_rendered(text[begin:])

    def _strip_added(self, ids: list[int]) -> list[int]:
        """Strip special tokens after a prompt, and repeated ones before."""
        before, after = self._added_tokens
        if after and ids[len(ids) - len(after) :] == after:
            ids = ids[: len(ids) - len(after)]
        # A prompt whose text begins with the special token itself would have it twice.
        if before and ids[: 2 * len(before)] == 2 * before:
            ids = ids[len(before) :]
        return ids

    @cached_property
    def _special_texts(self) -> dict[int, str]:
        return {token: str(text) for token, text in getattr(self.tokenizer, "added_tokens_decoder", {}).items()}

    @cached_property
    def _control_texts(self) -> tuple[str, ...]:
        tokens = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        return tuple(str(token) for token in tokens if str(token) and getattr(token, "special", True))

    @cached_property
    def text_after_answer(self) -> str:
        """Text by which a user's message follows an answer."""
        return self._render_follower({"content": "."}, {"role": "user", "content": "."})

    @cached_property
    def text_after_calls(self) -> str:
        """Text by which a result follows calls of tools."""
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
        result = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "."}
        return self._render_follower({"content": "", "tool_calls": [call]}, result)

    def _render_follower(self, turn: ChatMessage, message: ChatMessage) -> str:
        """Render what a message adds behind a turn.

        The text is empty if the template refuses or changes the turn.
        """
        earlier: list[ChatMessage] = [{"role": "user", "content": "."}, {"role": ASSISTANT, **turn}]
        try:
            before = self.render(earlier, add_generation_prompt=False)
            text = self.render([*earlier, message], add_generation_prompt=False)
        except Exception:  # noqa: BLE001 - a template may raise anything about messages that it does not expect
            return ""
        return text[len(before) :] if text.startswith(before) else ""

    @cached_property
    def _added_tokens(self) -> tuple[list[int], list[int]]:
        # Tokenizers do not tell which special tokens they put before and after a text, so a text shows them.
        bare, full = self.encode_rendered("a"), self.encode_rendered("a", add_special_tokens=True)
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    @cached_property
    def _core_without_blank(self) -> Any:
        # SentencePiece models mark the beginning of a word by a blank, and their tokenizers put a blank before any
        # text, as at the beginning of a document. In the middle of a conversation nobody wrote that blank.
        core: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        parts = [] if core is None else [part for part in (core.normalizer, core.pre_tokenizer) if part is not None]
        states = [json.loads(part.__getstate__()) for part in parts]
        if all(_remove_blank(state) == state for state in states):
            return None
        settings = json.loads(core.to_str())
        settings |= {name: _remove_blank(settings[name]) for name in ("normalizer", "pre_tokenizer")}
        return type(core).from_str(json.dumps(settings))

    @cached_property
    def _unread_roles(self) -> set[str]:
        begin, answer = {"role": "user", "content": "."}, {"role": ASSISTANT, "content": "."}
        unread = set()
        for role in OTHER_NAMES:
            mark = secrets.token_hex(8)
            message = {"role": role, "name": "f", "content": mark}
            conversation = [begin, answer, message] if role == "function" else [message, begin]
            if mark not in self._render_sample(conversation):
                unread.add(role)
        return unread

    def _render_sample(self, conversation: Sequence[ChatMessage]) -> str:
        """Render messages as they are; a refusal gives no text."""
        options = {"chat_template": self.format.chat_template, **self.format.chat_template_kwargs}
        try:
            return render_chat(self.tokenizer, conversation, **options)
        except Exception:  # noqa: BLE001 - a template may raise anything about messages that it does not expect
            return ""

    @cached_property
    def _shows_results_after_calls_alone(self) -> bool:
        # Gemma 4's template leaves results out without a word unless the turn before them has calls.
        begin, mark = {"role": "user", "content": "."}, secrets.token_hex(8)
        result = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": mark}
        try:
            if mark in self.render([begin, {"role": "assistant", "content": "."}, result]):
                return False
            return mark in _render_results(self.render, [begin], [result])
        except Exception:  # noqa: BLE001 - a template may raise anything about messages that it does not expect
            return False

    @cached_property
    def _can_read_parts(self) -> bool:
        # A template that cannot read parts writes the list as Python would, or leaves it out.
        content = [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]
        text = self._render_sample([{"role": "user", "content": content}])
        return "first part" in text and "second part" in text and "'type'" not in text and '"type"' not in text


def _render_results(render: Callable[..., str], earlier: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> str:
    # Some templates show results only after calls that they can read, so a turn of empty calls stands before them.
    calls = []
    for result in (message for message in messages if message.get("role") == "tool"):
        function = {"name": result.get("name", ""), "arguments": {}}
        calls.append({"id": result.get("tool_call_id", ""), "type": "function", "function": function})
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    before, text = render([*earlier, turn], add_generation_prompt=False), render([*earlier, turn, *messages])
    if not text.startswith(before):
        raise ValueError("the chat template changes a turn of tool calls once their results follow")
    return text[len(before) :]


def _remove_blank(part: Any) -> Any:
    # `part` is a normalizer or pre-tokenizer as tokenizer.json has it; None means that nothing is left of it.
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
