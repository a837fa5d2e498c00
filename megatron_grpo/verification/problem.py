"""The model and the batch that every layout computes, and the results of transformers for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, require_field
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import LossConfig, MoeConfig
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.families import add_text_prefix, find_family, is_carried, measure_tensors
from megatron_grpo.models.families.reading import UnknownFamilyError, read_model_shape
from megatron_grpo.models.shape import ExpertShape, ModelShape, read_config_json
from megatron_grpo.models.source import download_config, fetch_model_folder, find_local_folder, is_hub_name
from megatron_grpo.verification.double_precision import DoublePrecision
from megatron_grpo.verification.hf_model import find_router, list_stored_tensors, load_eager_model, read_routing
from megatron_grpo.verification.nearest_family import describe_nearest_family
from megatron_grpo.verification.random_pictures import load_whole_model, make_model_inputs
from megatron_grpo.verification.tolerances import Distance, Tolerances, measure_distance

SMALL, EXPERTS, LATENT, SPARSE, DELTA, MAMBA, WINDOW, RARE, TINY = yaml.safe_load(
    Path(__file__).with_name("tiny_models.yaml").read_text()
).values()
"""Entries of config.json: SMALL of every small model; EXPERTS, LATENT, SPARSE, DELTA, MAMBA and WINDOW of models with
experts, latent attention, an indexer, delta nets, Mamba-2 or sliding windows; RARE of some families; TINY of each
family, by its name."""


def prepare_model(model: str, shrink: bool, folder: Path, seed: int) -> Path:
    """Find the model to verify, or make it, and return its folder.

    Args:
        model: `tiny:` and a family, a folder with a config.json, or a hub name.
        shrink: make a small random model of the folder's own configuration.
        folder: folder to write a random model into.
        seed: seed of a random model's weights.

    Raises:
        ValueError: there is no such model, or it has no support; with `shrink` the text is the same.
        RunError: the model cannot be downloaded.
    """
    if model.startswith("tiny:"):
        family = model.removeprefix("tiny:")
        if family not in TINY:
            raise ValueError(f"model={model} is not known; use tiny: and one of {', '.join(TINY)}, or a folder")
        return make_model({"model_type": family, **SMALL, **TINY[family]}, folder, seed)
    path = _find_folder(model, weights=not shrink)
    if not (path / "config.json").is_file():
        raise ValueError(f"model={model} has no config.json; give a model's folder, a hub name, or tiny: and a family")
    try:
        shape = read_model_shape(path)
    except UnknownFamilyError as error:
        text = str(error).removeprefix(f"{path / 'config.json'}: ")
        raise ValueError(f"model={model}: {text}.{describe_nearest_family(path)}") from None
    if shrink and shape.vision is not None:
        raise ValueError(f"shrink=true makes models of text alone, and model={model} also sees images; leave it out")
    return _make_small_copy(path, shape, folder, seed) if shrink else path


def _make_small_copy(path: Path, shape: ModelShape, folder: Path, seed: int) -> Path:
    """Make a small random model of a folder's own configuration."""
    config_values = read_config_json(path / "config.json")
    part = config_values["text_config"] if shape.text_prefix else config_values
    raw = {name: value for name, value in part.items() if name not in _LEFT_OUT}
    family = find_family(shape.family)
    raw |= {"model_type": family.model_type or family.name, "tie_word_embeddings": shape.tied_embeddings}
    return make_model(
        {**raw, **_choose_sizes(raw, shape), **_keep_layers(raw, shape), **_cut_factors(raw)}, folder, seed
    )


