"""`--check` says of each released layout what its walk shows: refused tools, settings without effect, changed turns."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.command import main
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.data_schema import EnvironmentConfig, TaskConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.interface import Environment
from megatron_grpo.models.source import CONVERSATION_VOCABULARY
from megatron_grpo.preflight.conversation_checks import examine_conversations, load_examined_prompts
from megatron_grpo.prepare.models import make_tokenizer
from tests.support.released.layout import Layout
from tests.support.released.table import ADD, BY_NAME, LAYOUTS
from tests.support.released.weights import write_model

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
QUESTION = {"role": "user", "content": "How many?"}
Examine = Callable[..., tuple[str, str]]


class Talking(Environment):
    """Answers the model as a user."""

    multi_turn = True

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return [EnvironmentReturn(reward=0.0) for _ in requests]


@cache
def base() -> Config:
    config = compose_typed(["policy.model.path=model", "data.train_path=rows.jsonl", "data.task_name=math"]).config
    assert isinstance(config, Config)
    return config


def configuration(kind: str, **data: Any) -> Config:
    """A configuration with one environment of this kind."""
    settings = replace(base().data, **data)
    return replace(base(), data=settings, env={"math": EnvironmentConfig(type=kind)})


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    """Function that examines a layout; returns problems and remarks, a line each."""

    def examine(layout: Layout, kind: str = "tools", **data: Any) -> tuple[str, str]:
        conversations = examine_conversations(
            configuration(kind, **data), load_tokenizer(layout.write(tmp_path / layout.name))
        )
        problems, remarks = ("\n".join(f"{entry.subject} {entry.text}" for entry in part) for part in conversations)
        return problems, remarks

    return examine


@pytest.mark.turns(3)
@every_layout
def test_tools_whose_results_the_template_cannot_show_are_refused(examine: Examine, layout: Layout) -> None:
    problems, _ = examine(layout)
    expected = {
        "refused": "env.math.type=tools the chat template refuses messages of the role tool",
        "left out": "env.math.type=tools the chat template leaves out messages of the role tool",
    }
    assert problems.startswith(expected.get(layout.tool_role, "")) if layout.tool_role in expected else not problems


@pytest.mark.turns(3)
@every_layout
def test_answers_of_a_user_suit_every_template(examine: Examine, layout: Layout) -> None:
    problems, _ = examine(layout, kind=f"{__name__}:Talking")
    assert not problems


@pytest.mark.turns(3)
@every_layout
def test_settings_that_the_template_does_not_read_are_named(examine: Examine, layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([ADD]))
    variables = {**layout.kwargs, "budget_of_thoughts": 5}
    settings = {"tools": str(tmp_path / "tools.json"), "system_prompt": "Be brief.", "chat_template_kwargs": variables}
    _, remarks = examine(layout, **settings)
    assert ("data.tools changes no prompt" in remarks) == (not layout.shows_tools)
    assert "data.chat_template_kwargs.budget_of_thoughts=5 changes no prompt" in remarks
    assert not any(name in remarks for name in layout.kwargs if name != "date_string")
    assert "system_prompt" not in remarks


@pytest.mark.turns(3)
@every_layout
def test_a_date_in_prompts_is_named(examine: Examine, layout: Layout) -> None:
    _, remarks = examine(layout)
    prompt = layout.render([QUESTION])
    is_dated = any(time.strftime(form) in prompt for form in ("%Y-%m-%d", "%d %b %Y"))
    assert ("today's into prompts" in remarks) == is_dated
    assert is_dated == (layout.name in ("llama_3_2", "mistral_small", "gpt_oss"))
    if layout.name == "llama_3_2":
        assert "data.chat_template_kwargs.date_string" in remarks
        assert "today's into prompts" not in examine(layout, chat_template_kwargs={"date_string": "1 May 2026"})[1]


@pytest.mark.turns(3)
@every_layout
@pytest.mark.parametrize("kind", [f"{__name__}:Talking", "math"])
def test_turns_that_change_later_are_named_where_there_are_several(examine: Examine, layout: Layout, kind: str) -> None:
    _, remarks = examine(layout, kind=kind)
    conversation = [QUESTION, {"role": "assistant", "content": "<think>\nCount.\n</think>\n\n12."}, QUESTION]
    full_text = layout.render(conversation)
    changes = {
        "renders the first prompt otherwise": not full_text.startswith(layout.render([QUESTION])),
        "leaves out what the model thought": "Count." not in full_text,
    }
    for text, is_changed in changes.items():
        assert (text in remarks) == (is_changed and kind != "math")


THOUGHTS = r"^<think>\n?(.*?)</think>\s*<answer>(.*?)</answer>$"


@pytest.mark.turns(3)
@every_layout
@pytest.mark.parametrize("kind", ["format", "reward_functions", f"{__name__}:Talking", "math"])
def test_a_tag_that_prompts_end_with_is_named_where_rewards_may_look_for_it(
    tmp_path: Path, layout: Layout, kind: str
) -> None:
    config = configuration(kind)
    config.env["math"].options = {"pattern": THOUGHTS} if kind == "format" else {}
    _, messages = examine_conversations(config, load_tokenizer(layout.write(tmp_path)))
    remarks = [remark for remark in messages if "the chat template ends every prompt with" in remark.text]
    is_begun = layout.render([QUESTION]).rstrip().endswith("<think>")
    begun = {
        "nemotron_3_nano",
        "qwen3_5",
        "qwen3_next_thinking",
        "r1_distill_llama",
        "r1_distill_qwen",
        "minimax_m2",
        "glm_5",
    }
    assert is_begun == (layout.name in begun)
    assert bool(remarks) == (is_begun and kind != "math")
    if remarks:
        assert remarks[0].text.startswith("the chat template ends every prompt with <think>, ")


@pytest.mark.parametrize(
    ("end", "tag"),
    [
        *(("[THINK]", "[THINK]"), ("<|start_think|>\n", "<|start_think|>"), ("<reasoning>\n", "<reasoning>")),
        *(("<think>\n\n</think>\n\n", None), ("[/THINK]", None), ("<|end_think|>", None), ("<|assistant|>\n", None)),
    ],
)
def test_the_tags_of_other_templates_are_known(tmp_path: Path, end: str, tag: str | None) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}{% if add_generation_prompt %}" + end + "{% endif %}")
    config = configuration("reward_functions", chat_template=str(template))
    _, messages = examine_conversations(config, load_tokenizer(BY_NAME["qwen3"].write(tmp_path / "model")))
    remarks = [message.text for message in messages if "ends every prompt" in message.text]
    assert len(remarks) == (tag is not None)
    assert tag is None or f"ends every prompt with {tag}, " in remarks[0]


def test_a_pattern_without_the_tag_needs_no_remark(tmp_path: Path) -> None:
    config = configuration("format")
    config.env["math"].options = {"pattern": "(?s)((?!</?think>).)+</think>.+"}
    assert re.fullmatch(config.env["math"].options["pattern"], "First, 2 plus 2.\n</think>\nThe answer is 4.")
    _, remarks = examine_conversations(config, load_tokenizer(BY_NAME["r1_distill_qwen"].write(tmp_path)))
    assert not any("ends every prompt" in remark.text for remark in remarks)


def test_tasks_with_different_templates_are_named(tmp_path: Path) -> None:
    """An exported model can have the template of one alone."""
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }} =")
    task_config = TaskConfig(chat_template=str(tmp_path / "own.jinja"))
    layout = BY_NAME["qwen3"]
    tokenizer = load_tokenizer(layout.write(tmp_path / "model"))
    for tasks, differ in (
        ({}, False),
        ({"math": task_config}, True),
        ({"math": task_config, "other": task_config}, False),
    ):
        config = configuration("math", tasks=tasks)
        config = replace(config, env={**config.env, "other": config.env["math"]})
        _, remarks = examine_conversations(config, tokenizer)
        assert any("differ between tasks" in remark.text for remark in remarks) == differ


class Formatting(Talking):
    """Answers by results of tools of its own."""

    answer_role = "tool"


def test_an_environment_of_the_user_is_remarked_on(examine: Examine) -> None:
    problems, remarks = examine(BY_NAME["gemma_3"], kind=f"{__name__}:Formatting")
    assert not problems
    assert "Formatting the chat template refuses messages of the role tool" in remarks


def test_a_vocabulary_made_for_one_task_is_not_judged() -> None:
    """That of the tools recipe has no letters for the sample."""
    tokenizer = make_tokenizer(CONVERSATION_VOCABULARY, 64)
    problems, _ = examine_conversations(configuration("tools"), tokenizer)
    assert not problems


OWN = "{% for m in messages if m.role == 'user' %}<u>{{ m.content }}{% endfor %}<a>"
"""A template that reads the messages of the user alone."""


def test_a_template_that_leaves_out_other_roles(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    settings = {"chat_template": str(tmp_path / "own.jinja"), "system_prompt": "Be brief."}
    problems, remarks = examine(BY_NAME["qwen3"], **settings)
    assert "data.system_prompt is not in the prompts" in remarks
    assert "env.math.type=tools the chat template leaves out messages of the role tool" in problems


def test_a_tokenizer_that_changes_a_row_is_named(tmp_path: Path) -> None:
    words = ["<unk>", "how", "many", "cats", "dogs", "?"]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    for question, remark in (("how many cats ?", ""), ("how many zebras ?", "data: row 3 reaches the model as")):
        texts = [question if row == 3 else "how many dogs ?" for row in range(40)]
        rows.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
        config = configuration("math", train_path=str(rows), apply_chat_template=False)
        notes = load_examined_prompts(config, tmp_path / "model").notes
        changed = [note for note in notes if "other text" in note]
        assert len(changed) == bool(remark)
        assert not changed or remark in changed[0]


CALL = {"type": "function", "id": "call00001", "function": {"name": "multiply", "arguments": '{"a": 17}'}}
RESULT = {"role": "tool", "name": "multiply", "tool_call_id": "call00001", "content": "119 apples"}


@pytest.mark.parametrize(
    ("name", "content", "lacking"),
    [
        ("phi_4", None, "lacks the call of multiply in message 2"),
        ("phi_4", "Multiplying.", "lacks the call of multiply in message 2"),
        ("r1_distill_qwen", "Multiplying.", "lacks the call of multiply in message 2"),
        ("r1_distill_qwen", "", None),
        ("r1_distill_qwen", None, None),
        ("qwen3", "<think>\nLet me see\n</think>\n\nMultiplying.", None),
        ("llama_3_1", None, None),
        ("gpt_oss", None, None),
        ("glm_4_5", "Multiplying.", None),
    ],
)
def test_rows_whose_history_the_template_leaves_out_are_named(
    tmp_path: Path, name: str, content: str | None, lacking: str | None
) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    row = {"prompt": [QUESTION, turn, RESULT], "answer": "1"}
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for _ in range(40)))
    config = configuration("math", train_path=str(tmp_path / "rows.jsonl"))
    notes = load_examined_prompts(config, BY_NAME[name].write(tmp_path / "model")).notes
    lacks = [note for note in notes if note.startswith("data: row") and " lacks " in note]
    assert len(lacks) == (lacking is not None)
    assert lacking is None or lacking in lacks[0]


def test_results_that_the_template_leaves_out_are_named(tmp_path: Path) -> None:
    history = [QUESTION, {"role": "assistant", "content": "Multiplying."}, RESULT, QUESTION]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'prompt': history, 'answer': '1'})}\n" * 40)
    config = configuration("math", train_path=str(tmp_path / "rows.jsonl"))
    notes = load_examined_prompts(config, BY_NAME["phi_4"].write(tmp_path / "model")).notes
    assert any("lacks message 3, of the role tool: the chat template leaves it out" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "history", "tools", "lacking"),
    [
        ("qwen3", [{"role": "context", "content": "It is 3."}], None, "lacks message 1, of the role context"),
        ("qwen3", [{"role": "developer", "content": "Be brief."}], None, None),
        ("gpt_oss", [{"role": "developer", "content": "Be brief."}], None, None),
        ("gemma_3", [], [ADD], "lacks the tools"),
        ("qwen3", [], [ADD], None),
        (
            "llama_3_1",
            [QUESTION, {"role": "assistant", "content": "Three.", "reasoning": "Hm."}],
            None,
            "lacks the thoughts of message 2, of the role assistant",
        ),
    ],
)
def test_parts_of_prompts_that_the_template_leaves_out_are_named(
    tmp_path: Path, name: str, history: list[Any], tools: Any, lacking: str | None
) -> None:
    """Also where a reward model has that template, whatever the policy's shows."""
    row = {"prompt": [*history, QUESTION], "answer": "1", "tools": tools}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    config = configuration("math", train_path=str(tmp_path / "rows.jsonl"))
    folder = BY_NAME[name].write(tmp_path / "model")
    lacks = [note for note in load_examined_prompts(config, folder).notes if " lacks " in note]
    assert len(lacks) == (lacking is not None)
    assert lacking is None or lacking in lacks[0]
    if lacking is None or "thoughts" in lacking:  # without which a score is still one
        lacking = None
    environment = EnvironmentConfig(type="reward_functions", reward_funcs=[str(folder)])
    policy = BY_NAME["olmo_3"].write(tmp_path / "policy")
    notes = load_examined_prompts(replace(config, env={"math": environment}), policy).notes
    scored = [note for note in notes if f"reward_funcs={folder} cannot score the prompt of row 0" in note]
    assert len(scored) == (lacking is not None)
    assert lacking is None or lacking.removeprefix("lacks ") in scored[0]


def test_the_command_says_it_before_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{row}+1=", "answer": "1"}) + "\n" for row in range(40)))
    arguments = [
        f"policy.model.path={write_model(BY_NAME['llama_3_2'], tmp_path / 'model')}",
        f"data.train_path={rows}",
        f"run_dir={tmp_path / 'run'}",
        "env.math.type=math",
        "data.task_name=math",
        "cluster.gpus_per_node=0",
        "data.max_input_seq_length=200",
        "policy.max_total_sequence_length=256",
        "grpo.num_prompts_per_step=8",
        "generation.max_new_tokens=8",
    ]
    assert main([*arguments, "--check"]) == 0, capsys.readouterr().err
    assert "data.chat_template_kwargs.date_string can set a fixed date" in capsys.readouterr().out
