"""Texts of --help."""

from __future__ import annotations

import re
import textwrap

from megatron_grpo.config.command_line import find_version
from megatron_grpo.config.keys import read_keys
from megatron_grpo.config.overrides import RECIPES, list_config_groups

# The commands and what each does.
COMMANDS = {
    "train": "train a model as a recipe says: +exp=quickstart; --check only checks, --cfg job only prints",
    "launch": "submit a run to Slurm, Kubernetes or Ray, or start it in the background: TARGET +exp=...",
    "new": "write a folder to start from, with a recipe, rewards, an environment, a test and rows: NAME",
    "evaluate": "answer held-out prompts: checkpoint=RUN_DIR/checkpoints/step_N data.val_path=FILE output=DIR",
    "report": "write the page of a run, or of two side by side: RUN_DIR [OTHER_RUN_DIR]",
    "watch": "look at a run while it goes on, in a browser or a terminal: RUN_DIR [--text]",
    "export": "turn a checkpoint into a Hugging Face folder: checkpoint=RUN_DIR/checkpoints/step_N output=PATH",
    "verify": "prove on this machine that layouts compute the same: model=tiny:qwen3 'layouts=[tp2,pp2]'",
    "replay": "do a recorded step again, in another layout or precision: RUN_DIR step=N policy.parallel.tensor=2",
    "doctor": "say why log-probabilities of generation and training differ in a recorded step: RUN_DIR",
    "drill": "kill, stop and end processes of a small run, and tell what became of it: [+exp=...] [cells=[policy]]",
    "plan": "tell whether a recipe fits GPUs and how fast it is, without one: +exp=qwen3_8b_8gpu cluster.gpu=h100",
    "refit_plan": "tell what a refit of a recipe moves, before a GPU is asked for: +exp=qwen3_8b_8gpu",
    "serve": "start a vLLM server that runs can train against: MODEL",
}

# Keys that --help lists.
_COMMON = """
    run_dir policy.model.path data.train_path data.val_path policy.optimizer.lr grpo.max_num_steps
    grpo.num_prompts_per_step grpo.num_generations_per_prompt generation.max_new_tokens
    policy.max_total_sequence_length policy.parallel.tensor policy.parallel.pipeline
    generation.parallel.tensor cluster.gpus_per_node checkpointing.save_period
"""
_COLUMNS = 80

_TEMPLATE = """\
GRPO, PPO, distillation, SFT, DPO and reward models on Megatron-Core and vLLM.

  python -m megatron_grpo.train [+exp=RECIPE] [GROUP=OPTION ...] [KEY=VALUE ...]

  --check         check all that a start would, say what would run, and stop
  --cfg job       print the whole configuration and what is wrong with it
  --help PATTERN  explain keys, recipes and groups that match, such as lr
  --version       the version
  job=FILE        a flat YAML with the fields of GrpoParameters

recipes for CPUs (--help recipes: all {recipes}, also for 1 to 512 GPUs):
{quickstarts}
groups (--help groups: their options):
{groups}
common keys (--help KEY: type, default and text; docs/configuration.md: all):
{keys}

examples:
  python -m megatron_grpo.train +exp=quickstart grpo.max_num_steps=3
  python -m megatron_grpo.train +exp=qwen3_8b_8gpu data.train_path=mine.jsonl
  python -m megatron_grpo.train run_dir=outputs/mine     (goes on with a run)
"""


def format_commands() -> str:
    """Format the list of commands."""
    rows = {f"python -m megatron_grpo.{name}": text for name, text in COMMANDS.items()}
    headline = f"GRPO, PPO, distillation, SFT, DPO and reward models on Megatron-Core and vLLM, {find_version()}."
    return f"{headline}\n\n{_format_table(rows)}\n\n--help after any.\n"


def format_help() -> str:
    """Format the usage, which fits a screen: recipes, config groups, common keys and examples."""
    options = list_config_groups()
    recipes = options.pop(RECIPES)
    quickstarts = ", ".join(name for name in recipes if name.startswith("quickstart"))
    rows = {name: re.split(r"[.:;]( |$)", " ".join(read_keys()[name].doc.split()))[0] for name in _COMMON.split()}
    width = _COLUMNS - 4 - max(map(len, rows))
    keys = {name: textwrap.shorten(text, width, placeholder=" ...") for name, text in rows.items()}
    return _TEMPLATE.format(
        recipes=len(recipes),
        quickstarts=_fill_screen(quickstarts),
        groups=_fill_screen(", ".join(options)),
        keys=_format_table(keys),
    )


def _fill_screen(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, initial_indent="  ", subsequent_indent="  ")


def _format_table(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
