"""A tiny model that vLLM's CPU attention can run, transformers as the oracle for it, and engines around it."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.config.generation_schema import EngineConfig, GenerationParallelConfig, SpeculativeConfig
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation.engine import VllmEngine
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.generation.vllm_images import EngineImages
from megatron_grpo.models.adapter_slot import AdapterSlot
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts.engine_choice import Engines
from megatron_grpo.rollouts.engine_client import EngineClient
from tests.support.hf_configs import read_configs

EOS = 1
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCAB = len(LETTERS) + 2
MAX_LENGTH = 64
START_S = 600.0
ON_GPUS = torch.cuda.is_available()
ENGINE_PRECISION = "bfloat16" if ON_GPUS else "float32"  # on GPUs as runs have it


def make_config(name: str, changes: dict[str, Any] | None = None, **sizes: Any) -> PretrainedConfig:
    """The configuration of a family in tests/data/refitted_families.yaml, whose keys go before sizes, not changes."""
    keys = read_configs("refitted_families")["families"][name]
    return AutoConfig.for_model(**(sizes | keys | (changes or {})))


def start_ray() -> None:
    """Start a Ray of this process; without an address it would join one that another test has started."""
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 * 2**20,
        log_to_driver=False,
    )


def make_model(path: Path, seed: int, family: str | Callable[..., PretrainedConfig] = "qwen3") -> Path:
    """A random model with two layers, and a tokenizer of one token per letter."""
    torch.manual_seed(seed)
    build = partial(make_config, family) if isinstance(family, str) else family
    config = build(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
        dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    vocab = {"<pad>": 0, "<eos>": EOS} | {letter: index + 2 for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(path)
    return path


class Oracle:
    """What transformers says of the model in a folder."""

    def __init__(self, path: Path) -> None:
        config = AutoConfig.from_pretrained(path)
        if hasattr(config, "time_step_min"):  # vLLM has no lower bound of Mamba's time steps
            config.time_step_min = 0.0
        # Tensors that were stored in 4 bits come in bfloat16.
        self._model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).float().eval()

    @torch.no_grad()
    def distributions(self, prompt: list[int], response: Sequence[int]) -> Tensor:
        """Log-probabilities of every next token along a response: [len(response), vocabulary]."""
        logits = self._model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return logits.float()

    def logprobs(self, prompt: list[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token of a response."""
        table = (self.distributions(prompt, response) / temperature).log_softmax(dim=-1)
        return table.gather(1, torch.tensor(list(response))[:, None])[:, 0].tolist()

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The likeliest continuation, up to the end-of-text token."""
        response: list[int] = []
        while len(response) < tokens and EOS not in response:
            response.append(int(self.distributions(prompt, [*response, 0])[-1].argmax()))
        return response


def _meeting_files() -> set[Path]:
    """Those that vLLM leaves in the system's folder for temporary files, of all engines of the machine."""
    return set(Path(tempfile.gettempdir()).glob("vllm_dist_*"))


def _wait_until_gone(files: set[Path]) -> None:
    """Wait until none of these files is left; an engine that another test starts removes its own."""
    deadline = time.monotonic() + START_S
    while remaining := files & _meeting_files():
        assert time.monotonic() < deadline, f"an engine has started and left {remaining} behind"
        time.sleep(0.5)


def gpus(count: int) -> dict[str, Any]:
    """Ray's options of a process that needs as many GPUs, or runs on a CPU where there are none."""
    return {"num_cpus": 0, "num_gpus": count if ON_GPUS else 0}


FIRST_GPU = {**gpus(0), "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": "0" if ON_GPUS else ""}}}
"""Ray's options of a process on a GPU that another one has."""


