"""FP8 in blocks in vLLM's CPU engine on processors with AVX-512 but without tiles."""

from __future__ import annotations

import torch


def offer_fp8_blocks() -> None:
    """Let vLLM multiply by FP8 blocks here: it offers its kernels for tiles (AMX) alone, and they have an AVX-512 form.

    To be called once in each worker, before the model is made.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8

    if torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported():
        return
    CPUFp8BlockScaledMMKernel.is_supported = lambda compute_capability=None: (True, None)
    CPUExpertsFp8._supports_current_device = lambda: True
