"""Tools against independent oracles, and the environment that calls them turn by turn."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.batch.special_tokens import decode_response
from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import Config, EnvironmentConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.tools import calculate
from megatron_grpo.environments.vllm_parsers import read_parser_names
from megatron_grpo.models.source import CONVERSATION_VOCABULARY
from megatron_grpo.preflight.environment_checks import check_scoring
from megatron_grpo.prepare.models import make_tokenizer
from tests.support.foreign_tokenizers import byte_level, save_folder

EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
        lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(expression=EXPRESSIONS)
def test_whole_numbers_are_what_python_makes_of_them(expression: str) -> None:
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            calculate(expression)
    else:
        assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1/3", f"{1 / 3:.12g}"), ("0.1+0.2", "0.3"), ("2^10", "1024"), ("-2**2", "-4"), ("2**-2", "0.25"), ("6/3", "2")],
)
def test_fractions_are_exact_until_they_are_written(expression: str, value: str) -> None:
    assert calculate(expression) == value
    assert float(calculate(expression)) == pytest.approx(float(Fraction(value)))


@pytest.mark.parametrize(
    "expression",
    ["", "a", "1 +", "9**9**9", "10**9999", "1e999", "__import__('os')", "1<2", "(" * 500, "2**0.5", "[1]", "'a'*9"],
)
def test_what_is_no_arithmetic_is_told(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools")
    make_tokenizer(CONVERSATION_VOCABULARY, 64).save_pretrained(path / "model")
    (path / "facts.txt").write_text("The capital of Freedonia is Zenda.\n\nSylvania has no capital.")
    return path


def environment(folder: Path, **options: Any) -> Any:
    environment_settings = EnvironmentSettings(
        tokenizer=str(folder / "model"), sandbox=SandboxConfig(required="limits", wall_time_s=5)
    )
    options = {"tools": ["calculator", "python", "retriever"], "documents": str(folder / "facts.txt"), **options}
    return create_environment(EnvironmentConfig(type="tools", options=options), environment_settings)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_calls_are_carried_out_until_there_is_none(folder: Path) -> None:
    tools = environment(folder, compare="exact")
    state = tools.reset("", {})
    for response, text in (
        (call("calculator", expression="12*12"), "144"),
        (f"I ask: {call('python', code='print(sum(range(5)))')}", "10\n"),
        (
            call("retriever", query="capital Freedonia"),
            "The capital of Freedonia is Zenda.\n\nSylvania has no capital.",
        ),
        (call("calculator", expression="1/0"), "error: division by zero"),
        (call("calculator"), "error: calculator takes one argument"),
        (call("browser", url="x"), "error: there is no tool browser; there is calculator, python, retriever"),
        (
            call("b" * 9000),
            f"error: there is no tool {'b' * 73} [...] {'b' * 40}; there is calculator, python, retriever",
        ),
        (call("python", code="import sys; sys.exit('broken')"), "\nerror: broken"),
        (call("calculator", expression="1+1") + call("calculator", expression="2+2"), "2\n4"),
    ):
        turn = tools.step(state, response)
        assert (turn.done, turn.role, turn.text) == (False, "tool", text)
        state = turn.state
    last = tools.step(state, " 144 ")
    assert last.done
    wrong = tools.step(state, "145")
    scores = tools.score(
        [
            EnvironmentRequest(
                prompt="", response="", stop_reason="stop", extra_env_info={REFERENCE: "144"}, state=reply.state
            )
            for reply in (last, wrong)
        ]
    )
    assert [(reply.reward, reply.correct) for reply in scores] == [(1.0, True), (0.0, False)]


def test_each_of_several_calls_has_a_result_of_its_own(folder: Path) -> None:
    tools = environment(folder)
    first = tools.step(tools.reset("", {}), call("calculator", expression="1+1") + call("calculator", expression="2+2"))
    again = tools.step(first.state, call("calculator", expression="1/0"))
    results = [
        (message["role"], message["name"], message["tool_call_id"], message["content"]) for message in first.messages
    ]
    assert results == [("tool", "calculator", "call00000", "2"), ("tool", "calculator", "call00001", "4")]
    assert [(message["tool_call_id"], message["content"]) for message in again.messages] == [
        ("call00002", "error: division by zero")
    ]


def test_what_is_no_call_is_an_answer_and_calls_are_counted(folder: Path) -> None:
    tools = environment(folder, max_calls=2)
    for response in ("<tool_call>{not json}</tool_call>", "tool_call", ""):
        assert tools.step(tools.reset("", {}), response).done
    state = tools.reset("", {})
    for is_done in (False, False, True):
        turn = tools.step(state, call("calculator", expression="1"))
        state = turn.state
        assert turn.done is is_done


def test_the_last_turn_is_compared_by_value(folder: Path) -> None:
    tools = environment(folder, parser="pythonic")
    turn = tools.step(tools.reset("", {}), "[calculator(expression='3*4')]")
    assert (turn.done, turn.text) == (False, "12")
    last = tools.step(turn.state, "It is \\boxed{\\frac{1}{2}}")
    extra = {REFERENCE: "0.5"}
    request = EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info=extra, state=last.state)
    assert tools.score([request])[0].correct


@pytest.mark.parametrize("text", ["", "It is \\boxed{144}. "])
@pytest.mark.parametrize("compare", ["math", "exact"])
def test_a_rollout_that_ends_with_a_call_has_no_answer(folder: Path, text: str, compare: str) -> None:
    """At the limit of turns, of calls, or of tokens; the arguments of the call have the right number."""
    tools = environment(folder, max_calls=2, compare=compare)
    response = text + call("calculator", expression="144")
    turns = [tools.step(tools.reset("", {}), response)]
    for _ in range(2):
        turns.append(tools.step(turns[-1].state, response))
    assert [turn.done for turn in turns] == [False, False, True]
    for turn in turns:
        extra = {REFERENCE: "144"}
        request = EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info=extra, state=turn.state)
        assert tools.score([request])[0].reward == 0.0


def test_what_is_missing_is_told(folder: Path) -> None:
    with pytest.raises(RunError, match=r"options\.parser=hermez is not a tool parser of vLLM; choose one of .*hermes"):
        environment(folder, parser="hermez")
    with pytest.raises(RunError, match=r"options\.documents is missing: the retriever"):
        environment(folder, documents=None)
    with pytest.raises(RunError, match=r"options\.documents=gone.txt no such file"):
        environment(folder, documents="gone.txt")


def test_the_names_of_parsers_are_those_that_vllm_registers() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert read_parser_names("tool_parsers") == frozenset(ToolParserManager.list_registered())
    assert read_parser_names("reasoning") == frozenset(ReasoningParserManager.list_registered())


@pytest.mark.parametrize(
    ("parser", "marks", "text"),
    [
        (
            "hermes",
            ("<tool_call>", "</tool_call>"),
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>',
        ),
        (
            "mistral",
            ("[TOOL_CALLS]", "[TOOL_RESULTS]"),
            '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "12+34"}}]',
        ),
        ("llama3_json", ("<|python_tag|>",), '<|python_tag|>{"name": "calculator", "parameters": {"e": "12+34"}}'),
    ],
)
def test_calls_between_special_tokens_are_executed(parser: str, marks: Any, text: str, tmp_path: Path) -> None:
    core = byte_level(["<|endoftext|>", "<|im_end|>", *marks])
    folder = save_folder(tmp_path, core, "qwen3", "Qwen2Tokenizer", eos_token="<|im_end|>")
    tokenizer = load_tokenizer(folder)
    response = decode_response(tokenizer, tokenizer(f"{text}<|im_end|>")["input_ids"], "stop")
    config = EnvironmentConfig(type="tools", options={"parser": parser})
    environment = create_environment(config, EnvironmentSettings(tokenizer=str(folder)))
    turn = environment.step(environment.reset("12+34", {}), response)
    assert (turn.done, turn.text) == (False, "46")


@pytest.mark.parametrize(
    ("kind", "options", "subject"),
    [
        ("format", {"pattern": "(a"}, "env.math.options.pattern=(a"),
        ("code", {"programs_at_once": 0}, "env.math.options.programs_at_once=0"),
        ("tools", {"tools": ["retriever"]}, "env.math.options.documents"),
        ("tools", {"tools": ["retriever"], "documents": "gone.txt"}, "env.math.options.documents=gone.txt"),
        ("tools", {"parser": "hermez"}, "env.math.options.parser=hermez"),
    ],
)
def test_options_are_looked_at_before_a_run(kind: str, options: dict[str, Any], subject: str) -> None:
    config = Config(env={"math": EnvironmentConfig(type=kind, options=options)})
    config.grpo.max_rollout_turns = 3
    with pytest.raises(ConfigError) as caught:
        check_scoring(config)
    assert [problem.subject for problem in caught.value.problems] == [subject]
