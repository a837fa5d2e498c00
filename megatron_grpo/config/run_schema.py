"""The keys of machines, checkpoints, logs, preparation, debugging and plans."""

from __future__ import annotations

import os
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Predicate
from pydantic import Field

from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.section import (
    CONNECTS,
    Address,
    FormulaOptions,
    ImportPath,
    NonNegative,
    PathText,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    Starts,
)

# A repository on the Hugging Face hub.
HubName = Annotated[str, Predicate(is_hub_name), "ORGANISATION/NAME", Starts(CONNECTS)]
# Ray's environment variable with the address of the cluster that a driver joins; `ray job submit` sets it.
ADDRESS_VARIABLE = "RAY_ADDRESS"
# A cluster runs code on the machines that join it.
RayAddress = Annotated[str, Starts(CONNECTS, lambda address: address in ("auto", os.environ.get(ADDRESS_VARIABLE)))]


class ClusterConfig(Section):
    """The machines of a run."""

    num_nodes: Positive = 1
    """Machines; on the command line also cluster.nodes."""

    gpu: Literal["a100", "a100-40gb", "a800", "h20", "h100", "h200", "l40s", "b200", "b300", "gb200"] | None = None
    """GPU that plans assume (docs/plan.md); if it is set, --check also tells whether the run fits. null: no plan."""

    gpus_per_node: NonNegative | None = None
    """GPUs of each machine; 0: run on CPU; null: as many as the machine that starts the run has."""

    ray_address: RayAddress | None = None
    """Ray cluster to join: HOST:PORT or auto; null: RAY_ADDRESS of the environment, else Ray on this machine."""

    startup_timeout_s: Seconds = 900.0
    """Deadline for the start of all processes."""

    max_restarts: NonNegative = 2
    """How often all ranks start again when one of them dies or hangs: the run goes back to its newest checkpoint, and
    engines, rollout workers and environments stay. 0: a lost rank ends the run."""

    peak_tflops_per_device: PositiveFloat | None = None
    """Peak TFLOP/s of a policy rank's device, for model_flop_utilization; null: the value of common GPUs, else none."""

    @property
    def gpus(self) -> int:
        """GPUs of each machine; 0 also while gpus_per_node is null."""
        return self.gpus_per_node or 0


class CheckpointingConfig(Section):
    """Checkpoints under run_dir/checkpoints/step_N."""

    enabled: bool = True
    """Write checkpoints."""

    save_period: Positive = 10
    """Steps between checkpoints; the last step is always saved."""

    save_minutes: PositiveFloat | None = None
    """Also save after the first step that ends so many minutes after the last save or start; null: by steps alone."""

    async_save: bool = False
    """Write in the background, from a copy in host memory; a save waits only for the copy and the previous save."""

    keep_top_k: Positive | None = None
    """Number of checkpoints to keep, best by metric_name first; keep_newest stay besides. null: all."""

    keep_newest: Positive = 1
    """Number of the newest checkpoints that stay, whatever keep_top_k deletes."""

    metric_name: str | None = "val_accuracy"
    """Metric that ranks checkpoints (env/NAME: reported by an environment as NAME); reward where there is no
    validation, val_reward in place of val_accuracy where nothing says which responses are correct. Steps without a
    finite value rank last. null: the newest rank first."""

    higher_is_better: bool = True
    """true: a higher metric_name makes a better checkpoint; false: a lower one."""

    resume: PathText = "auto"
    """auto: start from the newest intact checkpoint of run_dir, if any; none: from step 1, in a run_dir without
    checkpoints; a path: from there while run_dir has none (RUN_DIR/checkpoints/best or latest: the one ranked first, or
    the last). A job that may be queued again needs auto or a path."""

    upload_to: Address | None = None
    """Storage that gets a copy of complete checkpoints while training goes on: a URL of fsspec, such as
    s3://BUCKET/RUN, whose package must be installed. null: none."""

    push_to_hub: HubName | None = None
    """Repository on the Hugging Face hub, ORGANISATION/NAME, that gets the model of complete checkpoints while training
    goes on. null: none."""

    upload_timeout_s: Seconds = 1800.0
    """Deadline for sending a checkpoint; at the end of the run the last one that misses it is an error."""


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = False
    """Send metrics to W&B (needs the wandb package)."""

    project: str = "megatron_grpo"
    """Project of the run on W&B."""

    name: str | None = None
    """Run name; null: the name of the run directory."""

    mode: Literal["online", "offline"] = "online"
    """offline: write only to run_dir/wandb, which `wandb sync` sends later."""


