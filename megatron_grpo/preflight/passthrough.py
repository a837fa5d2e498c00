"""Checks of the fields that users pass on to Megatron-Core: names and types, and that the run leaves them free."""

from __future__ import annotations

import ast
import collections.abc
import difflib
import functools
import importlib.util
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.schema import Config

_SIZE = "comes from the model's config.json"
_SUM = "losses are divided by counts over the whole optimizer step, and gradients are only ever summed"
_LOADED = "weights are loaded, so their initialisation is left out"
_FSDP = "weights and checkpoints are those of Megatron-Core's DistributedDataParallel"
_REPEATS = "log-probabilities have to repeat: there is no dropout"
_SHAPES = "pipeline stages tell each other the shapes of what they send"


def _all(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


MEGATRON_OWNED: dict[str, dict[str, str]] = {
    "megatron": {
        **_all(
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
            "layernorm_epsilon qk_layernorm qk_l2_norm gated_linear_unit activation_func add_bias_linear add_qkv_bias "
            "rotary_interleaved window_size window_attn_skip_freq multi_latent_attention softmax_scale num_moe_experts "
            "moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size moe_shared_expert_gate "
            "moe_layer_freq moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_latent_size "
            "moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias mtp_num_layers "
            "layernorm_zero_centered_gamma experimental_attention_variant attention_output_gate is_hybrid_model "
            "heterogeneous_block_specs no_rope_freq linear_attention_freq activation_func_clamp_value "
            "apply_residual_connection_post_layernorm",
            _SIZE,
        ),
        "tensor_model_parallel_size": "give policy.parallel.tensor",
        "pipeline_model_parallel_size": "give policy.parallel.pipeline",
        "virtual_pipeline_model_parallel_size": "give policy.parallel.virtual_pipeline",
        "pipeline_model_parallel_layout": "give policy.parallel.first_stage_layers and last_stage_layers",
        "num_layers_in_first_pipeline_stage": "give policy.parallel.first_stage_layers",
        "num_layers_in_last_pipeline_stage": "give policy.parallel.last_stage_layers",
        "account_for_embedding_in_pipeline_split": "give policy.parallel.count_embedding",
        "account_for_loss_in_pipeline_split": "give policy.parallel.count_loss",
        "context_parallel_size": "give policy.parallel.context",
        "expert_model_parallel_size": "give policy.parallel.expert",
        "expert_tensor_parallel_size": "give policy.parallel.expert_tensor",
        "sequence_parallel": "give policy.parallel.sequence",
        **_all(
            "fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
            "give policy.precision",
        ),
        **_all("recompute_granularity recompute_modules moe_layer_recompute", "give policy.recompute_modules"),
        **_all("recompute_method recompute_num_layers", "give policy.activation_checkpointing"),
        "deterministic_mode": "give policy.deterministic",
        "gradient_accumulation_fusion": "give policy.gradient_accumulation_fusion",
        **_all("hidden_dropout attention_dropout", _REPEATS),
        "calculate_per_token_loss": _SUM,
        **_all("variable_seq_lengths batch_p2p_comm", _SHAPES),
        **_all(
            "perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std "
            "embedding_init_method_std",
            _LOADED,
        ),
        "transformer_impl": "the layers are Transformer Engine's where it is installed and there is a GPU",
        "fp8_param": "weights are exported and published in policy.precision",
        "fp4_param": "weights are exported and published in policy.precision",
    },
    "ddp": {
        "use_distributed_optimizer": "give policy.optimizer.distributed",
        "overlap_grad_reduce": "give policy.overlap_grad_reduce",
        "overlap_param_gather": "give policy.overlap_param_gather",
        "average_in_collective": _SUM,
        "num_distributed_optimizer_instances": "all data-parallel ranks share one optimizer state",
        **_all(
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
            "fsdp_double_buffer fsdp_manual_registration preserve_fp32_weights keep_fp8_transpose_cache "
            "suggested_communication_unit_size",
            _FSDP,
        ),
        **_all(
            "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag",
            "weights are exported and published in policy.precision",
        ),
    },
    "megatron_optimizer": {
        "optimizer": "it is AdamW",
        "lr": "give policy.optimizer.lr",
        "min_lr": "give policy.optimizer.min_lr",
        "weight_decay": "give policy.optimizer.weight_decay",
        "adam_beta1": "give policy.optimizer.adam_beta1",
        "adam_beta2": "give policy.optimizer.adam_beta2",
        "adam_eps": "give policy.optimizer.adam_eps",
        **_all("fp16 bf16 params_dtype", "give policy.precision"),
        **_all(
            "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
            "is for float16, and policy.precision is bfloat16 or float32",
        ),
        **_all("sgd_momentum", "it is AdamW"),
        **_all(
            "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
            "muon_tp_mode muon_extra_scale_factor",
            "it is AdamW",
        ),
        "use_distributed_optimizer": "give policy.optimizer.distributed",
        "clip_grad": "give policy.max_grad_norm",
        "use_precision_aware_optimizer": "give policy.optimizer.precision_aware",
        **_all("optimizer_cpu_offload optimizer_offload_fraction", "give policy.optimizer.cpu_offload"),
        "overlap_param_gather": "give policy.overlap_param_gather",
        "overlap_param_gather_with_optimizer_step": "give policy.overlap_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag": "weights are exported and published in policy.precision",
    },
}
"""By key of policy.*: the refused fields, each with what is said of it."""

CLASSES = {
    "megatron": ("transformer.transformer_config", "TransformerConfig"),
    "ddp": ("distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    "megatron_optimizer": ("optimizer.optimizer_config", "OptimizerConfig"),
}
"""By key of policy.*: module below megatron.core, and the class in it whose fields are passed on."""

_DATA = "give generation.parallel.data, whose engines know nothing of each other"
_RANKS = "an engine's ranks are generation.parallel.tensor * pipeline, placed by the run"
_FOLDER = "the model and its tokenizer are those of policy.model.path"
_SPECULATION = "give generation.engine.speculative; a draft model would not be refitted"
_PUBLISHED = "weights come from the policy by the refit"


def _for_vllm(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


VLLM_OWNED: dict[str, str] = {
    **_for_vllm("model model_weights tokenizer hf_config_path skip_tokenizer_init", _FOLDER),
    **_for_vllm("revision tokenizer_revision", _FOLDER),
    **_for_vllm("code_revision trust_remote_code", "code that comes with a model is never run"),
    **_for_vllm("runner convert", "an engine generates"),
    "dtype": "give generation.engine.dtype, or policy.precision",
    "seed": "every response has a seed of its own, from grpo.seed",
    "max_model_len": "give policy.max_total_sequence_length",
    "tensor_parallel_size": "give generation.parallel.tensor",
    "pipeline_parallel_size": "give generation.parallel.pipeline",
    "enable_expert_parallel": "give generation.parallel.expert",
    **_for_vllm(
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "data_parallel_backend",
        _DATA,
    ),
    **_for_vllm(
        "prefill_context_parallel_size decode_context_parallel_size distributed_executor_backend master_addr "
        "master_port nnodes node_rank device_ids worker_cls",
        _RANKS,
    ),
    "max_num_seqs": "give generation.engine.max_num_seqs, or generation.generation_batch_size",
    "max_num_batched_tokens": "give generation.engine.max_num_batched_tokens",
    "enable_chunked_prefill": "give generation.engine.enable_chunked_prefill",
    "enable_prefix_caching": "give generation.engine.enable_prefix_caching",
    "enforce_eager": "give generation.engine.enforce_eager",
    "gpu_memory_utilization": "give generation.engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "give generation.engine.kv_cache_gib, or gpu_memory_utilization on GPUs",
    **_for_vllm("speculative_config spec_method spec_model spec_tokens", _SPECULATION),
    "logprobs_mode": "training needs the log-probabilities that tokens are drawn with",
    **_for_vllm("weight_transfer_config worker_extension_cls", _PUBLISHED),
    "enable_lora": "policy.lora's adapters are in the weights that a refit sends",
    **_for_vllm("enable_return_routed_experts aux_output_config", "give policy.moe.replay_routing"),
    "enable_sleep_mode": "give generation.placement=colocated, with which engines sleep while models train",
    "additional_config": "it is what the run tells its workers",
    "disable_log_stats": "statistics are in metrics.jsonl",
}
"""The refused arguments, each with what is said of it."""


class Unwritable:
    """Stands in a type for what no YAML value is: a class of the package's own, a function."""


def refusal(kind: Any, value: Any) -> str | None:
    """What is wrong with a value, in words; None: it is of the type.

    Args:
        kind: a type of builtins, Literal, Union and `Unwritable`.
        value: as YAML gives it. A list is also a tuple, an int also a float, and a bool is no number.
    """
    given = tuple(value) if isinstance(value, list) and _has_tuple(kind) else value
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(given)
    except ValidationError:
        return f"must be {in_words(kind)}"
    return None


def in_words(kind: Any) -> str:
    """A type for a message: "true or false", "int or null", "one of fp32, fp64 or null"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in args if writable(one)))
    if origin is typing.Annotated:
        return in_words(args[0])
    if origin in (list, tuple):
        return f"list of {in_words(args[0])}"
    if origin is dict or kind is dict:
        return "a mapping"
    return {bool: "true or false", str: "text", type(None): "null"}.get(kind) or str(getattr(kind, "__name__", kind))


def writable(kind: Any) -> bool:
    """Whether some YAML value but null is of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(writable(one) for one in args if one is not type(None))
    return not (kind is Unwritable or origin in (type, typing.get_origin(typing.Callable[..., Any])))


def _has_tuple(kind: Any) -> bool:
    return kind is tuple or typing.get_origin(kind) is tuple or any(_has_tuple(one) for one in typing.get_args(kind))


DtypeName = Literal["float32", "bfloat16", "float16"]
"""How a configuration writes a torch.dtype."""
_NAMES: dict[str, Any] = {
    **{name: getattr(typing, name) for name in ("Dict", "List", "Literal", "Optional", "Tuple", "Union")},
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, str, tuple)},
    "torch": SimpleNamespace(dtype=DtypeName),
}
"""What annotations of fields that a configuration can set are made of; functions and classes are not among it."""


@dataclass(frozen=True, slots=True)
class MegatronField:
    """A field of one of Megatron-Core's configuration classes."""

    annotation: str
    """Its type as it is written there."""

    @property
    def kind(self) -> Any:
        """The type, torch.dtype as `DtypeName`, enumerations as the names of their members; None: it is one that no
        YAML value can have, such as a function."""
        names = _NAMES | _enumerations()
        try:
            return eval(self.annotation, {"__builtins__": {}}, names)  # the installed package's own text
        except (NameError, AttributeError):
            return None

    def refuses(self, value: Any) -> str | None:
        """What is wrong with a value, in words; None: it is of the field's type.

        Args:
            value: as YAML gives it (`refusal`).
        """
        kind = self.kind
        if kind is None:
            return f"takes a {self.annotation}, which a configuration cannot hold"
        return refusal(kind, value)


@functools.cache
def _enumerations() -> dict[str, Any]:
    """Megatron-Core's enumerations by name, each as the names of its members."""
    tree = ast.parse((_package() / "transformer" / "enums.py").read_text())
    return {
        node.name: Literal[tuple(one.targets[0].id for one in node.body if isinstance(one, ast.Assign))]  # type: ignore[misc,attr-defined,unused-ignore]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _package() -> Path:
    """The folder of the installed megatron.core.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec("megatron.core")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("megatron.core is not installed", name="megatron.core")
    return Path(found.origin).parent


@functools.cache
def megatron_fields(module: str, name: str) -> dict[str, MegatronField]:
    """The fields of a class and of those it inherits from, by name.

    Args:
        module: where the class is, below megatron.core: "transformer.transformer_config".
        name: of the class.

    Raises:
        ModuleNotFoundError: Megatron-Core is not installed.
    """
    file = _package().joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    fields: dict[str, MegatronField] = {}
    for base in defined[name].bases:
        assert isinstance(base, ast.Name), f"{name} inherits from {ast.unparse(base)}"
        fields |= megatron_fields(module if base.id in defined else _imported_from(tree, base.id), base.id)
    for statement in defined[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields[statement.target.id] = MegatronField(ast.unparse(statement.annotation))
    return fields


def _imported_from(tree: ast.Module, name: str) -> str:
    """The module below megatron.core that a file imports a class from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return (node.module or "").removeprefix("megatron.core.")
    raise AssertionError(f"{name} is not imported")


def megatron_field_problems(config: Config) -> Iterator[Problem]:
    """Fields in policy.megatron, policy.ddp and policy.megatron_optimizer that the installed Megatron-Core does not
    have, whose values are of another type, or which the run sets itself."""
    for section in CLASSES:
        for name, value in getattr(config.policy, section).items():
            text = _refusal(section, str(name), value)
            if text is not None:
                yield Problem(f"policy.{section}.{name}={shown(value)}", text)


def _refusal(section: str, name: str, value: Any) -> str | None:
    """Why a field is not passed on; None: it is."""
    owned = MEGATRON_OWNED[section].get(name)
    if owned is not None:
        return f"is set by the run itself: {owned}"
    try:
        fields = megatron_fields(*CLASSES[section])
    except ModuleNotFoundError:
        return "cannot be checked: Megatron-Core is not installed here"
    field = None if name.startswith("_") else fields.get(name)
    if field is not None:
        return field.refuses(value)
    free = [one for one in fields if one not in MEGATRON_OWNED[section] and not one.startswith("_")]
    close = difflib.get_close_matches(name, free, n=1)
    hint = f"; did you mean policy.{section}.{close[0]}?" if close else ""
    return f"is no field of Megatron-Core's {CLASSES[section][1]}{hint}"


_ARGUMENTS = "vllm.engine.arg_utils"
_VLLM_NAMES: dict[str, Any] = {
    **{name: getattr(typing, name) for name in ("Annotated", "Any", "Literal", "Optional", "Union")},
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, object, str, tuple, type)},
    "None": None,
    "Callable": collections.abc.Callable,
    "set": list,  # YAML has no sets
    "torch": SimpleNamespace(dtype=Unwritable),
}


