"""What operators have of a real run: Prometheus scrapes it, a trace is opened, a collector gets the spans of steps."""

import gzip
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import ClassVar

import pytest

import megatron_grpo
from megatron_grpo.observability.prometheus import TARGETS_FILE

pytestmark = pytest.mark.slow
SERIES = re.compile(r"ray_(?:megatron_grpo|vllm)_\w+")
SCRAPE_S = 60.0


def read_dashboard_series() -> set[str]:
    dashboard = (resources.files("megatron_grpo.observability") / "grafana_dashboard.json").read_text()
    expressions = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in SERIES.findall(expression)}
    return names - {"ray_megatron_grpo_alarms_total"}  # Ray exports a counter with its first count, here an alarm


class Scraper(megatron_grpo.Callback):
    """Scrapes as Prometheus would until all series of the dashboard are there, and ends the run."""

    def __init__(self) -> None:
        self.text = ""

    def on_start(self, step: int, run_dir: Path) -> None:
        self.targets = json.loads((run_dir / TARGETS_FILE).read_text())

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        if step < 3:
            return False
        end, (group,) = time.monotonic() + SCRAPE_S, self.targets
        while time.monotonic() < end and read_dashboard_series() - set(SERIES.findall(self.text)):
            time.sleep(1.0)
            self.text = "".join(
                urllib.request.urlopen(f"http://{target}/metrics", timeout=10).read().decode()
                for target in group["targets"]
            )
        return True


class Collector(BaseHTTPRequestHandler):
    """Keeps what an exporter of OpenTelemetry posts."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    server.shutdown()


def test_a_real_run_has_every_series_and_the_spans_of_its_steps(tmp_path: Path, collector: str) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    scraper, run_dir = Scraper(), tmp_path / "run"
    settings = [f"logger.otlp_endpoint={collector}", "logger.prometheus=true", "logger.trace_steps=[2]"]
    megatron_grpo.train(
        ["+exp=quickstart_async", f"run_dir={run_dir}", "grpo.max_num_steps=20", "grpo.val_period=2", *settings],
        callbacks=[scraper],
    )
    missing = read_dashboard_series() - set(SERIES.findall(scraper.text))
    assert not missing
    assert re.search(r'ray_megatron_grpo_step\{[^}]*run="run"[^}]*\} [123]', scraper.text)  # Ray exports every 10 s
    events = json.loads((run_dir / "traces" / "step_2.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {"driver", "policy rank 0", "policy rank 1", "generation engine 0", "rollout worker 0"} <= names
    spans = [event for event in events if event["ph"] == "X"]
    (step,) = [event for event in spans if event["name"] == "step 2"]
    assert all(event["ts"] < step["ts"] + step["dur"] and event["ts"] + event["dur"] > step["ts"] for event in spans)
    assert {"train", "generate"} <= {event["name"] for event in spans}
    exported = [
        span
        for body in Collector.bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    roots = [span for span in exported if span.name == "step"]
    assert len(roots) == 3
    children = [span for span in exported if span.parent_span_id == roots[1].span_id]
    assert {"train", "generate"} <= {span.name for span in children}
    assert len({span.trace_id for span in exported}) == 3, "a trace for each step"