class MlflowConfig(Section):
    """MLflow."""

    enabled: bool = False
    """Send metrics to MLflow (needs the mlflow package)."""

    experiment: str = "megatron_grpo"
    """Experiment of the run."""

    name: str | None = None
    """Run name; null: the name of the run directory."""

    tracking_uri: Address | None = None
    """Server or store; null: run_dir/mlflow.db, and run_dir/mlflow for the tables of samples."""


class SwanlabConfig(Section):
    """SwanLab."""

    enabled: bool = False
    """Send metrics to SwanLab (needs the swanlab package)."""

    project: str = "megatron_grpo"
    """Project of the run on SwanLab."""

    name: str | None = None
    """Run name; null: the name of the run directory."""

    mode: Literal["online", "offline"] = "online"
    """offline: write only to run_dir/swanlab, which `swanlab sync` sends later."""


AlarmName = Literal[
    "entropy_collapse",
    "kl_growth",
    "mismatch_growth",
    "reward_flat",
    "reward_saturated",
    "groups_without_signal",
    "lengths_at_limit",
    "gradient_spike",
    "failed_rollouts",
    "slow_rank",
    "held_out_falls",
]


class RlInsightConfig(Section):
    """RL-Insight."""

    enabled: bool = False
    """Send metrics to an RL-Insight server (needs the rl-insight package)."""

    project: str = "megatron_grpo"
    """Project of the run."""

    name: str | None = None
    """Name of the experiment; null: the name of the run directory."""

    server_url: Address | None = None
    """Address of the server, such as http://HOST:18080; null: RL_INSIGHT_SERVER_URL of the environment."""


# A tracker of the user's code.
TrackerPath = Annotated[ImportPath, Predicate(lambda path: "." in path), "module.NAME"]


class LoggerConfig(Section):
    """Reports and trackers; metrics.jsonl, summary.json and the plot are always written."""

    report: bool = True
    """Write run_dir/report.html when the run ends or fails: curves, configuration, trajectories (docs/observing.md)."""

    tensorboard: bool = True
    """Write TensorBoard events to run_dir/tensorboard."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    rl_insight: RlInsightConfig = field(default_factory=RlInsightConfig)

    prometheus: bool = False
    """Give the figures to Ray's Prometheus exporters as ray_megatron_grpo_*, and vLLM's as ray_vllm_*
    (docs/operations.md); run_dir/prometheus_targets.json lists the addresses to scrape."""

    otlp_endpoint: Address | None = None
    """Collector of OpenTelemetry that gets the spans of all processes in each step, over HTTP:
    http://HOST:4318/v1/traces. null: none."""

    trace_steps: list[Positive] = field(default_factory=list)
    """Steps of which run_dir/traces/step_N.json shows what all processes did, for Perfetto; it costs nothing."""

    tracker: TrackerPath | None = None
    """A tracker of your own beside these, module.NAME (docs/extending.md)."""

    tracker_options: FormulaOptions = field(default_factory=dict)
    """Parameters of your own tracker by name, such as tracker_options.file=figures.csv."""

    alarms_off: list[AlarmName] = field(default_factory=list)
    """Alarms that are not raised (docs/operations.md)."""

    alarms_stop: list[AlarmName] = field(default_factory=list)
    """Alarms that end training after their step, which is validated and saved like every last step."""

    log_completions: bool = False
    """Print some responses of steps and validations, also into trackers. Needs logger.rollouts=all or sample."""

    num_completions_to_print: Positive = 5
    """Responses printed per step with log_completions, each to a different prompt."""

    profile_steps: list[Positive] = field(default_factory=list)
    """Steps whose time and memory are profiled on every rank, into run_dir/profiles/step_N."""

    num_val_samples_to_print: NonNegative = 5
    """Responses printed per validation."""

    progress: bool = True
    """Show the live progress line."""

    rollouts: Literal["all", "sample", "off"] = "all"
    """Rollouts of each step that are written to run_dir/rollouts. debug.rollouts_from can train on them with all."""

    rollouts_sample: Positive = 64
    """Rollouts written per step with rollouts=sample."""

    replay_every: Positive | None = None
    """With N, `python -m megatron_grpo.replay` can repeat steps N, 2N, ...: the run keeps the checkpoint before each of
    them, whatever checkpointing.keep_top_k deletes, all of its rollouts and results (docs/debugging.md). null: off."""

    level: Literal["debug", "info", "warning"] = "info"
    """Level of the logs of all processes in run_dir/logs."""

    def has_replay(self, step: int) -> bool:
        """True if the run keeps this step for a replay."""
        return self.replay_every is not None and step % self.replay_every == 0

    def is_replay_start(self, step: int) -> bool:
        """True if a replay begins with the checkpoint after this step."""
        return self.has_replay(step + 1)


