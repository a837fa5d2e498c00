"""What vLLM changes of transformers lasts for a test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_classes_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what vLLM replaces when it reads DeepSeek-V3.2: its class in transformers becomes V3's, with its name."""
    from transformers import CONFIG_MAPPING, DeepseekV3Config

    monkeypatch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
