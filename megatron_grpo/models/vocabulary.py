"""Which vocabulary a model's folder has: equal ones have equal digests, however their files are written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"


def vocabulary_digest(folder: Path) -> str | None:
    """Digest (BLAKE2b, 16 bytes, hexadecimal) of all tokens with their numbers, those that were added included.

    Args:
        folder: of a model in Hugging Face format.

    Returns:
        None where it has no tokenizer.json, or one that cannot be read.
    """
    try:
        content = json.loads((folder / TOKENIZER_FILE).read_bytes())
        tokens = content["model"]["vocab"]
        numbered = tokens.items() if isinstance(tokens, dict) else ((one[0], id_) for id_, one in enumerate(tokens))
        added = {one["content"]: one["id"] for one in content.get("added_tokens", [])}
        vocabulary = sorted((dict(numbered) | added).items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=16).hexdigest()
