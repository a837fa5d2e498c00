"""The tables of the documents are those of the committed results, and every preset reaches the goal in them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_grpo.config.overrides import list_config_groups

ROOT = Path(__file__).parents[2]
FP8_PAGE = (ROOT / "docs" / "precision.md").read_text()
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def newest(pattern: str) -> dict[str, Any]:
    """The last of the dated results."""
    result: dict[str, Any] = json.loads(max((ROOT / "benchmarks" / "results").glob(pattern)).read_text())
    return result


@pytest.mark.parametrize("pattern", ["*_variants_cpu.json", "*_variants_minibatches_cpu.json"])
def test_every_row_is_in_the_table(pattern: str) -> None:
    result = newest(pattern)
    assert f"Measured {result['date']} on a CPU ({result['machine']})." in PAGE
    for run in result["runs"]:
        accuracies = " | ".join(f"{accuracy:.3f}" for accuracy in run["curve"].values())
        clipped = f"{100 * run['clip_fraction_mean']:.1f} %"
        assert f"| `{run['name']}` | {accuracies} | {clipped} |" in PAGE


def test_defaults_every_measured_preset_and_ppo_learn_to_add() -> None:
    reached = {run["name"]: run["accuracy_after"] for run in newest("*_variants_cpu.json")["runs"]}
    presets = set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("`+variant=`")[2].partition("\n## ")[0], re.MULTILINE))
    assert presets <= {*list_config_groups()["variant"]}
    assert reached.keys() == {"defaults", "ppo", *presets}
    assert min(reached.values()) >= 0.8


def test_every_preset_is_measured_or_said_not_to_be() -> None:
    """A preset is in the first table, was trained on older weights, or is listed as neither."""
    intro = PAGE.partition("`+variant=`")[2].partition("\n## ")[0]
    first = set(re.findall(r"^\| `(\w+)` \|", intro, re.MULTILINE))
    on_older, unmeasured = (
        set(re.findall(r"`(\w+)`", intro.partition(begin)[2].partition(".\n" if begin == "trained for" else ". ")[0]))
        for begin in ("(#on-samples-of-older-weights):", "trained for")
    )
    presets = {*list_config_groups()["variant"]}
    assert first | on_older | unmeasured == presets
    assert len(first) + len(on_older) + len(unmeasured) == len(presets)
    overrides = [text for method in newest("*_lags_cpu.json")["methods"].values() for text in method]
    measured = {text.removeprefix("+variant=") for text in overrides if text.startswith("+variant=")}
    assert measured - first == on_older


def test_accuracies_on_older_weights() -> None:
    result = newest("*_lags_cpu.json")
    assert f"Measured {result['date']} on a CPU ({result['machine']})." in PAGE
    assert len(result["seeds"]) == 3
    for run in result["runs"]:
        low, high = run["interval"]
        assert f" {run['mean']:.2f} ± {(high - low) / 2:.2f} |" in PAGE


def test_with_minibatches_they_learn_too() -> None:
    """Only then do clipping and what takes its place act; SAPO needs the smaller learning rate that the page names."""
    reached = {run["name"]: run["accuracy_after"] for run in newest("*_variants_minibatches_cpu.json")["runs"]}
    assert reached.keys() == {"defaults", "ppo", "cispo", "gspo", "sapo", "sapo, lr 3e-4"}
    assert min(accuracy for name, accuracy in reached.items() if name != "sapo") >= 0.8


def test_what_is_said_of_the_critic() -> None:
    (ppo,) = (run for run in newest("*_variants_cpu.json")["runs"] if run["name"] == "ppo")
    explained = ppo["explained_variance"]
    assert f"{explained['mean']:.2f} on average, {explained['max']:.2f} at most" in " ".join(PAGE.split())


def test_what_fp8_does_to_logprobs() -> None:
    result = newest("*_fp8_logprobs_cpu.json")
    origin = f"Measured {result['date']} on a CPU ({result['machine']}), {result['layers']} layers"
    assert origin in " ".join(FP8_PAGE.split())
    rows = {name: row for name, row in result.items() if isinstance(row, dict) and "kl" in row}
    assert len(rows) == 7
    for name, row in rows.items():
        numbers = " | ".join(f"{row[key]:.3f}" for key in ("mean_abs", "p99_abs", "max_abs"))
        assert f"| `{name}` | {numbers} | {row['kl']:.1e} |" in FP8_PAGE


def test_what_a_million_rows_take() -> None:
    result = newest("*_data_cpu.json")
    page = " ".join((ROOT / "docs" / "data.md").read_text().split())
    jsonl, parquet = result["jsonl"], result["parquet"]
    assert result["rows"] == 1_000_000
    assert result["visits_by_epoch"] == [[1, 1], [1, 1]]
    assert f"took {jsonl['startup_s']:.0f} s and at most {jsonl['peak_mb'] / 1000:.1f} GB" in page
    assert f"{parquet['startup_s']:.0f} s and {parquet['peak_mb'] / 1000:.1f} GB with Parquet" in page
    assert result["date"] in page


def test_what_is_said_of_the_speed_of_sampling() -> None:
    page = " ".join((ROOT / "docs" / "generation.md").read_text().split())
    result = newest("*_generation_cpu.json")
    assert result["same_tokens"]
    assert result["ratio"] >= 0.95
    assert f"Both gave the same {result['tokens']:,} tokens, the run's way {result['ratio']:.2f} times" in page
    assert f"{result['requests']} requests, 2 cores, {result['date']}" in page


def test_what_plans_of_published_rl_steps_are_worth() -> None:
    result, page = newest("*_plan_rl_rows.json"), (ROOT / "docs" / "plan.md").read_text()
    assert result["date"] in page
    names, summary = ("step", "generation", "logprobs", "train", "refit"), result["summary"]
    for title, key in (("all rows", "all"), ("rows held out", "held_out")):
        for word in ("Median", "Worst"):
            cells = " | ".join(f"{100 * summary[f'{name}_{key}'][word.lower()]:.0f}%" for name in names)
            assert f"| **{word}**, {title} | {cells} |" in page


def test_what_plans_of_published_refits_are_worth() -> None:
    summary, page = newest("*_plan_refit_rows.json")["summary"], (ROOT / "docs" / "plan.md").read_text()
    for text, key in (
        ("messages alone, all rows", "messages alone, all"),
        ("as planned, all rows", "planned, all"),
        ("as planned, rows held out", "planned, held_out"),
    ):
        assert f"| {text} | {100 * summary[key]['median']:.0f}% | {100 * summary[key]['worst']:.0f}% |" in page


def test_the_numbers_of_the_readme() -> None:
    page = " ".join((ROOT / "README.md").read_text().split())
    refit = newest("*_refit_306mb_cpu.json")
    assert (
        f"{refit['bytes'] / 1e6:.0f} MB move between unlike layouts in {refit['refit_ms']['median'] / 1e3:.2f} s"
        in page
    )
    proofs = newest("*_model_proofs.json")["columns"]["verify"]
    cases, error = sum(row["passed"] for row in proofs.values()), max(row["logprob"] for row in proofs.values())
    assert f"{len(proofs)} families agree in {cases} combinations" in page
    assert f"to {error:.1e} in log-probabilities" in page
    assert not any(row["failed"] for row in proofs.values())
    plans = newest("*_plan_rl_rows.json")["summary"]["step_all"]
    assert f"Plans of {plans['rows']} published RL steps" in page
    assert f"{100 * plans['median']:.0f}% off in the median" in page


def test_the_picture_of_the_readme_is_of_its_command() -> None:
    with Image.open(ROOT / "docs" / "images" / "quickstart.png") as picture:
        title = picture.text["Title"]
    assert title.startswith("quickstart: 400 steps, held-out accuracy ")
    assert f"![{title}](docs/images/quickstart.png)" in (ROOT / "README.md").read_text()
