"""Whole runs of supervised and preference training: figures, resuming to the last digit, checkpoints as models."""

import json
from pathlib import Path

import pytest

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.export import main as export
from megatron_grpo.models.source import EOS, VOCABULARY
from tests.integration.runs import TrainingRun, without_timing
from tests.integration.whole_runs import complete, kill_after, read_options
from tests.support.documents import undocumented

OPTIONS = read_options("sft_run")

pytestmark = pytest.mark.slow

SHORT = OPTIONS["short"]


def sft_run(run_dir: Path, *overrides: str) -> TrainingRun:
    return TrainingRun(run_dir, *SHORT, *overrides, recipe="quickstart_sft")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Six steps without interruption, sampled before, between and after."""
    run = complete(sft_run(tmp_path_factory.mktemp("sft") / "run"))
    run.assert_nothing_left()
    return run


def validations(run: TrainingRun) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.run_dir / "validation.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_validation_samples(straight: TrainingRun) -> None:
    rows, validation_rows = straight.metrics(), validations(straight)
    assert [row["step"] for row in validation_rows] == [0, 3, 6]
    assert validation_rows[-1]["val_loss"] < validation_rows[0]["val_loss"]
    assert all(0 <= row["val_accuracy"] <= 1 and row["val_response_length"] > 0 for row in validation_rows)
    assert all(row["valid_tokens"] == 16 * 4 for row in rows), "three digits and the end of 16 answers"
    assert undocumented(rows[-1].keys() - {"step", "timing", "throughput"}) == set()


def test_rows_and_validations_are_kept_for_people_to_look_at(straight: TrainingRun) -> None:
    """What is learnt of a row is its answer, and the page of the run has both."""
    for step in range(1, 7):
        rows = list(read_rollouts(straight.run_dir, step, kind="rows"))
        assert len(rows) == 16
        first, second = rows[0]["prompt"].rstrip("=").split("+")
        assert int(rows[0]["response"]) == int(first) + int(second)
        assert rows[0]["spans"] == [[len(rows[0]["token_ids"]) - 4, len(rows[0]["token_ids"]), -1]]
    for step in (0, 3, 6):
        answers = list(read_rollouts(straight.run_dir, step, kind="validation"))
        assert len(answers) == 64
        assert all((row["response"] == row["answer"]) == row["correct"] for row in answers)
    assert not (straight.run_dir / "rollouts").exists()
    assert "run0-training6" in (page := (straight.run_dir / "report.html").read_text())
    assert "run0-validation6" in page


def test_killed_and_started_again_it_ends_as_if_nothing_had_happened(straight: TrainingRun, tmp_path: Path) -> None:
    kill_after(sft_run(tmp_path / "run"), 3)
    second = complete(sft_run(tmp_path / "run"))
    assert "resumed after step 3" in second.log()
    assert without_timing(second.metrics()) == without_timing(straight.metrics())


def test_without_engines_two_replicas_learn_the_same(straight: TrainingRun, tmp_path: Path) -> None:
    run = complete(
        sft_run(
            tmp_path / "run",
            "sft.val_rewards=false",
            "policy.parallel.pipeline=1",
            "policy.parallel.data=2",
            "sft.max_val_samples=33",
        )
    )
    expected = [row["loss"] for row in straight.metrics()]
    assert [row["loss"] for row in run.metrics()] == pytest.approx(expected, rel=1e-4)
    assert not list((run.run_dir / "logs").glob("engine*"))
    assert validations(run)[-1].keys() == {"step", "val_loss", "timing"}


def test_its_checkpoint_is_a_model_and_recorded_rollouts_are_rows(straight: TrainingRun, tmp_path: Path) -> None:
    """GRPO begins from the checkpoint, exactly, and the rollouts of its step are the rows of another run."""
    checkpoint = straight.run_dir / "checkpoints" / "step_6"
    options = ("grpo.max_num_steps=1", "grpo.num_prompts_per_step=16", "grpo.max_val_samples=64", "logger.rollouts=all")
    grpo = complete(TrainingRun(tmp_path / "grpo", *options, f"policy.model.path={checkpoint}"))
    before = validations(grpo)[0]
    assert before["val_accuracy"] == validations(straight)[-1]["val_accuracy"]
    right = [row for row in read_rollouts(grpo.run_dir, 1) if row["reward"] >= 1]
    prompts = len({row["prompt_idx"] for row in right})
    options = ("sft.num_prompts_per_step=4", "sft.max_num_steps=2", "data.min_reward=1")
    run = sft_run(tmp_path / "run", *options, f"data.from_rollouts={grpo.run_dir}", "data.best_of_group=true")
    assert prompts >= 8
    assert run.finish() == 0, run.log()
    assert [row["optimizer_steps"] for row in run.metrics()] == [1, 1]
    too_many = sft_run(
        tmp_path / "other", *options, f"data.from_rollouts={grpo.run_dir}", f"sft.num_prompts_per_step={len(right) + 1}"
    )
    assert too_many.finish() == 2
    assert f"has {len(right)} row" in too_many.log()


def pair_run(folder: Path, algorithm: str, name: str) -> TrainingRun:
    """Right sums as chosen responses, and others as rejected ones."""
    sums = [(a, b) for a in range(20, 40) for b in range(30, 40)]
    rows = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b:03}", "rejected": f"{a + b + 900}"} for a, b in sums]
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (
        f"algorithm={algorithm}",
        f"data.train_path={data}",
        f"data.val_path={data}",
        *("data.answer_key=null", "data.label_key=null"),
        f"{algorithm}.num_generations_per_prompt=2",
        f"{algorithm}.val_batch_size=64",
        "policy.optimizer.lr=3e-4",
        "loss_fn.reference_policy_kl_penalty=0.01",
    )
    return TrainingRun(folder / name, *SHORT, *options)


@pytest.mark.parametrize(
    ("algorithm", "accuracy", "first", "least"),
    [
        ("dpo", "val_preference_accuracy", 0.6931, 0.8),  # log 2: the policy is still the reference
        ("kto", "val_preference_accuracy", 0.5, 0.6),  # of responses, both of a pair apart
        ("reward_model", "val_accuracy", 0.6931, 0.8),  # log 2: scores are 0
    ],
)
def test_pairs_are_learnt_and_resumed(
    algorithm: str, accuracy: str, first: float, least: float, tmp_path: Path
) -> None:
    straight = complete(pair_run(tmp_path, algorithm, "straight"))
    losses = [row["loss"] for row in straight.metrics()]
    assert losses[0] == pytest.approx(first, abs=1e-3)
    assert losses[-1] < losses[0]
    validation_rows = validations(straight)
    assert validation_rows[-1]["val_loss"] < validation_rows[0]["val_loss"]
    assert validation_rows[-1][accuracy] > least
    assert undocumented(straight.metrics()[-1].keys() - {"step", "timing", "throughput"}) == set()
    kill_after(pair_run(tmp_path, algorithm, "run"), 3)
    second = complete(pair_run(tmp_path, algorithm, "run"))
    assert without_timing(second.metrics()) == without_timing(straight.metrics())
    if algorithm == "reward_model":
        expect_served_scores(straight, tmp_path)


def expect_served_scores(trained: TrainingRun, folder: Path) -> None:
    """A run of GRPO gets the scores that transformers computes, from the checkpoint and from its export."""
    import torch
    from transformers import AutoModelForSequenceClassification

    checkpoint, output = trained.run_dir / "checkpoints" / "step_6", folder / "reward_model"
    assert export([f"checkpoint={checkpoint}", f"output={output}"]) == 0
    options = ("grpo.max_num_steps=1", "grpo.num_prompts_per_step=8", "logger.rollouts=all", "data.val_path=null")
    scoring = (
        "env.addition.type=reward_functions",
        f"env.addition.reward_funcs=[{checkpoint},{output}]",
        "env.addition.reward_weights=[1.0,10.0]",
        "env.addition.reward_model.add_special_tokens=true",
        "checkpointing.metric_name=reward",
    )
    run = complete(TrainingRun(folder / "grpo", *options, *scoring))
    model = AutoModelForSequenceClassification.from_pretrained(output).eval()
    scored = [row for row in read_rollouts(run.run_dir, 1) if row["response"].isdigit()]
    assert len(scored) > 16
    for row in scored:
        ids = row["token_ids"].tolist()
        ids += [] if ids[-1] == VOCABULARY[EOS] else [VOCABULARY[EOS]]
        with torch.no_grad():
            score = model(torch.tensor([ids])).logits.item()
        assert row["reward"] == pytest.approx(11 * score, abs=1e-4)
    assert len({row["reward"] for row in scored}) > 4, "scores differ"
