"""What a page is made of, without a browser: the data in it, its escapes, what it leaves out."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_grpo import report
from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.observability.page import trajectories, write
from megatron_grpo.observability.page.trajectories import COLUMN_EXCERPT, TokenBytes, list_byte_alphabet, make_excerpts
from megatron_grpo.observability.page.write import (
    format_escaped_json,
    make_packed_element,
    render_page,
    try_to_write_report,
    write_report,
)
from megatron_grpo.report import REFRESH_S, main
from megatron_grpo.run.directory import lock_run_directory
from tests.support.forked import as_ordinary_user
from tests.support.report_runs import PROMPT, byte_tokenizer, make_answer, make_run, metrics_of
from tests.support.trajectories import make_trajectory

ELEMENT = re.compile(r'<script type="(?:application/json|text/plain)" id="([^"]*)">([^<]*)</script>')


def read_data(file: Path) -> dict[str, Any]:
    """Every element of data of a page by its name, read as the page reads it."""
    documents = {}
    for name, text in ELEMENT.findall(file.read_text()):
        documents[name] = json.loads(text) if name == "runs" else json.loads(gzip.decompress(base64.b64decode(text)))
    return documents


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer(tmp_path / "model")
    rows = [
        make_answer(
            tokenizer,
            f"answer {n} é",
            group=n // 2,
            sample=n % 2,
            reward=n / 3,
            prompt_idx=n,
            prompt=f"{PROMPT}{n // 2}",
            answer=f"expected {n // 2}",
            columns={"level": str(n // 2), "text": "x" * 1000},
        )
        for n in range(6)
    ]
    rows[1].reward_metrics = {"suspect/touched_harness": 1.0, "suspect/idle_tests": 0.0, "other": 1.0}
    return make_run(tmp_path / "run", steps=3, model=tmp_path / "model", trajectories=rows)


@pytest.mark.parametrize("text", ["</script>", "<!--", "a & b", "\u2028\u2029", "\ud800", "\x00"])
def test_no_text_leaves_its_element(text: str) -> None:
    escaped = format_escaped_json({text: [text, {"x": text}]})
    assert not set(escaped) & set("<>&\u2028\u2029")
    assert escaped.isascii()
    assert json.loads(escaped) == {text: [text, {"x": text}]}


def test_numbers_that_are_not_finite_are_null() -> None:
    assert json.loads(format_escaped_json([math.nan, math.inf, 1 / 3])) == [None, None, 0.3333333333]
    _, text = ELEMENT.findall(make_packed_element("x", [math.nan, 1 / 3]))[0]
    assert json.loads(gzip.decompress(base64.b64decode(text))) == [None, 0.3333333333]


def test_the_policy_names_exactly_what_is_there() -> None:
    text = render_page("p {}", "run();", "<main></main>", [])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    for kind, content in (("style", "p {}"), ("script", "run();")):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    with pytest.raises(AssertionError, match="would end its own element"):
        render_page("", "x = '</SCRIPT>'", "", [])


def test_a_page_is_one_file_that_names_no_other(run: Path) -> None:
    text = write_report([run]).read_text()
    without_data = ELEMENT.sub("", text)
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", without_data)
    assert set(re.findall(r"https?://[^\s\"']+", without_data)) == {"http://www.w3.org/2000/svg"}, "a name, not a place"
    assert "innerHTML" not in text, "nothing is read as markup"


def test_a_page_holds_what_the_run_wrote(run: Path) -> None:
    data = read_data(write_report([run]))
    (run_data,) = data["runs"]
    assert run_data["metrics"]["step"] == [1, 2, 3]
    assert run_data["metrics"]["reward"] == pytest.approx([0.01, 0.02, 0.03])
    assert run_data["timing"]["total"] == pytest.approx([1.001, 1.002, 1.003])
    assert "timing" not in run_data["metrics"]
    settings = {key: (value, default) for key, value, default in run_data["config"]}
    assert settings["policy.model.path"] == (str(run.parent / "model"), "???")
    assert settings["policy.parallel.tensor"] == ("1", None)
    counts = {name: run_data["training_tables"][name] for name in ("steps", "written", "rows", "full")}
    assert counts == {"steps": [1, 2, 3], "written": 18, "rows": 18, "full": 18}
    table = data["run0-training2"]
    assert table["reward"] == pytest.approx([n / 3 for n in range(6)], rel=1e-6)
    assert table["prompts"] == {group: f"{PROMPT}{group}" for group in "012"}
    assert table["rows"]["1"] == {"answer": "expected 1", "columns": {"level": "1", "text": "x" * COLUMN_EXCERPT}}
    assert table["suspect"] == [[], ["touched_harness"], [], [], [], []]
    full, tokens = table["full"]["3"], data["run0-tokens"]
    read = b"".join(
        base64.b64decode(tokens[str(token)][0]) if isinstance(tokens[str(token)], list) else tokens[str(token)].encode()
        for token in full["ids"]
    )
    assert read.decode() == PROMPT + "answer 3 é"
    answer = len("answer 3 é".encode())
    assert full["spans"] == [[len(PROMPT), len(PROMPT) + answer, 0]]
    assert full["logprobs"] == pytest.approx(np.linspace(-2.0, 0.0, answer), abs=1e-4)
    assert full["gaps"] == pytest.approx([-0.25] * answer)
    assert full["advantages"] == pytest.approx([answer + n / 8 for n in range(answer)])


def test_rollouts_of_an_earlier_version_show_what_their_tokens_say(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "model")
    rows = [make_answer(tokenizer, "4")]
    table = read_data(write_report([make_run(tmp_path / "run", steps=1, model=tmp_path / "model", trajectories=rows)]))
    assert table["run0-training1"]["prompts"] == {"0": PROMPT.strip()}
    assert table["run0-training1"]["rows"] == {"0": {"answer": None, "columns": {}}}


def test_texts_of_rows_are_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MAX_ROW_CHARACTERS", 3 * (COLUMN_EXCERPT + 100))
    data = read_data(write_report([run]))
    assert all(list(data[f"run0-training{step}"]["rows"]) == ["0"] for step in (1, 2, 3)), "one of three in each step"


def test_prompts_that_begin_alike_are_shown_from_where_they_differ() -> None:
    words = "Answer the question and give reasons for every step that you take. "
    excerpts = make_excerpts({"0": f"{words}What is 2 + 2?", "1": f"{words}What is\n 3 + 3?", "2": f"{words}Why?"})
    assert excerpts["0"].endswith("take. What is 2 + 2?")
    assert excerpts["0"].startswith("… ")
    assert len(excerpts["0"]) < 50
    assert make_excerpts({"0": words, "1": words}) == {"0": words.strip(), "1": words.strip()}
    assert make_excerpts({"0": "12+34=", "1": "12+35="}) == {"0": "12+34=", "1": "12+35="}
    assert make_excerpts({"7": "one prompt"}) == {"7": "one prompt"}
    assert make_excerpts({}) == {}
    assert len(make_excerpts({"0": "x" * 10**6})["0"]) == trajectories.EXCERPT


def test_responses_of_validations_are_in_the_page(run: Path) -> None:
    """A step that was never validated has none; limits of a run are the same with them."""
    tokenizer = byte_tokenizer(run.parent / "other")
    answer = make_answer(tokenizer, "held out", prompt="1+1=", answer="2", columns={"level": "3"})
    for step in (0, 3):
        write_rollouts(locate_rollouts_file(run, step, "validation"), [(0, [(answer, {})])])
    data = read_data(write_report([run]))
    (run_data,) = data["runs"]
    assert run_data["validation_tables"] == {"kind": "validation", "steps": [0, 3], "written": 2, "rows": 2, "full": 2}
    table = data["run0-validation3"]
    assert (table["response"], table["prompts"], table["advantage"]) == (["held out"], {"0": "1+1="}, [None])
    assert table["rows"] == {"0": {"answer": "2", "columns": {"level": "3"}}}


def test_rows_that_were_learnt_have_log_probabilities_of_training_alone(run: Path) -> None:
    tokenizer = byte_tokenizer(run.parent / "other")
    learnt = make_answer(tokenizer, "yes", reward=0.25, correct=None, logprobs=np.zeros(3))
    for step, values in ((1, {"prev_logprobs": np.float32([-0.5, -np.inf, -1.0])}), (2, {})):
        write_rollouts(locate_rollouts_file(run, step, "rows"), [(0, [(learnt, values)])])
    data = read_data(write_report([run]))
    assert data["runs"][0]["training_tables"]["kind"] == "rows"
    full = data["run0-training1"]["full"]["0"]
    assert full["logprobs"] == [-0.5, -40.0, -1.0]
    assert full.keys() == {"spans", "parts", "ids", "logprobs"}
    assert "logprobs" not in data["run0-training2"]["full"]["0"]


def test_the_head_says_what_ran(run: Path) -> None:
    starts = [
        {"time": "t", "resumed_after": after, "changes": [], "code": code}
        for after, code in ((None, "abc"), (1, "def"))
    ]
    (run / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    (run_data,) = read_data(write_report([run]))["runs"]
    model = str(run.parent / "model")
    assert run_data["about"] == {"recipe": "grpo", "algorithm": "grpo", "model": model, "code": "abc, def"}


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "my_recipe:ALGORITHM", "os:system"])
def test_the_figures_of_the_algorithm_come_first(algorithm: str, run: Path) -> None:
    """Nothing is imported that a folder from elsewhere names."""
    config = (run / "config.yaml").read_text().replace("algorithm: grpo", f"algorithm: {algorithm}")
    (run / "config.yaml").write_text(config)
    (run_data,) = read_data(write_report([run]))["runs"]
    assert run_data["about"]["algorithm"] == algorithm
    assert run_data["leading"] == list(ALGORITHMS.get(algorithm, ALGORITHMS["grpo"]).leading_metrics)


def test_what_does_not_fit_is_left_out_evenly_and_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MAX_FULL_TOKENS", 3 * 60)  # two answers of each step
    monkeypatch.setattr(trajectories, "MAX_ROWS", 3 * 4)
    data = read_data(write_report([run]))
    counts = data["runs"][0]["training_tables"]
    assert (counts["written"], counts["rows"], counts["full"]) == (18, 12, 6)
    assert all(list(data[f"run0-training{step}"]["full"]) == ["0", "1"] for step in (1, 2, 3)), "samples of one prompt"


def test_a_long_step_ends_the_reading(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MAX_READ_TOKENS", 3 * 50)
    assert read_data(write_report([run]))["runs"][0]["training_tables"]["rows"] == 6, "two of each step"


def test_without_the_tokenizer_there_is_the_text(run: Path) -> None:
    (run.parent / "model" / "tokenizer.json").unlink()
    data = read_data(write_report([run]))
    assert "shown as text" in data["runs"][0]["remark"]
    assert data["run0-training1"]["response"][1] == "answer 1 é"
    assert "ids" not in data["run0-training1"]["full"]["1"]


@pytest.mark.parametrize("missing", ["summary.json", "validation.jsonl", "config.yaml", "rollouts", "metrics.jsonl"])
def test_a_run_that_ended_early_has_a_page(missing: str, run: Path) -> None:
    path = run / missing
    if path.is_dir():
        path.rename(run / "elsewhere")
    else:
        path.unlink()
    assert len(read_data(write_report([run]))["runs"]) == 1


def test_what_is_damaged_is_told_and_nothing_more(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "rollouts" / "step_2.parquet").write_bytes(b"PAR1 nothing PAR1")
    assert try_to_write_report(run) is None
    assert "report.html could not be written: " in caplog.text
    monkeypatch.setattr(write, "read_run_data", lambda _: 1 / 0)
    assert try_to_write_report(run) is None


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("metrics.jsonl", b"[1, 2]", "it holds list, not an object"),
        ("metrics.jsonl", b"{step: 1}", "no line of JSON: Expecting property name"),
        ("validation.jsonl", b"\xff\xfe\x00", "no line of JSON: 'utf-"),
        ("validation.jsonl", b'{"reward": 1}', "it has no number under step"),
        ("metrics.jsonl", b'{"step": 1, "timing": [3]}', "timing is list, not an object"),
        ("starts.jsonl", b"3", "it holds int, not an object"),
    ],
)
def test_a_damaged_line_is_told_with_its_place(
    run: Path, capsys: pytest.CaptureFixture[str], file: str, line: bytes, reason: str
) -> None:
    with (run / file).open("ab") as opened:
        opened.write(line)
    before = (run / file).read_bytes().count(b"\n")
    assert main([str(run)]) == 0, "a last line that was cut off is left out"
    with (run / file).open("ab") as opened:
        opened.write(b"\n")
    capsys.readouterr()
    assert main([str(run)]) == 2
    assert f"report: {run / file}:{before + 1} is damaged" in (stderr := capsys.readouterr().err)
    assert reason in stderr
    assert stderr.count("\n") == 1


def test_rollouts_that_cannot_be_read_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "rollouts" / "step_2.parquet"
    file.write_bytes(b"PAR1 nothing PAR1")
    assert main([str(run)]) == 2
    assert f"report: {file} is damaged or was not written to its end: " in capsys.readouterr().err


def test_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    for arguments, reason in (
        ([], "give the folder of one run, or of two"),
        ([str(run)] * 3, f"{run} is not an argument"),
        ([str(run / "nowhere")], "is not a folder"),
        ([str(run.parent / "model")], "is not the folder of a run"),
        (["--fast"], "--fast is not an argument"),
    ):
        assert main(arguments) == 2
        assert reason in capsys.readouterr().err
    assert main(["--help"]) == 0


def test_the_page_of_a_run_that_goes_on_is_written_again(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(run), "follow=true"]) == 0, "a run that has ended is written once"
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    with lock_run_directory(str(run)):
        assert main([str(run)]) == 0
        assert "the run is going on: follow=true" in capsys.readouterr().out
        assert read_data(run / "report.html")["runs"][0]["refresh_s"] == REFRESH_S

    pages: list[tuple[float | None, int]] = []

    def wait(seconds: float) -> None:
        assert seconds == REFRESH_S
        (run_data,) = read_data(run / "report.html")["runs"]
        pages.append((run_data["refresh_s"], len(run_data["metrics"]["step"])))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_of(3 + len(pages))) + "\n")
        if len(pages) == 2:
            stack.close()

    monkeypatch.setattr(report.time, "sleep", wait)
    with ExitStack() as stack:
        stack.enter_context(lock_run_directory(str(run)))
        assert main([str(run), "follow=true"]) == 0
    assert pages == [(REFRESH_S, 3), (REFRESH_S, 4)]
    (run_data,) = read_data(run / "report.html")["runs"]
    assert (run_data["refresh_s"], len(run_data["metrics"]["step"])) == (None, 5), "the last page has all of it"


def test_the_page_of_a_read_only_run_comes_into_the_current_folder(capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        byte_tokenizer(folder / "model")
        run = make_run(folder / "run", steps=2, model=folder / "model", trajectories=[make_trajectory(2)])
        writable, closed = folder / "writable", folder / "closed"
        for path in (writable, closed):
            path.mkdir()
        for path in (folder, writable):
            path.chmod(0o777)
        for path in (closed, run):
            path.chmod(0o555)

        def written_from(directory: Path, *arguments: str) -> Any:
            os.chdir(directory)
            return main([str(run), *arguments])

        assert as_ordinary_user(partial(written_from, writable)) == 0
        page = writable / "run_report.html"
        stdout = capfd.readouterr().out
        assert f"{run} cannot be written (Permission denied); output=FILE chooses another file" in stdout
        assert f"wrote {page}\n" in stdout
        assert read_data(page)["runs"][0]["name"] == "run"
        assert as_ordinary_user(partial(written_from, closed)) == 2
        stdout = capfd.readouterr().err
        assert f"report: give output=FILE: neither {run} nor {closed} cannot be written: Permission denied" in stdout
        assert as_ordinary_user(partial(written_from, closed, f"output={writable}")) == 0
        assert (writable / "report.html").is_file()
        assert as_ordinary_user(partial(written_from, writable, f"output={closed / 'page.html'}")) == 2
        assert f"output={closed / 'page.html'} cannot be written: Permission denied" in capfd.readouterr().err


def test_a_mismatch_of_a_millionth_is_in_the_page(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**metrics_of(4), "token_mult_prob_error": 1.0000003}) + "\n")
    (run_data,) = read_data(write_report([run]))["runs"]
    assert run_data["metrics"]["token_mult_prob_error"][-1] == 1.0000003


def test_bytes_of_a_trained_tokenizer_make_its_texts(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "naïve café 日本語 😀", "x = {'a': 1}\n\treturn x"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = TokenBytes(tmp_path)
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert b"".join(map(read.find_bytes, ids)).decode() == text == tokenizer.decode(ids)
    end = tokenizer.token_to_id("<|end|>")
    assert (read.find_bytes(end), read.decode_text([end]), read.find_bytes(10**6)) == (b"<|end|>", "", b"<1000000>")
    assert set(list_byte_alphabet()) == set(alphabet)


def test_tokens_with_bytes_written_out(tmp_path: Path) -> None:
    """As tokenizers of the SentencePiece kind have them."""
    pieces = {"<unk>": 0, "▁the": 1, "<0xE3>": 2, "<0x81>": 3, "<0x82>": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    replace_, fallback = decoders.Replace("▁", " "), decoders.ByteFallback()
    tokenizer.decoder = decoders.Sequence([replace_, fallback, decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = TokenBytes(tmp_path)
    assert b"".join(map(read.find_bytes, [1, 2, 3, 4, 5])).decode() == " theあ "
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        TokenBytes(tmp_path / "nowhere")
