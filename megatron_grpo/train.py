"""Trains a model as a recipe says: python -m megatron_grpo.train +exp=quickstart grpo.max_num_steps=3.

This module is run, never imported: an import would replace the function `megatron_grpo.train` by the module.
"""

from __future__ import annotations

import sys

from megatron_grpo.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
