"""Checks of advantages, rewards, environments and tasks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.data_schema import (
    BUILT_IN,
    MIN_COMPARED,
    REWARD_FUNCTIONS,
    SUSPICIONS,
    UNUSUALLY_SHORT,
    WITH_ANSWER,
    EnvironmentConfig,
    PromptConfig,
    is_model_folder,
    parse_reward_name,
)
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.paths import SCRIPT_STREAM, is_hub_name
from megatron_grpo.config.schema import MISSING, Config, GRPOConfig
from megatron_grpo.preflight.rules import Rule, format_value

# Keys that environments of every type have; the others are for type reward_functions.
_COMMON_KEYS = ("type", "options", "num_workers", "timeout_s", "leave_out_suspects")


def check_rewards(config: Config) -> Iterator[Rule]:
    """Check keys of rewards and advantages."""
    if isinstance(config.loop, GRPOConfig) and config.uses_rewards:
        yield from _check_estimator(config)
    loop = config.loop
    if isinstance(loop, SampledLoopConfig):
        yield from _check_scaling(loop)
        yield from _check_shaping(config, loop)
    yield from check_environments(config)
    for name, environment in config.env.items():
        is_unknown = environment.type == REWARD_FUNCTIONS and environment.correct_func is None
        needs_correctness = config.loss_fn.positive_example_nll_weight and environment.reward_funcs
        text = f"imitates correct responses, and env.{name} does not say which are; give env.{name}.correct_func"
        yield needs_correctness and is_unknown, "loss_fn.positive_example_nll_weight=", text
    follows_accuracy = config.data.curriculum.column is not None and config.env
    text = "raises the level by accuracy, and nothing says which responses are correct; give env.NAME.correct_func"
    yield follows_accuracy and not config.has_correctness, "data.curriculum.column=", text


def _check_scaling(loop: SampledLoopConfig) -> Iterator[Rule]:
    scaling = loop.reward_scaling
    text = f"must be below LOOP.reward_scaling.source_max={format_value(scaling.source_max)}"
    is_empty = scaling.source_min >= scaling.source_max
    yield scaling.enabled and is_empty, "LOOP.reward_scaling.source_min=", text
    text = "equals LOOP.reward_scaling.target_max, which makes all rewards the same"
    is_point = scaling.target_min == scaling.target_max
    yield scaling.enabled and is_point, "LOOP.reward_scaling.target_min=", text
    lowest, highest = loop.advantage_clip_low, loop.advantage_clip_high
    text = "equals LOOP.advantage_clip_high, which leaves no advantage"
    yield lowest is not None and lowest == highest, "LOOP.advantage_clip_low=", text


def _check_shaping(config: Config, loop: SampledLoopConfig) -> Iterator[Rule]:
    shaping = loop.reward_shaping
    if not shaping.enabled:
        return
    buffer, factor = shaping.overlong_buffer_length, shaping.stop_properly_penalty_coef
    text = "needs one of LOOP.reward_shaping.overlong_buffer_length (DAPO) and"
    text += " LOOP.reward_shaping.stop_properly_penalty_coef"
    yield buffer is None and factor is None, "LOOP.reward_shaping.enabled=", text
    text = "needs one of LOOP.reward_shaping.overlong_buffer_length (DAPO) and"
    text += " LOOP.reward_shaping.stop_properly_penalty_coef, not both: they punish the same"
    yield buffer is not None and factor is not None, "LOOP.reward_shaping.enabled=", text
    longest = shaping.max_response_length or config.generation.max_new_tokens
    text = f"is more than the response may have before the full penalty, {longest} tokens"
    yield (buffer or 0) > longest, "LOOP.reward_shaping.overlong_buffer_length=", text
    if buffer is None:
        return
    if config.generation.endpoint.enabled:
        text = "an agent's rollout has any number of responses; give the sampled tokens at which the penalty is full"
        yield shaping.max_response_length is None, "LOOP.reward_shaping.max_response_length=", text
        return
    longest = config.most_sampled_tokens
    penalty_start = (shaping.max_response_length or longest) - buffer
    limit = f"generation.max_new_tokens={config.generation.max_new_tokens}"
    limit += "" if loop.max_rollout_turns == 1 else f" in all turns, {longest} tokens"
    text = f"the penalty starts beyond {limit}, where no response gets"
    yield penalty_start >= longest, "LOOP.reward_shaping.overlong_buffer_length=", text


def check_environments(config: Config) -> Iterator[Rule]:
    """Check keys of the environments."""
    types, samples = (*BUILT_IN, REWARD_FUNCTIONS), config.loop.num_generations_per_prompt
    for name, environment in config.env.items():
        section, kind = f"env.{name}", environment.type
        text = f"must be one of {', '.join(types)}, or package.module:Class"
        yield kind not in types and ":" not in kind, f"{section}.type={kind}", text
        if kind == REWARD_FUNCTIONS:
            yield from _check_functions(section, environment)
        else:
            values, defaults = vars(environment), vars(EnvironmentConfig())
            unfit = [key for key in values if key not in _COMMON_KEYS and values[key] != defaults[key]]
            yield unfit, f"{section}.{next(iter(unfit), '')}", f"needs {section}.type={REWARD_FUNCTIONS}"
        signs = (*SUSPICIONS.get(kind, ()), UNUSUALLY_SHORT)
        for sign in environment.leave_out_suspects:
            text = f"is no sign that type {kind} reports; it reports {', '.join(signs)}"
            yield kind in BUILT_IN and sign not in signs, f"{section}.leave_out_suspects={sign}", text
            is_too_few = sign == UNUSUALLY_SHORT and samples < MIN_COMPARED
            text = f"compares at least {MIN_COMPARED} samples of a prompt;"
            text += " needs LOOP.num_generations_per_prompt that high"
            yield is_too_few, f"{section}.leave_out_suspects={sign}", text
        task = config.data.tasks.get(name)
        is_scored = config.needs_generation or not config.method.rows
        has_no_answer = is_scored and config.data.answer_key is None and (task is None or task.answer_key is None)
        text = f"{section} of type {kind} compares with an answer; give the column that has it"
        yield has_no_answer and kind in WITH_ANSWER, "data.answer_key=None", text


def _check_estimator(config: Config) -> Iterator[Rule]:
    loop = config.loop
    assert isinstance(loop, GRPOConfig)
    yield from _check_normalization(config, loop)
    if loop.adv_estimator.name == "gdpo":
        yield from _check_gdpo(config)
    if loop.turn_credit == "turn":
        text = f"is for grpo.adv_estimator.name=grpo; {loop.adv_estimator.name} has an advantage of the response"
        yield loop.adv_estimator.name != "grpo", "grpo.turn_credit=", text
        text = "does not go with loss_fn.use_kl_in_reward=true, which changes the reward of the response; use false"
        yield config.loss_fn.use_kl_in_reward, "grpo.turn_credit=", text
        text = "does not go with grpo.reward_scaling.enabled=true, which maps the reward of the response; use false"
        yield loop.reward_scaling.enabled, "grpo.turn_credit=", text


def _check_normalization(config: Config, loop: GRPOConfig) -> Iterator[Rule]:
    estimator, options = loop.adv_estimator.name, loop.adv_estimator
    has_one_baseline, is_over_group = estimator == "reinforce_plus_plus", loop.normalize_rewards_over == "group"
    text = f"is for grpo.adv_estimator.name=reinforce_plus_plus; {estimator} has a baseline anyway"
    yield options.minus_baseline and not has_one_baseline, "grpo.adv_estimator.minus_baseline=", text
    has_own_scale = estimator in ("reinforce_plus_plus", "gdpo")
    text = f"is not possible with grpo.adv_estimator.name={estimator}, which is a normalisation"
    yield has_own_scale and not loop.normalize_rewards, "grpo.normalize_rewards=", text
    text = f"is for grpo.adv_estimator.name=grpo; {estimator} has a normalisation of its own"
    yield has_own_scale and not is_over_group, "grpo.normalize_rewards_over=", text
    text = "would divide a group of equal rewards by the spread of its KL penalties alone; use"
    text += " grpo.normalize_rewards=false, grpo.normalize_rewards_over=batch or another grpo.adv_estimator.name"
    divides_groups = estimator == "grpo" and loop.normalize_rewards and is_over_group
    yield config.loss_fn.use_kl_in_reward and divides_groups, "loss_fn.use_kl_in_reward=", text
    text = f"does not go with grpo.adv_estimator.name={estimator}, which scales or compares rewards alone; use false"
    has_own_baseline = estimator in ("maxrl", "pass_at_k", "rae")
    yield config.loss_fn.use_kl_in_reward and has_own_baseline, "loss_fn.use_kl_in_reward=", text
    text = "drops groups of equal rewards, which have advantages with grpo.adv_estimator.name=rae; use false"
    yield loop.use_dynamic_sampling and options.has_task_baselines, "grpo.use_dynamic_sampling=", text
    text = "is of whole distributions, and generation filters them; leave generation.top_p, top_k and min_p out"
    yield options.needs_score_sizes and config.generation.has_training_filter, "grpo.adv_estimator.name=", text
    text = "takes the best of so many responses; needs grpo.num_generations_per_prompt that high"
    is_too_large = estimator == "pass_at_k" and options.pass_k > loop.num_generations_per_prompt
    yield is_too_large, "grpo.adv_estimator.pass_k=", text
    text = "the baseline of a sample comes from the others of its prompt; use 2 or more"
    entry = options.entry
    compares_samples = (entry is not None and entry.compares_samples) or (has_one_baseline and options.minus_baseline)
    yield compares_samples and loop.num_generations_per_prompt < 2, "grpo.num_generations_per_prompt=", text


def _check_gdpo(config: Config) -> Iterator[Rule]:
    loop, text = config.sampled_loop, "changes the sum of the rewards, and gdpo takes each by itself; use false"
    yield loop.reward_scaling.enabled, "grpo.reward_scaling.enabled=", text
    yield loop.reward_shaping.enabled, "grpo.reward_shaping.enabled=", text
    text = "there is no single reward with gdpo to subtract the penalty from; use false"
    yield config.loss_fn.use_kl_in_reward, "loss_fn.use_kl_in_reward=", text
    # Each reward is normalised by itself before it is weighted, so a function needs one weight in all tasks.
    weights: dict[str, float] = {}
    for task, environment in config.env.items():
        text = f"needs the parts of the reward, which env.{task} does not give; use type {REWARD_FUNCTIONS}"
        yield environment.type != REWARD_FUNCTIONS, "grpo.adv_estimator.name=", text
        for function, weight in environment.function_weights.items():
            first = weights.setdefault(function, weight)
            text = f"gives {function} the weight {weight:g}, another environment {first:g}; gdpo needs one"
            yield first != weight, f"env.{task}.reward_weights", text


def _check_functions(section: str, environment: EnvironmentConfig) -> Iterator[Rule]:
    functions, weights = environment.reward_funcs, environment.reward_weights
    option = next(iter(environment.options), "")
    text = f"is for the class of an environment, and {section}.type={REWARD_FUNCTIONS} has none; leave it out"
    yield environment.options, f"{section}.options.{option}", text
    text = f"serves the reward models among {section}.reward_funcs, and there is none; leave it out, or name one"
    is_set = environment.reward_model != EnvironmentConfig().reward_model
    yield is_set and not environment.reward_model_folders, f"{section}.reward_model", text
    yield not functions, f"{section}.reward_funcs", "is empty; give functions as package.module.function"
    importable = [("reward_funcs", function) for function in functions if not is_model_folder(function)]
    agents = [] if environment.agent_func is None else [("agent_func", environment.agent_func)]
    for key, function in [*importable, *agents]:
        is_path = "." in function and all(part.isidentifier() for part in function.split("."))
        alternative = ", or be the folder of a reward model, with a / in it" if key == "reward_funcs" else ""
        yield not is_path, f"{section}.{key}={function}", f"must be written package.module.function{alternative}"
    names = [parse_reward_name(function) for function in functions]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield True, f"{section}.reward_funcs", f"has two functions called {name}; their rewards could not be told apart"
    correct = environment.correct_func
    text = f"is none of the reward_funcs, which are called {', '.join(names)}"
    yield correct is not None and correct not in names, f"{section}.correct_func={correct}", text
    if weights is not None:
        yield functions and not any(weights), f"{section}.reward_weights", "are all 0, which leaves no reward"
        text = f"must have one weight for each of the {len(functions)} reward_funcs, not {len(weights)}"
        yield len(weights) != len(functions), f"{section}.reward_weights", text


def check_prompts(config: Config) -> Iterator[Rule]:
    """Check that environments score all prompts, and templates render them."""
    data, environments = config.data, ", ".join(config.env)
    task_names = {"data.task_name": data.task_name}
    for section in ("train_sets", "val_sets"):
        for name, dataset in getattr(data, section).items():
            task_names[f"data.{section}.{name}.task_name"] = dataset.task_name
            yield dataset.path == MISSING, f"data.{section}.{name}.path", "is required: a file, a folder or a hub name"
    for key, task in task_names.items():
        is_unknown = config.env and task is not None and task not in config.env
        yield is_unknown, f"{key}={task}", f"no such environment under env; there is {environments}"
    for task in data.tasks:
        text = f"sets the prompts of a task that has no environment; env has {environments}"
        yield config.env and task not in config.env, f"data.tasks.{task}", text
    text = "is for a data.train_path that is a hub name, and for a script's train_dataset; files are not loaded anyway"
    is_stream = data.train_path == SCRIPT_STREAM or is_hub_name(data.train_path)
    yield data.streaming and (data.train_sets or not is_stream), "data.streaming=", text
    yield from check_system_prompts(config)


def check_system_prompts(config: Config) -> Iterator[Rule]:
    """Check that environments exist, and system messages have a chat template."""
    text = "has no environment left, and nothing scores the responses; give env=math or env.NAME.type"
    yield not config.env, "env", text
    data = config.data
    sections: dict[str, tuple[PromptConfig, bool]] = {}
    for task, settings in data.tasks.items():
        is_chat = data.apply_chat_template if settings.apply_chat_template is None else settings.apply_chat_template
        sections[f"data.tasks.{task}"] = settings, is_chat
    # A prompt takes the system message of its task, else the one of data.
    sections["data"] = data, data.has_chat_prompts
    for section, (prompts, is_chat) in sections.items():
        for name in ("system_prompt", "system_prompt_file"):
            text = f"is a message of a chat template; needs {section}.apply_chat_template=true"
            yield getattr(prompts, name) is not None and not is_chat, f"{section}.{name}", text
