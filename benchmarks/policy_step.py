"""Times optimizer steps of the policy, packed and padded, against plain torch; prints JSON.

    python benchmarks/policy_step.py [--layers 8] [--hidden 384] [--vocab 8192] [--sequences 64] [--longest 512]
    python benchmarks/policy_step.py --model addition --lengths even --sequences 256 --longest 11

One rank, in this process, on skewed lengths (log-normal: a few sequences are many times as long as most) or even ones
(from 0.8 of the longest on); on a model of these sizes, or on one that recipes prepare. `packed` is
policy.packing=true; `rectangles` policy.packing=false, sequences of like length padded to the longest of a
microbatch; `plain_torch` is transformers with AdamW over batches in the order in which they come, padded to their
longest, with the logits of every token. Ways take turns; `*_ratio` is a way's median over that of packed. The
gradient norms say that all compute the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from header import header
from torch.distributed import HashStore
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.batch.packing import TOKEN_COST, make_packer
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, require_field
from megatron_grpo.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.problem import count_tokens, make_loss

Step = Callable[[], float]
"""One optimizer step; the norm of its gradient."""


def make_batch(sequences: int, longest: int, vocab: int, *, even: bool) -> TokenBatch:
    """Prompts of a fifth and responses of the rest of each sequence; the loss is over responses."""
    draw = torch.Generator().manual_seed(0)
    if even:
        raw = torch.empty(sequences).uniform_(0.8, 1.0, generator=draw)
    else:
        raw = torch.empty(sequences).log_normal_(mean=0.0, std=1.0, generator=draw)
    lengths = (raw / raw.max() * longest).long().clamp(min=8)
    total = int(lengths.sum())
    mask = torch.cat([torch.arange(length) >= max(1, length // 5) for length in lengths.tolist()]).float()
    fields = TokenFields(
        token_ids=torch.randint(0, vocab, (total,), generator=draw).int(),
        loss_mask=mask,
        advantages=torch.randn(total, generator=draw),
        generation_logprobs=-torch.rand(total, generator=draw),
    )
    return TokenBatch(lengths.tolist(), fields)


def ours(folder: Path, batch: TokenBatch, tokens: int, packing: bool) -> Step:
    """The policy's rank, as it trains in a run."""
    config = PolicyConfig(
        model=ModelConfig(path=str(folder)),
        precision="float32",
        packing=packing,
        microbatch_tokens=tokens,
        optimizer=OptimizerConfig(lr=1e-9),
    )
    rank = PolicyRank(RankSettings(config=config, shape=read_model_shape(folder), folder=str(folder), decay_steps=100))
    (microbatches,) = make_packer(config, TOKEN_COST).make_microbatches([torch.tensor(batch.lengths).numpy()])
    loss_fn, counts = make_loss(), count_tokens(batch)
    return lambda: rank.train(batch, microbatches, loss_fn, counts).grad_norm


def plain_torch(folder: Path, batch: TokenBatch, tokens: int) -> Step:
    """Transformers, without Megatron-Core."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    per_batch = max(1, tokens // max(batch.lengths))
    numbers = range(len(batch.lengths))
    cuts = [batch.select(list(numbers[start : start + per_batch])) for start in numbers[::per_batch]]
    scale = 1.0 / float(require_field(batch.fields.loss_mask).sum())

    def step() -> float:
        optimizer.zero_grad()
        for cut in cuts:
            entries = (cut.fields.token_ids, cut.fields.loss_mask, cut.fields.advantages)
            rows = [pad_sequence(require_field(entry).split(cut.lengths), batch_first=True) for entry in entries]
            ids, mask, advantages = rows[0].long(), rows[1], rows[2]
            is_token = torch.arange(ids.shape[1]) < torch.tensor(cut.lengths)[:, None]
            logits = model(ids, attention_mask=is_token.long()).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            (-(logprobs * advantages[:, 1:] * mask[:, 1:]).sum() * scale).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        return norm

    return step


def sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    """The entries of config.json that options name, and what follows from them."""
    return {
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": options.hidden // 8,
        "vocab_size": options.vocab,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "hidden": 384, "vocab": 8192, "sequences": 64, "longest": 512, "runs": 3}
    for name, default in {**sizes, "microbatch-tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", choices=("skewed", "even"), default="skewed")
    parser.add_argument("--model", choices=("addition", "calculator"), help="instead of one of the sizes above")
    options = parser.parse_args()
    initialize_parallel(ParallelConfig(), rank=0, store=HashStore(), seed=0, timeout_s=600)
    config = Qwen3Config(**(PREPARED_MODELS[options.model] if options.model else sizes_of(options)))
    batch = make_batch(options.sequences, options.longest, config.vocab_size, even=options.lengths == "even")
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder)
        ways = {
            "packed": ours(folder, batch, options.microbatch_tokens, packing=True),
            "rectangles": ours(folder, batch, options.microbatch_tokens, packing=False),
            "plain_torch": plain_torch(folder, batch, options.microbatch_tokens),
        }
        norms = {name: way() for name, way in ways.items()}  # warm-up; later steps have moved by next to nothing
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.runs):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(durations) for name, durations in seconds.items()}
    result = {
        **header("policy_step"),
        **vars(options),
        "parameters": parameters,
        "tokens": sum(batch.lengths),
        "in_loss": float(require_field(batch.fields.loss_mask).mean()),
        "seconds": medians,
        "grad_norm": norms,
        "rectangles_ratio": medians["rectangles"] / medians["packed"],
        "plain_torch_ratio": medians["plain_torch"] / medians["packed"],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
