"""Routing of tokens to experts: load balancing per sequence, replay of recorded experts, counts and metrics.

The last classes are layers of Gemma 4: experts beside a dense network, and a factor of each layer's output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.config.schema import MoeConfig
from megatron_grpo.models.megatron_names import count_earlier
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.trainer.model.latent_attention import ReplicatedLinear
from megatron_grpo.trainer.model.layers import RMSNorm
from megatron_grpo.trainer.model.packed_sequences import Membership, PackedSequences


class ExpertRouter(TopKRouter):
    """Chooses experts, counts the choices, and adds balancing losses.

    Megatron-Core's own router balances the load over a microbatch, which depends on packing and layout, and scales its
    loss by token counts that only its own loss normalisation cancels. Here the load is balanced within each sequence,
    and averaged over the sequences of the optimizer step.
    """

    def __init__(self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        # Else Megatron-Core makes the weight on the CPU and moves it in the first pass, after the optimizer copied it.
        with config.platform.device:
            super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.aux_loss_coeff = 0.0
        self.z_loss_coeff = 0.0
        self.sequences_in_step = 1.0  # over all replicas; both losses are averages over them
        self.replayed_layer: int | None = None  # index among this rank's layers with experts; None: it always chooses
        # `DecoderLayer` sets these before every pass: the sequence of each token of the microbatch, and its recorded
        # experts, [tokens of this rank, experts of a token], int16, -1 where there are none.
        self.membership: Membership | None = None
        self.record: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Reset the counts at the start of a step."""
        # All of this rank's tokens, without padding. Agreement is the number of recorded experts that the router would
        # have chosen too, and the number of all recorded ones.
        device = self.config.platform.device
        self.expert_tokens = torch.zeros(self.num_experts, device=device)  # tokens that chose each expert
        self.losses = torch.zeros(2, device=device)  # shares of the auxiliary and the z loss
        self.agreement = torch.zeros(2, device=device)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts; returns (weights, is chosen), both [tokens, experts].

        The weight of an expert that is not chosen is 0. The logits are [tokens of this rank, 1, experts], float32;
        `padding_mask` is unused: `membership` marks padding.
        """
        flat = logits.view(-1, self.num_experts)
        config, membership = self.config, self.membership
        indices, agreed = (None, None) if self.replayed_layer is None else self._replay(flat)
        probs, chosen = self._choose(flat, precomputed_indices=indices)
        if config.single_expert_has_weight_one:
            # Divided by itself, as transformers does it, so that the router stays in the graph with a gradient of 0.
            scale = config.moe_router_topk_scaling_factor or 1.0
            probs = probs / (probs.sum(dim=1, keepdim=True) + 1e-20) * scale
        # With recomputed activations only the second pass, which has a gradient, is counted.
        if self.training and torch.is_grad_enabled() and membership is not None:
            is_token = membership.weight > 0  # not padding
            self.expert_tokens += (chosen & is_token[:, None]).sum(dim=0)  # no indexing, which would wait for the GPU
            if agreed is not None:
                compared = is_token & (agreed >= 0)
                self.agreement += torch.stack([(agreed * compared).sum(), compared.sum() * self.topk])
            if self.aux_loss_coeff or self.z_loss_coeff:
                probs = self._attach_losses(probs, flat, membership)
        return probs, chosen

    def _choose(self, logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        config = self.config
        choice: tuple[Tensor, Tensor] = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            **options,
        )
        return choice

    def _replay(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        # Recorded experts, [tokens, topk], int64, or the router's where nothing is on record; and how many of the
        # router's choices are recorded ones, [tokens], int64, or -1.
        assert self.record is not None, "the recorded experts come with every microbatch"
        record = self.record.long()
        is_recorded = (record >= 0).all(dim=1)
        _, preferred = self._choose(logits.detach(), dense_output=True)
        agreed = (preferred[:, :, None] == record[:, None, :]).sum(dim=(1, 2))
        return torch.where(is_recorded[:, None], record, preferred), torch.where(is_recorded, agreed, -1)

    def _attach_losses(self, probs: Tensor, logits: Tensor, membership: Membership) -> Tensor:
        sigmoid = self.score_function == "sigmoid"
        level = sum_load_levels(logits.float(), membership, top_k=self.topk, sigmoid=sigmoid, sum_parts=_sum_over_parts)
        level = level * self.aux_loss_coeff / self.sequences_in_step
        squares = logits.float().logsumexp(dim=1).square()
        z_loss = (squares * membership.weight).sum() * self.z_loss_coeff / self.sequences_in_step
        self.losses += torch.stack([level, z_loss]).detach()
        with_losses: Tensor = MoEAuxLossAutoScaler.apply(probs, level + z_loss)
        return with_losses


def build_shared_experts(*, build: Callable[..., Any], config: Any, **settings: Any) -> Any:
    """Build them on the device, where Megatron-Core makes all but their gate."""
    with config.platform.device:
        return build(config=config, **settings)


def sum_load_levels(
    logits: Tensor, members: Membership, *, top_k: int, sigmoid: bool, sum_parts: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sum this rank's share of sum_i f_i P_i over sequences.

    DeepSeek-V3 (2024), equations 17 to 20. f_i is the share of the sequence's choices that fell on expert i, times the
    number of experts; P_i the mean of its normalised score. A sequence whose tokens chose all experts equally often
    adds 1. Logits are [tokens, experts], float32; scores are their sigmoids or their softmax. `sum_parts` sums
    [sequences + 1, experts] over the ranks that share the sequences.
    """
    scores = logits.softmax(dim=1)
    if sigmoid:
        scores = logits.sigmoid()
        scores = scores / (scores.sum(dim=1, keepdim=True) + 1e-20)
    weight = members.weight[:, None]
    with torch.no_grad():  # f has no gradient, so ranks that share a sequence only have to sum f
        best = torch.zeros_like(scores).scatter_(1, scores.topk(top_k, dim=1).indices, 1.0)
        shares = scores.new_zeros(members.sequences + 1, scores.shape[1])
        shares.index_add_(0, members.sequence, best * weight)
        load = sum_parts(shares)[members.sequence] * (scores.shape[1] / top_k)
    return (scores * load * weight).sum()


