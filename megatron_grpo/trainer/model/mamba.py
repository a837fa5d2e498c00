"""Mamba-2 in place of attention, in plain torch: packed sequences, tensor and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import all_to_all
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from megatron_grpo.models.shape import MambaShape
from megatron_grpo.trainer.model.packed_sequences import PackedSequences, StateTokens

CHUNK = 64
"""Tokens that are computed together; states pass from chunk to chunk."""


def convolve_packed(x: Tensor, weight: Tensor, bias: Tensor, sequence: Tensor) -> Tensor:
    """Causal convolution of each channel over its own sequence, and SiLU.

    Args:
        x: [tokens, channels], sequence after sequence.
        weight: [channels, kernel]; the last column multiplies the token itself.
        bias: [channels].
        sequence: [tokens], int64: index of each token's sequence.

    Returns:
        [tokens, channels], in the dtype of `x`, computed in float32.
    """
    inputs, factors = x.float(), weight.float()
    result = inputs * factors[:, -1] + bias.float()
    for back in range(1, min(weight.shape[1], len(x))):
        is_same = F.pad(sequence[:-back], (back, 0), value=-1) == sequence
        earlier = F.pad(inputs[:-back], (0, 0, back, 0))
        result = result + torch.where(is_same[:, None], earlier, 0.0) * factors[:, -1 - back]
    return F.silu(result).type_as(x)


def scan_states(x: Tensor, dt: Tensor, decay: Tensor, write: Tensor, read: Tensor, sequence: Tensor) -> Tensor:
    """Run the recurrence of each head over each sequence.

    Dao and Gu 2024, "Transformers are SSMs", section 6. The state S, [state, head_dim], is zero before the first token
    of a sequence, and becomes at token t

        S_t = exp(dt_t decay) S_(t-1) + dt_t write_t x_t^T

    and the output is S_t^T read_t. Within a chunk all tokens are computed at once, from the state before the chunk and
    from each other; a chunk may hold tokens of several sequences.

    Args:
        x: [tokens, heads, head_dim], sequence after sequence.
        dt: [tokens, heads], above 0.
        decay: [heads], below 0.
        write: [tokens, groups, state]; neighbouring heads share a group. The paper calls it B.
        read: like `write`. The paper calls it C.
        sequence: [tokens], int64: index of each token's sequence.

    Returns:
        [tokens, heads, head_dim], float32, as all arguments but the last are.
    """
    tokens, groups = len(x), write.shape[1]
    padding = -tokens % CHUNK
    written, read = (_cut(values, padding).movedim(1, 2) for values in (write, read))  # [chunks, groups, CHUNK, state]
    # Heads of a group stand behind it: [chunks, groups, heads, CHUNK, head_dim], and without the last of them.
    values = _cut(x * dt[..., None], padding).unflatten(2, (groups, -1)).movedim(1, 3)
    logs = _cut(dt * decay, padding).unflatten(2, (groups, -1)).movedim(1, 3).cumsum(dim=-1)
    member = F.pad(sequence, (0, padding), value=-1).unflatten(0, (-1, CHUNK))
    last = member[:, -1]  # sequence whose state a chunk passes on
    before = F.pad(last[:-1], (1, 0), value=-1)  # sequence whose state a chunk gets
    # Tokens of the same sequence, up to the reader: [chunks, reader, writer].
    is_seen = (member[:, :, None] == member[:, None, :]).tril()
    between = _exponentiate(logs[..., :, None] - logs[..., None, :], is_seen[:, None, None])
    scores = read @ written.transpose(-1, -2)
    within = (scores[:, :, None] * between) @ values
    to_end = _exponentiate(logs[..., -1:] - logs, (member == last[:, None])[:, None, None])
    added = torch.einsum("cgjn,cghjp->cghnp", written, values * to_end[..., None])
    retained = _exponentiate(logs[..., -1], (before == last)[:, None, None])[..., None, None]
    state, states = torch.zeros_like(added[0]), []
    for chunk in range(len(added)):
        states.append(state)
        state = state * retained[chunk] + added[chunk]
    from_before = _exponentiate(logs, (member == before[:, None])[:, None, None])
    outputs = within + torch.einsum("cgin,cghnp->cghip", read, torch.stack(states)) * from_before[..., None]
    return outputs.movedim(3, 1).flatten(2, 3).flatten(0, 1)[:tokens]


def _cut(values: Tensor, padding: int) -> Tensor:
    """Cut tokens into chunks: [tokens, ...] to [chunks, CHUNK, ...]."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, padding)).unflatten(0, (-1, CHUNK))


