"""Scores of reasoning_gym: the library's own, and no answer is executed."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.data.gym_rows import ENTRY, GymEntry, create_dataset
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments import reasoning_gym as environment
from megatron_grpo.environments.registry import create_environment

library: Any = pytest.importorskip("reasoning_gym", reason="the extra reasoning_gym is not installed")


def score(task: str, *responses: str, **options: Any) -> tuple[dict[str, Any], list[EnvironmentReturn]]:
    item = create_dataset(task, {**options, "seed": 7, "size": 3})[1]
    entry = GymEntry(task, options, item)
    requests = [
        EnvironmentRequest(
            prompt="", response=response.replace("ANSWER", str(item["answer"])), stop_reason="stop",
            extra_env_info={ENTRY: entry},
        )
        for response in responses
    ]  # fmt: skip
    return item, create_environment(EnvironmentConfig(type="reasoning_gym")).score(requests)


def test_rewards_are_the_scorers() -> None:
    responses = ("ANSWER", "<answer>1</answer> then <answer> ANSWER </answer>.", "ANSWER or so", "-99999")
    item, scores = score("chain_sum", *responses)
    length = len(item["answer"])
    expected = [1.0, 1.0, length / (length + len(" or so")), 0.0]
    assert [result.reward for result in scores] == pytest.approx(expected)
    assert [result.correct for result in scores] == [True, True, False, False]


# Tasks with a reference answer that their scorer accepts; knight_swap takes three seconds a question.
TASKS = sorted(
    {*library.factory.DATASETS}
    - {"composite", "boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour", "knight_swap"}
)


@pytest.mark.slow  # makes questions of a hundred tasks
def test_every_task_accepts_its_own_answer() -> None:
    refused = [task for task in TASKS if score(task, "<answer>ANSWER</answer>")[1][0].reward != 1]
    assert refused == []


def test_tasks_whose_scorers_evaluate_answers() -> None:
    """Pinned for this release of the library: a scorer that begins to evaluate shows here."""
    evaluating = {task for task in library.factory.DATASETS if environment.is_evaluating(task)}
    assert evaluating >= {
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
        *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
    }
    assert len(evaluating) == 13, "the others evaluate their own questions"


@pytest.mark.parametrize("task", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown"])
def test_no_answer_is_executed(task: str, tmp_path: Path) -> None:
    """The library's scorers alone would: the second half is the proof that the test can fail."""
    file = tmp_path / "executed"
    attack = f"[open({str(file)!r}, 'w').close()]"
    _, (scored,) = score(task, attack)
    assert scored.reward == 0
    assert not file.exists()
    dataset = create_dataset(task, {"seed": 7, "size": 3})
    with suppress(Exception):  # whatever the scorer makes of the result
        dataset.score_answer(attack, dataset[1])
    assert file.exists()


def test_the_reference_cannot_be_named_as_answer() -> None:
    _, (scored,) = score("string_insertion", "oracle_answer")
    assert scored.reward == 0


def test_a_scorer_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, _ = library.factory.DATASETS["chain_sum"]

    def hang(*arguments: Any) -> float:
        while True:
            pass

    monkeypatch.setattr(dataset, "score_answer", hang)
    monkeypatch.setattr(environment, "ANSWER_TIMEOUT_S", 0.05)
    _, (scored,) = score("chain_sum", "1")
    assert (scored.reward, scored.correct) == (0.0, False)
