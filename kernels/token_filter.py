"""The filter of sampling, which removes unlikely tokens; imports no torch, for messages between processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """The tokens that sampling keeps, by vLLM's options of these names."""

    top_k: int | None = None
    """Keep this many likeliest tokens, and all that are as likely as the last of them; None: all."""
    top_p: float = 1.0  # then keep the likeliest tokens until their probability reaches this; 1: all
    min_p: float = 0.0  # before both, remove tokens below this share of the likeliest one's probability; 0: none
