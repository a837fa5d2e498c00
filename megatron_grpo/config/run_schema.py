"""The keys of machines, checkpoints, logs, preparation, debugging and plans, which no algorithm reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import NonNegative, PathText, Positive, PositiveFloat, Seconds, Section


@dataclass(kw_only=True)
class ClusterConfig(Section):
    """The machines that a run has."""

    num_nodes: Positive = 1
    """Number of machines; on the command line also cluster.nodes."""

    gpu: Literal["a100", "a100-40gb", "a800", "h20", "h100", "h200", "l40s", "b200", "b300", "gb200"] | None = None
    """GPU that plans assume (docs/plan.md); with it, --check also tells whether the run fits. null: no plan."""

    gpus_per_node: NonNegative | None = None
    """GPUs of each machine; 0: run on CPU; null: as many as the machine that starts the run has."""

    ray_address: str | None = None
    """Address of a running Ray cluster, HOST:PORT or auto; null: that in the environment variable RAY_ADDRESS, and
    without it a Ray is started on this machine that ends with the run."""

    startup_timeout_s: Seconds = 900.0
    """Deadline for the start of all processes."""

    peak_tflops_per_device: Annotated[float, Field(gt=0)] | None = None
    """Peak TFLOP/s of a policy rank's device, for model_flop_utilization; null: known for common GPUs, else none."""

    @property
    def gpus(self) -> int:
        """GPUs of each machine; 0 also while gpus_per_node is null."""
        return self.gpus_per_node or 0


@dataclass(kw_only=True)
class CheckpointingConfig(Section):
    """Checkpoints under run_dir/checkpoints/step_N."""

    enabled: bool = True
    """Whether checkpoints are written."""

    save_period: Positive = 10
    """Steps between checkpoints; the last step is always saved."""

    async_save: bool = False
    """Write in the background: a save waits only for the previous save and for a copy of the models and optimizers in
    host memory, which needs that much more of it."""

    keep_top_k: Positive | None = None
    """Checkpoints kept, best by metric_name first; the newest is always kept. null keeps all."""

    metric_name: str | None = "val_accuracy"
    """Metric that ranks checkpoints; a metric of validation where nothing is validated gives way to reward. env/NAME is
    a figure that a reward function or environment reports as NAME. Steps without a finite value rank last. null: the
    newest rank first."""

    higher_is_better: bool = True
    """Whether a higher metric_name makes a better checkpoint; false: a lower one does."""

    resume: PathText = "auto"
    """auto: start from the newest intact checkpoint of run_dir, if any; none: start from step 1, in a run_dir without
    checkpoints; or the path of a checkpoint to start from while run_dir has none of its own. A job that may be queued
    again needs auto or a path."""


@dataclass(kw_only=True)
class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = False
    """Whether metrics go to W&B (needs the wandb package)."""

    project: str = "megatron_grpo"
    """Project that the run appears in on W&B."""

    name: str | None = None
    """Run name; null: the name of the run directory."""

    mode: Literal["online", "offline"] = "online"
    """offline: write to run_dir/wandb only; `wandb sync` sends it later."""


@dataclass(kw_only=True)
class MlflowConfig(Section):
    """MLflow."""

    enabled: bool = False
    """Whether metrics go to MLflow (needs the mlflow package)."""

    experiment: str = "megatron_grpo"
    """Experiment that the run belongs to."""

    name: str | None = None
    """Run name; null: the name of the run directory."""

    tracking_uri: str | None = None
    """Server or store; null: run_dir/mlflow.db, with the tables of samples in run_dir/mlflow."""


