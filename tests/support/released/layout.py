"""A released layout: the files beside a model's weights, and its renderings by transformers as the oracle."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_PADDING = 64
"""Released vocabularies are padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The files of one released model, and the behaviour of its template."""

    name: str
    core: Callable[[], Tokenizer]
    """Makes tokenizer.json."""
    settings: Mapping[str, Any]
    """tokenizer_config.json, without template and added_tokens_decoder."""
    template: str
    config: Mapping[str, Any]
    """config.json; token ids are given as the text of their token, and vocab_size follows from the tokenizer."""
    generation: Mapping[str, Any] | None
    """generation_config.json, with ids as in `config`; None: there is none."""
    template_file: bool = False
    """Whether the template lies in chat_template.jinja; otherwise in tokenizer_config.json."""
    has_decoder: bool = True
    """Whether tokenizer_config.json lists all added tokens."""
    special_map: bool = False
    """Whether there is a special_tokens_map.json."""
    end: str = ""
    """Text of the token that the model samples to end an answer to a user."""
    tool_end: str | None = None
    """Text of the token that the model samples to end a turn of tool calls; None: that of `end`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template that change the generation prompt or the system message."""
    shows_tools: bool = True
    """Whether the template renders definitions of tools."""
    calls: int = 2
    """Most tool calls that the template renders in one message of the assistant; 0: none, or it leaves them out."""
    tool_role: str = "shown"
    """What the template does with messages of the role tool: shown, left out, or refused."""
    call_text: str = ""
    """As many calls as the template renders, as the model writes them, without its end token."""
    call_close: str = ""
    """The end of the last call in rendered conversations, before the end token."""

    @cached_property
    def truth(self) -> Tokenizer:
        """The tokenizer that tokenizer.json describes."""
        return Tokenizer.from_str(_json_of(self.core))

    @cached_property
    def oracle(self) -> PreTrainedTokenizerFast:
        """transformers' template engine around `truth`."""
        fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_json_of(self.core)))
        for key in _SPECIAL:
            value = self.settings.get(key)
            if value is not None:
                setattr(fast_tokenizer, key, value["content"] if isinstance(value, dict) else value)
        fast_tokenizer.chat_template = self.template
        return fast_tokenizer

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation by transformers, with the prompt for the model's next message."""
        text = self.oracle.apply_chat_template(
            list(messages), tokenize=False, **{"add_generation_prompt": True, **options}
        )
        assert isinstance(text, str)
        return text

    def ids(self, text: str) -> list[int]:
        """Tokens of a text by tokenizer.json alone, without those that are added to every text."""
        ids: list[int] = self.truth.encode(text, add_special_tokens=False).ids
        return ids

    def id(self, token: str) -> int:
        """The id of a token by its text."""
        number = self.truth.token_to_id(token)
        assert number is not None, f"{self.name} has no token {token}"
        return number

    def write(self, folder: Path) -> Path:
        """Write all files but the weights; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(_json_of(self.core))
        settings = dict(self.settings)
        if self.has_decoder:
            decoder = self.truth.get_added_tokens_decoder()
            settings["added_tokens_decoder"] = {
                str(number): _fields(token) for number, token in sorted(decoder.items())
            }
        if self.template_file:
            (folder / "chat_template.jinja").write_text(self.template)
        else:
            settings["chat_template"] = self.template
        _dump(settings, folder / "tokenizer_config.json")
        vocabulary = -(-self.truth.get_vocab_size() // _PADDING) * _PADDING
        config = self._with_ids(self.config)
        text = config.get("text_config", config)
        text["vocab_size"] = vocabulary
        _dump(config, folder / "config.json")
        if self.generation is not None:
            _dump(self._with_ids(self.generation), folder / "generation_config.json")
        if self.special_map:
            special = {key: value for key in _SPECIAL if (value := self.settings.get(key)) is not None}
            _dump(special, folder / "special_tokens_map.json")
        return folder

    @property
    def ends(self) -> set[int]:
        """Ids that end a response, by generation_config.json or else by the tokenizer."""
        stops = None if self.generation is None else self._with_ids(self.generation).get("eos_token_id")
        if stops is None:
            stops = self.id(_content(self.settings["eos_token"]))
        return set(stops) if isinstance(stops, list) else {stops}

    def _with_ids(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a configuration with the ids of tokens that are given by their text."""
        result: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, Mapping):
                result[key] = self._with_ids(value)
            elif key in _IDS and isinstance(value, list):
                result[key] = [self.id(token) for token in value]
            elif key in _IDS and isinstance(value, str):
                result[key] = self.id(value)
            else:
                result[key] = value
        return result


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _fields(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


@cache
def _json_of(core: Callable[[], Tokenizer]) -> str:
    return core().to_str(pretty=True)


def _dump(content: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
