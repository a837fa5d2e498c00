"""Texts of --help."""

from __future__ import annotations

from importlib import resources

from megatron_grpo.config.command_line import find_version
from megatron_grpo.config.keys import read_keys
from megatron_grpo.config.overrides import CONF_MODULE, RECIPES, list_config_groups

# The commands and what each does.
COMMANDS = {
    "train": "train a model as a recipe says: +exp=quickstart; --check only checks, --cfg job only prints",
    "new": "write a folder to start from, with a recipe, rewards, an environment, a test and rows: NAME",
    "evaluate": "answer held-out prompts: checkpoint=RUN_DIR/checkpoints/step_N data.val_path=FILE output=DIR",
    "report": "write the page of a run, or of two side by side: RUN_DIR [OTHER_RUN_DIR]",
    "export": "turn a checkpoint into a Hugging Face folder: checkpoint=RUN_DIR/checkpoints/step_N output=PATH",
    "verify": "prove on this machine that layouts compute the same: model=tiny:qwen3 'layouts=[tp2,pp2]'",
    "replay": "do a recorded step again, in another layout or precision: RUN_DIR step=N policy.parallel.tensor=2",
    "doctor": "say why log-probabilities of generation and training differ in a recorded step: RUN_DIR",
    "plan": "tell whether a recipe fits GPUs and how fast it is, without one: +exp=qwen3_8b_8gpu cluster.gpu=h100",
    "refit_plan": "tell what a refit of a recipe moves, before a GPU is asked for: +exp=qwen3_8b_8gpu",
    "serve": "start a vLLM server that runs can train against: MODEL",
}

# Keys that --help lists.
_COMMON = """
    run_dir policy.model.path policy.parallel.tensor policy.parallel.pipeline policy.parallel.data policy.optimizer.lr
    policy.max_total_sequence_length generation.parallel.tensor generation.parallel.pipeline generation.parallel.data
    generation.max_new_tokens grpo.num_prompts_per_step grpo.num_generations_per_prompt grpo.max_num_steps
    loss_fn.reference_policy_kl_penalty data.train_path data.val_path cluster.gpus_per_node checkpointing.save_period
    checkpointing.resume
"""

_TEMPLATE = """\
GRPO, PPO, distillation, SFT, DPO and reward models on Megatron-Core and vLLM.

usage: python -m megatron_grpo.train [+exp=RECIPE] [GROUP=OPTION ...] [KEY=VALUE ...] [job=FILE]
                                    [--check] [--cfg job] [--version] [--help]

  job=FILE    a flat YAML with the fields of GrpoParameters (docs/python.md), which the recipe is run with
  --check     check everything that a start would, files and machine included; say what would run, and stop
  --cfg job   print the configuration with everything filled in, and stop; say on standard error what is wrong with it
  --version   the version
  --help      this text

recipes (+exp=NAME):
{recipes}

groups (GROUP=OPTION):
{groups}

common keys (--cfg job shows all; docs/configuration.md explains them; grpo.KEY is a key of any algorithm's loop):
{keys}

examples:
  python -m megatron_grpo.train +exp=quickstart
  python -m megatron_grpo.train +exp=quickstart grpo.max_num_steps=3 policy.parallel.tensor=2
  python -m megatron_grpo.train +exp=qwen3_8b_8gpu policy.model.path=/models/mine data.train_path=mine.jsonl
  python -m megatron_grpo.train +exp=quickstart run_dir=outputs/mine   (again: resumes where it stopped)
"""


def format_commands() -> str:
    """Format the list of commands."""
    rows = {f"python -m megatron_grpo.{name}": text for name, text in COMMANDS.items()}
    headline = f"GRPO, PPO, distillation, SFT, DPO and reward models on Megatron-Core and vLLM, {find_version()}."
    return f"{headline}\n\n{_format_table(rows)}\n\n--help after any.\n"


def format_help() -> str:
    """Format the usage: recipes, config groups, common keys and examples."""
    options = list_config_groups()
    recipes = {name: read_recipe_summary(name) for name in options.pop(RECIPES)}
    groups = {name: ", ".join(names) for name, names in options.items()}
    common = {f"{name} ({read_keys()[name].default_text})": read_keys()[name].doc for name in _COMMON.split()}
    return _TEMPLATE.format(recipes=_format_table(recipes), groups=_format_table(groups), keys=_format_table(common))


def read_recipe_summary(name: str) -> str:
    """Read the comment at the top of a recipe."""
    lines = resources.files(CONF_MODULE).joinpath(RECIPES, f"{name}.yaml").read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#") and "@package" not in line]
    return " ".join(comments)


def _format_table(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