@dataclass(kw_only=True)
class LoggerConfig(Section):
    """Reports and trackers; metrics.jsonl, summary.json and the plot are always written."""

    report: bool = True
    """Write run_dir/report.html when the run ends or fails: curves, configuration, trajectories (docs/report.md)."""

    tensorboard: bool = True
    """Write TensorBoard events to run_dir/tensorboard."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)

    log_completions: bool = False
    """Print some responses of every step and validation, with their prompts and rewards, and send them to the trackers
    as tables. Needs logger.rollouts=all or sample."""

    num_completions_to_print: Positive = 5
    """Responses printed per step with log_completions, each to a different prompt."""

    profile_steps: list[Positive] = field(default_factory=list)
    """Steps whose time and memory are profiled on every rank, into run_dir/profiles/step_N."""

    num_val_samples_to_print: NonNegative = 5
    """Responses printed per validation."""

    progress: bool = True
    """Show the live progress line."""

    rollouts: Literal["all", "sample", "off"] = "all"
    """Which rollouts of a step are written to run_dir/rollouts; all: `debug.rollouts_from` can train on them."""

    rollouts_sample: Positive = 64
    """Rollouts written per step with rollouts=sample."""

    replay_every: Positive | None = None
    """Keep what `python -m megatron_grpo.replay` needs to do steps N, 2N, ... again: the checkpoint before each of
    them, which checkpointing.keep_top_k does not delete, all of its rollouts, and what it computed (docs/replay.md).
    null: nothing."""

    level: Literal["debug", "info", "warning"] = "info"
    """Detail of the per-process logs in run_dir/logs."""

    def has_replay(self, step: int) -> bool:
        """Whether the run keeps what a replay of this step needs."""
        return self.replay_every is not None and step % self.replay_every == 0

    def is_replay_start(self, step: int) -> bool:
        """Whether a replay begins with the checkpoint after this step."""
        return self.has_replay(step + 1)


@dataclass(kw_only=True)
class PrepareConfig(Section):
    """Model and data made before the run, for recipes that need no download."""

    name: Literal["addition", "addition_moe", "calculator", "two_tasks"] | None = None
    """addition: a tiny Qwen3 that gets about 4 in 10 sums of two numbers right, and its problems; addition_moe: a tiny
    Qwen3-MoE, and the same problems; calculator: a tiny Qwen3 that calls a calculator, rarely correctly; two_tasks: a
    tiny Qwen3 that adds numbers and plays a game of several turns; null: nothing is made."""

    folder: PathText = "${oc.env:MEGATRON_GRPO_CACHE,${oc.env:HOME,.}/.cache/megatron_grpo}/${prepare.name}"
    """Folder in which the model and its data are made, once; later runs reuse them."""


@dataclass(kw_only=True)
class DebugConfig(Section):
    """Run sampling without training, or training without sampling; docs/debugging.md. `logger.rollouts=all` records
    every step, for the other half to train on."""

    rollouts_from: PathText | None = None
    """Folder of a run that recorded its rollouts, or the folder `rollouts` in it: train on these, step by step, instead
    of sampling. No engine, environment or refit is started, and no prompt is read. A recording with fewer steps ends
    the run earlier. null: sample."""

    train: bool = True
    """False: sample and score with the weights of the model folder, and train nothing: no rank is started, no refit and
    no checkpoint is made. Rollouts, rewards, metrics and validations are written as usual."""


@dataclass(kw_only=True)
class PlanConfig(Section):
    """What a plan assumes (docs/plan.md); runs do not read these keys."""

    workload: Literal["rl", "pretrain"] = "rl"
    """rl: a step of the recipe's algorithm; pretrain: an optimizer step on plan.global_batch_samples sequences of
    plan.sequence_length tokens, without engines and reference policy."""

    global_batch_samples: Positive | None = None
    """Sequences of an optimizer step with workload=pretrain; null: the samples of the recipe's step."""

    sequence_length: Positive | None = None
    """Tokens of each sequence with workload=pretrain; null: policy.max_total_sequence_length."""

    prompt_tokens: Positive | None = None
    """Mean tokens of a prompt; null: a quarter of data.max_input_seq_length."""

    response_tokens: Positive | None = None
    """Mean tokens of a response; null: half of generation.max_new_tokens."""

    response_sigma: PositiveFloat = 0.6
    """Standard deviation of the logarithm of response lengths, which are log-normal up to generation.max_new_tokens."""

    lengths_from: PathText | None = None
    """Folder of a run that recorded its rollouts, whose lengths replace the log-normal ones; null: log-normal."""

    expert_skew: Annotated[float, Field(ge=1)] = 1.5
    """Tokens of the fullest rank's experts relative to the mean; memory is planned at this and at balanced experts."""

    hardware: PathText | None = None
    """YAML with values that replace those of the profile of cluster.gpu, as `plan calibrate` writes; null: none."""

    host_memory_gib: PositiveFloat | None = None
    """Memory of each node's host in GiB; null: that of the DGX system of cluster.gpu, where there is one."""

    timeout_s: Seconds = 1800.0
    """Deadline of all dry runs of a plan."""

    search_s: Seconds = 240.0
    """Seconds for the dry runs of --search, which begins with the layouts of the best estimates; and for those of the
    advice on a run that does not fit."""