def vllm_arguments() -> dict[str, Any]:
    """The types of the arguments of vLLM's engine, by name. A class of settings is a dict.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    return dict(_argument_types())


def settings_of(argument: str) -> frozenset[str] | None:
    """The names that the mapping of an argument may have; None: it takes none, or one of any names."""
    module = _module(_ARGUMENTS)
    (annotation,) = (one for name, one in _annotations(module, "AsyncEngineArgs") if name == argument)
    named = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    known = (module.found(name) for name in sorted(named - _VLLM_NAMES.keys()))
    fields = [_fields(*place) for place in known if place is not None and _is_class(*place)]
    return frozenset().union(*fields) if fields else None


@functools.cache
def _argument_types() -> dict[str, Any]:
    module = _module(_ARGUMENTS)
    found = _annotations(module, "AsyncEngineArgs")
    return {name: _evaluated(annotation, module) for name, annotation in found if not name.startswith("_")}


class _Module:
    """A source file of vLLM: what it defines, and where what it imports comes from."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree = ast.parse(_file(name).read_text())
        self.defined = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.aliases = dict(_aliases(self.tree))
        self.imported = {
            alias.asname or alias.name: (self._absolute(node), alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def found(self, name: str) -> tuple[_Module, str] | None:
        """The module of vLLM that defines what this one calls `name`, and its name there; None: none does."""
        if name in self.defined or name in self.aliases:
            return self, name
        place = self.imported.get(name)
        if place is None or not place[0].startswith("vllm."):
            return None
        return _module(place[0]).found(place[1])

    def _absolute(self, node: ast.ImportFrom) -> str:
        package = self.name if _file(self.name).name == "__init__.py" else self.name.rpartition(".")[0]
        above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
        return ".".join(filter(None, [above, node.module])) if node.level else node.module or ""


@functools.cache
def _module(name: str) -> _Module:
    return _Module(name)


def _file(module: str) -> Path:
    """The source of a module.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    path = Path(found.origin).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names that stand for a type: `X = Literal[...]`, `X: TypeAlias = ...`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _annotations(module: _Module, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Fields of a class and of those it inherits from in the same file, with their annotations."""
    for base in module.defined[name].bases:
        if isinstance(base, ast.Name) and base.id in module.defined:
            yield from _annotations(module, base.id)
    for node in module.defined[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation


def _fields(module: _Module, name: str) -> frozenset[str]:
    return frozenset(field for field, _ in _annotations(module, name) if not field.startswith("_"))


def _is_class(module: _Module, name: str) -> bool:
    """Whether a name is a class of settings: one that has fields, and is no enumeration."""
    return name in module.defined and not _members(module.defined[name]) and bool(_fields(module, name))


def _members(node: ast.ClassDef) -> list[str]:
    """The names of an enumeration's members; empty: it is none."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    if not bases & {"Enum", "IntEnum", "StrEnum"}:
        return []
    return [
        one.targets[0].id for one in node.body if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    ]


class _Names(Mapping[str, Any]):
    """The types that names stand for in a module; what YAML cannot have is `Unwritable`."""

    def __init__(self, module: _Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        if name in _VLLM_NAMES:
            return _VLLM_NAMES[name]
        place = self._module.found(name)
        if place is None:
            return Unwritable
        module, known = place
        if known in module.aliases:
            return _evaluated(module.aliases[known], module)
        members = _members(module.defined[known])
        if members:
            return Literal[tuple(members)]  # type: ignore[misc,unused-ignore]
        return dict[str, Any] if _fields(module, known) else Unwritable

    def __iter__(self) -> Iterator[str]:
        return iter(_VLLM_NAMES)

    def __len__(self) -> int:
        return len(_VLLM_NAMES)


def _evaluated(annotation: ast.expr, module: _Module) -> Any:
    """The type that an annotation means; `Unwritable`: one that no YAML value has."""
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    try:
        return eval(str(text), {"__builtins__": {}}, _Names(module))  # the installed package's own text
    except (NameError, AttributeError, TypeError):
        return Unwritable


_PREFIX = "generation.engine_args"


def vllm_argument_problems(config: Config) -> Iterator[Problem]:
    """Arguments in generation.engine_args that the installed vLLM does not have, whose values are of another type, or
    which the run sets itself."""
    for name, value in config.generation.engine_args.items():
        text = _vllm_refusal(str(name), value)
        if text is not None:
            yield Problem(f"{_PREFIX}.{name}={shown(value)}", text)


def _vllm_refusal(name: str, value: Any) -> str | None:
    """Why an argument is not passed on; None: it is."""
    if name in VLLM_OWNED:
        return f"is set by the run itself: {VLLM_OWNED[name]}"
    try:
        arguments = vllm_arguments()
    except ModuleNotFoundError:
        return "cannot be checked: vLLM is not installed here"
    if name not in arguments:
        return f"is no argument of the installed vLLM{_meant(name, set(arguments) - set(VLLM_OWNED), f'{_PREFIX}.')}"
    kind = arguments[name]
    if not writable(kind):
        return "takes an object of vLLM, which a configuration cannot hold"
    return refusal(kind, value) or _unknown_setting(name, value)


def _unknown_setting(argument: str, value: Any) -> str | None:
    """What is wrong with the names of a mapping; None: they are those of the argument."""
    known = settings_of(argument)
    if known is None or not isinstance(value, Mapping):
        return None
    wrong = next((name for name in value if name not in known), None)
    if wrong is None:
        return None
    return f"has {wrong}, which is no setting of it{_meant(str(wrong), set(known), '')}"


def _meant(name: str, known: set[str], prefix: str) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
