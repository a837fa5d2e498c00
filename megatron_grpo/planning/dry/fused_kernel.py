"""Memory and work of one fused kernel of a GPU, and a stand-in that has no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.planning.dry.tracker import kind
from megatron_grpo.planning.dry.work import WorkKind, count_bytes, note, note_message, note_product

TensorSpec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype."""


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer's product, [m, k] x [k, n], of all experts."""

    m: int
    k: int
    n: int
    dtype: str
    number: int = 1
    """Experts, each with a product of its own."""

    def note(self, m: int, k: int, n: int) -> None:
        """Record a product of these sizes, such as a gradient's."""
        width = {"fp8": 1, "float32": 4}.get(self.dtype, 2)
        sort: WorkKind = "grouped_matmul" if self.number > 1 else "matmul"
        note_product("linear", m, k, n, self.dtype, number=self.number, kind=sort, width=width)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: name, bytes of its larger side, process group."""

    name: str
    nbytes: int
    group: Any


@dataclass(frozen=True, slots=True)
class Kernel:
    """Memory and work of one Transformer Engine operation, forward and backward."""

    kind: str
    outputs: Sequence[TensorSpec]
    keeps: Sequence[int] = ()
    """Indices of the inputs that are saved for the backward pass."""
    keeps_output: bool = False
    """Whether the first output is saved, too."""
    saved: Sequence[TensorSpec] = ()
    """Further tensors that are saved."""
    forward: Sequence[TensorSpec] = ()
    """Tensors that live only during the forward pass."""
    backward: Sequence[TensorSpec] = ()
    """Tensors that live only during the backward pass, besides the inputs' gradients."""
    product: Product | None = None
    """The product that a linear layer computes."""
    attention_flops: float = 0.0
    """Operations of an attention's forward pass."""
    messages: Sequence[Collective] = ()
    """Collectives of the forward pass."""
    messages_back: Sequence[Collective] = ()
    """Collectives of the backward pass."""
    operators: tuple[int, int] = (1, 1)
    """Operators of the forward and of the backward pass, where torch's functions take the kernel's place."""

    def note_forward(self, moved: int) -> None:
        """Record the forward pass, which reads and writes `moved` bytes."""
        note("elementwise", self.kind, times=self.operators[0] - 1)
        if self.product is not None:
            self.product.note(self.product.m, self.product.k, self.product.n)
        elif self.attention_flops:
            note("attention", self.kind, flops=self.attention_flops, nbytes=moved)
        else:
            note("elementwise", self.kind, nbytes=moved)
        for message in self.messages:
            note_message(message.name, message.nbytes, message.group)

    def note_backward(self, moved: int, of_input: bool, of_weights: bool) -> None:
        """Record the backward pass: a product for each gradient."""
        note("elementwise", self.kind, times=self.operators[1] - 1)
        if self.product is not None:
            m, k, n = self.product.m, self.product.k, self.product.n
            if of_input:
                self.product.note(m, n, k)
            if of_weights:
                # Grouped products keep the tokens as rows, because their number differs from expert to expert.
                self.product.note(n, m, k) if self.product.number == 1 else self.product.note(m, k, n)
        elif self.attention_flops:
            # Flash attention computes the scores again, which makes five products of the forward pass's two.
            note("attention", self.kind, flops=2.5 * self.attention_flops, nbytes=2 * moved)
        else:
            note("elementwise", self.kind, nbytes=moved)
        for message in self.messages_back:
            note_message(message.name, message.nbytes, message.group)


def run(kernel: Kernel, *inputs: Tensor) -> Any:
    """Run a kernel; return its output, or a tuple of several."""
    outputs = _KernelFunction.apply(kernel, *inputs)
    return outputs[0] if len(kernel.outputs) == 1 else outputs


class _KernelFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, *inputs: Tensor) -> tuple[Tensor, ...]:
        like = inputs[0]
        with kind(kernel.kind):
            work, outputs, saved = (
                [_make_like(like, tensor) for tensor in tensors]
                for tensors in (kernel.forward, kernel.outputs, kernel.saved)
            )
        # The tensors of the forward pass have counted for the peak by now.
        del work
        inputs_to_keep = [inputs[number] for number in kernel.keeps]
        ctx.save_for_backward(*inputs_to_keep, *(outputs[:1] if kernel.keeps_output else ()), *saved)
        ctx.kernel, ctx.inputs = kernel, [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.moved = count_bytes([*inputs, *outputs])
        kernel.note_forward(ctx.moved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, like = ctx.saved_tensors, gradients[0]
        with kind(ctx.kernel.kind):
            work = [_make_like(like, tensor) for tensor in ctx.kernel.backward]
            needed = zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
            results = [_make_like(like, tensor) if is_needed else None for tensor, is_needed in needed]
        del work, saved
        needed_gradients = ctx.needs_input_grad[1:]
        ctx.kernel.note_backward(ctx.moved, of_input=needed_gradients[0], of_weights=any(needed_gradients[1:]))
        return None, *results


def _make_like(like: Tensor, form: TensorSpec) -> Tensor:
    return like.new_empty(tuple(form[0]), dtype=form[1])
