"""The server of followed runs: who gets an answer, and that nothing but the runs is in it."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_grpo.launch.target import make_launch_folder
from megatron_grpo.observability.live.page_server import PageServer
from megatron_grpo.watch import main
from tests.support.report_runs import byte_tokenizer, make_answer, make_run
from tests.support.watched import TOKEN, serve_runs

HOSTILE = "</script><script>owned=1</script>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("runs")
    rows = [make_answer(byte_tokenizer(folder / "model"), HOSTILE)]
    run = make_run(folder / f"run {HOSTILE[:8]}", steps=3, model=folder / "model", trajectories=rows)
    with serve_runs([run]) as server:
        yield server


def get(server: PageServer, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    sent = {"Host": f"127.0.0.1:{server.port}", "Cookie": f"megatron_grpo_watch_{server.port}={TOKEN}"} | headers
    connection.putrequest("GET", path, skip_host=True)
    for name, value in sent.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9"}, 200),
        ({"Host": "[::1]:9"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Host": "10.0.0.1:80"}, 421),
        ({"Host": ""}, 421),
        ({"Cookie": ""}, 401),
        ({"Cookie": "megatron_grpo_watch_1=token-of-tests"}, 401),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/state"])
def test_only_this_machine_and_who_has_the_token_get_an_answer(
    server: PageServer, path: str, headers: dict[str, str], status: int
) -> None:
    assert get(server, path, **headers)[0] == status


def test_the_token_becomes_a_cookie_that_no_script_reads(server: PageServer) -> None:
    status, _, headers = get(server, f"/?token={TOKEN}", Cookie="")
    assert (status, headers["Location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=Strict"} <= set(headers["Set-Cookie"].split("; "))
    assert get(server, "/?token=wrong")[0] == 401


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    with socket.socket() as client:
        client.settimeout(5)
        with pytest.raises(OSError, match="refused"):
            client.connect(("127.0.0.2", server.port))


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/api/table?step=99",
            "/api/table?step=../../etc/passwd",
            "/api/table?source=../x&step=1",
            "/api/table?step=1&run=7",
        ),
        *(
            "/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/api/lanes?seconds=x",
            "/api/prompt?prompt=x",
            "/api/table",
        ),
        *("/api/state?known={", "/api/state?known=[[1]]", "/config.yaml", "/api/table?step=1&run=-1"),
    ],
)
def test_nothing_but_the_runs_is_served(server: PageServer, path: str) -> None:
    status, text, _ = get(server, path)
    assert status == 404
    assert "root:" not in text


def test_texts_of_a_run_stay_data(server: PageServer) -> None:
    status, text, headers = get(server, "/")
    assert (status, HOSTILE in text) == (200, False)
    assert "connect-src 'self'" in text
    assert headers["X-Frame-Options"] == "DENY"
    status, text, headers = get(server, "/api/table?step=1")
    assert json.loads(text)["response"] == [HOSTILE]
    assert headers["Content-Type"].startswith("application/json")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_only_what_is_new_is_sent(server: PageServer) -> None:
    first = json.loads(get(server, "/api/state")[1])["runs"][0]
    assert first["is_whole"]
    assert first["figures"]["metrics"]["step"] == [1, 2, 3]
    answer = json.dumps([first["known"]], separators=(",", ":"))
    second = json.loads(get(server, f"/api/state?known={answer}")[1])["runs"][0]
    assert (second["is_whole"], second["description"], second["figures"]["metrics"]["step"]) == (False, None, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the folder of a run"),
        (["/nowhere"], "is not a folder"),
        (["."], "is not the folder of a run"),
        ([".", "port=70000"], "is no port"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_launched_run_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_launch_folder(tmp_path / "run")
    (folder / "launches.jsonl").write_text('{"target": "slurm"}\n')
    run = folder.parent
    beginning = threading.Timer(0.5, lambda: (run / "config.yaml").write_text("name: late\n"))
    beginning.start()
    assert main([str(run), "--text"]) == 0
    beginning.join()
    text = capsys.readouterr()
    assert "was launched and has not begun: waiting for it" in text.err
    assert "run" in text.out


def test_a_terminal_gets_one_screen(server: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(server.runs[0].folder), "--text"]) == 0
    screen = capsys.readouterr().out
    assert "completed" in screen
    assert "reward" in screen
