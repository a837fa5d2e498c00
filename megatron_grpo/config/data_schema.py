"""The keys of prompts and of what scores the responses."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_grpo.config.section import MISSING, EnvironmentOptions, Positive, Seconds, Section


@dataclass(kw_only=True)
class DataConfig(Section):
    """Prompts."""

    train_path: str = MISSING
    """JSONL file of training rows."""

    val_path: str | None = None
    """JSONL file of validation rows; null: no validation."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    answer_key: str | None = "answer"
    """Column with the reference answer that the environment gets; null: there is none, for reward functions."""

    task_name: str = "math"
    """Environment of rows that have no task_name column."""

    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template (true) or use the text as it is (false)."""

    system_prompt: str | None = None
    """System message put before every prompt; needs apply_chat_template."""

    max_input_seq_length: Positive = 1024
    """Rows whose prompt has more tokens are left out; the run says how many."""

    shuffle: bool = True
    """Visit training rows in an order drawn anew each epoch."""


@dataclass(kw_only=True)
class EnvironmentConfig(Section):
    """One environment: what answers and scores the responses; docs/environments.md."""

    type: str = "math"
    """math: math-verify compares the final answers; addition: the response is exactly the digits of the answer; code:
    programs that pass tests in the sandbox; format: a regular expression; judge: another model says; tools: the model
    calls tools before it answers; countdown: a game of several turns; reward_functions: the functions in
    reward_funcs; package.module:Class: an environment of your own."""

    options: EnvironmentOptions = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    reward_funcs: list[str] = field(default_factory=list)
    """Functions by import path (package.module.function), called with prompts, completions and the data's columns."""

    reward_weights: list[float] | None = None
    """Weight of each function's reward in the sum; null: 1 each."""

    correct_func: str | None = None
    """Name of the function in reward_funcs whose reward above 0 makes a response correct (accuracy, imitation); null:
    the only function there is. With several and null, nothing says what is correct, and there is no accuracy."""

    agent_func: str | None = None
    """With type=reward_functions, a function by import path that makes the turns of a rollout: it is called with the
    prompt, the row's columns and where the model answers (an OpenAI-compatible address), and asks the model itself.
    null: a rollout is one response. Needs generation.endpoint.enabled."""

    num_workers: Positive = 1
    """Processes that score in parallel; at least one for each rollout worker. With an agent, as many as rollouts are to
    go on side by side."""

    timeout_s: Seconds = 600.0
    """Deadline of one call of a process, which scores what has gathered while it was busy; past it the process is
    replaced, and the responses are scored once more, one by one."""

    def weights_by_function(self) -> dict[str, float]:
        """Weight of each reward function, by the last part of its path."""
        names = [path.rpartition(".")[2] for path in self.reward_funcs]
        return dict(zip(names, self.reward_weights or [1.0] * len(names), strict=False))

    def correctness_function(self) -> str | None:
        """The reward function that says whether a response is correct; None: none does, or the type has none."""
        names = list(self.weights_by_function())
        return names[0] if self.correct_func is None and len(names) == 1 else self.correct_func


BUILT_IN = {
    "math": "megatron_grpo.environments.math_environment:MathEnvironment",
    "addition": "megatron_grpo.environments.addition:AdditionEnvironment",
    "code": "megatron_grpo.environments.code:CodeEnvironment",
    "format": "megatron_grpo.environments.format:FormatEnvironment",
    "judge": "megatron_grpo.environments.judge:JudgeEnvironment",
    "tools": "megatron_grpo.environments.tools.environment:ToolEnvironment",
    "countdown": "megatron_grpo.environments.countdown:CountdownEnvironment",
}
"""Classes of the environments that come along, by type; reward_functions has keys of its own."""

REWARD_FUNCTIONS = "reward_functions"
"""The environment type that calls the functions in reward_funcs."""

WITH_ANSWER = frozenset({"math", "addition", "code", "tools"})
"""Types that compare with the reference answer of a row."""
