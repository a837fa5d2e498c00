"""The keys of data and prompts, environments and the sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from megatron_grpo.config.section import (
    MISSING,
    EnvironmentOptions,
    NonNegativeFloat,
    PathText,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    TemplateArguments,
)


@dataclass(kw_only=True)
class PromptConfig(Section):
    """How the rows of a task become prompts. In data.tasks.NAME, null takes the value that data has for all tasks."""

    processor: str | None = None
    """Function that turns rows into prompts: gsm8k, math, dapo_math, openmathinstruct2, tldr, countdown, or one of your
    own by import path (docs/data.md); null: rows already have a prompt and an answer."""

    prompt_file: PathText | None = None
    """Text file with a template for every prompt: {} stands for the prompt, {NAME} for a column of the row."""

    system_prompt: str | None = None
    """System message put before every prompt without one of its own; needs apply_chat_template."""

    system_prompt_file: PathText | None = None
    """Text file with the system message, instead of system_prompt."""

    chat_template: PathText | None = None
    """File with the chat template (Jinja) to use instead of the tokenizer's."""

    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    """Further variables of the chat template, such as enable_thinking."""

    tools: PathText | None = None
    """JSON file with a list of tool definitions for the chat template."""


@dataclass(kw_only=True)
class TaskConfig(PromptConfig):
    """Prompt settings of one task; null takes the value that data has for all tasks."""

    prompt_key: str | None = None
    """Column with the prompt."""

    answer_key: str | None = None
    """Column with the reference answer."""

    apply_chat_template: bool | None = None
    """Whether prompts are rendered with the chat template."""


@dataclass(kw_only=True)
class DatasetConfig(Section):
    """One set of rows."""

    path: PathText = MISSING
    """A file (.jsonl, .parquet, .arrow, .csv), a folder that `datasets` saved, or a name on the Hugging Face hub, such
    as openai/gsm8k."""

    subset: str | None = None
    """Configuration of a hub set, such as main; null: its only one."""

    split: str = "train"
    """Split of a hub set or a folder, also a part of it as `datasets` writes it: train[:1000]. A file has no splits."""

    task_name: str | None = None
    """Environment of rows without a task_name column; null: data.task_name."""

    weight: PositiveFloat = 1.0
    """Visits of each row in an epoch of training: 2 shows the set twice, 0.5 half of it, and the other half in the
    next epoch. Not used for validation sets."""

    def count_visits(self, rows: int) -> int:
        """Visits to rows of this set in one epoch, given its number of rows."""
        return int(self.weight) * rows + round(self.weight % 1 * rows)


