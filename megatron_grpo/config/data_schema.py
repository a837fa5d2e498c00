"""The keys of data and prompts, environments and the sandbox."""

from __future__ import annotations

from dataclasses import field
from pathlib import PurePath
from typing import Annotated, Literal

from megatron_grpo.config.gym_schema import GymConfig
from megatron_grpo.config.section import (
    IMPORTS,
    LOOSENS,
    MISSING,
    EnvironmentOptions,
    ImportPath,
    NonNegativeFloat,
    PathText,
    Positive,
    PositiveFloat,
    PositiveShare,
    Seconds,
    Section,
    Starts,
    TemplateArguments,
    TemplateFile,
)


class PromptConfig(Section):
    """How the rows of a task become prompts."""

    processor: ImportPath | None = None
    """Function that turns rows into prompts: gsm8k, math, dapo_math, openmathinstruct2, tldr, countdown, or the import
    path of your own (docs/data.md); null: rows already have a prompt and an answer."""

    prompt_file: PathText | None = None
    """Text file with a template for every prompt: {} stands for the prompt, {NAME} for a column of the row."""

    system_prompt: str | None = None
    """System message of every prompt that has none of its own; needs apply_chat_template."""

    system_prompt_file: PathText | None = None
    """Text file with the system message, instead of system_prompt."""

    chat_template: TemplateFile | None = None
    """File with the chat template (Jinja) to use instead of the tokenizer's."""

    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    """Further variables of the chat template, such as enable_thinking."""

    tools: PathText | None = None
    """JSON file with a list of tool definitions for the chat template."""


class TaskConfig(PromptConfig):
    """Prompt settings of one task; null: the value in data."""

    prompt_key: str | None = None
    """Column with the prompt."""

    answer_key: str | None = None
    """Column with the reference answer."""

    apply_chat_template: bool | None = None
    """Render prompts with the chat template."""


class DatasetConfig(Section):
    """One set of rows."""

    path: PathText = MISSING
    """A file (.jsonl, .parquet, .arrow, .csv), a folder that `datasets` saved, a hub name (openai/gsm8k), or
    reasoning_gym: rows that data.reasoning_gym describes."""

    subset: str | None = None
    """Subset (configuration) of a hub set, such as main; null: its only one."""

    split: str = "train"
    """Split of a hub set or a folder, also a part of it as `datasets` writes it: train[:1000]. A file has no splits."""

    task_name: str | None = None
    """Environment of rows without a task_name column; null: data.task_name."""

    weight: PositiveFloat = 1.0
    """How often an epoch visits each row; 0.5: half of the rows, and the other half in the next. Not for validation."""

    def count_visits(self, rows: int) -> int:
        """Count the visits of one epoch to a set of this size."""
        return int(self.weight) * rows + round(self.weight % 1 * rows)


class CurriculumConfig(Section):
    """Training rows by level; a level begins when responses are accurate."""

    column: str | None = None
    """Column with a row's level, a whole number of at least 0. Training begins with the lowest. null: no curriculum."""

    raise_at: PositiveShare = 0.8
    """Accuracy of the last `window` responses at which training goes on to the next level."""

    window: Positive = 256
    """Latest responses to rows of the present level, whose accuracy decides."""


