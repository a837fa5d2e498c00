"""Checks of environments, rewards, advantages and the prompts that environments score."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.data_schema import (
    BUILT_IN,
    REWARD_FUNCTIONS,
    WITH_ANSWER,
    DataConfig,
    EnvironmentConfig,
    PromptConfig,
    is_model_folder,
    name_of_reward,
)
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.schema import MISSING, Config

_OF_FUNCTIONS = (
    "reward_funcs",
    "reward_weights",
    "correct_func",
    "agent_func",
    "on_reward_error",
    "reward_timeout_s",
    "reward_model",
)
"""Keys of an environment that are for type reward_functions alone."""
_DEFAULT = EnvironmentConfig()


def reward_problems(config: Config) -> Iterator[Problem]:
    """Keys about rewards and advantages that exclude each other or lack what they need."""
    if config.algorithm == "grpo":
        yield from _estimator(config)
        yield from _groups(config)
    yield from _scaling(config)
    yield from _shaping(config)
    yield from environment_problems(config)
    for name, environment in config.env.items():
        if environment.type == REWARD_FUNCTIONS and environment.correctness_function() is None:
            yield from _unknown_correctness(f"env.{name}", config)
    low, high = config.loop.advantage_clip_low, config.loop.advantage_clip_high
    if low is not None and high is not None and low == high:
        yield Problem(
            f"{config.algorithm}.advantage_clip_low={low:g}",
            f"equals {config.algorithm}.advantage_clip_high, which leaves no advantage",
        )


def environment_problems(config: Config) -> Iterator[Problem]:
    """Keys of the environments that exclude each other or lack what they need."""
    for name, environment in config.env.items():
        yield from _functions(f"env.{name}", environment)
        task = config.data.tasks.get(name)
        unanswered = config.data.answer_key is None and (task is None or task.answer_key is None)
        if unanswered and environment.type in WITH_ANSWER:
            text = f"env.{name} of type {environment.type} compares with an answer; give the column that has it"
            yield Problem("data.answer_key=None", text)


def _estimator(config: Config) -> Iterator[Problem]:
    grpo, name = config.grpo, config.grpo.adv_estimator.name
    if grpo.adv_estimator.minus_baseline and name != "reinforce_plus_plus":
        text = f"is for grpo.adv_estimator.name=reinforce_plus_plus; {name} has a baseline anyway"
        yield Problem("grpo.adv_estimator.minus_baseline=True", text)
    if name == "grpo":
        yield from _normalized_penalty(config)
        return
    subject = f"grpo.adv_estimator.name={name}"
    if not grpo.normalize_rewards:
        yield Problem("grpo.normalize_rewards=False", f"is not possible with {subject}, which is a normalisation")
    if grpo.normalize_rewards_over != "group":
        text = f"is for grpo.adv_estimator.name=grpo; {name} has a normalisation of its own"
        yield Problem(f"grpo.normalize_rewards_over={grpo.normalize_rewards_over}", text)
    if name == "gdpo":
        others = [task for task, environment in config.env.items() if environment.type != REWARD_FUNCTIONS]
        if others:
            text = f"needs the parts of the reward, which env.{others[0]} does not give; use type {REWARD_FUNCTIONS}"
            yield Problem(subject, text)
        for section in ("reward_scaling", "reward_shaping"):
            if getattr(grpo, section).enabled:
                text = "changes the sum of the rewards, and gdpo takes each by itself; use false"
                yield Problem(f"grpo.{section}.enabled=True", text)
        if config.loss_fn.use_kl_in_reward:
            text = "there is no single reward with gdpo to subtract the penalty from; use false"
            yield Problem("loss_fn.use_kl_in_reward=True", text)
        yield from _conflicting_weights(config)


def _groups(config: Config) -> Iterator[Problem]:
    generations, estimator = config.grpo.num_generations_per_prompt, config.grpo.adv_estimator
    if generations < 2 and (estimator.name != "reinforce_plus_plus" or estimator.minus_baseline):
        text = "the baseline of a sample comes from the others of its prompt; use 2 or more"
        yield Problem(f"grpo.num_generations_per_prompt={generations}", text)


def _scaling(config: Config) -> Iterator[Problem]:
    scaling, prefix = config.loop.reward_scaling, f"{config.algorithm}.reward_scaling"
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        text = f"must be below {prefix}.source_max={scaling.source_max:g}"
        yield Problem(f"{prefix}.source_min={scaling.source_min:g}", text)
    if scaling.enabled and scaling.target_min == scaling.target_max:
        text = f"equals {prefix}.target_max, which makes all rewards the same"
        yield Problem(f"{prefix}.target_min={scaling.target_min:g}", text)


def _unknown_correctness(section: str, config: Config) -> Iterator[Problem]:
    if config.loss_fn.positive_example_nll_weight and config.env[section.removeprefix("env.")].reward_funcs:
        text = f"imitates correct responses, and {section} does not say which are; give {section}.correct_func"
        yield Problem(f"loss_fn.positive_example_nll_weight={config.loss_fn.positive_example_nll_weight:g}", text)


def _normalized_penalty(config: Config) -> Iterator[Problem]:
    grpo = config.grpo
    if config.loss_fn.use_kl_in_reward and grpo.normalize_rewards and grpo.normalize_rewards_over == "group":
        text = (
            "would divide a group of equal rewards by the spread of its KL penalties alone; use "
            "grpo.normalize_rewards=false, grpo.normalize_rewards_over=batch or another grpo.adv_estimator.name"
        )
        yield Problem("loss_fn.use_kl_in_reward=True", text)


def _conflicting_weights(config: Config) -> Iterator[Problem]:
    seen: dict[str, float] = {}
    for task, environment in config.env.items():
        for function, weight in environment.weights_by_function().items():
            if seen.setdefault(function, weight) != weight:
                text = f"gives {function} the weight {weight:g}, another environment {seen[function]:g}; gdpo needs one"
                yield Problem(f"env.{task}.reward_weights", text)


def _shaping(config: Config) -> Iterator[Problem]:
    shaping, longest = config.loop.reward_shaping, config.generation.max_new_tokens
    if not shaping.enabled:
        return
    prefix, buffer = f"{config.algorithm}.reward_shaping", shaping.overlong_buffer_length
    if (buffer is None) == (shaping.stop_properly_penalty_coef is None):
        text = f"needs one of {prefix}.overlong_buffer_length (DAPO) and {prefix}.stop_properly_penalty_coef"
        yield Problem(f"{prefix}.enabled=True", text if buffer is None else f"{text}, not both: they punish the same")
    if buffer is None:
        return
    full = shaping.max_response_length or longest
    if buffer > full:
        text = f"is more than the response may have before the full penalty, {full} tokens"
        yield Problem(f"{prefix}.overlong_buffer_length={buffer}", text)
    elif full - buffer >= longest:
        text = f"starts beyond generation.max_new_tokens={longest}, where no response gets"
        yield Problem(f"{prefix}.overlong_buffer_length={buffer}", f"the penalty {text}")


def _unread(section: str, environment: EnvironmentConfig) -> Iterator[Problem]:
    """Settings of an environment of reward functions that are for other types or for reward models."""
    if environment.options:
        text = f"is for the class of an environment, and {section}.type={REWARD_FUNCTIONS} has none; leave it out"
        yield Problem(f"{section}.options.{next(iter(environment.options))}", text)
    if environment.reward_model != _DEFAULT.reward_model and not environment.reward_model_folders:
        text = f"serves the reward models among {section}.reward_funcs, and there is none; leave it out, or name one"
        yield Problem(f"{section}.reward_model", text)


def _functions(section: str, environment: EnvironmentConfig) -> Iterator[Problem]:
    functions, weights = environment.reward_funcs, environment.reward_weights
    if environment.type not in BUILT_IN and environment.type != REWARD_FUNCTIONS and ":" not in environment.type:
        known = ", ".join([*BUILT_IN, REWARD_FUNCTIONS])
        yield Problem(f"{section}.type={environment.type}", f"must be one of {known}, or package.module:Class")
    if environment.type != REWARD_FUNCTIONS:
        for name in [name for name in _OF_FUNCTIONS if getattr(environment, name) != getattr(_DEFAULT, name)][:1]:
            yield Problem(f"{section}.{name}", f"needs {section}.type={REWARD_FUNCTIONS}")
        return
    yield from _unread(section, environment)
    if not functions:
        yield Problem(f"{section}.reward_funcs", "is empty; give functions as package.module.function")
    importable = [("reward_funcs", one) for one in functions if not is_model_folder(one)]
    agents = [] if environment.agent_func is None else [("agent_func", environment.agent_func)]
    for key, function in [*importable, *agents]:
        module, _, name = function.rpartition(".")
        if not (module and all(part.isidentifier() for part in function.split("."))):
            or_model = ", or be the folder of a reward model, with a / in it" if key == "reward_funcs" else ""
            yield Problem(f"{section}.{key}={function}", f"must be written package.module.function{or_model}")
    short = [name_of_reward(function) for function in functions]
    for name in sorted({name for name in short if short.count(name) > 1}):
        text = f"has two functions called {name}; their rewards could not be told apart"
        yield Problem(f"{section}.reward_funcs", text)
    if environment.correct_func is not None and environment.correct_func not in short:
        text = f"is none of the reward_funcs, which are called {', '.join(short)}"
        yield Problem(f"{section}.correct_func={environment.correct_func}", text)
    if weights is not None and functions and not any(weights):
        yield Problem(f"{section}.reward_weights", "are all 0, which leaves no reward")
    if weights is not None and len(weights) != len(functions):
        text = f"must have one weight for each of the {len(functions)} reward_funcs, not {len(weights)}"
        yield Problem(f"{section}.reward_weights", text)


MIN_TEMPERATURE = 0.01
"""vLLM silently uses this for any temperature between it and 0, and training would divide by the configured one."""


def prompt_problems(config: Config) -> Iterator[Problem]:
    """Temperatures that vLLM does not have, and prompts that no environment scores or no template renders."""
    yield from _temperatures(config)
    yield from _prompts(config)


def _temperatures(config: Config) -> Iterator[Problem]:
    for key, value in (
        ("generation.temperature", config.generation.temperature),
        (f"{config.algorithm}.val_temperature", config.loop.val_temperature),
    ):
        if 0 < value < MIN_TEMPERATURE:
            text = f"vLLM samples with {MIN_TEMPERATURE} or more; use that, or 0 for greedy"
            yield Problem(f"{key}={value:g}", text)


def _prompts(config: Config) -> Iterator[Problem]:
    yield from scorer_problems(config)
    if config.env:
        yield from _tasks(config)
    yield from _sets(config)
    yield from system_prompt_problems(config.data)


def scorer_problems(config: Config) -> Iterator[Problem]:
    """A configuration without an environment."""
    if not config.env:
        text = "has no environment left, and nothing scores the responses; give env=math or env.NAME.type"
        yield Problem("env", text)


def system_prompt_problems(data: DataConfig) -> Iterator[Problem]:
    """System messages of prompts that are plain text: those of a task, or of all that take the one of data."""
    chats = dict.fromkeys(data.tasks, data.apply_chat_template)
    chats |= {task: one.apply_chat_template for task, one in data.tasks.items() if one.apply_chat_template is not None}
    sections: list[tuple[str, PromptConfig, bool]] = [("data", data, data.apply_chat_template or any(chats.values()))]
    sections += [(f"data.tasks.{task}", one, chats[task]) for task, one in data.tasks.items()]
    for section, prompts, is_chat in sections:
        for name in ("system_prompt", "system_prompt_file"):
            if getattr(prompts, name) is not None and not is_chat:
                text = f"has a place only in a chat; needs {section}.apply_chat_template=true"
                yield Problem(f"{section}.{name}", text)


def _tasks(config: Config) -> Iterator[Problem]:
    """Tasks without an environment."""
    data, known = config.data, ", ".join(config.env)
    named = {"data.task_name": data.task_name}
    for section in ("train_sets", "val_sets"):
        named |= {f"data.{section}.{name}.task_name": one.task_name for name, one in getattr(data, section).items()}
    for key, task in named.items():
        if task is not None and task not in config.env:
            yield Problem(f"{key}={task}", f"no such environment under env; there is {known}")
    for task in data.tasks:
        if task not in config.env:
            yield Problem(f"data.tasks.{task}", f"says how prompts of no environment look; env has {known}")


def _sets(config: Config) -> Iterator[Problem]:
    """Data sets that are given twice or not at all, and streaming of files."""
    data = config.data
    if data.train_sets and data.train_path not in (MISSING, None):
        yield Problem(f"data.train_path={data.train_path}", "and data.train_sets say the same; give one of them")
    for section in ("train_sets", "val_sets"):
        for name, one in getattr(data, section).items():
            if one.path == MISSING:
                yield Problem(f"data.{section}.{name}.path", "is required: a file, a folder or a hub name")
    if data.streaming and (data.train_sets or not is_hub_name(data.train_path)):
        yield Problem("data.streaming=True", "is for a data.train_path that is a hub name; files are not loaded anyway")
