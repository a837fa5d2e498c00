"""Computes transformers' models in float64, also where their code asks for float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class DoublePrecision(TorchFunctionMode):
    """Replaces float32 by float64 in all calls of torch in the body.

    Norms, softmax, rotary embeddings, routers and recurrences convert to float32 whatever the dtype of the model is, so
    `dtype=torch.float64` alone computes hardly more exactly than float32.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        return function(*tree_map(_replace_dtype, args), **tree_map(_replace_dtype, kwargs or {}))


def _replace_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
