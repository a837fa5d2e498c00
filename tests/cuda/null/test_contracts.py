"""Every module of ours imports on CUDA, and every use of another library fits what is installed."""

import importlib
import inspect
import pkgutil
import types

import pytest
from fla.modules.convolution import causal_conv1d
from fla.modules.l2norm import l2norm
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from megatron.core.ssm.gated_delta_net import common
from megatron.core.transformer.moe.router import TopKRouter
from torch.distributed import ProcessGroupNCCL

import megatron_grpo
import megatron_grpo_kernels
from megatron_grpo.platform.hooks import Hook, load_hooks
from megatron_grpo.weight_sync.refit_group import NCCL_MAGIC, NET_CHANNELS, NcclConfig, set_net_channels
from tests.cuda.contracts import Findings, check_module, check_source, override_problems

FEWEST_CALLS = 120
"""Calls that are found at least: with fewer the check would have stopped to recognise them."""


def our_modules() -> list[str]:
    """Names of all modules but those for CPUs and commands."""
    modules = []
    for package in (megatron_grpo, megatron_grpo_kernels):
        modules += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [
        name for name in modules if not name.startswith("megatron_grpo.generation") and not name.endswith("__main__")
    ]


def test_our_calls_and_overridden_methods_fit_the_installed_libraries() -> None:
    findings = Findings()
    for name in our_modules():
        check_module(name, findings)
    assert findings.problems == []
    assert findings.checked >= FEWEST_CALLS


def test_delta_nets_have_the_kernels_that_megatron_core_calls() -> None:
    assert common.HAVE_FLA
    tensors = dict.fromkeys(("query", "key", "value"))
    state = {"initial_state": None, "output_final_state": False, "cu_seqlens": None}
    rule = {"g": None, "beta": None, "use_qk_l2norm_in_kernel": False}
    inspect.signature(chunk_gated_delta_rule).bind(*tensors, **rule, **state)
    inspect.signature(causal_conv1d).bind(x=None, weight=None, bias=None, activation="silu", **state)
    inspect.signature(l2norm).bind(None)


OURS = [hook for hook in load_hooks() if hook.platform != "cpu"]


@pytest.mark.parametrize("hook", OURS, ids=lambda hook: ".".join(hook.names))
def test_private_names_are_there(hook: Hook) -> None:
    importlib.import_module(hook.module)
    assert not hook.is_missing()


PLANTED = {
    "keyword": ("from megatron.core import parallel_state as p\np.initialize_model_parallel(tensor=2)", "'tensor'"),
    "position": ("from megatron.core import parallel_state as p\np.destroy_model_parallel(1)", "too many positional"),
    "missing argument": ("from megatron.core.transformer import ModuleSpec\nModuleSpec()", "'module'"),
    "imported name": ("from vllm.v1.engine.async_llm import SyncLLM", "has no SyncLLM"),
    "read name": ("from megatron.core import parallel_state as p\np.get_tensor_rank", "has no get_tensor_rank"),
    "method of an object": (
        "from vllm.v1.engine.async_llm import AsyncLLM\n"
        "async def pause(llm: AsyncLLM | None) -> None:\n    await llm.sleep(depth=1)",
        "'depth'",
    ),
    "method of a made object": (
        "from vllm import SamplingParams\ndef copy():\n    return SamplingParams().clone(deep=True)",
        "'deep'",
    ),
    "nccl": ("from torch.distributed import ProcessGroupNCCL\nProcessGroupNCCL(None, 0)", "'size'"),
}


def test_links_get_more_channels_by_a_field_that_torch_does_not_show() -> None:
    """The address and the mark are those of the installed NCCL."""
    config = ProcessGroupNCCL.Options().config
    set_net_channels(config)
    fields = NcclConfig.from_address(config.unsafe_get_ptr())
    assert (fields.magic, fields.nChannelsPerNetPeer) == (NCCL_MAGIC, NET_CHANNELS)


@pytest.mark.parametrize(("source", "reason"), PLANTED.values(), ids=PLANTED)
def test_a_planted_mistake_is_found(source: str, reason: str) -> None:
    findings = Findings()
    check_source(source, types.ModuleType("planted"), findings)
    (problem,) = findings.problems
    assert reason in problem


def test_a_method_that_lacks_an_argument_is_found() -> None:
    class Router(TopKRouter):
        def routing(self, logits):
            return logits

    (problem,) = override_problems(Router)
    assert "padding_mask" in problem or "too many positional" in problem
