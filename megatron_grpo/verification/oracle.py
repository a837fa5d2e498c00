"""A model in transformers, whose parts can be replaced, as an independent source of log-probabilities."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_grpo.config.errors import RunError
from megatron_grpo.verification.doctor.law import Law, Tokens
from megatron_grpo.verification.hf_model import (
    find_halves,
    find_router,
    list_stored_tensors,
    load_eager_model,
    read_routing,
)

BATCH_TOKENS = 4096
"""Most tokens of one forward pass, padding included; more if a single sequence is longer."""
_EPSILONS = ("variance_epsilon", "eps")  # names of a norm's epsilon in transformers
TIE = 3e-5
"""Rounding may change the order of experts whose float32 scores differ by less than this."""
RouterPart = Literal["inputs", "weights", "logits", "scores"]
"""Tensors of a router that may be rounded: of its matrix product, and the weights of the chosen experts (scores)."""


class Oracle:
    """A model that transformers' plain code computes in this process.

    Args:
        folder: the model in Hugging Face format.
        dtype: type of weights and activations.
        settings: values in place of those of the folder's config.json.

    Raises:
        RunError: transformers cannot load the model.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, settings: Mapping[str, Any] | None = None
    ) -> None:
        try:
            model = load_eager_model(folder, dtype, settings)
        except Exception as error:  # a model's own code may raise anything
            raise RunError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
        self.folder = folder
        self.model: Any = model.requires_grad_(False)
        self._head: Tensor | None = None

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding share their weights."""
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    def list_tensors(self) -> dict[str, Tensor]:
        """List weights by transformers' names: experts stacked, tied weights once."""
        return {name: tensor.detach() for name, tensor in list_stored_tensors(self.model).items()}

    @property
    def layers(self) -> list[Any]:
        return list(self.model.model.layers)

    @torch.no_grad()
    def compute_logprobs(self, sequences: Sequence[Tokens], laws: Sequence[Law]) -> Tensor:
        """Compute log-probabilities of the chosen tokens under each law.

        Returns:
            [laws, chosen tokens of all sequences], float32.
        """
        logprobs: dict[int, Tensor] = {}
        for numbers in _split_batches([len(sequence.ids) for sequence in sequences]):
            batch = [sequences[number] for number in numbers]
            padded = torch.nn.utils.rnn.pad_sequence([sequence.ids for sequence in batch], batch_first=True)
            lengths = torch.tensor([len(sequence.ids) for sequence in batch])
            mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()  # the padding follows the tokens
            options = {"attention_mask": mask, "use_cache": False}
            if any(sequence.positions is not None for sequence in batch):
                plain = [
                    torch.arange(len(sequence.ids)) if sequence.positions is None else sequence.positions
                    for sequence in batch
                ]
                options["position_ids"] = torch.nn.utils.rnn.pad_sequence(plain, batch_first=True)
            hidden = self.model.model(padded, **options).last_hidden_state
            for number, tokens, states in zip(numbers, batch, hidden, strict=True):
                # The hidden state of a token gives the logits of the next one.
                logits = self._compute_logits(states[tokens.chosen - 1])
                logprobs[number] = torch.stack([law.compute_logprobs(logits, tokens) for law in laws])
        return torch.cat([logprobs[number] for number in range(len(sequences))], dim=1)

    @torch.no_grad()
    def compute_probabilities(self, sequences: Sequence[Tokens], law: Law) -> list[Tensor]:
        """Compute the distribution at every chosen token.

        Returns:
            For each sequence [chosen tokens, vocabulary], float32.
        """
        probabilities = []
        for tokens in sequences:
            states = self.model.model(tokens.ids[None], use_cache=False).last_hidden_state[0]
            probabilities.append(
                law.compute_distribution(self._compute_logits(states[tokens.chosen - 1]), tokens).exp()
            )
        return probabilities

    def compute_gradients(
        self, sequences: Sequence[Tokens], law: Law, names: Collection[str] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the gradients of each chosen token's log-probability.

        Args:
            sequences: the tokens.
            law: the distribution.
            names: weights to differentiate by; None: all.
        """
        by_name = {
            name: value
            for name, value in list_stored_tensors(self.model).items()
            if value.is_floating_point() and (names is None or name in names)
        }
        for tensor in by_name.values():
            tensor.requires_grad_(True)
        try:
            for tokens in sequences:
                with torch.enable_grad():
                    states = self.model.model(tokens.ids[None], use_cache=False).last_hidden_state[0]
                    logprobs = law.compute_logprobs(self._compute_logits(states[tokens.chosen - 1]), tokens)
                for number, logprob in enumerate(logprobs):
                    # One graph serves all tokens of a sequence, so it is kept until the last one.
                    has_next = number + 1 < len(logprobs)
                    gradients = torch.autograd.grad(
                        logprob, list(by_name.values()), retain_graph=has_next, allow_unused=True
                    )
                    yield {name: value for name, value in zip(by_name, gradients, strict=True) if value is not None}
        finally:
            for tensor in by_name.values():
                tensor.requires_grad_(False)

    def _compute_logits(self, states: Tensor) -> Tensor:
        """From the last hidden states, [tokens, width], to [tokens, vocabulary], float32."""
        head = self.model.get_output_embeddings()
        logits = head(states) if self._head is None else torch.nn.functional.linear(states, self._head)
        limit = getattr(self.model.config, "final_logit_softcapping", None)
        return (logits if limit is None else torch.tanh(logits / limit) * limit).float()

    @torch.no_grad()
    def compute_logprobs_with_cache(
        self, older: Oracle, sequences: Sequence[Tokens], cuts: Sequence[int], law: Law
    ) -> Tensor:
        """Compute log-probabilities with the keys and values of another model.

        Args:
            older: the model that computes keys and values of each sequence's first tokens.
            sequences: the tokens.
            cuts: number of these first tokens, by sequence; below the position of its first chosen token.
            law: the distribution.

        Returns:
            [chosen tokens of all sequences], float32.
        """
        logprobs = []
        for tokens, cut in zip(sequences, cuts, strict=True):
            if cut == 0:
                logprobs.append(self.compute_logprobs([tokens], [law])[0])
                continue
            cache = older.model.model(tokens.ids[None, :cut], use_cache=True).past_key_values
            states = self.model.model(tokens.ids[None, cut:], past_key_values=cache, use_cache=True).last_hidden_state
            logprobs.append(law.compute_logprobs(self._compute_logits(states[0][tokens.chosen - 1 - cut]), tokens))
        return torch.cat(logprobs)

    # The methods below change the model in place and put it back: a copy for each suspect would take as much memory as
    # the model, and a search tries thousands.
    @contextmanager
    def other_head(self, weight: Tensor) -> Iterator[None]:
        """Compute logits with another head, [vocabulary, width]; the embedding stays."""
        self._head = weight
        try:
            yield
        finally:
            self._head = None

    def change_scale(self, factor: float, layer: int | None = None) -> AbstractContextManager[None]:
        """Compute attention, of one layer or all, with query-key products times a factor."""
        attentions = [attention for number, attention in self.attentions.items() if layer in (None, number)]
        return _with_attributes([(attention, "scaling", attention.scaling * factor) for attention in attentions])

    def change_epsilon(self, epsilon: float, within: str = "") -> AbstractContextManager[None]:
        """Compute norms with another epsilon; `within`: the beginning of their names."""
        norms = [norm for name, norm in self.norms.items() if name.startswith(within)]
        return _with_attributes([(module, key, epsilon) for module, key in norms])

    @property
    def norms(self) -> dict[str, tuple[Any, str]]:
        """Norms, each with the name of its epsilon, by the names of the modules."""
        modules = self.model.named_modules()
        return {name: (module, key) for name, module in modules for key in _EPSILONS if key in vars(module)}

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute the body with other values of tensors, by their names."""
        parameters = list_stored_tensors(self.model)
        before = {name: parameters[name].data for name in values}
        try:
            for name, value in values.items():
                parameters[name].data = value.to(before[name].dtype)
            yield
        finally:
            for name, value in before.items():
                parameters[name].data = value

    def change_rope(self, rope: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Compute the body with other rotary embeddings; `rope`: transformers' rope_parameters."""
        config = copy.deepcopy(self.model.config)
        config.rope_parameters = dict(rope)
        # Transformers computes the frequencies when the module is built, so the module is built anew.
        changes = [(self.model.model, "rotary_emb", type(self.model.model.rotary_emb)(config))]
        for number, attention in self.attentions.items():
            # YaRN changes the scale of query-key products in some families; the module computes it when it is built.
            with torch.device("meta"):
                changes.append((attention, "scaling", type(attention)(config, number).scaling))
        return _with_attributes(changes)

    @contextmanager
    def change_rope_in(self, layer: int, rope: Mapping[str, Any]) -> Iterator[None]:
        """Compute one layer with other rotary embeddings; `rope`: transformers' rope_parameters."""
        config = copy.deepcopy(self.model.config)
        config.rope_parameters = dict(rope)
        # The model computes the embeddings once for all layers, so the layer's attention gets its own in their place.
        rotary = self.model.model.rotary_emb
        changed, computed = type(rotary)(config), list[Any]()

        def compute(_: Any, inputs: Any, options: dict[str, Any], _output: Any) -> None:
            computed[:] = [changed(*inputs, **options)]

        def exchange(_: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return inputs, {**options, "position_embeddings": computed[0]}

        handles = [
            rotary.register_forward_hook(compute, with_kwargs=True),
            self.attentions[layer].register_forward_pre_hook(exchange, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def attentions(self) -> dict[int, Any]:
        """Attention modules by number of the layer; some layers may have none."""
        # Not by `find_halves`: behind Gemma's attention stands the norm that joins the residual stream.
        mixers = {
            number: getattr(layer, "self_attn", getattr(layer, "mixer", None))
            for number, layer in enumerate(self.layers)
        }
        return {number: mixer for number, mixer in mixers.items() if hasattr(mixer, "scaling")}

    @property
    def routers(self) -> dict[int, Any]:
        """Router modules by number of the layer; empty without experts."""
        routers = {number: find_router(layer) for number, layer in enumerate(self.layers)}
        return {number: router for number, router in routers.items() if router is not None}

    @contextmanager
    def rounded_routers(self, parts: Set[RouterPart]) -> Iterator[None]:
        """Compute the body with some parts of the routers rounded to bfloat16."""
        routers = list(self.routers.values())
        for router in routers:
            router.forward = partial(_round_forward, router.forward, parts)
        try:
            yield
        finally:
            for router in routers:
                del router.forward  # the attribute that hid the method of the class

    @torch.no_grad()
    def find_first_ties(self, sequences: Sequence[Tokens]) -> list[int]:
        """Find each sequence's first token whose experts rounding may change.

        Returns:
            Position of the token in each sequence; the sequence's length if there is none.
        """
        # At such a token a chosen expert and one that is not chosen have equal scores within `TIE`: two correct
        # programs may compute different experts for it, and different numbers for all that follows.
        closest: list[Tensor] = []
        handles = [
            router.register_forward_hook(
                lambda module, inputs, output: closest.append(
                    _compute_margins(module, inputs, read_routing(module, output))
                )
            )
            for router in self.routers.values()
        ]
        ties = []
        try:
            for tokens in sequences:
                closest.clear()
                self.model.model(tokens.ids[None], use_cache=False)
                tied = (torch.stack(closest) < TIE).any(0)
                ties.append(int(tied.nonzero()[0]) if tied.any() else len(tokens.ids))
        finally:
            for handle in handles:
                handle.remove()
        return ties

    @torch.no_grad()
    def compute_hidden_states(self, sequences: Sequence[Tokens]) -> dict[str, Tensor]:
        """Compute the outputs of embedding, layers, their halves and routers, by point.

        Returns:
            [tokens of all sequences, width] for each point of `verification.doctor.layer_outputs`, in the order of
            computation. At a router, the weight of every expert, 0 for those that were not chosen.
        """
        decoder, states = self.model.model, dict[str, list[Tensor]]()
        modules = {"embedding": decoder.get_input_embeddings()}
        for number, layer in enumerate(self.layers):
            name = f"layers.{number}"
            routers = {f"{name}.mlp.router": self.routers[number]} if number in self.routers else {}
            for half, module in find_halves(layer).items():
                modules |= {**(routers if half == "mlp" else {}), f"{name}.{half}": module}
            modules[name] = layer
        handles = [module.register_forward_hook(_keep_tensors(point, states)) for point, module in modules.items()]
        try:
            for tokens in sequences:
                decoder(tokens.ids[None], use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return {point: torch.cat(states[point]) for point in modules}


@contextmanager
def _with_attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, each (object, name, value), and put them back."""
    before = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


def _keep_tensors(point: str, states: dict[str, list[Tensor]]) -> Any:
    """Make a hook that keeps a module's output, [tokens, width]."""

    def keep(module: Any, _inputs: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if point.endswith("router"):
            logits, weights, chosen = read_routing(module, output)
            value = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, chosen, weights.float())
        states.setdefault(point, []).append(value.reshape(-1, value.shape[-1]).clone())

    return keep


def _compute_margins(router: Any, inputs: tuple[Tensor, ...], routing: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Distance from the lowest chosen score to the highest unchosen: [tokens], float32."""
    scores, chosen = routing[0].float(), routing[2]
    # MiniMax-M2 passes the bias.
    bias = inputs[1] if len(inputs) > 1 else getattr(router, "e_score_correction_bias", None)
    if bias is not None:  # DeepSeek-V3 chooses by the sigmoid and a bias
        scores = scores.sigmoid() + bias
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, value=True)
    worst = scores.masked_fill(~is_chosen, torch.inf).amin(-1)
    return (worst - scores.masked_fill(is_chosen, -torch.inf).amax(-1)).abs()


class _RoundedProduct(TorchFunctionMode):
    """Rounds operands or results of matrix products: a transformers router computes one."""

    def __init__(self, parts: Set[RouterPart]) -> None:
        super().__init__()
        self._parts = parts

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.linear:
            return function(*args, **(kwargs or {}))
        operands = (
            _round_to_bfloat16(operand) if part in self._parts else operand
            for part, operand in zip(("inputs", "weights"), args[:2], strict=True)
        )
        logits = function(*operands, *args[2:])
        return _round_to_bfloat16(logits) if "logits" in self._parts else logits


def _round_forward(forward: Any, parts: Set[RouterPart], *inputs: Tensor) -> tuple[Tensor, ...]:
    with _RoundedProduct(parts):
        output = list(forward(*inputs))
    position = len(output) - 2  # of the weights, which Llama 4's router returns first
    output[position] = _round_to_bfloat16(output[position]) if "scores" in parts else output[position]
    return tuple(output)


def _round_to_bfloat16(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def _split_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split sequences into batches of similar lengths; yields their indices."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batch and lengths[batch[0]] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