@dataclass(kw_only=True)
class DataConfig(PromptConfig):
    """Data sets, and how their rows become prompts."""

    train_path: PathText = MISSING
    """JSONL file of training rows; or a .parquet, .arrow or .csv file, a folder that `datasets` saved, or a hub name.
    Not needed beside train_sets."""

    val_path: PathText | None = None
    """Validation rows: a file, folder or hub name, as for train_path; null: no validation, unless val_sets has sets."""

    subset: str | None = None
    """Configuration of a hub set in train_path and val_path; null: its only one."""

    train_split: str = "train"
    """Split of train_path, where that is a hub name or a folder."""

    val_split: str = "test"
    """Split of val_path, where that is a hub name or a folder."""

    train_sets: dict[str, DatasetConfig] = field(default_factory=dict)
    """Several training sets by name, mixed by their weights, in place of train_path."""

    val_sets: dict[str, DatasetConfig] = field(default_factory=dict)
    """Validation sets by name, in addition to val_path; each has metrics of its own, such as val_set_accuracy/NAME."""

    streaming: bool = False
    """Read the rows of train_path, a hub name, from the hub on demand, without storing them; they are shuffled within
    shuffle_buffer. Needs max_num_epochs or max_num_steps to end."""

    shuffle_buffer: Positive = 10000
    """Rows among which the next one is drawn while streaming."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    answer_key: str | None = "answer"
    """Column with the reference answer for the environment; null: rows have none, for example with reward functions."""

    task_name: str = "math"
    """Environment of rows that have no task_name column."""

    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Prompt settings of single tasks, by the name of the task."""

    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template (true) or use the text as it is (false)."""

    max_input_seq_length: Positive = 1024
    """Most tokens of a prompt; long_prompts says what happens to longer prompts."""

    long_prompts: Literal["filter", "cut_left", "error"] = "filter"
    """Rows whose prompt is too long: filter leaves them out, and the run reports how many; cut_left drops tokens at the
    beginning of the prompt; with error the run does not start."""

    bad_rows: Literal["fail", "skip"] = "fail"
    """Rows that cannot be read or used: with fail the run reports them and does not start; skip reports the first ones,
    counts all and leaves them out."""

    rows_rendered_at_start: Positive = 50000
    """Most rows of each set that are rendered and tokenized before training, to find prompts that are too long or that
    the chat template refuses; other rows are rendered when they are used. All rows are read and checked at start."""

    shuffle: bool = True
    """Visit training rows in an order drawn anew each epoch."""

    @property
    def training_sets(self) -> dict[str, DatasetConfig]:
        """The training sets, by the key of their path."""
        if self.train_sets:
            return {f"data.train_sets.{name}.path": one for name, one in self.train_sets.items()}
        return {"data.train_path": DatasetConfig(path=self.train_path, subset=self.subset, split=self.train_split)}

    @property
    def validation_sets(self) -> dict[str, DatasetConfig]:
        """The validation sets, by the key of their path."""
        sets = {f"data.val_sets.{name}.path": one for name, one in self.val_sets.items()}
        if self.val_path is None:
            return sets
        one = DatasetConfig(path=self.val_path, subset=self.subset, split=self.val_split)
        return {"data.val_path": one, **sets}


def is_model_folder(reward: str) -> bool:
    """Whether an entry of reward_funcs is the folder or hub name of a reward model rather than an import path."""
    return "/" in reward


def parse_reward_name(reward: str) -> str:
    """Name of a reward in metrics: the last part of the entry's import path or folder."""
    return PurePath(reward).name if is_model_folder(reward) else reward.rpartition(".")[2]


@dataclass(kw_only=True)
class RewardModelConfig(Section):
    """The processes that run the reward models among reward_funcs."""

    num_workers: Positive = 1
    """Processes of each model."""

    gpus: NonNegativeFloat = 0.0
    """GPUs of each process, a fraction where several share one; 0: it computes on the CPU."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""

    batch_tokens: Positive = 16384
    """Most tokens, padding included, that are computed together; a conversation that is longer goes alone."""

    max_tokens: Positive | None = None
    """Tokens at the end of a conversation that the model is shown; null: all of them."""


@dataclass(kw_only=True)
class EnvironmentConfig(Section):
    """One environment, which answers and scores the responses; docs/environments.md."""

    type: str = "math"
    """math: math-verify compares the final answers; addition: the response is exactly the digits of the answer; code:
    programs that pass tests in the sandbox; format: a regular expression; judge: another model scores; tools: the model
    calls tools before it answers; countdown: a game of several turns; reward_functions: the functions in
    reward_funcs; package.module:Class: an environment of your own."""

    options: EnvironmentOptions = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions: functions or objects by import path (package.module.name), called with prompts, completions
    and the data's columns; and reward models by their folder or hub name, which has a / in it (docs/rewards.md)."""

    on_reward_error: Literal["fail", "none"] = "fail"
    """When a reward function raises or exceeds its deadline: fail makes the response a failed rollout; none takes the
    reward as None and counts it in reward_errors."""

    reward_timeout_s: Seconds | None = None
    """Deadline of one call of a reward function; null: only timeout_s, past which the process is replaced."""

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)

    reward_weights: list[float] | None = None
    """Weight of each function's reward in the sum; null: 1 each."""

    correct_func: str | None = None
    """Name of the function in reward_funcs whose reward above 0 makes a response correct (accuracy, imitation); null:
    the only function. With several functions and null, correctness is unknown, and there is no accuracy."""

    agent_func: str | None = None
    """With type=reward_functions, the import path of a function that drives the turns of a rollout: it is called with
    the prompt, the row's columns and the address of an OpenAI-compatible endpoint, through which it asks the model.
    null: a rollout is one response. Needs generation.endpoint.enabled."""

    leave_out_suspects: list[str] = field(default_factory=list)
    """Names of figures, such as touched_harness (docs/environments.md, undeserved rewards). A response with one of them
    above 0 loses its reward, so that baselines and loss leave it out. Empty: the figures are only reported."""

    num_workers: Positive = 1
    """Processes that score in parallel; at least one for each rollout worker. With an agent, the number of rollouts
    that run at the same time."""

    timeout_s: Seconds = 600.0
    """Deadline of one call of a process, which scores all responses that arrived while it was busy; past it the process
    is replaced, and the responses are scored once more, one by one."""

    @property
    def reward_model_folders(self) -> list[str]:
        """The reward models among reward_funcs."""
        return [path for path in self.reward_funcs if is_model_folder(path)]

    @property
    def function_weights(self) -> dict[str, float]:
        """Weight of each reward function, by its name."""
        names = [parse_reward_name(path) for path in self.reward_funcs]
        return dict(zip(names, self.reward_weights or [1.0] * len(names), strict=False))

    @property
    def correctness_function(self) -> str | None:
        """The reward function that says whether a response is correct; None: none does, or the type has none."""
        names = list(self.function_weights)
        return names[0] if self.correct_func is None and len(names) == 1 else self.correct_func