@contextmanager
def engines(
    path: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    data: int = 1,
    precision: str = ENGINE_PRECISION,
    max_length: int = MAX_LENGTH,
    routed: RoutedForm | None = None,
    generation_batch_size: int | None = None,
    engine_args: dict[str, Any] | None = None,
    in_flight: AsyncGRPOConfig | None = None,
    engine_restarts: int = 0,
    colocated: bool = False,
    environment: dict[str, str] | None = None,
    startup_s: float = START_S,
    awaits_refit: bool = False,
    adapter: AdapterSlot | None = None,
    speculative: SpeculativeConfig | None = None,
    images: EngineImages | None = None,
) -> Iterator[VllmGeneration]:
    """Ready engines of this layout, each on GPUs of its own if there are any; needs Ray.

    Args:
        colocated: of one engine: on the first GPU, which a policy has.
        environment: further environment variables of the engines' actors.
        startup_s: deadline of the start.
        awaits_refit: the engines need not have the folder's weights before a refit.
        adapter: of which they have a slot beside the base model.
    """
    config = GenerationConfig(
        placement="colocated" if colocated else "separate",
        parallel=GenerationParallelConfig(tensor=tensor, pipeline=pipeline, expert=expert, data=data),
        engine=EngineConfig(
            enforce_eager=True,
            kv_cache_gib=0.1,
            gpu_memory_utilization=0.3,
            max_num_seqs=1 if ON_GPUS else 32,  # there the last bits depend on what a batch is made of
            speculative=speculative or SpeculativeConfig(),
        ),
        generation_batch_size=generation_batch_size,
        engine_args=engine_args or {},
        timeout_s=120.0,
        engine_restarts=engine_restarts,
    )
    generation = VllmGeneration(
        VllmSettings(
            model_path=str(path),
            config=config,
            precision=precision,
            max_total_sequence_length=max_length,
            routed=routed,
            in_flight=in_flight,
            awaits_refit=awaits_refit,
            adapter=adapter,
            images=images,
        ),
        actor_options=lambda engine: (
            FIRST_GPU if colocated else {**gpus(tensor * pipeline), "runtime_env": {"env_vars": environment or {}}}
        ),
        startup_timeout_s=startup_s,
    )
    met = _meeting_files()
    try:
        generation.start()
        generation.wait_ready()
        _wait_until_gone(_meeting_files() - met)
        yield generation
    finally:
        generation.shutdown()


def generate(
    generation: VllmGeneration,
    requests: Sequence[GenerationRequest],
    settings: SamplingSettings,
    *,
    timeout_s: float = 120.0,
) -> list[GenerationOutput]:
    """Responses in the order of the requests, from engines that are asked as rollout workers ask them."""

    async def ask() -> list[GenerationOutput]:
        pool = Engines([EngineClient(engine, index, "test") for index, engine in generation.engines.items()])
        placed = pool.assign([1] * len(requests))
        calls = (
            client.generate(sample_request, settings) for client, sample_request in zip(placed, requests, strict=True)
        )
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*calls)

    return asyncio.run(ask())


def request(prompt: Sequence[int], seed: int, max_new_tokens: int) -> GenerationRequest:
    """A request for one response to these token ids."""
    return GenerationRequest(prompt_ids=np.array(prompt, dtype=np.int32), seed=seed, max_new_tokens=max_new_tokens)


def kill_a_worker(generation: VllmGeneration) -> None:
    """SIGKILL one of the processes of the first engine that hold weights."""
    psutil.Process(worker_pids(generation)[0]).kill()


def worker_pids(generation: VllmGeneration, engine: int = 0) -> list[int]:
    """The processes of an engine that hold weights.

    The engine's actor itself looks for them, and by kinship: nothing else is as many generations away from it.
    """
    workers = ray.get(generation.engines[engine].__ray_call__.remote(_youngest_generation))
    assert workers, [(process.pid, process.ppid(), process.name()) for process in psutil.process_iter()]
    return workers


def _youngest_generation(_: VllmEngine) -> list[int]:
    generation = [psutil.Process()]
    while children := [child for parent in generation for child in parent.children()]:
        generation = children
    return [process.pid for process in generation]