class DataConfig(PromptConfig):
    """Data sets, and how their rows become prompts."""

    train_path: PathText = MISSING
    """JSONL file of training rows; or .parquet, .arrow, .csv, a `datasets` folder or a hub name, or reasoning_gym. Or
    train_sets."""

    val_path: PathText | None = None
    """Validation rows: a file, folder or name, as for train_path; null: no validation, unless val_sets has sets."""

    subset: str | None = None
    """Subset (configuration) of a hub set in train_path and val_path; null: its only one."""

    train_split: str = "train"
    """Split of train_path, where that is a hub name or a folder."""

    val_split: str = "test"
    """Split of val_path, where that is a hub name or a folder."""

    train_sets: dict[str, DatasetConfig] = field(default_factory=dict)
    """Several training sets by name, mixed by their weights, in place of train_path."""

    val_sets: dict[str, DatasetConfig] = field(default_factory=dict)
    """Validation sets by name, besides val_path; each has its own metrics, such as val_set_accuracy/NAME."""

    from_rollouts: PathText | None = None
    """With algorithm=sft, the folder of a run whose recorded rollouts are the training rows, in place of train_path:
    rejection sampling. Their token ids are used as they are."""

    min_reward: float | None = None
    """Lowest reward of rollouts that from_rollouts takes; null: any reward."""

    best_of_group: bool = False
    """Of the samples of a prompt in a step, from_rollouts takes one with the highest reward (true), or all (false)."""

    streaming: bool = False
    """Read rows of train_path, a hub name or a script's train_dataset, on demand without storing them; shuffle_buffer
    shuffles them."""

    shuffle_buffer: Positive = 10000
    """Rows in the buffer from which streaming draws the next row at random."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    answer_key: str | None = "answer"
    """Column with the reference answer; null: rows have none, for example with reward functions."""

    image_key: str | None = None
    """Column with the images of a row: a path, bytes, a data URL, {bytes, path}, or a list of them. Parts of messages
    may hold images too. null: rows have no images (docs/data.md)."""

    max_images: Positive = 8
    """Most images of a prompt; a row with more cannot be used. Turns of an environment that show more end the
    rollout."""

    max_image_tokens: Positive = 4096
    """Most tokens of the images together, as of max_images."""

    response_key: str | None = None
    """With algorithm=sft or kto, the column with the response to learn from: a text, or a list of messages that follow
    the prompt. null: the prompt column has whole conversations, and all turns of the assistant are learnt."""

    chosen_key: str = "chosen"
    """With algorithm=dpo or reward_model, the column with the better response: a text, or messages, also with the
    prompt before it. With kto, if label_key is null."""

    rejected_key: str = "rejected"
    """With algorithm=dpo or reward_model, the column with the worse response, in the form of chosen_key."""

    label_key: str | None = "label"
    """With algorithm=kto, the column that is true for a desirable response and false for another; the response is in
    response_key. null: rows are pairs, whose better response is desirable."""

    task_name: str = "math"
    """Environment of rows that have no task_name column."""

    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Prompt settings of single tasks, by the name of the task; null: the value of the same key in data."""

    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template (true) or use the text as it is (false)."""

    max_input_seq_length: Positive = 1024
    """Longest prompt in tokens; long_prompts decides about longer ones."""

    long_prompts: Literal["filter", "cut_left", "error"] = "filter"
    """Prompts that are too long: filter leaves them out; cut_left drops their first tokens; error ends the start."""

    bad_rows: Literal["fail", "skip"] = "fail"
    """Rows that cannot be read or used: fail stops the run at its start; skip counts and leaves them out."""

    rows_rendered_at_start: Positive = 50000
    """Rows of each set that are rendered and tokenized before training, to find prompts that are too long or that the
    chat template refuses; the rest is rendered when it is used. All rows are read and checked at the start."""

    reasoning_gym: GymConfig = field(default_factory=GymConfig)

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    shuffle: bool = True
    """Draw a new order of the training rows in each epoch."""

    @property
    def has_chat_prompts(self) -> bool:
        """True if the prompts of some task are rendered with a chat template."""
        return self.apply_chat_template or any(task.apply_chat_template for task in self.tasks.values())

    @property
    def training_sets(self) -> dict[str, DatasetConfig]:
        """The training sets, by the key of their path."""
        if self.from_rollouts is not None:
            return {"data.from_rollouts": DatasetConfig(path=self.from_rollouts)}
        if self.train_sets:
            return {f"data.train_sets.{name}.path": dataset for name, dataset in self.train_sets.items()}
        return {"data.train_path": DatasetConfig(path=self.train_path, subset=self.subset, split=self.train_split)}

    @property
    def validation_sets(self) -> dict[str, DatasetConfig]:
        """The validation sets, by the key of their path."""
        sets = {f"data.val_sets.{name}.path": dataset for name, dataset in self.val_sets.items()}
        if self.val_path is None:
            return sets
        return {"data.val_path": DatasetConfig(path=self.val_path, subset=self.subset, split=self.val_split), **sets}


def is_model_folder(reward: str) -> bool:
    """True for a model's folder or hub name, false for an import path."""
    return "/" in reward


