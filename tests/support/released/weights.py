"""Random weights for a released layout, beside its own config.json."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.released.layout import Layout


def write_model(layout: Layout, folder: Path, seed: int = 7) -> Path:
    """Write the layout and weights of its tiny sizes in float32; returns the folder."""
    layout.write(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tied = bool(model.config.tie_word_embeddings)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
