"""The message for each kind of mistake on a command line: where it is, and what to do about it."""

from __future__ import annotations

import pytest

from tests.support.config_problems import problems_of

MISSPELT = [
    (["=1"], "=1", "has no key before the ="),
    (["+=1"], "+=1", "has no key before the ="),
    (["quickstart"], "quickstart", "did you mean +exp=quickstart?"),
    (["+quikstart"], "+quikstart", "did you mean +exp=quickstart?"),
    (["dapo"], "dapo", "did you mean +variant=dapo?"),
    (["run_dir"], "run_dir", "write run_dir=..."),
    (["run_dir='/a"], "run_dir='/a", "a quote that is not closed"),
    (['run_dir=/a"'], 'run_dir=/a"', "a quote that is not closed"),
    (["data.train_path=a.jsonl,b.jsonl"], "data.train_path=a.jsonl,b.jsonl", "a text with commas needs quotes"),
    (["grpo.max_num_steps=(3)"], "grpo.max_num_steps=(3)", "must be int > 0"),
    (["generation.stop_strings=[a(b]"], "generation.stop_strings=[a(b]", "with quotes around each text"),
    (["generation.stop_strings={a: 1}"], "generation.stop_strings={a: 1}", "must be list of text"),
    (["~grpo"], "~grpo", "would drop what the recipe sets in grpo"),
    (["~grpo.max_num_steps"], "~grpo.max_num_steps", "write grpo.max_num_steps=..., 1000 by default"),
    (["~variant"], "~variant", "choose another variant"),
    (["+grpo.num_generation_per_prompt=4"], "grpo.num_generation_per_prompt", "grpo.num_generations_per_prompt?"),
    (["qqq=1"], "qqq", "unknown key"),
    (["Qwen/Qwen3-8B"], "Qwen/Qwen3-8B", "a model is policy.model.path=Qwen/Qwen3-8B"),
    (["/"], "/", "a model is policy.model.path=/"),
    (
        ["grpo.yaml"],
        "grpo.yaml",
        "job=grpo.yaml takes the fields of a flat YAML; a recipe of your own is --config-d",
    ),
    (["rows.parquet"], "rows.parquet", "write data.train_path=rows.parquet"),
    (["hydra.run.dir=x"], "hydra.run.dir", "run_dir chooses"),
    (["+exp=quikstart"], "exp=quikstart", "did you mean quickstart? there is deepseek_v3_64nodes, "),
    (["loss_fn=ppo"], "loss_fn=ppo", "no such option; there is clip_higher, no_kl"),
    (["loss_fn=null"], "loss_fn=null", "no such option; there is clip_higher, no_kl"),
    (["grpo=3"], "grpo=3", "set one of its keys: num_prompts_per_step"),
    (["env.math=null"], "env.math=null", "set one of its keys: type, reward_funcs"),
    (["a b"], "a b", "write key=value"),
    (["grpo.seed="], None, "must be int"),
    (["grpo.seed=1,2"], "grpo.seed=1,2", "lists are written [a,b]"),
    (["grpo.max_num_steps=three"], "grpo.max_num_steps=three", "must be int > 0"),
    (["grpo.max_num_steps=0"], "grpo.max_num_steps=0", "must be int > 0"),
    (["generation.top_p=1.5"], "generation.top_p=1.5", "must be float > 0 and <= 1"),
    (
        ["generation.stop_token_ids=[-1]"],
        "generation.stop_token_ids.0=-1",
        "is an element of what must be list of int >= 0",
    ),
    (
        ["generation.stop_token_ids=[1,x]"],
        "generation.stop_token_ids.1=x",
        "is an element of what must be list of int >= 0",
    ),
    (["data.train_path=[a,b]"], None, "; several sets are data.train_sets.NAME.path="),
    (["env.on_reward_error=none"], "env.on_reward_error=none", "is env.NAME.on_reward_error; NAME is an environment"),
    (["grpo.max_num_steps=true"], "grpo.max_num_steps=True", "must be int > 0"),
    (["policy.max_grad_norm=false"], "policy.max_grad_norm=False", "must be float >= 0"),
    (["grpo.seed=9223372036854775808"], "grpo.seed=9223372036854775808", "must be int >= 0"),
    (["policy.optimizer.lr=nan"], "policy.optimizer.lr=nan", "must be float > 0"),
    (["policy.optimizer.lr=null"], "policy.optimizer.lr=null", "must be float > 0"),
    (["data.prompt_key=${nowhere}"], "data.prompt_key=${nowhere}", "cannot be resolved"),
    (["data.train_path=???"], "data.train_path", "is required: JSONL file"),
]
"""Overrides that cannot be read, or whose value is of another type or range."""

