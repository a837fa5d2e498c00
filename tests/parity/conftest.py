"""Parity tests compute what they compare with in one thread, which is faster on their small tensors."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
