"""Chat templates of released models: those that TRL and Mistral store, and rebuilt ones in tests/data/released."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

RELEASED = Path(__file__).parents[2] / "data" / "released"
"""Layouts as NAME.json, and templates of models whose template no package stores, rebuilt, as NAME.jinja."""


@cache
def read_released_template(name: str) -> str:
    """A released template, byte for byte, from the files that TRL compares tokenizers with."""
    package = find_spec("trl")
    assert package is not None, "TRL belongs to the requirements of tests"
    assert package.origin is not None
    return (Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def mistral_v13(*, thinks: bool) -> str:
    """The template of Mistral's tokenizers of version 13 as its own package makes it, with or without thoughts."""
    from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    return build_chat_template(
        TemplateConfig(
            version=TokenizerVersion.v13,
            spm=False,
            image_support=True,
            audio_support=False,
            thinking_support=thinks,
            plain_thinking_support=False,
            use_special_token_variables=True,
            model_settings_fields=None,
            reasoning_effort_values=None,
            reasoning_effort_default=None,
        )
    )


def qwen3_thinking() -> str:
    """Qwen's template of models that always think (Qwen3-Next, Qwen3-2507): every prompt opens a thought."""
    template, generation = read_released_template("qwen3"), "{%- if add_generation_prompt %}"
    beginning, _, _ = template.rpartition(generation)
    return f"{beginning}{generation}{{{{- '<|im_start|>assistant\\n<think>\\n' }}}}{{%- endif %}}"


def read_template(name: str, source: str | None) -> str:
    """The template of a layout: of Mistral's package, a stored one, or without a source the file beside the layout."""
    if source is None:
        return (RELEASED / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    if source.startswith("mistral_v13"):
        return mistral_v13(thinks=source.endswith("_thinking"))
    return qwen3_thinking() if source == "qwen3_thinking" else read_released_template(source)
