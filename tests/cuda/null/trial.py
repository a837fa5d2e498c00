"""A rank of the policy on the stand-in device: one rank of a job of any size, whose other ranks are made up.

Collectives go through torch's fake process group: they return at once, and tensors that other ranks would have filled
have any content. Where such content is a size, a plausible one is put there (`_even_experts`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import PolicyConfig, ReferenceConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.trainer.messages import RankSettings, RankTrainResult
from megatron_grpo.trainer.parallel import initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.problem import SMALL, TINY, count_tokens, make_loss
from tests.cuda.null.kernels import Answers

SIZES: dict[str, Any] = {
    "hidden_size": 512,  # heads times their size, which vLLM takes for granted in some families
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_local_experts": 8,
}
"""Sizes that every FP8 recipe can split into whole blocks, in place of those of `verification.problem`."""
LATENT = {
    "num_key_value_heads": SIZES["num_attention_heads"],
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
"""Sizes of latent attention that vLLM's kernels have: DeepSeek-V3's, with fewer heads."""
LENGTHS = [[37, 91, 128], [156, 100], [256], [61, 67, 64, 64]]
"""Tokens of each sequence by microbatch; all microbatches have as many, so that stages may exchange one shape."""


def make_model(family: str, folder: Path) -> Path:
    """Write a small random model of a family, with the sizes above; returns its folder.

    ", full queries" after the name: latent attention does not compress queries.
    """
    family, _, variant = family.partition(", ")
    config = {"model_type": family, **SMALL, **TINY[family]}
    config |= {name: size for name, size in SIZES.items() if name in config}
    rope = config.get("rope_parameters") or {}
    if "short_factor" in rope:  # one factor for each pair of rotated numbers
        head = config["hidden_size"] // config["num_attention_heads"]
        pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        factors = {name: [rope[name][0]] * pairs for name in ("short_factor", "long_factor")}
        config["rope_parameters"] = rope | factors
    if "kv_lora_rank" in config:
        config |= LATENT | ({"q_lora_rank": None} if variant else {})
        config |= {"index_topk": 64, "index_head_dim": 128} if "index_topk" in config else {}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass
class Trial:
    """A rank, with the batch of its replica."""

    rank: PolicyRank
    batch: TokenBatch
    microbatches: list[list[int]]
    answers: Answers

    def logprobs(self) -> Tensor | None:
        """The policy's log-probabilities of the batch."""
        with self.answers:
            return self.rank.compute_logprobs(self.batch, self.microbatches)

    def reference_logprobs(self) -> Tensor | None:
        """The reference's log-probabilities of the batch."""
        with self.answers:
            return self.rank.compute_reference_logprobs(self.batch, self.microbatches)

    def train(self) -> RankTrainResult:
        """One optimizer step on the batch."""
        counts = count_tokens(self.batch)
        with self.answers:
            return self.rank.train(self.batch, self.microbatches, make_loss(), counts)


def make_trial(
    folder: Path,
    config: PolicyConfig,
    number: int = 0,
    reference: ReferenceConfig | None = None,
    lengths: Sequence[Sequence[int]] = LENGTHS,
) -> Trial:
    """Build rank `number` of the configuration's layout, on the model of a folder; `lengths` as `LENGTHS`."""
    config.model.path = str(folder)
    shape = read_model_shape(folder)
    with _fake_groups():
        initialize_parallel(config.parallel, rank=number, store=FakeStore(), seed=1, timeout_s=60)
    top_k = 0 if shape.experts is None else shape.experts.top_k
    with (answers := Answers(top_k)):
        settings = RankSettings(config=config, shape=shape, folder=str(folder), decay_steps=10, reference=reference)
        rank = PolicyRank(settings)
    _share_experts()
    numbers = iter(range(sum(map(len, lengths))))
    microbatches = [[next(numbers) for _ in length] for length in lengths]
    return Trial(rank, _batch(shape, list(chain(*lengths))), microbatches, answers)


def _batch(shape: ModelShape, lengths: list[int]) -> TokenBatch:
    """A batch of sequences of these lengths with every field that a loss reads."""
    total = sum(lengths)
    sampled = torch.cat([torch.arange(length) >= length // 4 for length in lengths])
    fields = TokenFields(
        token_ids=torch.randint(shape.vocab, (total,), dtype=torch.int32),
        sampled=sampled,
        loss_mask=sampled.float(),
        generation_logprobs=-torch.rand(total),
        prev_logprobs=-torch.rand(total),
        advantages=torch.randn(total),
    )
    return TokenBatch(lengths, fields)


@contextmanager
def _fake_groups() -> Iterator[None]:
    """Let NCCL's groups be fake ones, which collectives of objects do not know."""
    init_process_group = dist.init_process_group

    def fake(backend: str, **arguments: Any) -> None:
        assert backend == "nccl", f"a process with a GPU asks for {backend}"
        init_process_group("fake", **arguments)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    dist.init_process_group, dist.all_gather_object = fake, all_gather_object
    yield
    dist.init_process_group = init_process_group


def _share_experts() -> None:
    """Send every expert as many tokens, where kernels would have counted them."""
    preprocess = MoEAlltoAllTokenDispatcher.preprocess

    def evenly(self: Any, routing_map: Tensor) -> Tensor:
        device = preprocess(self, routing_map).device
        ranks, number = self.tp_size * self.ep_size, len(routing_map) * self.config.moe_router_topk
        counts = torch.full((self.num_experts,), number // self.num_experts)
        counts[: number % self.num_experts] += 1
        local_counts = counts[self.local_expert_indices]
        if ranks > 1:
            self.input_splits = counts.view(self.ep_size, -1).sum(1).to(device)
            self.output_splits = local_counts.sum().repeat(self.ep_size).to(device)
            self.output_splits_tp = (local_counts.sum() * self.ep_size).repeat(self.tp_size).to(device)
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = local_counts.repeat(ranks, 1).to(device)
        return (local_counts * ranks).to(device)

    MoEAlltoAllTokenDispatcher.preprocess = evenly
