"""Loads a model's tokenizer as its tokenizer.json describes it, without the model's code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_grpo.config.errors import RunError, select_first_line, to_text
from megatron_grpo.models.tokenizer_files import TOKENIZER_FILE, list_declared_tokens, read_settings

SAMPLE_TEXTS = (
    "How many of the 2023 cats\n  are in the hat?",
    "  two  three   blanks \n\n\t tab\r\nend  ",
    "1234567890 3.14159 -42 1e5 50% $20 \u00bd x\u00b2",
    "def f(x):\n    if x:\n\t\treturn {'a': [1, 2]}\n",
    "It's we'll I'd DON'T they'RE; \"quotes\" \u2014 dash\u2026 (a, b) .  , !",
    "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m A\u030angstro\u0308m \ufb01 \uff21\uff22",
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u3002\ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \U0001f44d\U0001f3fd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea e\u200bx\u00a0y",
    "<think>\nso </think> <answer>4</answer> \\boxed{\\frac{1}{2}}",
)
"""Texts on which tokenizers differ: blanks, line ends, digits, code, contractions, accents, scripts, emoji, tags."""
ROUND_TRIP = "the answer is 42 or 7"
"""A text that every tokenizer without unknown tokens gives back, whatever it normalizes."""
MAX_ADDED = 240  # added tokens that are compared; some tokenizers have thousands of unused tokens
_ADDED_PER_TEXT = 12
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(model: Path | str) -> Any:
    """Load a model's tokenizer; raises as `read_tokenizer`."""
    return read_tokenizer(model)[0]


def read_tokenizer(model: Path | str) -> tuple[Any, str | None]:
    """Load the tokenizer that tokenizer.json describes, and a remark about it.

    Transformers builds some tokenizers anew from the vocabulary, by the class that tokenizer_config.json or config.json
    names, and leaves out the rest of tokenizer.json. Therefore texts are encoded and decoded by both. If they differ,
    the plain fast tokenizer is loaded, which is the file itself.

    Where the files of a folder disagree, tokenizer.json decides how texts are cut and joined, and which tokens a text
    gets: `add_bos_token` and `add_eos_token` of tokenizer_config.json change only tokenizers without it, as in
    transformers and vLLM; `add_prefix_space` and `legacy` do not count either. tokenizer_config.json,
    special_tokens_map.json and added_tokens.json decide which tokens are special, and their roles; tokens that
    tokenizer.json lacks get the numbers after its last. Blanks before punctuation are never removed from decoded texts.

    RunError: the folder has no tokenizer, or its tokenizer needs code of the model, which is never run, or transformers
    cannot load it as tokenizer.json describes it.
    """
    # Imported here: it takes seconds, which are spent while other processes start.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = Path(model) / TOKENIZER_FILE
    tokenizer = _load(AutoTokenizer, model)
    if not file.is_file():
        _require_round_trip(tokenizer, model)
        return tokenizer, None
    difference = _find_difference_from_file(tokenizer, file)
    if difference is None:
        return tokenizer, None
    plain = _load(PreTrainedTokenizerFast, model)
    for name in _ROLES:  # a class of transformers may know tokens that tokenizer_config.json leaves out
        token = getattr(tokenizer, name, None)
        if getattr(plain, name) is None and token is not None and token in plain.get_vocab():
            setattr(plain, name, token)
    remaining = _find_difference_from_file(plain, file)
    if remaining is not None:
        text = f"transformers loads another tokenizer than {TOKENIZER_FILE} describes ({remaining})"
        raise RunError(f"{model}: {text}; repair the files, which have to agree on all tokens")
    name = type(tokenizer).__name__
    return plain, f"{file} is followed: transformers' {name} would have been another tokenizer ({difference})"


def find_difference(tokenizer: Any, reference: Any, texts: Iterable[str]) -> str | None:
    """Describe a text that two tokenizers treat differently; None: they agree.

    `reference`, which may be a `tokenizers.Tokenizer`, is right.
    """

    def decode(coder: Any, ids: list[int], skip: bool) -> str:
        options = {"clean_up_tokenization_spaces": False} if hasattr(coder, "clean_up_tokenization_spaces") else {}
        return coder.decode(ids, skip_special_tokens=skip, **options)

    # Both directions, with and without special tokens: tokenizers that encode alike may still decode otherwise.
    for text in texts:
        for special in (False, True):
            ids, expected = (encode_text(coder, text, special=special) for coder in (tokenizer, reference))
            if ids != expected:
                return f"{to_text(text)!r} has the tokens {quote_difference(ids, expected)}"
            if expected is None:
                continue
            for skip in (False, True):
                decoded, right = (decode(coder, expected, skip) for coder in (tokenizer, reference))
                if decoded != right:
                    return f"the tokens of {to_text(text)!r} are the text {quote_difference(decoded, right)}"
    return None


