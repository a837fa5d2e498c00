"""Rows of English text with a chat template and a byte-level tokenizer for it, made on the spot."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

VOCABULARY = 32_000
WORDS = 60
"""Words of a prompt."""
LONG_EVERY, LONG_WORDS = 250, 600
"""One row of so many has a prompt of so many words, which is too long."""
REPEATED_EVERY = 100
"""One row of so many has the prompt of the row before."""

BEGIN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '" + BEGIN + "' + message.role + '\\n' + message.content + '" + END + "\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + BEGIN + "assistant\\n' }}{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on Python's own reference manual, and write it in Hugging Face format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=TEMPLATE)
    fast.save_pretrained(folder)


def made_up_rows(number: int) -> Iterator[dict[str, Any]]:
    """Rows of a prompt, an answer and two more columns, equal in every call: about 480 bytes of JSON each."""
    words = " ".join(topics.values()).split()
    draw = random.Random(0)
    prompt = ""
    for row in range(number):
        if row % REPEATED_EVERY != 1:
            length = LONG_WORDS if row % LONG_EVERY == LONG_EVERY - 1 else WORDS
            begin = draw.randrange(len(words) - length)
            prompt = f"{row}. {' '.join(words[begin : begin + length])}"
        yield {"prompt": prompt, "answer": str(row), "source": "python", "level": row % 5}


def write_rows(path: Path, number: int) -> Path:
    """Write them to a file, .jsonl or .parquet."""
    rows = made_up_rows(number)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"prompt": pa.string(), "answer": pa.string(), "source": pa.string(), "level": pa.int64()})
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, number, 50_000):
            part = [next(rows) for _ in range(min(50_000, number - begin))]
            writer.write_table(pa.Table.from_pylist(part, schema=schema))
    return path