BUILT_IN = {
    "math": "megatron_grpo.environments.tasks:MathEnvironment",
    "addition": "megatron_grpo.environments.tasks:AdditionEnvironment",
    "code": "megatron_grpo.environments.code:CodeEnvironment",
    "format": "megatron_grpo.environments.tasks:FormatEnvironment",
    "judge": "megatron_grpo.environments.judge:JudgeEnvironment",
    "tools": "megatron_grpo.environments.tools:ToolEnvironment",
    "countdown": "megatron_grpo.environments.tasks:CountdownEnvironment",
}
"""Classes of the built-in environments, by type; reward_functions has keys of its own."""

REWARD_FUNCTIONS = "reward_functions"
"""The environment type that calls the functions in reward_funcs."""

ENVIRONMENT_FIGURE = "env/"
"""Beginning of the names of figures that environments and reward functions report, among the metrics of a step."""
UNUSUALLY_SHORT = "unusually_short"
"""Figure of suspicion that every environment has, if there are enough samples of a prompt to compare."""
LEAST_COMPARED = 4
"""Fewest samples of a prompt whose lengths are compared."""
SUSPICIONS = {"code": ("touched_harness", "idle_tests", "equal_outputs")}
"""Further figures of suspicion, by the built-in type that reports them."""

WITH_ANSWER = frozenset({"math", "addition", "code", "tools"})
"""Types that compare with the reference answer of a row."""

Level = Literal["limits", "namespaces", "filtered"]
LEVELS: tuple[Level, ...] = ("limits", "namespaces", "filtered")
"""Levels of isolation, the weakest first."""


@dataclass(kw_only=True)
class SandboxConfig(Section):
    """Isolation and limits of programs that the model wrote."""

    required: Level = "filtered"
    """Weakest accepted isolation; a machine that allows less is refused. limits: of time, memory and output, but all
    files of this user are open, and without libseccomp the network; namespaces: also no network, no other process, no
    files but the system's; filtered: certainly also a filter of system calls (libseccomp)."""

    wall_time_s: Seconds = 10.0
    """Longest time of a program; then it is killed."""

    cpu_time_s: Positive = 10
    """Processor time of each process of a program, in whole seconds."""

    memory_mb: Positive = 512
    """Memory of all processes of a program together, in MiB, without the files of its own folder."""

    folder_mb: Positive = 64
    """Size of a program's own folder, in MiB; the folder is in memory and is deleted when the program ends."""

    processes: Positive = 16
    """Processes and threads of a program."""

    output_kb: Positive = 64
    """Largest output of a program, in KiB; one that writes more is killed."""

    readable: list[str] = field(default_factory=list)
    """Further folders that programs may read, under the same path, such as packages that they import."""