def parse_reward_name(reward: str) -> str:
    """Find a reward's name for metrics: the end of its path."""
    return PurePath(reward).name if is_model_folder(reward) else reward.rpartition(".")[2]


class RewardModelConfig(Section):
    """The processes that run the reward models among reward_funcs."""

    num_workers: Positive = 1
    """Processes of each model."""

    gpus: NonNegativeFloat = 0.0
    """GPUs of each process, a fraction where several share one; 0: it computes on the CPU."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""

    batch_tokens: Positive = 16384
    """Most tokens of a forward pass, padding included; a longer conversation is a pass of its own."""

    max_tokens: Positive | None = None
    """Most tokens of a conversation; a longer one loses its beginning. null: no limit."""

    add_special_tokens: bool = False
    """Score plain texts between the special tokens that rows without a chat template have in training (those that the
    tokenizer puts before any text, and its eos_token behind). false: as TRL's GRPOTrainer, which gives them none."""


def is_built_in(kind: str) -> bool:
    """True for a type of environments of the package."""
    return kind in BUILT_IN or kind == REWARD_FUNCTIONS


class EnvironmentConfig(Section):
    """One environment, which answers and scores responses; docs/environments.md."""

    type: Annotated[str, Starts(IMPORTS, is_built_in)] = "math"
    """math, addition, code, format, judge, tools or countdown (docs/environments.md); openenv, reasoning_gym or
    verifiers (docs/environments.md); unscored: no rewards, for distillation alone; reward_functions: the functions in
    reward_funcs; package.module:Class: your own."""

    options: EnvironmentOptions = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    reward_funcs: list[Annotated[str, Starts(IMPORTS, is_model_folder)]] = field(default_factory=list)
    """Reward functions: functions or objects by import path (package.module.name), called with prompts, completions
    and the data's columns; and reward models by their folder or hub name, which has a / in it (docs/rewards.md)."""

    on_reward_error: Literal["fail", "none"] = "fail"
    """After an exception or timeout of a reward function. fail: the rollout fails; none: no reward (reward_errors)."""

    reward_timeout_s: Seconds | None = None
    """Deadline of one call of a reward function; null: only timeout_s, after which the process is replaced."""

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)

    reward_weights: list[float] | None = None
    """Weight of each function's reward in the sum; null: 1 each."""

    correct_func: str | None = None
    """Function in reward_funcs that says which responses are correct. null: unknown, and nothing is called accuracy."""

    correct_from: float = 1.0
    """Reward of correct_func from which a response is correct."""

    agent_func: ImportPath | None = None
    """With type=reward_functions, the import path of an agent, which makes the turns of a rollout through
    generation.endpoint (docs/agents.md). null: a rollout is one response."""

    leave_out_suspects: list[str] = field(default_factory=list)
    """Signs of an undeserved reward, such as touched_harness (docs/environments.md). A response in which one of them is
    above 0 loses its reward, so that baselines and loss leave it out. Empty: they are only reported."""

    num_workers: Positive = 1
    """Processes that score in parallel, at least one per rollout worker; with an agent, each runs one rollout."""

    timeout_s: Seconds = 600.0
    """Deadline of one call of a process; then the process is replaced, and the call is repeated once."""

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
    def has_correctness(self) -> bool:
        """True if the environment may say which responses are correct."""
        if self.type == REWARD_FUNCTIONS:
            return self.correct_func is not None
        option = CORRECT_BY_OPTION.get(self.type)
        return self.type not in WITHOUT_CORRECTNESS and (option is None or self.options.get(option) is not None)


