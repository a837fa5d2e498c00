"""A model in transformers, whose parts can be replaced, as an independent source of log-probabilities."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from megatron_grpo.config.errors import RunError

BATCH_TOKENS = 4096
"""Most tokens of one forward pass, padding included; more if a single sequence is longer."""
GREEDY = 1e-5
"""vLLM samples greedily below this temperature, and then does not divide the logits."""


TIE = 3e-5
"""Experts whose float32 scores differ by less than this may change their order by rounding."""
RouterPart = Literal["inputs", "weights", "logits", "scores"]
"""Parts of a router's computation that may be rounded: its product, and the weights of the chosen experts."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence, and those of its tokens whose log-probabilities are computed."""

    ids: Tensor
    """[tokens], int64."""
    places: Tensor
    """[chosen tokens], int64, ascending, above 0: positions of the tokens."""
    begins: Tensor
    """[chosen tokens], int64: position at which the response of each token begins; penalties count its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The distribution that tokens are drawn from: vLLM's options, applied to logits in vLLM's order."""

    temperature: float = 1.0
    top_k: int = 0
    """0: no filter."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens that came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are removed."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def logprobs(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Log-probabilities of the chosen tokens.

        Args:
            logits: [chosen tokens, vocabulary], float32, before each chosen token.
            tokens: the sequence.

        Returns:
            [chosen tokens], float32; -inf for a token that a filter removes.
        """
        if self.penalises:
            logits = self._penalised(logits, tokens)
        if self.temperature > GREEDY:
            logits = logits / self.temperature
        if self.filters:
            logits = self._filtered(logits)
        return logits.log_softmax(-1).gather(1, tokens.ids[tokens.places][:, None])[:, 0]

    def _penalised(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Logits after the penalties; `repetition_penalty` counts the prompt too, the others only the response."""
        said = torch.zeros(len(tokens.ids) + 1, logits.shape[1])
        said[1:].scatter_(1, tokens.ids[:, None], 1.0)
        counts = said.cumsum(0)  # of each token, how often it occurs before a position
        before, own = counts[tokens.places], counts[tokens.places] - counts[tokens.begins]
        penalty = torch.where(before > 0, self.repetition_penalty, 1.0)
        logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        return logits - self.frequency_penalty * own - self.presence_penalty * (own > 0)

    def _filtered(self, logits: Tensor) -> Tensor:
        if self.min_p > 0:
            probabilities = logits.softmax(-1)
            logits = logits.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
        values, order = logits.sort(-1)  # ascending, as in vLLM
        if self.top_k:
            values = values.masked_fill(values < values[:, -min(self.top_k, values.shape[1])][:, None], -torch.inf)
        if self.top_p < 1:
            removed = values.softmax(-1).cumsum(-1) <= 1 - self.top_p
            removed[:, -1] = False
            values = values.masked_fill(removed, -torch.inf)
        return torch.empty_like(logits).scatter_(1, order, values)


def eager_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model whose attention and experts are transformers' plain torch code, without fused kernels."""
    # Grouped products of experts need sizes that are multiples of 16 bytes; eager ones take any.
    kind = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **kind).eval()


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, and the buffers that a model's files have too, by their names in transformers."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