UNFIT = [
    (["policy.parallel.tensor=16"], "policy.parallel.tensor=16", "8 attention heads; use 1, 2, 4 or 8"),
    (["generation.parallel.tensor=6"], "generation.parallel.tensor=6", "8 attention heads; use 1, 2, 4 or 8"),
    (["policy.parallel.pipeline=3"], "policy.parallel.pipeline=3", "4 layers; use 1, 2 or 4"),
    (["generation.parallel.pipeline=5"], "generation.parallel.pipeline=5", "exceeds the model's 4 layers"),
    (["policy.parallel.expert=2"], "policy.parallel.expert=2", "the model has no experts; use 1"),
    (["policy.parallel.sequence=true"], "policy.parallel.sequence=True", "needs policy.parallel.tensor > 1"),
    (["policy.parallel.data=3"], "policy.parallel.data=3", "32 prompts x 16 generations = 512 samples"),
    (["policy.parallel.data=3"], "policy.parallel.data=3", "use grpo.num_prompts_per_step=30 or 33"),
    (["grpo.num_generations_per_prompt=1"], "grpo.num_generations_per_prompt=1", "use 2 or more"),
    (["generation.max_new_tokens=1025"], "policy.max_total_sequence_length=2048", "1024 + 1025 = 2049 tokens"),
    (
        ["policy.max_total_sequence_length=8193", "policy.microbatch_tokens=9000"],
        "policy.max_total_sequence_length=8193",
        "8192 positions",
    ),
    (["policy.microbatch_tokens=2047"], "policy.microbatch_tokens=2047", "longest sequence"),
    (["policy.logprob_microbatch_tokens=9"], "policy.logprob_microbatch_tokens=9", "longest sequence"),
    (["policy.optimizer.min_lr=1"], "policy.optimizer.min_lr=1", "above policy.optimizer.lr=1e-06"),
    (
        [
            "policy.optimizer.decay_style=cosine",
            "policy.optimizer.warmup_steps=1000",
            "policy.optimizer.decay_steps=1000",
        ],
        "policy.optimizer.warmup_steps=1000",
        "ends at step 1000",
    ),
    (["data.task_name=code"], "data.task_name=code", "there is math"),
    (
        ["data.system_prompt_file=hi.txt", "data.apply_chat_template=false"],
        "data.system_prompt_file",
        "apply_chat_template=true",
    ),
    (["data.system_prompt=hi", "data.apply_chat_template=false"], "data.system_prompt", "apply_chat_template=true"),
    (
        ["data.tasks.math.system_prompt=hi", "data.apply_chat_template=false"],
        "data.tasks.math.system_prompt",
        "needs data.tasks.math.apply_chat_template=true",
    ),
    (["generation.stop_strings=['']"], "generation.stop_strings.0=", "must be list of text that is not empty"),
    (
        ["checkpointing.keep_top_k=2", "checkpointing.metric_name=val_acuracy"],
        "checkpointing.metric_name=val_acuracy",
        "these are: val_accuracy, val_reward",
    ),
    (
        ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=2"],
        "grpo.reward_scaling.source_min=2",
        "must be below",
    ),
    (
        ["cluster.gpus_per_node=8", "policy.parallel.data=8"],
        "cluster.gpus_per_node=8",
        "1 node(s) have 8 GPUs, but policy.parallel takes 8 and generation.parallel 1",
    ),
]
"""Values that do not fit the model, the machine or one another."""


@pytest.mark.parametrize(("overrides", "subject", "text"), [*MISSPELT, *UNFIT], ids=lambda one: str(one)[:60])
def test_a_mistake_is_the_only_problem_and_names_its_remedy(
    given: list[str], overrides: list[str], subject: str | None, text: str
) -> None:
    """A subject of None: the key is in the override itself."""
    ((found, message),) = problems_of([*given, *overrides]).items()
    assert found.startswith(overrides[0].partition("=")[0]) if subject is None else found == subject
    assert text in message
