"""Tells what a file is that should be JSONL and is not, from its first bytes."""

from __future__ import annotations

import json

HEAD_BYTES = 2**16
_MAGIC = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first (gunzip)",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first (unzstd)",
    b"\xfd7zXZ\x00": "is compressed with xz; unpack it first (unxz)",
    b"BZh": "is compressed with bzip2; unpack it first (bunzip2)",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"PAR1": "is a Parquet file; give it a name that ends in .parquet",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}


def packed_kind(head: bytes) -> str | None:
    """What a file is instead of text, and what to do; None: it may be text.

    Args:
        head: first bytes of the file.
    """
    return next((text for magic, text in _MAGIC.items() if head.startswith(magic)), None)


def wrong_kind(head: bytes) -> str | None:
    """What a file is instead of JSONL, and what to do; None: its first line is an object, or a broken one.

    Args:
        head: first HEAD_BYTES bytes of the file.
    """
    packed = packed_kind(head)
    if packed is not None:
        return packed
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    first = start.split(b"\n", 1)[0].strip()
    if not first or (first.startswith(b"{") and first != b"{"):
        return None
    if first == b"{":
        return "spreads an object over several lines; write one object a line (jq -c . FILE)"
    if first.startswith(b"["):
        return "is a JSON array; write one object a line (jq -c '.[]' FILE)"
    try:
        json.loads(first)
    except ValueError:
        if b"," in first or b"\t" in first:
            return "looks like a table (CSV); give it a name that ends in .csv (or .tsv, with tabs)"
        return "is not JSONL: its first line is no object {...}"
    return None
