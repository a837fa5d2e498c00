"""The page of a run in a headless Chromium: it opens at once, shows what a model wrote as text, and needs no mouse."""

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from megatron_grpo.models.image_store import locate_images, store_image
from megatron_grpo.observability.page.write import write_report
from tests.support.chromium import PROGRAM, Page, chromium
from tests.support.image_models import draw_picture
from tests.support.report_runs import PROMPT, byte_tokenizer, make_answer, make_run, metrics_of

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="this machine has no Chromium (apt-get install chromium)")

HOSTILE = (
    "</script><script>owned=1</script><!--<script> <img src=x onerror=owned=1><svg/onload=owned=1> "
    "&lt;b&gt; &amp; \u202egnp.exe\u202c \u2066isolate\u2069 \u200fmark\u2028line \x00\x1b[31m “日本語” 😀 {{7*7}}"
)
SHOWN = (
    "</script><script>owned=1</script><!--<script> <img src=x onerror=owned=1><svg/onload=owned=1> "
    "&lt;b&gt; &amp; RLOgnp.exePDF LRIisolatePDI RLMmarkLSline NULESC[31m “日本語” 😀 {{7*7}}"
)
LONG = "long " * 200_000
OPENS_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as page:
        page.look(width=1440, height=900, dark=False)
        yield page


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run whose model, reward functions, settings and messages are all against the reader."""
    folder = tmp_path_factory.mktemp("hostile")
    tokenizer = byte_tokenizer(folder / "model")
    rows = [
        make_answer(
            tokenizer,
            HOSTILE,
            reward_parts={HOSTILE: 1.0},
            sample=0,
            prompt=HOSTILE,
            answer=HOSTILE,
            columns={HOSTILE: HOSTILE},
        ),
        make_answer(tokenizer, "wrong", sample=1, reward=0.0, correct=False),
        make_answer(tokenizer, "plain", sample=2, failure=HOSTILE, reward=None, correct=None),
    ]
    run = make_run(folder / "run <script>owned=1<", steps=3, model=folder / "model", trajectories=rows)
    summary = {"outcome": "failed", "reason": HOSTILE}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "starts.jsonl").write_text(json.dumps({"time": "t", "resumed_after": 1, "changes": [HOSTILE]}) + "\n")
    return write_report([run])


def open_trajectories(page: Page) -> None:
    page.press("2", "2")
    page.wait("document.querySelectorAll('.part').length > 0")


def errors(page: Page) -> list[str]:
    """Exceptions, violations of the policy, and what the console was told."""
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    return [json.dumps(event["params"]) for event in page.events if event.get("method") in kinds]


def find_foreign_requests(page: Page) -> set[str]:
    """Addresses that the page asked for, besides its own."""
    sent = (
        event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"
    )
    return {url for url in sent if not url.startswith("file:")}


def text_of(page: Page, selector: str) -> Any:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


@pytest.mark.slow
def test_500_steps_of_256_trajectories_open_within_a_second(page: Page, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "model")
    answer = "The sum of two and two is four, as everybody knows. "
    rows = [make_answer(tokenizer, answer * 3, group=n // 8, sample=n % 8, prompt_idx=n // 8) for n in range(256)]
    file = write_report([make_run(tmp_path / "run", steps=500, model=tmp_path / "model", trajectories=rows)])
    assert min(page.open(file) for _ in range(3)) <= OPENS_WITHIN_S
    assert "128,000 of the 128,000 rollouts" in text_of(page, "#view-Trajectories .note")
    open_trajectories(page)
    assert page.evaluate("trajectories.step") == 500
    assert page.evaluate("document.querySelectorAll('.row').length") < 100, "only what is seen exists"


def test_what_a_model_wrote_is_text(page: Page, hostile: Path) -> None:
    page.events.clear()
    page.open(hostile)
    open_trajectories(page)
    assert text_of(page, ".part.prompt .tokens") == PROMPT
    assert text_of(page, ".part.model .tokens") == SHOWN
    assert SHOWN.replace("\n", " ") in text_of(page, ".facts")
    assert text_of(page, ".part.expected .tokens") == SHOWN
    page.evaluate("document.querySelector('.columns').open = true")
    assert text_of(page, ".columns dt") == text_of(page, ".columns dd") == SHOWN.replace("\n", " ")
    assert SHOWN in text_of(page, "#head")
    page.press("3", "3")
    assert SHOWN in text_of(page, ".starts")
    assert page.evaluate("typeof owned") == "undefined"
    assert (
        page.evaluate("document.querySelectorAll('main img, main script, main svg[onload], header script').length") == 0
    )
    raw = page.evaluate("document.body.innerText")
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f]", raw), "nothing turns the text around it"
    assert (errors(page), find_foreign_requests(page)) == ([], set())


def test_the_first_step_in_which_training_and_generation_disagree_stands_in_the_head(
    page: Page, tmp_path: Path
) -> None:
    """The last line is that of a step that was refused, which has little else."""
    run = make_run(tmp_path / "run", steps=4, model=tmp_path / "model", trajectories=[])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    page.open(write_report([run]))
    assert "disagree" not in text_of(page, "#head")
    rows = [row | {"token_mult_prob_error_off": float(row["step"] == 3)} for row in rows]
    rows.append({"step": 5, "token_mult_prob_error_off": 1.0, "timing": {"total": 1.0}, "throughput": {}})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page.events.clear()
    page.open(write_report([run]))
    head = text_of(page, "#head")
    assert "disagree more than noise explains in 2 of 5 steps, first in step 3: python -m megatron_grpo.doctor" in head
    assert errors(page) == []


def test_a_megabyte_of_text_is_shown_piece_by_piece(page: Page, tmp_path: Path) -> None:
    rows = [make_answer(byte_tokenizer(tmp_path / "model"), LONG)]
    page.open(write_report([make_run(tmp_path / "run", steps=1, model=tmp_path / "model", trajectories=rows)]))
    open_trajectories(page)
    assert text_of(page, ".part.model h4 span") == "1,000,000 tokens"
    assert text_of(page, ".part.model .tokens").startswith(LONG[:3000])
    page.evaluate("document.querySelector('.part.model .more').click()")
    assert page.evaluate("document.querySelectorAll('.part.model .token').length") == 6000


def test_images_of_a_prompt_are_seen_in_its_text(page: Page, tmp_path: Path) -> None:
    store = locate_images(str(tmp_path / "run"))
    images = [StoredImage(store_image(store, draw_picture(2, columns)), 4, 2 * columns) for columns in (2, 3)]
    images.append(StoredImage("0" * 64, 2, 2))
    prompt = f"first <image> or <image>, <image> {HOSTILE}"
    rows = [make_answer(byte_tokenizer(tmp_path / "model"), "two", images=images, prompt=prompt)]
    (tmp_path / "run").rename(tmp_path / "stored")
    run = make_run(tmp_path / "run", steps=1, model=tmp_path / "model", trajectories=rows)
    locate_images(str(tmp_path / "stored")).rename(store)
    page.open(write_report([run]))
    open_trajectories(page)
    sizes = "[...document.querySelectorAll('.pictures img')].map((one) => [one.naturalWidth, one.naturalHeight])"
    assert page.evaluate(sizes) == [[16, 16], [24, 16]]
    text = text_of(page, ".pictures p")
    assert text.startswith("first  or , image of 2 x 2 patches, not on this page </script><script>owned=1")
    assert page.evaluate("typeof owned") == "undefined"
    assert errors(page) == []


def test_the_policy_lets_nothing_else_run(page: Page, hostile: Path) -> None:
    page.open(hostile)
    page.events.clear()
    page.evaluate(
        "{ const s = document.createElement('script'); s.textContent = 'owned = 1'; document.body.append(s);"
        "  const i = document.createElement('img'); i.src = 'https://example.org/x.png'; document.body.append(i); }"
    )
    assert page.evaluate("typeof owned") == "undefined"
    refused = " ".join(errors(page))
    assert "script-src" in refused
    assert "default-src 'none'" in refused or "img-src" in refused


def test_every_view_works_with_the_keyboard_alone(page: Page, hostile: Path) -> None:
    page.open(hostile)
    page.evaluate("document.querySelector('.drawing').focus()")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.press(key)
    assert text_of(page, "#spoken").startswith("step 2: ")
    is_shown = page.evaluate("[...document.querySelectorAll('.readout')].every(one => one.textContent !== '')")
    assert is_shown, "the crosshair is in all charts"
    page.press("Enter", "\r")
    page.wait("document.querySelectorAll('.part').length > 0")
    assert page.evaluate("trajectories.step") == 2
    page.press("]", "]")
    page.wait("trajectories.panels[0].step === 3")
    page.evaluate("document.querySelector('[role=grid]').focus()")
    page.press("End")
    page.wait("document.querySelector('.failure') !== null")
    assert page.evaluate("document.querySelector('.row.chosen').getAttribute('aria-rowindex')") == "4"
    page.press("/", "/")
    for letter in "plain":
        page.press(letter, letter)
    assert page.evaluate("trajectories.panels[0].table.rows.length") == 1
    page.press("Escape")
    page.press("3", "3")
    assert page.evaluate("document.getElementById('view-Configuration').hidden") is False


def make_pair(tokenizer: Any, number: int, margin: float) -> tuple[int, list[tuple[Any, Any]]]:
    """A pair as a step of DPO records it; the rejected response is the longer one."""
    responses = []
    for sample, (text, reward) in enumerate([(f"good {number}", margin), (f"worse {number} </script>", 0.0)]):
        answer = make_answer(
            tokenizer, text, sample=sample, group=number, prompt_idx=7 + number, reward=reward, correct=None
        )
        values = {"prev_logprobs": np.full(len(text), -0.5 - sample, dtype=np.float32)}
        responses.append((replace(answer, prompt=f"prompt {number}", columns={"source": "book"}), values))
    return number, responses


def test_the_chosen_response_stands_beside_the_rejected_one(page: Page, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "model")
    run = make_run(tmp_path / "run", steps=2, model=tmp_path / "model", trajectories=[], algorithm="dpo")
    pairs = [make_pair(tokenizer, 0, 2.5), make_pair(tokenizer, 1, -1.0)]
    write_rollouts(locate_rollouts_file(run, 2, "rows"), pairs)
    page.events.clear()
    page.open(write_report([run]))
    open_trajectories(page)
    heads = "[...document.querySelectorAll('.table-head button')].map(one => one.textContent)"
    assert page.evaluate(heads) == ["Step", "Prompt", "Chosen", "Rejected", "Margin", "Right"]
    sides = "[...document.querySelectorAll('.side')].map(one => one.querySelector('.tokens').textContent)"
    assert page.evaluate(sides) == ["good 0", "worse 0 </script>"]
    boxes = page.evaluate("[...document.querySelectorAll('.side')].map(one => one.getBoundingClientRect().top)")
    assert boxes[0] == boxes[1], "beside each other"
    assert text_of(page, ".part.prompt .tokens") == PROMPT
    facts = page.evaluate("[...document.querySelectorAll('.side .facts')].map(one => one.textContent)")
    assert facts[0] == "Reward2.5Log-probability−3per token−0.5Learnt tokens6"
    assert facts[1] == "Reward0Log-probability−25.5per token−1.5Learnt tokens17"
    assert text_of(page, ".detail > .facts") == "Margin2.5Higherchosen"
    assert text_of(page, ".columns") == "Another column of the rowsourcebook"
    rows = "trajectories.panels[0].table.rows.map(row => row.promptIdx)"
    page.evaluate("trajectories.choice.value = 'wrong'; trajectories.choice.dispatchEvent(new Event('change'))")
    assert page.evaluate(rows) == [8], "the rejected response has more"
    assert page.evaluate(sides) == ["good 1", "worse 1 </script>"]
    page.look(width=400, height=800, dark=True)
    boxes = page.evaluate("[...document.querySelectorAll('.side')].map(one => one.getBoundingClientRect().top)")
    page.look(width=1440, height=900, dark=False)
    assert boxes[0] < boxes[1], "a narrow window has them below each other"
    assert errors(page) == []


def test_rows_are_shown_with_what_is_learnt_and_without_log_probabilities(page: Page, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "model")
    run = make_run(tmp_path / "run", steps=2, model=tmp_path / "model", trajectories=[], algorithm="sft")
    row = make_answer(tokenizer, "four", reward=None, correct=None, prompt="2 + 2?")
    write_rollouts(locate_rollouts_file(run, 1, "rows"), [(0, [(row, {})])])
    page.events.clear()
    page.open(write_report([run]))
    open_trajectories(page)
    assert page.evaluate("[...document.querySelectorAll('.part h4')].map(one => one.firstChild.textContent)") == [
        "Prompt",
        "Learnt",
    ]
    assert text_of(page, ".detail .facts") == "Learnt tokens4"
    assert text_of(page, "#view-Trajectories .note").startswith("1 of the 1 rows or responses")
    assert page.evaluate("document.querySelectorAll('.choice').length") == 0, "there is nothing to colour by"
    assert errors(page) == []


@pytest.mark.parametrize(
    ("algorithm", "titles", "tile"),
    [
        ("grpo", ["Reward", "Accuracy"], "Reward"),
        ("sft", ["Loss", "Accuracy"], "Loss"),
        ("dpo", ["Loss", "Preference accuracy", "Margin of the pairs"], "Loss"),
        ("reward_model", ["Loss", "Accuracy", "Margin of the pairs"], "Loss"),
        ("distillation", ["Divergence from the teacher", "Reward"], "Divergence from the teacher"),
    ],
)
def test_the_page_begins_with_the_figures_of_its_algorithm(
    algorithm: str, titles: list[str], tile: str, page: Page, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", steps=3, model=tmp_path / "model", trajectories=[], algorithm=algorithm)
    figures = ("preference_accuracy", "margin", "teacher_divergence")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | dict.fromkeys(figures, row["step"] / 4) for row in rows]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page.open(write_report([run]))
    charts = page.evaluate("[...document.querySelectorAll('.charts:not(.small) h3')].map(one => one.textContent)")
    assert charts[: len(titles)] == titles
    assert "Loss" in charts
    assert next(iter(tiles(page))) == tile
    about = dict(
        page.evaluate(
            "[...document.querySelectorAll('.about div')].map(one => [...one.children].map(part => part.textContent))"
        )
    )
    assert about["Algorithm"] == algorithm
    assert about["Model"].endswith("/model")


def test_figures_are_found_by_their_names(page: Page, tmp_path: Path) -> None:
    """Of a step's line and of validations, each once; what is typed is kept while the page loads itself again."""
    run = make_run(tmp_path / "run", steps=3, model=tmp_path / "model", trajectories=[])
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0]) | {
        "step": 4,
        "val_accuracy": 0.5,
        "val_other": 1,
    }
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with (run / "validation.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "val_accuracy": 0.5, "val_other": 1}) + "\n")
    page.open(write_report([run]))
    charts = "[...document.querySelectorAll('.chart')].filter(one => one.checkVisibility())"
    shown_titles = f"{charts}.map(one => one.querySelector('h3').textContent)"
    before = page.evaluate(shown_titles)
    page.press("/", "/")
    for letter in "val_":
        page.press(letter, letter)
    assert page.evaluate(shown_titles) == ["Accuracy", "val_other"]
    page.evaluate("document.getElementById('figures').value = 'figure_7'")
    page.evaluate("document.getElementById('figures').dispatchEvent(new Event('input'))")
    assert page.evaluate(shown_titles) == ["figure_7"]
    page.evaluate("isOld = true; location.reload()")
    page.wait("typeof isOld === 'undefined' && document.readyState === 'complete'")
    assert page.evaluate(shown_titles) == ["figure_7"]
    page.evaluate("document.getElementById('figures').value = ''")
    page.evaluate("document.getElementById('figures').dispatchEvent(new Event('input'))")
    assert page.evaluate(shown_titles) == before


def test_a_page_of_a_run_that_goes_on_loads_itself_again_until_it_ends(page: Page, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "model")
    rows = [make_answer(tokenizer, "4", sample=n) for n in range(3)]
    run = make_run(tmp_path / "run", steps=3, model=tmp_path / "model", trajectories=rows)
    summary = (run / "summary.json").read_text()
    (run / "summary.json").unlink()
    page.open(write_report([run], refresh_s=0.3))
    assert text_of(page, ".outcome") == "running"
    open_trajectories(page)
    page.evaluate("trajectories.open(2)")
    (run / "metrics.jsonl").open("a").write(json.dumps(metrics_of(4)) + "\n")
    write_report([run], refresh_s=0.3)
    page.wait("document.readyState === 'complete' && runs[0].metrics.step.length === 4")
    page.wait("document.querySelectorAll('.part').length > 0")
    assert page.evaluate("[trajectories.step, document.querySelector('[aria-selected=true]').textContent]") == [
        2,
        "Trajectories",
    ]
    page.evaluate("document.querySelector('.pause').click(); stays = true")
    (run / "summary.json").write_text(summary)
    write_report([run])
    time.sleep(1)
    assert page.evaluate("stays"), "paused"
    page.evaluate("document.querySelector('.pause').click()")
    page.wait("document.querySelector('.outcome')?.textContent === 'completed'")
    assert page.evaluate("document.querySelectorAll('.fresh').length") == 0
    page.evaluate("stays = true")
    time.sleep(1)
    assert page.evaluate("stays"), "a run that has ended changes no more"


@pytest.mark.parametrize("fragment", ["view=Trajectories", "view=Trajectories&source=elsewhere&step=9"])
def test_an_address_names_a_view_alone_or_what_the_page_lacks(page: Page, hostile: Path, fragment: str) -> None:
    page.open(hostile)
    page.evaluate(f"location.hash = '{fragment}'; location.reload()")
    page.wait("document.readyState === 'complete' && document.querySelectorAll('.part').length > 0")
    assert text_of(page, "[aria-selected=true]") == "Trajectories"
    assert page.evaluate("[trajectories.step, trajectories.source]") == [3, "training"]
    assert errors(page) == []


def test_a_column_sorts_and_says_so(page: Page, hostile: Path) -> None:
    page.open(hostile)
    open_trajectories(page)
    page.evaluate(
        "[...document.querySelectorAll('.table-head button')].find(one => one.textContent === 'Tokens').click()"
    )
    tokens = "trajectories.panels[0].table.order.map(place => trajectories.panels[0].table.rows[place].tokens)"
    assert page.evaluate(tokens) == [len(HOSTILE.encode()), 5, 5]
    assert page.evaluate("document.querySelector('[aria-sort=descending]').textContent") == "Tokens"


def test_two_runs_stand_side_by_side(page: Page, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "model")
    runs = [
        make_run(tmp_path / name, steps=steps, model=tmp_path / "model", trajectories=[make_answer(tokenizer, name)])
        for name, steps in (("first", 4), ("second", 2))
    ]
    file = write_report(runs)
    assert file == runs[0] / "report.html"
    page.open(file)
    assert page.evaluate("[...document.querySelectorAll('h1 bdi')].map(one => one.textContent)") == ["first", "second"]
    open_trajectories(page)
    page.wait("document.querySelectorAll('.part.model .tokens').length === 2")
    texts = page.evaluate("[...document.querySelectorAll('.part.model .tokens')].map(one => one.textContent)")
    assert (page.evaluate("trajectories.step"), texts) == (2, ["first", "second"])


def tiles(page: Page) -> dict[str, str]:
    """Texts of the tiles at the head of the page, by name."""
    texts = "[...document.querySelectorAll('.tile')].map(one => [...one.children].map(part => part.textContent))"
    return dict(page.evaluate(texts))


def empty_run(folder: Path, **summary: Any) -> Path:
    """The folder of a run without steps; without a summary it has not ended."""
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_without_steps_has_ended_or_it_has_not(page: Page, tmp_path: Path) -> None:
    page.open(write_report([empty_run(tmp_path / "going")]))
    text = page.evaluate("document.body.innerText")
    assert "no end recorded" in text
    assert "No step has been written yet." in text
    assert "The run ended" not in text
    page.press("2", "2")
    page.wait("!document.getElementById('view-Trajectories').hidden")
    assert "ended before" not in page.evaluate("document.body.innerText")
    page.open(write_report([empty_run(tmp_path / "failed", outcome="failed", reason="no memory")]))
    text = page.evaluate("document.body.innerText")
    assert "failed" in text
    assert "The run ended before its first step." in text
    assert "no end recorded" not in text


@pytest.mark.parametrize("summary", [{}, {"outcome": "completed", "reward_first": 0.4, "reward_last": 0.5}])
def test_the_reward_is_that_of_the_last_step_and_of_the_first(
    page: Page, tmp_path: Path, summary: dict[str, Any]
) -> None:
    run = empty_run(tmp_path / "run", **summary)
    timing = {"train": 0.5, "total": 1.0}
    rows = [{"step": 2 + n, "reward": reward, "timing": timing} for n, reward in enumerate((0.125, 0.9, 0.75))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = [{"step": 0, "val_accuracy": 0.25}, {"step": 4, "val_accuracy": 0.5}]
    (run / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    page.open(write_report([run]))
    figures = tiles(page)
    assert figures["Reward"] == "0.75from 0.125 at step 2"
    assert figures["Held-out accuracy"] == "0.5from 0.25 at step 0"
    (run / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    page.open(write_report([run]))
    assert tiles(page)["Reward"] == "0.125"


def test_the_mismatch_is_on_a_logarithmic_axis(page: Page, tmp_path: Path) -> None:
    """A healthy step, one of bfloat16, a broken one and an exact one can all be told apart."""
    run = empty_run(tmp_path / "run")
    values = [1.0000004, 1.002, 14_838.0, 1.0, *[1.000001] * 40]
    timing = {"train": 0.5, "total": 1.0}
    names = ("token_mult_prob_error", "token_mult_prob_error_max")
    rows = [{"step": n + 1, **dict.fromkeys(names, error), "timing": timing} for n, error in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.open(write_report([run]))
    chart = "[...document.querySelectorAll('figure.chart')].find(one => one.textContent.includes('Mismatch'))"
    page.wait(f"{chart}.querySelector('path.line') !== null")
    path = page.evaluate(f"{chart}.querySelector('path.line').getAttribute('d')")
    heights = [float(point.split(",")[1]) for point in path[1:].split("L")]
    least, half, broken, exact, *more_heights = heights
    assert len(heights) == len(values), "every step is drawn"
    decade = (half - broken) / (math.log10(14_837.0) - math.log10(0.002))
    assert decade > 10
    assert least - half == pytest.approx(decade * (math.log10(0.002) - math.log10(4e-7)), abs=0.3)
    assert exact == max(heights) >= least
    assert least - more_heights[0] == pytest.approx(decade * math.log10(1e-6 / 4e-7), abs=0.3)
    ticks = page.evaluate(f"[...{chart}.querySelectorAll('.grid')].map(one => Number(one.getAttribute('y1')))")
    assert [low - high for low, high in pairwise(ticks)] == pytest.approx([ticks[0] - ticks[1]] * (len(ticks) - 1))
    page.evaluate("document.querySelector('details.others').open = true")
    other_chart = chart.replace("'Mismatch'", "'token_mult_prob_error_max − 1'")
    page.wait(f"{other_chart} !== undefined && {other_chart}.querySelector('path.line') !== null")
    assert page.evaluate(f"{other_chart}.querySelector('path.line').getAttribute('d').split('L').length") == len(values)
    labels = page.evaluate(f"[...{other_chart}.querySelectorAll('text.tick')].map(one => one.textContent)")
    assert {"1e−7", "100,000"} <= set(labels)
