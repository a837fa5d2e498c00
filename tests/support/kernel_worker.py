"""A worker of vLLM that names the kernels by which its layers multiply."""

from typing import Any

from megatron_grpo.weight_sync.engine_worker import RefitWorker


class KernelWorker(RefitWorker):
    """The worker extension of engines whose kernels a test wants to know."""

    def name_kernels(self) -> list[str]:
        """Name the classes of the kernels of linear layers and of experts."""
        names: set[str] = set()
        for layer in self.model_runner.get_model().modules():
            method: Any = getattr(layer, "quant_method", None)
            for name in ("fp8_linear", "experts_cls"):
                kernel = getattr(method, name, None)
                if kernel is not None:
                    names.add((kernel if isinstance(kernel, type) else type(kernel)).__name__)
        return sorted(names)
