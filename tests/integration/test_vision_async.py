"""Whole asynchronous runs with images: what older weights drew, a kill, and groups that waited in a checkpoint."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.prepare.pictures import draw_counting_rows
from megatron_grpo.verification.random_pictures import load_whole_model
from tests.integration.runs import TrainingRun
from tests.integration.test_vision_turns import FEW, compute_logprobs
from tests.integration.whole_runs import complete, export

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")  # vLLM's module of these models imports it

STEPS = 4
AHEAD = (
    *FEW,
    "algorithm=async_grpo",
    "env.counting.type=tests.support.showing_environment:ShowingEnvironment",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "rollouts.keep_finished=true",
)


def ahead(run_dir: Path, *overrides: str) -> TrainingRun:
    return TrainingRun(run_dir, *AHEAD, *overrides, recipe="quickstart_vision")


def images_of(run: TrainingRun, step: int) -> list[tuple[int, int, list[dict[str, object]]]]:
    """The prompt, the sample and the prompt's image of each rollout."""
    return [(row["prompt_idx"], row["sample"], row["images"][:1]) for row in run.rollouts(step)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return complete(ahead(tmp_path_factory.mktemp("straight") / "run"))


def test_every_token_was_drawn_by_its_version_from_the_images(straight: TrainingRun, tmp_path: Path) -> None:
    rows = straight.metrics()
    assert max(row["trajectory_age_max"] for row in rows) == 1
    assert all(row["grad_norm"] > 0 for row in rows)
    folders = {step: export(straight.run_dir / "checkpoints" / f"step_{step}", tmp_path / str(step)) for step in (1, 2)}
    models = {step: load_whole_model(folder, torch.float32) for step, folder in folders.items()}
    compared, counts = set[tuple[int, int]](), set[int]()
    for step in (3, 4):
        for rollout in read_rollouts(straight.run_dir, step):
            counts.add(len(rollout["images"]))
            first = 0
            for begin, end, version in rollout["spans"]:
                part, first = slice(first, first + end - begin), first + end - begin
                if version in models:
                    span = {**Trajectory.from_row(rollout).to_row(), "spans": [[begin, end, version]]}
                    expected = compute_logprobs(models[version], folders[version], straight.run_dir, span)
                    torch.testing.assert_close(torch.tensor(rollout["logprobs"][part]), expected, atol=2e-5, rtol=0)
                    compared.add((step, version))
    assert 2 in counts, "the second is of a turn"
    assert {(3, 1), (3, 2)} & compared, "the third step has tokens of the first step's weights, or the second's"
    assert (4, 2) in compared or (3, 1) in compared, "and some are of older weights than the step's"


def test_without_age_both_sides_see_the_same_images(tmp_path: Path) -> None:
    run = complete(ahead(tmp_path / "run", "grpo.async_grpo.max_trajectory_age_steps=0", "grpo.max_num_steps=2"))
    assert all(row["token_mult_prob_error_max"] < 1.001 for row in run.metrics())


@pytest.mark.parametrize("factor", ["null", "1.5"])
def test_after_a_kill_it_has_the_same_prompts_and_images(factor: str, straight: TrainingRun, tmp_path: Path) -> None:
    """Whether steps take prompts in the order of the data, or the first that are complete."""
    overrides = () if factor == "null" else (f"grpo.async_grpo.oversampling_factor={factor}",)
    overrides += () if factor == "null" else ("rollouts.keep_finished=false",)
    run = ahead(tmp_path / "run", *overrides)
    run.start()
    finished = run.run_dir / "finished_samples"

    def is_ahead() -> bool:
        is_saved = (run.run_dir / "checkpoints" / "step_2").exists()
        return is_saved and (factor != "null" or any(file.stat().st_size for file in finished.glob("batch_*.jsonl")))

    run.wait_for(is_ahead)
    run.kill()
    run.assert_nothing_left()
    for file in finished.glob("batch_*.jsonl"):
        trajectories = [json.loads(line)["trajectory"] for line in file.read_text().splitlines() if line.endswith("}")]
        assert all(row["images"] for row in trajectories)
    last = complete(ahead(tmp_path / "run", *overrides))
    steps = range(1, STEPS + 1)
    images = [rollout for step in steps for rollout in images_of(last, step)]
    expected = [rollout for step in steps for rollout in images_of(straight, step)]
    if factor == "null":
        assert images == expected
    assert sorted(images, key=str) == sorted(expected, key=str)


def test_groups_that_waited_go_on_in_another_folder_with_their_images(tmp_path: Path) -> None:
    """Two of eight prompts have an answer that nobody gives, so an epoch never fills a step of eight."""
    rows = [
        {**row, "answer": "x"} if number < 2 else row for number, row in enumerate(islice(draw_counting_rows(8, 3), 8))
    ]
    data = tmp_path / "eight.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = (f"data.train_path={data}", "grpo.use_dynamic_sampling=true", "grpo.max_num_steps=1")
    limits += ("env.counting.options.turns=2", "grpo.num_generations_per_prompt=8")
    first = complete(ahead(tmp_path / "first", *limits, "grpo.max_num_epochs=1"))
    assert first.metrics() == []
    checkpoint = first.run_dir / "checkpoints" / "step_0"
    waited = [row for group in json.loads((checkpoint / "state.json").read_text())["batch_cache"] for row in group]
    digests = {digest for row in waited for digest, _, _ in row["images"]}
    assert {file.name for file in (checkpoint / "images").iterdir()} == digests
    assert len({row["images"][1][0] for row in waited}) > 1, "pictures of turns, which no row has"
    second = complete(
        ahead(tmp_path / "second", *limits, "grpo.max_num_epochs=9", f"checkpointing.resume={checkpoint}")
    )
    trained = {(row["prompt_idx"], row["sample"], str(row["token_ids"])): row["images"] for row in second.rollouts(1)}
    for row in waited:
        images = [{"digest": digest, "rows": rows, "columns": columns} for digest, rows, columns in row["images"]]
        assert trained[row["prompt_idx"], row["sample"], str(row["token_ids"])] == images
    assert second.metrics()[0]["grad_norm"] > 0
