"""What an agent is given: where the model answers it in this one rollout."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """An OpenAI-compatible address that belongs to one rollout, for instance for an `openai.OpenAI`."""

    base_url: str
    """Ends in /v1. It holds the rollout's name, which nobody else knows."""
    token: str = field(repr=False)
    """Bearer token; any text where none is needed."""
    model: str
    """Name of the model, for the requests."""