PreparedName = Literal[
    "addition",
    "addition_moe",
    "addition_hybrid",
    "addition_text",
    "distillation",
    "preference",
    "labelled",
    "counting",
    "calculator",
    "two_tasks",
]


class PrepareConfig(Section):
    """A model and data made before the run, without a download."""

    name: PreparedName | None = None
    """A tiny Qwen3 and its data. addition: sums of two numbers, 4 in 10 right; addition_moe: a Qwen3-MoE;
    addition_hybrid: a Qwen3.5; addition_text: as reasoning_gym asks; distillation: with a teacher; preference: pairs;
    labelled: labels; counting: a Qwen2.5-VL and pictures; calculator: calls one; two_tasks: sums and a game;
    null: none."""

    folder: PathText = "${oc.env:MEGATRON_GRPO_CACHE,${oc.env:HOME,.}/.cache/megatron_grpo}/${prepare.name}"
    """Folder of the model and its data; later runs reuse them."""


class DebugConfig(Section):
    """Sampling without training, or training without sampling; docs/debugging.md.

    `logger.rollouts=all` records every step, so that a second run can train on it."""

    rollouts_from: PathText | None = None
    """Folder of a run that recorded its rollouts, or `rollouts` in it: train on these, step by step, without engines,
    environments, refits and prompts, until the recording ends. null: sample."""

    train: bool = True
    """false: sample and score with the model folder's weights, without ranks, training, refits and checkpoints."""


class PlanConfig(Section):
    """Assumptions of a plan (docs/plan.md); runs do not read these keys."""

    workload: Literal["rl", "pretrain"] = "rl"
    """rl: a step of the recipe's algorithm; pretrain: an optimizer step on plan.global_batch_samples sequences."""

    global_batch_samples: Positive | None = None
    """Sequences of an optimizer step with workload=pretrain; null: the samples of the recipe's step."""

    sequence_length: Positive | None = None
    """Tokens of each sequence with workload=pretrain; null: policy.max_total_sequence_length."""

    prompt_tokens: Positive | None = None
    """Mean tokens of a prompt; null: a quarter of data.max_input_seq_length."""

    response_tokens: Positive | None = None
    """Mean tokens of a response, cut ones included; null: half of generation.max_new_tokens."""

    response_sigma: PositiveFloat = 0.6
    """Standard deviation of the logarithm of response lengths, which are log-normal up to generation.max_new_tokens."""

    lengths_from: PathText | None = None
    """Folder of a run that recorded its rollouts; their lengths replace the log-normal ones. null: log-normal."""

    expert_skew: Annotated[float, Field(ge=1)] = 1.5
    """Tokens of the fullest rank's experts relative to the mean. Seconds are planned with it, and memory with it and
    without skew."""

    hardware: PathText | None = None
    """YAML with values in place of the profile of cluster.gpu, as `plan calibrate` writes it; null: none."""

    host_memory_gib: PositiveFloat | None = None
    """Host memory of each node in GiB; null: that of the DGX system with cluster.gpu, where there is one."""

    storage_gb_per_s: PositiveFloat = 20.0
    """Speed at which all nodes together write checkpoints and read models, in 10^9 bytes a second."""

    timeout_s: Seconds = 1800.0
    """Deadline of all dry runs of a plan."""

    search_s: Seconds = 240.0
    """Seconds for the dry runs of --search, best estimates first, and of the advice on a run that does not fit."""