def make_sample_texts(added: Iterable[str]) -> list[str]:
    """Make texts on which tokenizers differ."""
    # Every n-th of the sorted tokens, so that each family of names is among them.
    tokens = sorted(set(added))
    chosen = tokens[:: -(-len(tokens) // MAX_ADDED) or 1]
    batches = [chosen[begin : begin + _ADDED_PER_TEXT] for begin in range(0, len(chosen), _ADDED_PER_TEXT)]
    return [*SAMPLE_TEXTS, *("".join(f"a{token}b {token} c\n{token}\n" for token in batch) for batch in batches)]


def _load(kind: Any, model: Path | str) -> Any:
    try:
        # trust_remote_code: with None, transformers would ask at the terminal whether it may run the code.
        # mistral_format: else tekken.json, where the folder has one, would replace tokenizer.json.
        tokenizer = kind.from_pretrained(model, trust_remote_code=False, mistral_format=False)
    except Exception as error:  # the tokenizers library raises bare exceptions
        text = f"{model} has no tokenizer that transformers can load (code that comes with a model is not run)"
        raise RunError(f"{text}: {select_first_line(error)}") from error
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _find_difference_from_file(tokenizer: Any, file: Path) -> str | None:
    if not hasattr(tokenizer, "backend_tokenizer"):
        return f"{type(tokenizer).__name__} does not read it"
    reference = _load_reference(tokenizer, file)
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = tokenizer.split_special_tokens
    if tokenizer.init_kwargs.get("fix_mistral_regex"):  # the folder itself asks for another expression
        reference.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    # The further files of the folder may declare tokens that tokenizer.json lacks.
    declared, special = set(list_declared_tokens(file.parent)), set(tokenizer.all_special_tokens)
    for _, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.content in special and (token.content in declared or reference.token_to_id(token.content) is not None):
            reference.add_special_tokens([token])
        elif token.content in declared:
            reference.add_tokens([token])
    vocabulary = tokenizer.backend_tokenizer.get_vocab_size()
    if vocabulary != reference.get_vocab_size():
        return f"it has {vocabulary} tokens instead of {reference.get_vocab_size()}"
    tokens = {name: getattr(tokenizer, name) for name in _ROLES if getattr(tokenizer, name) is not None}
    for name, token in tokens.items():
        number, expected = getattr(tokenizer, f"{name}_id"), reference.token_to_id(token)
        if number != expected:
            return f"{name} {token} is token {number} instead of {expected}"
    added = (token.content for token in reference.get_added_tokens_decoder().values())
    return find_difference(tokenizer, reference, make_sample_texts(added))


def _load_reference(tokenizer: Any, file: Path) -> Tokenizer:
    """Load tokenizer.json as it is, but for tokens that it lists twice.

    A token that is both special and plain in it is as transformers and vLLM have it.
    """
    content = read_settings(file)
    listed = [entry for entry in content.get("added_tokens") or [] if isinstance(entry, dict)]
    kinds: dict[Any, set[Any]] = {}
    for entry in listed:
        kinds.setdefault(entry.get("content"), set()).add(entry.get("special"))
    repeated = {text for text, special in kinds.items() if len(special) > 1}
    if not repeated:
        return Tokenizer.from_file(str(file))
    is_special = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    content["added_tokens"] = [
        entry
        for entry in listed
        if entry["content"] not in repeated or entry["special"] == is_special.get(entry["content"])
    ]
    return Tokenizer.from_str(json.dumps(content))


def _require_round_trip(tokenizer: Any, model: Path | str) -> None:
    # Without tokenizer.json nothing says what is right; transformers may build a tokenizer that loses all blanks.
    ids = encode_text(tokenizer, ROUND_TRIP)
    if ids is None or tokenizer.unk_token_id in ids:
        return
    text = tokenizer.decode(ids).strip()
    if text.lower() != ROUND_TRIP:
        kind = f"the tokenizer that transformers makes of its other files ({type(tokenizer).__name__})"
        change = f"turns {ROUND_TRIP!r} into {text!r}"
        raise RunError(f"{model} has no {TOKENIZER_FILE}, and {kind} {change}; add the {TOKENIZER_FILE} of the model")


def encode_text(coder: Any, text: str, *, special: bool = False) -> list[int] | None:
    """Encode a text; None: the tokenizer refuses it."""
    try:
        encoded = coder.encode(text, add_special_tokens=special)
    except Exception:  # noqa: BLE001 - the tokenizers library raises bare exceptions
        return None
    return list(encoded.ids if hasattr(encoded, "ids") else encoded)


def quote_difference(value: Any, expected: Any) -> str:
    """Quote two values around their first difference."""
    if value is None or expected is None:
        return f"{'none' if value is None else value[:8]} instead of {'none' if expected is None else expected[:8]}"
    shorter = min(len(value), len(expected))
    first = next((n for n, (a, b) in enumerate(zip(value, expected, strict=False)) if a != b), shorter)
    begin, length = (max(first - 8, 0), 24) if isinstance(value, str) else (first, 6)
    return f"{value[begin : begin + length]!r} instead of {expected[begin : begin + length]!r}"