class Oracle:
    """The model of a folder, in one process, computed by transformers' plain code.

    Args:
        folder: the model in Hugging Face format.
        dtype: type of weights and activations.

    Raises:
        RunError: transformers cannot load the model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        try:
            model = eager_model(folder, dtype)
        except Exception as error:  # a model's own code may raise anything
            raise RunError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
        self.model: Any = model.requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        """Weights by their names in transformers, in memory: experts are stacked, tied weights named once."""
        return {name: tensor.detach() for name, tensor in stored_tensors(self.model).items()}

    @property
    def layers(self) -> list[Any]:
        """Modules of the decoder's layers, in order."""
        return list(self.model.model.layers)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Tokens], laws: Sequence[Law]) -> Tensor:
        """Log-probabilities of the chosen tokens under each law.

        Returns:
            [laws, chosen tokens of all sequences], float32.
        """
        found: dict[int, Tensor] = {}
        for numbers in _batches([len(one.ids) for one in sequences]):
            batch = [sequences[number] for number in numbers]
            padded = torch.nn.utils.rnn.pad_sequence([one.ids for one in batch], batch_first=True)
            lengths = torch.tensor([len(one.ids) for one in batch])
            mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()  # the padding follows the tokens
            hidden = self.model.model(padded, attention_mask=mask, use_cache=False).last_hidden_state
            for number, tokens, states in zip(numbers, batch, hidden, strict=True):
                logits = self.model.get_output_embeddings()(states[tokens.places - 1]).float()
                found[number] = torch.stack([law.logprobs(logits, tokens) for law in laws])
        return torch.cat([found[number] for number in range(len(sequences))], dim=1)

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute the body with other values of some tensors, by name; each has the shape of the tensor."""
        own = stored_tensors(self.model)
        before = {name: own[name].data for name in values}
        try:
            for name, value in values.items():
                own[name].data = value.to(before[name].dtype)
            yield
        finally:
            for name, value in before.items():
                own[name].data = value

    @contextmanager
    def other_rope(self, rope: Mapping[str, Any]) -> Iterator[None]:
        """Compute the body with other rotary embeddings; `rope`: transformers' rope_parameters."""
        config = copy.deepcopy(self.model.config)
        config.rope_parameters = dict(rope)
        rotary = self.model.model.rotary_emb
        attentions = [layer.self_attn for layer in self.layers]
        scales = [attention.scaling for attention in attentions]
        self.model.model.rotary_emb = type(rotary)(config)
        for number, attention in enumerate(attentions):
            with torch.device("meta"):  # YaRN changes the scale of query-key products in some families
                attention.scaling = type(attention)(config, number).scaling
        try:
            yield
        finally:
            self.model.model.rotary_emb = rotary
            for attention, scale in zip(attentions, scales, strict=True):
                attention.scaling = scale

    @property
    def routers(self) -> dict[int, Any]:
        """Modules of the routers, by number of the layer; empty without experts."""
        return {number: layer.mlp.gate for number, layer in enumerate(self.layers) if hasattr(layer.mlp, "experts")}

    @contextmanager
    def rounded_routers(self, parts: Set[RouterPart]) -> Iterator[None]:
        """Compute the body with some parts of the routers rounded to bfloat16."""
        routers = list(self.routers.values())
        for router in routers:
            router.forward = partial(_rounded_forward, router.forward, parts)
        try:
            yield
        finally:
            for router in routers:
                del router.forward  # that of the class comes back

    @torch.no_grad()
    def first_ties(self, sequences: Sequence[Tokens]) -> list[int]:
        """Position of each sequence's first token whose choice of experts rounding may change; else its length.

        At such a token a chosen expert and one that is not chosen have equal scores within `TIE`, so that two correct
        programs may compute different experts for it, and different numbers for what follows.
        """
        closest: list[Tensor] = []
        handles = [
            router.register_forward_hook(lambda module, _, output: closest.append(_margins(module, output)))
            for router in self.routers.values()
        ]
        found = []
        try:
            for tokens in sequences:
                closest.clear()
                self.model.model(tokens.ids[None], use_cache=False)
                tied = (torch.stack(closest) < TIE).any(0)
                found.append(int(tied.nonzero()[0]) if tied.any() else len(tokens.ids))
        finally:
            for handle in handles:
                handle.remove()
        return found

    @torch.no_grad()
    def hidden_states(self, sequences: Sequence[Tokens]) -> dict[str, Tensor]:
        """Outputs of the embedding, of the layers and their halves, and of the experts' routers, by point.

        Returns:
            [tokens of all sequences, width] for each point of `proof.hidden_states`, in the order of computation. At a
            router, the weight of every expert, 0 for those that were not chosen.
        """
        inner, found = self.model.model, dict[str, list[Tensor]]()
        modules = {"embedding": inner.embed_tokens}
        for number, layer in enumerate(self.layers):
            name = f"layers.{number}"
            routers = {f"{name}.mlp.router": self.routers[number]} if number in self.routers else {}
            modules |= {f"{name}.self_attn": layer.self_attn, **routers, f"{name}.mlp": layer.mlp, name: layer}
        handles = [module.register_forward_hook(_kept(point, found)) for point, module in modules.items()]
        try:
            for tokens in sequences:
                inner(tokens.ids[None], use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return {point: torch.cat(found[point]) for point in modules}


def _kept(point: str, found: dict[str, list[Tensor]]) -> Any:
    """A hook that keeps a module's output, [tokens, width]."""

    def keep(_module: Any, _given: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if point.endswith("router"):
            logits, weights, chosen = output
            value = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, chosen, weights.float())
        found.setdefault(point, []).append(value.reshape(-1, value.shape[-1]).clone())

    return keep


def _margins(router: Any, output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Absolute difference of the lowest score of a chosen expert and the highest of the others, [tokens], float32."""
    scores, chosen = output[0].float(), output[2]
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:  # DeepSeek-V3 chooses by the sigmoid and a bias
        scores = scores.sigmoid() + bias
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, value=True)
    worst = scores.masked_fill(~is_chosen, torch.inf).amin(-1)
    return (worst - scores.masked_fill(is_chosen, -torch.inf).amax(-1)).abs()


class _RoundedProduct(TorchFunctionMode):
    """Rounds parts of matrix products; transformers' routers make one each."""

    def __init__(self, parts: Set[RouterPart]) -> None:
        super().__init__()
        self._parts = parts

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.linear:
            return function(*args, **(kwargs or {}))
        given = (
            _rounded(one) if part in self._parts else one for part, one in zip(("inputs", "weights"), args, strict=True)
        )
        logits = function(*given)
        return _rounded(logits) if "logits" in self._parts else logits


def _rounded_forward(forward: Any, parts: Set[RouterPart], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with _RoundedProduct(parts):
        logits, scores, chosen = forward(hidden)
    return logits, _rounded(scores) if "scores" in parts else scores, chosen


def _rounded(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of the sequences of each forward pass: of similar lengths, so that little is padded."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batch and lengths[batch[0]] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
