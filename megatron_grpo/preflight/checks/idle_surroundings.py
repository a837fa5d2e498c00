"""Which keys of data, engines, refits, checkpoints and reports change nothing while a switch they belong to is off."""

from __future__ import annotations

from megatron_grpo.config.data_schema import DataConfig
from megatron_grpo.preflight.checks.idle_learning import Check


def _renders_chats(data: DataConfig) -> bool:
    """Whether the prompts of some task are rendered with a chat template."""
    return data.apply_chat_template or any(task.apply_chat_template for task in data.tasks.values())


SURROUNDINGS: tuple[Check, ...] = (
    (("refit.directory",), lambda config: config.refit.mode != "files", "needs refit.mode=files"),
    (
        ("generation.engine.", "generation.engine_args.", "generation.generation_batch_size"),
        lambda config: bool(config.generation.server.urls),
        "is for engines that the run starts; give python -m megatron_grpo.serve the argument of vLLM",
    ),
    (
        ("generation.endpoint.",),
        lambda config: not config.generation.endpoint.enabled,
        "needs generation.endpoint.enabled=true",
    ),
    (
        ("generation.server.timeout_s",),
        lambda config: not config.generation.server.urls,
        "needs generation.server.urls",
    ),
    (
        ("generation.engine.speculative.prompt_lookup_min", "generation.engine.speculative.prompt_lookup_max"),
        lambda config: config.generation.engine.speculative.num_speculative_tokens == 0,
        "needs generation.engine.speculative.num_speculative_tokens above 0",
    ),
    (
        ("checkpointing.keep_top_k", "checkpointing.save_period", "checkpointing.async_save"),
        lambda config: not config.checkpointing.enabled,
        "needs checkpointing.enabled=true",
    ),
    (
        ("checkpointing.metric_name", "checkpointing.higher_is_better"),
        lambda config: not config.checkpointing.enabled or config.checkpointing.keep_top_k is None,
        "ranks checkpoints, and needs checkpointing.keep_top_k",
    ),
    (
        ("LOOP.val_period", "LOOP.val_batch_size", "LOOP.max_val_samples", "LOOP.val_temperature"),
        lambda config: not config.data.validation,
        "needs data.val_path or data.val_sets",
    ),
    (("data.val_split",), lambda config: config.data.val_path is None, "needs data.val_path"),
    (
        ("data.train_split",),
        lambda config: bool(config.data.train_sets),
        "is of data.train_path; each of data.train_sets has a split of its own",
    ),
    (
        ("data.subset",),
        lambda config: bool(config.data.train_sets) and config.data.val_path is None,
        "is of data.train_path and data.val_path; each of data.train_sets and data.val_sets has a subset of its own",
    ),
    (("data.shuffle_buffer",), lambda config: not config.data.streaming, "needs data.streaming=true"),
    (
        ("data.chat_template", "data.chat_template_kwargs.", "data.tools"),
        lambda config: not _renders_chats(config.data),
        "needs data.apply_chat_template=true",
    ),
    (("logger.rollouts_sample",), lambda config: config.logger.rollouts != "sample", "needs logger.rollouts=sample"),
    (
        ("logger.num_completions_to_print",),
        lambda config: not config.logger.log_completions,
        "needs logger.log_completions=true",
    ),
    (("logger.wandb.",), lambda config: not config.logger.wandb.enabled, "needs logger.wandb.enabled=true"),
    (("logger.mlflow.",), lambda config: not config.logger.mlflow.enabled, "needs logger.mlflow.enabled=true"),
)
