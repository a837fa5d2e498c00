"""The page of a run that goes on, served and driven in a headless Chromium: new steps come in without a reload."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.batch.rollout_files import locate_rollouts_file
from megatron_grpo.observability.live.page_server import PageServer
from tests.support.chromium import PROGRAM, Page, chromium
from tests.support.report_runs import byte_tokenizer, make_answer, make_run, metrics_of
from tests.support.watched import serve_runs, write_spans

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="this machine has no Chromium (apt-get install chromium)")
HOSTILE = "</script><script>owned=1</script><img src=x onerror=owned=1> \u202egnp.exe"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as page:
        page.look(width=1440, height=900, dark=False)
        yield page


def make_live_run(folder: Path, steps: int, *, rollouts: bool = True, name: str = "run", **summary: Any) -> Path:
    """A run that goes on, or that ended as `summary` says."""
    model = folder / f"model_{name}"
    tokenizer = byte_tokenizer(model)
    rows = [
        make_answer(
            tokenizer, f"{HOSTILE} {n}", group=n // 2, sample=n % 2, prompt_idx=n // 2, reward=n / 7, prompt="p"
        )
        for n in range(8)
    ]
    for n, row in enumerate(rows):
        row.task_name = ("addition", "game")[n // 4]
    run = make_run(folder / name, steps=steps, model=model, trajectories=rows if rollouts else [])
    (run / "summary.json").unlink()
    if summary:
        (run / "summary.json").write_text(json.dumps(summary))
    alarm = {"step": max(steps // 2, 1), "name": "entropy_collapse", "text": f"approx_entropy is small {HOSTILE}"}
    (run / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return run


def open_page(page: Page, server: PageServer) -> None:
    page.navigate("about:blank")  # the page of an earlier server still asks it
    page.wait("location.href === 'about:blank' && document.readyState === 'complete'")
    page.events.clear()
    page.navigate(server.address)
    page.wait("location.port !== '' && document.readyState === 'complete'")
    page.wait("typeof trajectories === 'object' && trajectories !== null")


def errors(page: Page) -> list[str]:
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    entries = [json.dumps(event["params"]) for event in page.events if event.get("method") in kinds]
    return [entry for entry in entries if "favicon" not in entry]


def text_of(page: Page, selector: str) -> Any:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def test_new_steps_come_in_without_a_reload(page: Page, tmp_path: Path) -> None:
    run = make_live_run(tmp_path, 5)
    with serve_runs([run]) as server:
        open_page(page, server)
        assert page.evaluate("location.search") == "", "the token does not stay in the address"
        assert "1 alarm" in text_of(page, "#head")
        page.evaluate("window.isSame = true")
        page.press("2", "2")
        page.wait("document.querySelectorAll('.part').length > 0 && trajectories.step === 5")
        with (run / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(metrics_of(step)) + "\n" for step in (6, 7)))
        locate_rollouts_file(run, 6).write_bytes(locate_rollouts_file(run, 5).read_bytes())
        page.wait("runs[0].metrics.step.length === 7 && trajectories.step === 6")
        assert page.evaluate("window.isSame") is True
        (run / "summary.json").write_text(json.dumps({"outcome": "failed", "reason": HOSTILE}))
        page.wait("document.querySelector('.outcome').textContent === 'failed'")
        assert HOSTILE.replace("\u202e", "RLO") in text_of(page, ".run-head .reason")
        assert page.evaluate("typeof owned") == "undefined"
        assert errors(page) == []


def test_a_resumed_run_that_drops_steps_is_shown_anew(page: Page, tmp_path: Path) -> None:
    run = make_live_run(tmp_path, 6, rollouts=False)
    with serve_runs([run]) as server:
        open_page(page, server)
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
        (run / "new").write_text("".join(lines))
        (run / "new").replace(run / "metrics.jsonl")
        page.wait("runs[0].metrics.step.length === 3")
        assert errors(page) == []


def test_lanes_show_every_process(page: Page, tmp_path: Path) -> None:
    run = make_live_run(tmp_path, 20)
    write_spans(run, begin=time.time() - 20, steps=20)
    with serve_runs([run]) as server:
        open_page(page, server)
        page.press("4", "4")
        page.wait("processes.lanes[0].data !== undefined")
        names = page.evaluate("processes.lanes[0].data.lanes.map(lane => lane.name)")
        assert names == ["driver", "policy rank 0", "policy rank 1", "generation engine 0", "rollout worker 0"]
        facts = text_of(page, ".lanes-of .facts")
        assert "generation that nothing overlaps" in facts
        pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
        colours = "new Set(Array.from({length: d.length / 4}, (_, i) => d.slice(4 * i, 4 * i + 3).join())).size"
        drawn = page.evaluate(
            f"(() => {{ const c = document.querySelector('canvas'), d = {pixels}; return {colours} }})()"
        )
        assert drawn > 5, "phases have colours"
        assert "send weights" in text_of(page, ".lanes-of .phases")
        assert "31.5" in text_of(page, ".lanes-of")
        assert errors(page) == []


def test_rollouts_are_narrowed_and_a_prompt_is_followed_over_steps(page: Page, tmp_path: Path) -> None:
    run = make_live_run(tmp_path, 4)
    with serve_runs([run]) as server:
        open_page(page, server)
        page.press("2", "2")
        page.wait("document.querySelectorAll('.part').length > 0")
        rewards = "trajectories.panels[0].table.rows.map(row => row.reward.toFixed(2))"
        page.evaluate(
            "{ const [from, to] = document.querySelectorAll('.ranges input'); from.value = '0.3'; to.value = '0.6';"
            "for (const field of [from, to]) field.dispatchEvent(new Event('input')); }"
        )
        assert page.evaluate(rewards) == ["0.43", "0.57"]
        page.evaluate(
            "{ const menu = document.querySelector('.ranges select'); menu.value = 'game';"
            "menu.dispatchEvent(new Event('change')); }"
        )
        assert page.evaluate(rewards) == ["0.57"]
        page.evaluate("document.querySelector('.over-steps').click()")
        page.wait("document.querySelector('.history') !== null")
        steps = "[...document.querySelectorAll('.history tbody tr')].map(one => one.firstChild.textContent)"
        assert page.evaluate(steps) == ["1", "2", "3", "4"]
        assert errors(page) == []


def test_two_runs_stand_side_by_side_while_one_has_failed(page: Page, tmp_path: Path) -> None:
    first = make_live_run(tmp_path, 4)
    second = make_live_run(tmp_path, 9, name="other", outcome="failed", reason="out of memory")
    for run, ago in ((first, 10), (second, 10)):
        write_spans(run, begin=time.time() - ago, steps=9)
    with serve_runs([first, second]) as server:
        open_page(page, server)
        outcomes = "[...document.querySelectorAll('.outcome')].map(one => one.textContent)"
        assert page.evaluate(outcomes) == ["no end recorded", "failed"]
        page.press("4", "4")
        page.wait("processes.lanes.every(one => one.data !== undefined && one.data.lanes.length === 5)")
        page.press("2", "2")
        page.wait("document.querySelectorAll('.panel .part').length > 1")
        assert errors(page) == []


@pytest.mark.slow
@pytest.mark.parametrize("steps", [400, 20_000])
def test_long_runs_open_and_refresh_in_bounded_time_and_bytes(page: Page, tmp_path: Path, steps: int) -> None:
    run = make_live_run(tmp_path, 1)
    (run / "metrics.jsonl").write_text("".join(json.dumps(metrics_of(step)) + "\n" for step in range(1, steps + 1)))
    for step in range(2, steps + 1):
        os.link(locate_rollouts_file(run, 1), locate_rollouts_file(run, step))
    write_spans(run, begin=time.time() - steps, steps=steps)
    with serve_runs([run]) as server:
        began = time.monotonic()
        open_page(page, server)
        opened_s = time.monotonic() - began
        assert page.evaluate("runs[0].metrics.step.length") <= 1000
        assert page.evaluate("runs[0].metrics.step.at(-1)") == steps
        page.press("4", "4")
        page.wait("processes.lanes[0].data !== undefined")
        (run / "metrics.jsonl").open("a").write(json.dumps(metrics_of(steps + 1)) + "\n")
        os.link(locate_rollouts_file(run, 1), locate_rollouts_file(run, steps + 1))
        page.wait(f"runs[0].metrics.step.at(-1) === {steps + 1}")
        sizes = "performance.getEntriesByType('resource').map(one => [one.name, one.encodedBodySize])"
        assert page.evaluate("runs[0].training_tables.steps.length") == steps + 1
        states = [size for name, size in page.evaluate(sizes) if "/api/state" in name]
        print(f"{steps} steps: open in {opened_s:.1f} s, answers of at most {max(states)} bytes")
        assert opened_s < 60, "about 2 s on a machine that does nothing else"
        assert max(states) < 20_000
        assert errors(page) == []
