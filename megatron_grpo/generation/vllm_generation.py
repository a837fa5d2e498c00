"""The pool of vLLM engines as the driver sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from megatron_grpo.cluster.futures import gather
from megatron_grpo.config.generation_schema import EngineMemory
from megatron_grpo.config.schema import AsyncGRPOConfig, GenerationConfig, GenerationParallelConfig
from megatron_grpo.generation.interface import EngineEndpoint, GenerationInterface
from megatron_grpo.generation.vllm_arguments import VllmSettings
from megatron_grpo.generation.vllm_engine import VllmEngine
from megatron_grpo.models.routed import RoutedForm

ENGINE_NAME = "generation engine {}".format
SHUTDOWN_S = 10.0


class VllmGeneration(GenerationInterface):
    """Engines in Ray actors. `start()` returns at once, so that the policy can start meanwhile; then `wait_ready()`."""

    def __init__(
        self,
        model_path: str,
        config: GenerationConfig,
        *,
        precision: str,
        max_total_sequence_length: int,
        actor_options: Callable[[int], dict[str, Any]],
        startup_timeout_s: float,
        routed: RoutedForm | None = None,
        in_flight: AsyncGRPOConfig | None = None,
    ) -> None:
        """
        Args:
            model_path: folder in Hugging Face format.
            precision: of weights and activations, unless the config names another.
            max_total_sequence_length: longest prompt plus response in tokens.
            actor_options: Ray options (resources, placement) of the engine with this index.
            startup_timeout_s: deadline of `wait_ready`, counted from `start`.
            routed: what the experts look like that responses are to come with; None: they come without.
            in_flight: what happens to the cache when weights change under responses; None: they never do.
        """
        self._config = config
        self._settings = [
            VllmSettings(
                index=index,
                model_path=model_path,
                config=config,
                precision=precision,
                max_total_sequence_length=max_total_sequence_length,
                routed=routed,
                in_flight=in_flight,
            )
            for index in range(config.parallel.data)
        ]
        self._actor_options = actor_options
        self._startup_timeout_s = startup_timeout_s
        self._started_at = 0.0
        self._engines: list[Any] = []
        self._starting: list[ray.ObjectRef] = []
        self.startup_s: list[dict[str, float]] = []
        """Seconds that each engine took to start, by part, as `VllmEngine.start` returns them."""

    def start(self) -> None:
        """Begin to start every engine."""
        self._started_at = time.monotonic()
        actor = ray.remote(VllmEngine)
        self._engines = [actor.options(**self._actor_options(s.index)).remote(s) for s in self._settings]
        self._starting = self.submit("start")

    def wait_ready(self) -> None:
        """Return when every engine can generate.

        Raises:
            RuntimeError: an engine failed or the deadline passed; the message names the engine and the cause.
        """
        left = self._startup_timeout_s - (time.monotonic() - self._started_at)
        self.startup_s = gather(self._starting, deadline_s=max(left, 0.0), what="generation start", name=ENGINE_NAME)

    @property
    def engines(self) -> Sequence[Any]:
        return self._engines

    @property
    def parallel(self) -> GenerationParallelConfig:
        """How engines are laid out."""
        return self._config.parallel

    @property
    def colocated(self) -> bool:
        """Whether engines share the devices of the models in training."""
        return self._config.colocated

    def endpoints(self) -> list[EngineEndpoint]:
        return [EngineEndpoint(one.index, one.config.parallel.ranks_per_engine) for one in self._settings]

    def submit(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Call a method of every engine actor without waiting; results in the order of the engines."""
        return [getattr(engine, method).remote(*args) for engine in self._engines]

    def submit_each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[ray.ObjectRef]:
        """Call a method of every engine actor with arguments of its own, without waiting; results by engine."""
        return [getattr(engine, method).remote(*args) for engine, args in zip(self._engines, arguments, strict=True)]

    def sleep(self) -> None:
        """Let models in training have the devices.

        Raises:
            RunError: an engine has responses in flight, failed, or did not come to an end in time.
        """
        self._gather(self.submit("sleep"), "engines going to sleep")

    def wake(self, part: EngineMemory) -> None:
        """Have a part of the devices' memory again: the weights first, then the cache, after which engines sample.

        Raises:
            RunError: an engine failed, or did not come to an end in time.
        """
        self._gather(self.submit("wake", part), "engines waking up")

    def _gather(self, refs: list[ray.ObjectRef], what: str) -> None:
        gather(refs, deadline_s=self._config.timeout_s, what=what, name=ENGINE_NAME)

    def shutdown(self) -> None:
        engines, self._engines = self._engines, []
        ray.wait([engine.shutdown.remote() for engine in engines], num_returns=len(engines), timeout=SHUTDOWN_S)
        for engine in engines:
            ray.kill(engine)