def _exponentiate(logs: Tensor, is_kept: Tensor) -> Tensor:
    """Compute exp(logs) where `is_kept`, and 0 elsewhere, also in the gradient."""
    return logs.masked_fill(~is_kept, -torch.inf).exp()


@dataclass
class MambaParts:
    """Classes of a mixer's linear layers."""

    in_proj: Any
    out_proj: Any


class MambaMixer(MegatronModule):
    """Mixes the tokens of each packed sequence by a state that begins empty.

    A tensor-parallel rank has whole groups and their heads. Context-parallel ranks exchange tokens for heads: each
    computes whole sequences of its share of the rank's heads, with copies of their groups where several share one. The
    decay is kept in float32, as vLLM has it, because it is an exponential of an exponential of the parameter. Time
    steps have no lower bound, as in vLLM and in Megatron-Core; transformers raises those below `time_step_min`
    (docs/layouts.md).
    """

    def __init__(
        self, config: TransformerConfig, submodules: MambaParts, *, sizes: MambaShape, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config)
        self._tensor, self._context = pg_collection.tp, pg_collection.cp
        parts = self._tensor.size()
        self._heads, self._groups, self._dim = sizes.heads // parts, sizes.groups // parts, sizes.head_dim
        self._width = self._heads * self._dim
        self._channels = {"x": self._width, "B": self._groups * sizes.state, "C": self._groups * sizes.state}
        self._sections = {"z": self._width, **self._channels, "dt": self._heads}
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self._tensor}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            sum(self._sections.values()) * parts,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **options,
        )
        channels = sum(self._channels.values())
        self.conv1d_weight = self._make_parameter(channels, 1, sizes.kernel)
        self.conv1d_bias = self._make_parameter(channels)
        self.dt_bias, self.D = self._make_parameter(self._heads), self._make_parameter(self._heads)
        self.A_log = self._make_parameter(self._heads, dtype=torch.float32)
        self.norm_weight = self._make_parameter(self._width)
        self.out_proj = submodules.out_proj(
            self._width * parts,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **options,
        )

    def _make_parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        options: dict[str, Any] = {"dtype": dtype or self.config.params_dtype, "device": self.config.platform.device}
        parameter = torch.nn.Parameter(torch.empty(*shape, **options))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(self, hidden_states: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> tuple[Tensor, None]:
        """Mix the tokens of each sequence; returns no bias.

        Both are [tokens of this rank, 1, hidden].
        """
        assert isinstance(packed_seq_params, PackedSequences), "sequences without their layout"
        tokens = packed_seq_params.state_tokens
        assert tokens is not None, "the microbatch was made for a model without Mamba"
        projected, _ = self.in_proj(hidden_states)
        gate, inputs = projected[:, 0].tensor_split([self._width], dim=1)
        mixed = self._mix(inputs, tokens) if self._context.size() == 1 else self._mix_over_ranks(inputs, tokens)
        output, _ = self.out_proj(self._normalize(mixed, gate).type_as(projected)[:, None])
        return output, None

    def _mix(self, inputs: Tensor, tokens: StateTokens, part: int = 0, parts: int = 1) -> Tensor:
        """Compute the convolution and the recurrence of a part of the heads.

        From [tokens, columns of x, B, C and dt] to [tokens, heads * head_dim], float32.
        """
        heads = self._heads // parts
        share = slice(part * heads, (part + 1) * heads)
        weight: Tensor = self.conv1d_weight[:, 0]
        bias: Tensor = self.conv1d_bias
        if parts > 1:
            channels = self._list_columns(part, parts)[:-heads]
            weight, bias = weight[channels], bias[channels]
        widths = [heads * self._dim, (len(bias) - heads * self._dim) // 2]
        convolved = convolve_packed(inputs[:, : len(bias)], weight, bias, tokens.sequence).float()
        x, write, read = convolved.tensor_split([widths[0], sum(widths)], dim=1)
        x = x.unflatten(1, (heads, self._dim))
        state = self._channels["B"] // self._groups
        dt = F.softplus(inputs[:, len(bias) :].float() + self.dt_bias[share].float())
        write, read = (values.unflatten(1, (-1, state)) for values in (write, read))
        outputs = scan_states(x, dt, -self.A_log[share].float().exp(), write, read, tokens.sequence)
        return (outputs + self.D[share].float()[:, None] * x).flatten(1)

    def _mix_over_ranks(self, inputs: Tensor, tokens: StateTokens) -> Tensor:
        """Compute `_mix` of all context-parallel ranks' tokens, for a share of the heads."""
        parts, part, order = self._context.size(), self._context.rank(), tokens.order
        assert order is not None, "ranks without the order of their tokens"
        columns = torch.stack([self._list_columns(number, parts) for number in range(parts)])
        # To every rank the columns of its heads; from every rank its tokens.
        sent = inputs[:, columns].movedim(1, 0).flatten(0, 1)
        received = all_to_all(self._context, sent)
        mixed = self._mix(received[order], tokens, part, parts)
        returned = all_to_all(self._context, torch.empty_like(mixed).index_copy(0, order, mixed))
        return returned.unflatten(0, (parts, -1)).movedim(0, 1).flatten(1)

    def _list_columns(self, part: int, parts: int) -> Tensor:
        """List the columns for a part of the heads.

        They count from the first of x, B, C and dt.
        """
        heads, shared = self._heads // parts, self._heads // self._groups
        first, groups = part * heads, max(1, heads // shared)  # several parts may share a group
        state, starts, begin = self._channels["B"] // self._groups, {}, 0
        for name, size in self._sections.items():
            starts[name], begin = begin - self._width, begin + size
        sizes = {
            "x": (first * self._dim, heads * self._dim),
            **dict.fromkeys("BC", (first // shared * state, groups * state)),
            "dt": (first, heads),
        }
        ranges = [range(starts[name] + begin, starts[name] + begin + size) for name, (begin, size) in sizes.items()]
        return torch.tensor([column for columns in ranges for column in columns], device=self.D.device)

    def _normalize(self, values: Tensor, gate: Tensor) -> Tensor:
        """Multiply by the gate, and normalise each group: [tokens, heads * head_dim], float32."""
        gated = (values * F.silu(gate.float())).unflatten(1, (self._groups, -1))
        return F.rms_norm(gated, gated.shape[-1:], eps=self.config.layernorm_epsilon).flatten(1) * self.norm_weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Build the checkpoint's entries; each section is cut by tensor parallelism on its own."""
        parameters: dict[str, Any] = {}
        self._save_to_state_dict(parameters, "", keep_vars=True)
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            dict.fromkeys(parameters, 0),
            sharded_offsets,
            tp_group=self._tensor,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tensor
            )
        sections = {"in_proj.weight": self._sections, "in_proj.lora_b": self._sections}
        sections |= {"conv1d_weight": self._channels, "conv1d_bias": self._channels}
        for name, sizes in sections.items():
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = _split_tensor_factory(
                    state[f"{prefix}{name}"], list(sizes.values()), list(sizes), 0
                )
        return state
