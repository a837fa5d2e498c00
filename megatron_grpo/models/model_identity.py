"""Identity of a model's folder: a digest of its content, whatever path leads to it."""

from __future__ import annotations

import json
from pathlib import Path

from xxhash import xxh3_128

# Parts of each weights file that are read, evenly spaced, so that hundreds of gigabytes take a second.
_CHUNKS = 4
_CHUNK = 1 << 18


def compute_model_digest(folder: Path) -> str | None:
    """Compute a digest of a model's config.json, vocabulary and samples of its weights.

    Returns:
        Hexadecimal digits; None where a file is missing or cannot be read.
    """
    # Chat templates and generation settings are left out, since a run may change them between two starts. Weights that
    # were trained further differ nearly everywhere, so samples of each file tell them apart.
    digest = xxh3_128()
    try:
        config = json.loads((folder / "config.json").read_bytes())
        digest.update(json.dumps(config, sort_keys=True).encode())
        vocabulary = folder / "tokenizer.json"
        digest.update(vocabulary.read_bytes() if vocabulary.is_file() else b"")
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            _add_samples(digest, file)
    except (OSError, ValueError, RecursionError):
        return None
    return digest.hexdigest() if files else None


def _add_samples(digest: xxh3_128, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size} ".encode())
    with file.open("rb") as stream:
        for number in range(_CHUNKS):
            stream.seek(max(size - _CHUNK, 0) * number // (_CHUNKS - 1))
            digest.update(stream.read(_CHUNK))