def _sum_over_parts(shares: Tensor) -> Tensor:
    process_group = parallel_state.get_tensor_and_context_parallel_group()
    if process_group.size() > 1:
        dist.all_reduce(shares, group=process_group)
    return shares


class LatentExperts(MoELayer):
    """Experts between two projections, as vectors shorter than the hidden state (Nemotron 3).

    Megatron-Core's own projections need Transformer Engine, which a CPU and a dry run lack.
    """

    def __init__(self, config: Any, submodules: MoESubmodules, *arguments: Any, **keywords: Any) -> None:
        without = copy.copy(config)
        without.moe_latent_size = None
        experts: Any = submodules.experts

        def build_experts(count: int, _config: Any, **options: Any) -> Any:
            return experts(count, config, **options)

        super().__init__(without, replace(submodules, experts=build_experts), *arguments, **keywords)
        self.config = config
        self.fc1_latent_proj = ReplicatedLinear(config.hidden_size, config.moe_latent_size, config=config)
        self.fc2_latent_proj = ReplicatedLinear(config.moe_latent_size, config.hidden_size, config=config)


class DecoderLayer(TransformerLayer):
    """Megatron-Core's layer, which passes sequences and recorded experts to its router."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if self.is_moe_layer and self.mlp.moe_layer_recompute:
            # Megatron-Core would recompute the experts with the sequences of a later microbatch.
            self.mlp.moe_layer_recompute = False
            self._experts, self.mlp.forward = self.mlp.forward, self._compute_experts

    def _compute_experts(self, hidden: Tensor, *args: Any, **keywords: Any) -> Any:
        router = self.mlp.router
        microbatch = router.membership, router.record

        def compute(hidden: Tensor) -> Any:
            router.membership, router.record = microbatch
            return self._drop_probs(self._experts(hidden, *args, **keywords))

        return tensor_parallel.checkpoint(compute, False, hidden) if self.training else compute(hidden)

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **keywords: Any) -> Any:
        if self.is_moe_layer:
            # Set in every call, because recomputation calls a layer again after other microbatches.
            packed = packed_seq_params if isinstance(packed_seq_params, PackedSequences) else None
            router = self.mlp.router
            router.membership = None if packed is None else packed.membership
            router.record = None
            if packed is not None and packed.routed is not None and router.replayed_layer is not None:
                router.record = packed.routed[:, router.replayed_layer]
        return self._drop_probs(super().forward(*args, packed_seq_params=packed_seq_params, **keywords))

    def _drop_probs(self, result: Any) -> Any:
        # The dispatcher would keep the routing probabilities of its last call. Their graph holds the input of a
        # recomputed layer, and its gradient, until the end of the step.
        if self.is_moe_layer:
            self.mlp.token_dispatcher.probs = None
        return result


def mark_experts(model: torch.nn.Module) -> None:
    """Give the experts an optimizer of their own in every layout."""
    # Megatron-Core marks them only where other ranks share them than share the other parameters. A checkpoint of one
    # layout would lack an optimizer that another layout has.
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]  # read by Megatron-Core
            # Megatron-Core marks the biases of second matrices, whose gradients it would sum over these ranks twice.
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


class StepRouting:
    """A rank's routers during optimizer steps; metrics have the prefix `name`.

    `form`: of recorded experts, which the routers replay; None: they replay none.
    """

    def __init__(self, chunks: Sequence[Any], config: MoeConfig, name: str, form: RoutedForm | None) -> None:
        self._name, self._device = name, chunks[0].config.platform.device
        modules = [module for chunk in chunks for module in chunk.modules()]
        self.routers = [module for module in modules if isinstance(module, ExpertRouter)]  # layer by layer
        self.form = form
        layers = [module for module in modules if isinstance(module, DecoderLayer) and module.is_moe_layer]
        self._layers = [count_earlier(layer.config.moe_layer_freq, layer.layer_number) for layer in layers]
        self._bias_rate = config.bias_update_rate
        for number, router in enumerate(self.routers):
            router.aux_loss_coeff, router.z_loss_coeff = config.aux_loss_coeff, config.z_loss_coeff
            router.replayed_layer = None if form is None else number

    @property
    def replays(self) -> bool:
        """True if routers of this rank replay recorded experts."""
        return self.form is not None and bool(self.routers)

    def select_layers(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Select the bytes of this rank's layers from rows of all layers."""
        assert self.form is not None, "nothing is replayed"
        return self.form.select_layers(rows, self._layers)

    def begin(self, sequences: float) -> None:
        """Start a step of `sequences` sequences, counted over all replicas."""
        for router in self.routers:
            router.clear()
            router.sequences_in_step = sequences

    def sum_counts(self) -> Tensor:
        """Sum the step's tokens by expert: [layers, experts]; collective."""
        if not self.routers:
            return torch.zeros(0, 1, device=self._device)
        counts = torch.stack([router.expert_tokens for router in self.routers])
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        return counts

    @torch.no_grad()
    def end(self) -> dict[str, float]:
        """Update the bias of experts, and return the step's metrics; collective."""
        counts = self.sum_counts()
        if self._bias_rate:
            # The bias rises for experts chosen less than the mean, and falls for the others (DeepSeek-V3, 2.1.2).
            for router, chosen in zip(self.routers, counts, strict=True):
                router.expert_bias.add_(self._bias_rate * torch.sign(chosen.mean() - chosen))
        level = counts * counts.shape[1] / counts.sum(dim=1, keepdim=True).clamp(min=1.0)
        by_layer = [torch.cat([router.losses, router.agreement]) for router in self.routers]
        over_tokens = torch.stack(by_layer or [counts.new_zeros(4)]).sum(dim=0)
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(over_tokens, group=stage)
        extremes = torch.stack([level.amax(dim=1).sum(), level.amin(dim=1).sum()])
        sums = torch.cat([extremes, over_tokens, over_tokens.new_tensor([float(len(level))])])
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        highest, lowest, aux, z, agreed, compared, layers = sums.tolist()
        metrics = {
            f"{self._name}_load_highest": highest / layers,
            f"{self._name}_load_lowest": lowest / layers,
            f"{self._name}_aux_loss": aux,
            f"{self._name}_z_loss": z,
        }
        return metrics | ({"moe_routing_agreement": agreed / max(compared, 1.0)} if self.form is not None else {})