# Classes of the built-in environments, by type; reward_functions has keys of its own.
BUILT_IN = {
    "math": "megatron_grpo.environments.tasks:MathEnvironment",
    "addition": "megatron_grpo.environments.tasks:AdditionEnvironment",
    "code": "megatron_grpo.environments.code:CodeEnvironment",
    "format": "megatron_grpo.environments.tasks:FormatEnvironment",
    "judge": "megatron_grpo.environments.judge:JudgeEnvironment",
    "tools": "megatron_grpo.environments.tools:ToolEnvironment",
    "unscored": "megatron_grpo.environments.tasks:UnscoredEnvironment",
    "countdown": "megatron_grpo.environments.tasks:CountdownEnvironment",
    "openenv": "megatron_grpo.environments.openenv:OpenEnvEnvironment",
    "reasoning_gym": "megatron_grpo.environments.reasoning_gym:ReasoningGymEnvironment",
    "verifiers": "megatron_grpo.environments.verifiers:VerifiersEnvironment",
}

# Built-in types that say which responses are correct only with this option, and those that never do.
CORRECT_BY_OPTION = {"judge": "correct_from", "verifiers": "correct_at"}
WITHOUT_CORRECTNESS = frozenset({"unscored", "openenv"})
# The environment type that gives no rewards, for distillation alone.
UNSCORED = "unscored"
# The environment type that calls the functions in reward_funcs.
REWARD_FUNCTIONS = "reward_functions"

# Prefix, among the metrics of a step, of those that environments and reward functions report.
ENVIRONMENT_PREFIX = "env/"
# Sign of an undeserved reward that every environment reports.
UNUSUALLY_SHORT = "unusually_short"
# UNUSUALLY_SHORT compares lengths of a prompt's samples only if there are at least this many.
MIN_COMPARED = 4
# Further signs of undeserved rewards, by the built-in type that reports them.
SUSPICIONS = {"code": ("touched_harness", "idle_tests", "equal_outputs")}

# Kind of rows that have the responses to learn from, in place of an environment's type.
SUPERVISED = "supervised"
# Kind of rows that have two responses, a better and a worse one.
PREFERENCE = "preference"
# Kind of rows that have a response, and whether it is desirable.
LABELLED = "labelled"
# Kind of the rows with pairs whose scores a reward model learns.
SCORED = "scored"
# The path of a set whose rows the library reasoning_gym makes.
REASONING_GYM = "reasoning_gym"

# Types that need the reference answer of a row.
WITH_ANSWER = frozenset({"math", "addition", "code", "tools"})

IsolationLevel = Literal["limits", "namespaces", "filtered"]
# Levels of a sandbox's isolation, the weakest first.
LEVELS: tuple[IsolationLevel, ...] = ("limits", "namespaces", "filtered")


class SandboxConfig(Section):
    """Isolation and limits of programs that the model wrote."""

    required: Annotated[IsolationLevel, Starts(LOOSENS, {"filtered"}.__contains__)] = "filtered"
    """Weakest isolation with which the run starts. limits: of time, memory and output; namespaces: also no access to
    network, files and other processes; filtered: also a filter of system calls (docs/environments.md)."""

    wall_time_s: Seconds = 10.0
    """Time after which a program is killed."""

    cpu_time_s: Positive = 10
    """Processor time of each process of a program, in whole seconds."""

    memory_mb: Positive = 512
    """Memory of all processes of a program together, in MiB, without the files in its folder."""

    folder_mb: Positive = 64
    """Size of a program's folder in MiB. The folder is in memory and is deleted when the program ends."""

    processes: Positive = 16
    """Most processes and threads of a program."""

    output_kb: Positive = 64
    """Largest output of a program in KiB; a program that writes more is killed."""

    readable: list[Annotated[str, Starts(LOOSENS)]] = field(default_factory=list)
    """Further folders that programs may read, under the same path: for example packages that they import."""