def _choose_sizes(raw: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Choose small sizes for those that a configuration states."""
    # Families name the number of experts differently; only the names that the configuration has are used below.
    count = EXPERTS["num_local_experts"]
    small = {**SMALL, **EXPERTS, **RARE, "num_experts": count, "n_routed_experts": count}
    kinds = {"kv_lora_rank": LATENT, "index_topk": SPARSE, "linear_num_key_heads": DELTA, "ssm_state_size": MAMBA}
    small |= {name: size for key, part in kinds.items() if key in raw for name, size in part.items()}
    small["rotary_dim"] = SMALL["head_dim"] // 2
    del small["max_position_embeddings"]  # which some rotary embeddings compare with another number
    if raw.get("num_experts_per_tok") == 1:
        small["num_experts_per_tok"] = 1
    if shape.experts is not None and shape.experts.groups == 1:
        small |= {"n_group": 1, "topk_group": 1}
    if shape.key_value_heads in (1, shape.attention_heads):
        small["num_key_value_heads"] = min(shape.key_value_heads, SMALL["num_attention_heads"])
    required = ("pad_token_id", "vocab_size", "num_key_value_heads")
    sizes = {name: size for name, size in small.items() if raw.get(name) is not None or name in required}
    if shape.window is not None:
        names = ("attention_chunk_size", "floor_scale") if shape.chunked else ("sliding_window",)
        sizes |= {name: WINDOW[name] for name in names}
    return sizes


def _keep_layers(raw: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Keep some layers, of every kind, as config.json spells kinds."""
    layers = _choose_layers(shape)
    settings: dict[str, Any] = {
        name: [value[layer] for layer in layers]
        for name, value in raw.items()
        if isinstance(value, list) and len(value) == shape.layers
    }
    if isinstance(pattern := raw.get("hybrid_override_pattern"), str):  # a letter for each layer
        settings["hybrid_override_pattern"] = "".join(pattern[layer] for layer in layers)
    if "num_hidden_layers" in raw:
        settings["num_hidden_layers"] = len(layers)
    if shape.indexer is not None and not all(shape.indexer.layers):
        settings["index_topk_pattern"] = "".join("F" if shape.indexer.layers[layer] else "S" for layer in layers)
    if shape.chunked:
        settings["no_rope_layers"] = [int(not shape.unrotated[layer]) for layer in layers]
    if shape.chunked or shape.sinks:  # transformers derives them
        settings["layer_types"] = None
    elif shape.delta_layers:
        kinds = ("full_attention", "linear_attention")
        settings["layer_types"] = [kinds[shape.delta_layers[layer]] for layer in layers]
    elif len(set(shape.windowed)) > 1:
        kinds = ("full_attention", "sliding_attention")
        settings["layer_types"] = [kinds[shape.windowed[layer]] for layer in layers]
    if shape.experts is not None and not shape.single_halves:
        settings |= _keep_dense_layers(
            raw, [number for number, layer in enumerate(layers) if not shape.has_experts(layer)]
        )
    return settings


def _keep_dense_layers(raw: Mapping[str, Any], dense: list[int]) -> dict[str, Any]:
    """Write which layers of a small copy have no experts, in the family's keys."""
    if "interleave_moe_layer_step" in raw:
        return {"interleave_moe_layer_step": 2 if dense else 1}
    if {"mlp_only_layers", "decoder_sparse_step"} & raw.keys():
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return {"first_k_dense_replace": len(dense)} if dense or "first_k_dense_replace" in raw else {}


def _choose_layers(shape: ModelShape) -> list[int]:
    """Choose layers for a small copy.

    They are the last, the first of each other kind, and then the first.
    """
    numbers = range(shape.layers)
    by_kind = {_describe_layer(shape, layer): layer for layer in (*reversed(numbers), numbers[-1])}  # the last is first
    chosen = dict.fromkeys([*by_kind.values(), *numbers])
    return sorted([*chosen][: SMALL["num_hidden_layers"]])


def _describe_layer(shape: ModelShape, layer: int) -> tuple[object, ...]:
    """Describe a layer's halves, its window and its rotation."""
    return (shape.list_kinds(layer), *(flags[layer : layer + 1] for flags in (shape.windowed, shape.unrotated)))


def _cut_factors(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the factors of LongRoPE, one for two features of a head."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    names = [name for name in ("short_factor", "long_factor") if isinstance(rope.get(name), list)]
    share = raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    count = int(SMALL["head_dim"] * share) // 2
    return {key: {**rope, **{name: rope[name][:count] for name in names}}} if names else {}


def _find_folder(model: str, *, weights: bool) -> Path:
    """Find a model's folder, or download it; only its config.json without `weights`."""
    if weights or not is_hub_name(model):
        return fetch_model_folder(model, "model")
    reason = download_config(model) if find_local_folder(model) is None else None
    folder = find_local_folder(model)
    if folder is None:
        raise ValueError(f"model={model} could not be downloaded: {reason}")
    return folder


def make_model(config: dict[str, Any], folder: Path, seed: int) -> Path:
    """Make a random model of a configuration's entries, and return its folder."""
    # Freshly initialised weights would hide mistakes: zero biases, norms of 1, and numbers so small that every layer is
    # nearly the identity. So all are drawn, norms around their initial 1 or 0.
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):  # time steps of 1e-4 to 1, some of them below transformers' bound
                parameter.uniform_(-9.0, 1.0)
            elif "norm" in name or name.endswith("scale"):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


# Entries of config.json without which transformers makes the weights in float32, by its own code, and for all layers.
_LEFT_OUT = ("quantization_config", "auto_map", "moe_layers", "per_layer_config", "mlp_layer_types", "indexer_types")
MOE = MoeConfig(aux_loss_coeff=0.05, z_loss_coeff=0.01)
"""Settings of the experts' balancing losses, which are part of every layout's gradient."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The results of transformers in float64, which every layout has to reproduce."""

    logprobs: Tensor
    """[tokens], float64: log-probability of every token; 0 at the first token of a sequence."""
    gradients: dict[str, Tensor]
    """Float64, by the names and with the shapes of the model's files; in memory transformers stacks experts."""
    weights: dict[str, Tensor]
    """Float32, by the same names."""
    reference: Distance
    """Distance of transformers' own float32 results."""
    loss: float
    """Loss of the batch."""
    sensitivity: float = 1.0
    """Largest change of the loss if each log-probability is off by 1, for small errors."""

    @property
    def tolerances(self) -> Tolerances:
        """Largest distances of a layout that rounding explains."""
        return Tolerances.from_reference(self.reference, float(self.logprobs.abs().max()), self.sensitivity)


def make_batch(vocab: int, sequences: int, longest: int, seed: int) -> TokenBatch:
    """Make sequences of random lengths, masks, advantages and sampling log-probabilities."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, max(longest, 2) + 1, (sequences,), generator=draw)
    lengths[0] = longest
    total = int(lengths.sum())
    mask = (torch.rand(total, generator=draw) < 0.7).float()
    # The mask differs from token to token, so that a token in the wrong row or rank changes the loss.
    starts = (lengths.cumsum(0) - lengths).tolist()
    mask[starts] = 0.0  # a first token has no log-probability
    mask[starts[0] + 1] = 1.0
    fields = TokenFields(
        token_ids=torch.randint(0, vocab, (total,), generator=draw).int(),
        loss_mask=mask,
        advantages=torch.randn(total, generator=draw),
        generation_logprobs=-torch.rand(total, generator=draw),
    )
    return TokenBatch(lengths.tolist(), fields)


# From the log-probabilities of each sequence, [tokens - 1] and with gradient, to a loss of shape [].
SequenceLoss = Callable[[list[Tensor]], Tensor]


def make_loss() -> ClippedPGLossFn:
    """Minus the mean of advantage times log-probability (REINFORCE).

    Its value depends on the weights. The value of PPO's loss does not before the first update, when every ratio is 1.
    """
    return ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0, objective="reinforce"))


def write_out_loss(batch: TokenBatch) -> SequenceLoss:
    """Write out the loss of `make_loss`."""

    def compute(logprobs: list[Tensor]) -> Tensor:
        masks = require_field(batch.fields.loss_mask).split(batch.lengths)
        advantages = require_field(batch.fields.advantages).split(batch.lengths)
        total, tokens = logprobs[0].new_zeros(()), require_field(batch.fields.loss_mask).sum()
        for row, values in enumerate(logprobs):
            total = total - (values * advantages[row][1:] * masks[row][1:]).sum() / tokens
        return total

    return compute


def count_tokens(batch: TokenBatch) -> GlobalCounts:
    """The denominators of a step on the whole batch."""
    masks = require_field(batch.fields.loss_mask).split(batch.lengths)
    return GlobalCounts(
        tokens=float(sum(mask.sum() for mask in masks)),
        sequences=float(sum(bool(mask.any()) for mask in masks)),
        all_sequences=float(len(masks)),
    )


def compute_truth(
    folder: Path,
    batch: TokenBatch,
    loss: SequenceLoss | None = None,
    store: Path | None = None,
    shape: ModelShape | None = None,
) -> Truth:
    """Compute a batch in transformers, in float32 and in float64.

    One sequence at a time, without padding. `loss`: of the whole batch; None: that of `make_loss`. `store`: of the
    images that sequences have; None: they have none. `shape`: with the vision tower if that is trained; None: as read.

    Raises:
        RunError: transformers cannot load or compute the model.
    """
    try:
        loss, shape = loss or write_out_loss(batch), shape or read_model_shape(folder)
        arguments = loss, store, shape
        logprobs, gradients, weights, _ = _run_transformers(folder, batch, torch.float32, *arguments)
        with DoublePrecision():
            exact_logprobs, exact_gradients, _, total = _run_transformers(folder, batch, torch.float64, *arguments)
    except Exception as error:  # a model's own code may raise anything
        raise RunError(f"transformers cannot compute {folder}: {type(error).__name__}: {error}") from error
    reference = measure_distance(logprobs, gradients, exact_logprobs, exact_gradients)
    return Truth(exact_logprobs, exact_gradients, weights, reference, total)


def _run_transformers(
    folder: Path, batch: TokenBatch, dtype: torch.dtype, loss: SequenceLoss, store: Path | None, shape: ModelShape
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], float]:
    """Compute log-probabilities, gradients, weights and loss, as `Truth` has them."""
    load = load_eager_model if shape.vision is None else load_whole_model
    model = load(folder, dtype).to(dtype)  # some families keep parameters in float32
    if shape.vision is not None:
        model.model.visual.requires_grad_(shape.vision.trained is not None)
    # torch leaves the gradient of this token's row out. Training has no such token: padding is never computed.
    model.get_input_embeddings().padding_idx = None
    experts = shape.experts
    router_logits = [] if experts is None else _keep_router_logits(model)
    in_memory = {name: value.detach().clone() for name, value in list_stored_tensors(model).items()}
    weights = _name_as_stored(model, in_memory, shape)
    logprobs = []
    router_loss = torch.zeros((), dtype=dtype)
    for number, ids in enumerate(require_field(batch.fields.token_ids).long().split(batch.lengths)):
        router_logits.clear()
        inputs = {"input_ids": ids[None]}
        if shape.vision is not None and batch.images is not None and store is not None:
            inputs = make_model_inputs(ids, batch.images[number], shape.vision, folder, store)
        output = model(**inputs, use_cache=False)
        logprobs.append(output.logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0])
        if experts is not None:
            losses = [compute_router_losses(logits, experts) for logits in router_logits]
            router_loss = router_loss + sum(losses) / len(batch)
    total = loss(logprobs)
    (total + router_loss).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Nothing predicts a sequence's first token.
    padded = torch.cat([torch.nn.functional.pad(values.detach(), (1, 0)) for values in logprobs])
    return padded, _name_as_stored(model, gradients, shape), weights, float(total)


def _name_as_stored(model: Any, tensors: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Give trained tensors of transformers' model the folder's names and form."""
    if shape.vision is not None:
        stored, sizes = revert_weight_conversion(model, tensors), measure_tensors(shape)
        trained = {name: tensor for name, tensor in stored.items() if not is_carried(name, shape)}
        # transformers turns Qwen3-VL's experts over when it loads them, and does not turn them back.
        return {name: tensor if tensor.shape == sizes.get(name) else tensor.mT for name, tensor in trained.items()}
    if shape.experts is None or not shape.experts.packed:  # transformers, too, has packed experts
        tensors = revert_weight_conversion(model, tensors)
    return {add_text_prefix(name, shape.text_prefix): tensor for name, tensor in tensors.items()}


def _keep_router_logits(model: Any) -> list[Tensor]:
    """Make the model append its routers' logits, [tokens, experts], to a list."""
    router_logits: list[Tensor] = []
    for layer in getattr(model.model, "language_model", model.model).layers:
        router = find_router(layer)
        if hasattr(router, "proj"):  # Gemma 4's router returns probabilities
            router.proj.register_forward_hook(lambda _module, _inputs, logits: router_logits.append(logits))
        elif router is not None:
            router.register_forward_hook(
                lambda module, _, output: router_logits.append(read_routing(module, output)[0])
            )
    return router_logits


def compute_router_losses(logits: Tensor, experts: ExpertShape) -> Tensor:
    """Compute a layer's balancing and z losses for one sequence, a scalar.

    Logits are [tokens, experts], float32.
    """
    if experts.score == "softmax":  # transformers' own counts a token once for each of its experts
        balancing = load_balancing_loss_func((logits,), experts.count, experts.top_k) / experts.top_k
    else:  # DeepSeek-V3 (2024), equations 17 to 20
        scores = logits.sigmoid() / logits.sigmoid().sum(dim=1, keepdim=True)
        chosen = torch.nn.functional.one_hot(scores.topk(experts.top_k, dim=1).indices, experts.count).sum(dim=1)
        balancing = (chosen.float().mean(dim=0) * experts.count / experts.top_k * scores.mean(dim=0)).sum()
    z_loss = logits.logsumexp(dim=1).square().mean()
    return MOE.aux_loss_coeff * balancing + MOE.z_loss_coeff * z_loss
