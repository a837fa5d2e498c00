"""Measures what simulated FP8 does to log-probabilities, recipe by recipe; prints JSON.

    python benchmarks/fp8_logprobs.py [--model FOLDER] [--sequences 8] [--tokens 128] [--layers 8]

Without --model a Qwen3 of random weights is made: 256 hidden features, 2 heads of 128. Each recipe rounds the operands
of all linear layers; `kept` leaves the first and last layer as they are. `bfloat16` is the same model without FP8 in
bfloat16, for comparison. All are compared with float32, token by token; `kl` is the mean of the k3 estimate
exp(d) - 1 - d, with d = log p(float32) - log p(recipe) at tokens drawn from the float32 model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from header import header
from torch import Tensor
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import Fp8Config, ModelConfig, ParallelConfig, PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank

RECIPES: tuple[Literal["tensorwise", "blockwise", "mxfp8"], ...] = ("tensorwise", "blockwise", "mxfp8")


def make_model(folder: Path, layers: int) -> Path:
    """A model of random weights whose logits spread like a trained one's."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        vocab_size=1024,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def sample_ids(folder: Path, sequences: int, tokens: int) -> Tensor:
    """[sequences, tokens], int64: drawn from the model in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(1)
    first = torch.randint(3, model.config.vocab_size, (sequences, 1))
    with torch.no_grad():
        return model.generate(first, do_sample=True, max_new_tokens=tokens - 1, min_new_tokens=tokens - 1, top_k=0)


def logprobs(folder: Path, ids: Tensor, fp8: Fp8Config, precision: Literal["float32", "bfloat16"]) -> Tensor:
    """[sequences, tokens - 1], float32."""
    config = PolicyConfig(model=ModelConfig(path=str(folder)), precision=precision, fp8=fp8)
    shape = read_model_shape(folder)
    rank = PolicyRank(RankSettings(config=config, shape=shape, folder=str(folder), decay_steps=1))
    batch = TokenBatch([ids.shape[1]] * len(ids), TokenFields(token_ids=ids.flatten().int()))
    outputs = rank.compute_logprobs(batch, [[number] for number in range(len(ids))])
    assert outputs is not None
    return outputs.view(ids.shape)[:, 1:]


def difference(actual: Tensor, exact: Tensor) -> dict[str, float]:
    """How far log-probabilities, both [...], are apart, in nats."""
    d = (exact - actual).double()
    return {
        "mean_abs": d.abs().mean().item(),
        "p99_abs": d.abs().flatten().quantile(0.99).item(),
        "max_abs": d.abs().max().item(),
        "mean": -d.mean().item(),
        "kl": (torch.exp(-d) - 1 + d).mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    for name, default in {"sequences": 8, "tokens": 128, "layers": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    initialize_parallel(ParallelConfig(), rank=0, store=HashStore(), seed=0, timeout_s=600)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(Path(folder) / "model", options.layers)
        ids = sample_ids(model, options.sequences, options.tokens)
        exact = logprobs(model, ids, Fp8Config(), "float32")
        result: dict[str, Any] = {"bfloat16": difference(logprobs(model, ids, Fp8Config(), "bfloat16"), exact)}
        for recipe in RECIPES:
            fp8 = Fp8Config(format="hybrid", recipe=recipe, simulate=True)
            fp8_config = Fp8Config(
                format="hybrid", recipe=recipe, simulate=True, first_layers_bf16=1, last_layers_bf16=1
            )
            result[recipe] = difference(logprobs(model, ids, fp8, "float32"), exact)
            result[f"{recipe}, kept"] = difference(logprobs(model, ids, fp8_config, "float32"), exact)
    about = {"model": "random Qwen3" if options.model is None else options.model.name, "layers": options.layers}
    sizes = {"sequences": options.sequences, "tokens": options.tokens}
    print(
        json.dumps(
            {**header("fp8_logprobs"), **about, **sizes, "mean_logprob": exact.mean().item(), **result}, indent=2
        )
    )


if __name__ == "__main__":
    main()