class ScaledLayer(DecoderLayer):
    """A layer whose output is multiplied by an untrained number."""

    layer_scalar: Tensor

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        scalar = torch.ones(1, dtype=config.params_dtype, device=config.platform.device)
        self.register_buffer("layer_scalar", scalar)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        hidden, *rest = super().forward(*args, **keywords)
        return hidden * self.layer_scalar, *rest


class NormedRouter(ExpertRouter):
    """Normalises its input, and multiplies the weights of experts by trained factors."""

    def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.norm = RMSNorm(config, config.hidden_size)
        options = {"dtype": config.params_dtype, "device": config.platform.device}
        factors: Any = torch.nn.Parameter(torch.empty(config.num_moe_experts, **options))
        factors.sequence_parallel = config.sequence_parallel
        self.per_expert_scale = factors

    def gating(self, input: Tensor) -> Tensor:
        """Compute logits: [..., hidden] to [..., experts], float32."""
        logits: Tensor = super().gating(self.norm(input) * input.shape[-1] ** -0.5)
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts, as `ExpertRouter.routing`."""
        probs, chosen = super().routing(logits, padding_mask)
        return probs * self.per_expert_scale, chosen


class MixtureBesideDense(MoELayer):
    """Experts beside a dense network, each with norms of its own.

    Both have the same input. The dense network is what Megatron-Core calls the shared expert. The router sees the input
    without a norm before it.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.dense_norm, self.dense_post_norm = RMSNorm(config, config.hidden_size), RMSNorm(config, config.hidden_size)
        self.expert_norm = RMSNorm(config, config.hidden_size)
        self.expert_post_norm = RMSNorm(config, config.hidden_size)
        self.post_norm = RMSNorm(config, config.hidden_size)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """Compute the dense network with its norms."""
        return self.dense_post_norm(super().shared_experts_compute(self.dense_norm(hidden_states)))

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Normalise the input of experts, and sort it by expert."""
        return super().preprocess(self.expert_norm(hidden_states), probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Add the normalised outputs of both, and normalise their sum."""
        routed = self.expert_post_norm(super().postprocess(output, None))
        return self.post_norm(routed + shared_expert_output)
