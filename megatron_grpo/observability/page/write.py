"""Writes the report page of one run, or of two side by side."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_grpo.batch.rollout_files import ROLLOUTS_FOLDER, ROWS_FOLDER, VALIDATION_FOLDER, find_recorded_steps
from megatron_grpo.config.algorithms import choose_imported, find_algorithm
from megatron_grpo.config.hiding import hide_values
from megatron_grpo.config.keys import flatten
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.outside_files import read_json, read_yaml
from megatron_grpo.config.schema import Config
from megatron_grpo.observability import run_files
from megatron_grpo.observability.alarms import read_alarms
from megatron_grpo.observability.page.trajectories import (
    TokenBytes,
    load_token_bytes,
    make_step_tables,
    make_token_table,
)

REPORT_FILE = "report.html"
STYLE = "report.css"
# Scripts in the order in which the page runs them; the last one starts the page.
SCRIPTS = tuple(
    f"{name}.js"
    for name in (
        *("elements", "data", "chart", "alarms", "curves", "tokens", "table", "kinds", "detail"),
        *("narrowing", "trajectories", "configuration", "refresh", "report"),
    )
)
# JSON escapes of HTML's special characters; json.dumps itself escapes all non-ASCII characters.
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
_DIGITS = 10  # significant digits of a number in the page: some metrics differ from 1 by a millionth
logger = logging.getLogger(__name__)


def make_packed_element(name: str, value: Any) -> str:
    """Make a script element that holds gzipped JSON in base 64."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # non-finite numbers are rare, and searching for them takes longest
        text = json.dumps(run_files.replace_non_finite(value, _DIGITS), separators=(",", ":"))
    packed = gzip.compress(text.encode(), compresslevel=6, mtime=0)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>\n'


def format_escaped_json(value: Any) -> str:
    """Format as ASCII JSON without `<`, `>` and `&`; non-finite numbers become null."""
    text = json.dumps(run_files.replace_non_finite(value, _DIGITS), separators=(",", ":"), allow_nan=False)
    return text.translate(ESCAPES)


def render_page(
    style: str, script: str, body: str, data: Sequence[str], title: str = "Run report", *, asks: bool = False
) -> str:
    """Render a page whose security policy allows this script alone.

    `asks`: it may ask the server that it comes from for data. `body` is HTML of this package, without data of a run;
    `data` has elements that hold escaped or packed JSON.
    """
    hashes = []
    for kind, text in (("style", style), ("script", script)):
        assert f"</{kind}" not in text.lower(), f"the {kind} would end its own element"
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes.append(f"{kind}-src 'sha256-{digest}'; ")
    asking = "connect-src 'self'; " if asks else ""
    policy = f"default-src 'none'; {''.join(hashes)}img-src data:; {asking}base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        f"{''.join(data)}<script>{script}</script>\n</body>\n</html>\n"
    )


def read_run_data(folder: Path) -> dict[str, Any]:
    """Read all data of a run for the page, but for its trajectories.

    Raises ValueError if the folder is not a run's, or a line of a file is damaged; the message names it.
    """
    require_run_folder(folder)
    steps, validations = (
        run_files.read_steps(folder / name) for name in (run_files.METRICS_FILE, run_files.VALIDATION_FILE)
    )
    return describe_run(folder) | {
        "metrics": collect_columns([_select_metrics(row) for row in steps]),
        **{
            group: collect_columns([{"step": row["step"], **row.get(group, {})} for row in steps])
            for group in run_files.CLOCK_FIGURES
        },
        "validation": collect_columns([_select_metrics(row) for row in validations]),
        "alarms": read_alarms(folder),
    }


def require_run_folder(folder: Path) -> None:
    """Raise ValueError unless a folder is a run's."""
    if not (folder / run_files.METRICS_FILE).exists() and not (folder / run_files.CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} is not the folder of a run: it has neither {run_files.METRICS_FILE} nor {run_files.CONFIG_FILE}"
        )


def describe_run(folder: Path) -> dict[str, Any]:
    """Describe a run without its figures: name, settings, starts, summary.

    ValueError: a line of its starts is damaged.
    """
    defaults = dict(flatten(asdict(Config()) | {loop: asdict(section()) for loop, section in LOOPS.items()}))
    # Of each setting: key, value, and the default where it differs.
    recorded = read_config(folder)
    settings = [
        (key, _to_text(value), _to_text(defaults[key]) if key in defaults and defaults[key] != value else None)
        for key, value in recorded.items()
    ]
    starts = run_files.read_lines(folder / run_files.STARTS_FILE)
    return {
        "name": folder.resolve().name,
        **_list_facts(recorded, starts),
        "summary": _read_mapping(folder / run_files.SUMMARY_FILE, read_json),
        "config": settings,
        "starts": starts,
    }


def _list_facts(recorded: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe what ran: recipe, algorithm, model, code; and the metrics to begin with."""
    names = {"recipe": "name", "algorithm": "algorithm", "model": "policy.model.path"}
    about = {name: str(recorded[key]) for name, key in names.items() if recorded.get(key) is not None}
    codes = dict.fromkeys(str(start["code"]) for start in starts if start.get("code") is not None)
    # An algorithm of the user's own is not imported here: the recorded name may be anybody's.
    method = find_algorithm(choose_imported(about.get("algorithm")))
    return {"about": about | ({"code": ", ".join(codes)} if codes else {}), "leading": list(method.leading_metrics)}


def _read_mapping(file: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    try:
        values = read(file)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the settings of a run by key; empty if they cannot be read."""
    return dict(flatten(hide_values(_read_mapping(folder / run_files.CONFIG_FILE, read_yaml))))


def collect_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns, with None where a row lacks a name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _select_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in run_files.CLOCK_FIGURES}


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def write_report(folders: Sequence[Path], refresh_s: float | None = None) -> Path:
    """Write report.html of one run or two, as `render_report`; returns its path.

    Raises ValueError if a folder is not a run's, OSError if a file cannot be read or written.
    """
    file = folders[0] / REPORT_FILE
    run_files.write_text(file, render_report(folders, refresh_s))
    return file


def render_report(folders: Sequence[Path], refresh_s: float | None = None) -> str:
    """Render the HTML of one run or two.

    `refresh_s`: seconds after which the page loads itself again; None: it does not, because the runs have ended.
    """
    runs: list[dict[str, Any]] = []
    data: list[str] = []
    for number, folder in enumerate(folders):
        run, model = read_run_data(folder), read_config(folder).get("policy.model.path")
        reason = f"the tokenizer of {model} is not on this machine"
        try:
            vocabulary = load_token_bytes(model) if isinstance(model, str) else None
        except ValueError as error:
            vocabulary, reason = None, str(error)
        token_ids: set[int] = set()
        learnt = ROWS_FOLDER if find_recorded_steps(folder / ROWS_FOLDER) else ROLLOUTS_FOLDER
        for source, kind in (("training", learnt), ("validation", VALIDATION_FOLDER)):
            counts = _add_tables(data, f"run{number}-{source}", folder, kind, vocabulary, token_ids)
            run[f"{source}_tables"] = {"kind": kind} | counts
        data.append(make_packed_element(f"run{number}-tokens", make_token_table(vocabulary, token_ids)))
        run["remark"] = None if vocabulary else f"Responses are shown as text, not as tokens: {reason}."
        run["refresh_s"], run["written"] = refresh_s, datetime.now().strftime("%H:%M:%S")
        runs.append(run)
    data.insert(0, make_runs_element(runs))
    return render_page(*read_assets(SCRIPTS), data)


def make_runs_element(runs: Sequence[Mapping[str, Any]]) -> str:
    """Make the element with the data of the runs that the page reads first."""
    return f'<script type="application/json" id="runs">{format_escaped_json(runs)}</script>\n'


def read_assets(scripts: Sequence[str]) -> tuple[str, str, str]:
    """Read the style, these scripts as one, and the body of the page."""
    assets = resources.files("megatron_grpo.observability.page") / "assets"
    texts = {name: (assets / name).read_text(encoding="utf-8") for name in (STYLE, "body.html", *scripts)}
    return texts[STYLE], '"use strict";\n' + "\n".join(texts[name] for name in scripts), texts["body.html"]


def _add_tables(
    data: list[str], name: str, folder: Path, kind: str, vocabulary: TokenBytes | None, token_ids: set[int]
) -> dict[str, Any]:
    """Add tables of steps to `data`, their tokens to `token_ids`; return counts."""
    counts: dict[str, Any] = {"steps": [], "written": 0, "rows": 0, "full": 0}
    for step, rollouts, table in make_step_tables(folder, kind, vocabulary):
        data.append(make_packed_element(f"{name}{step}", table))
        counts["steps"].append(step)
        counts["written"] += rollouts
        counts["rows"] += len(table["group"])
        counts["full"] += len(table["full"])
        for trajectory in table["full"].values():
            token_ids.update(trajectory.get("ids", ()))
    return counts


def try_to_write_report(folder: Path) -> Path | None:
    """Write the page of a run, or log why this failed."""
    try:
        return write_report([folder])
    except Exception as error:  # noqa: BLE001  # a failed report must not change the outcome of the run
        logger.warning("%s could not be written: %s: %s", folder / REPORT_FILE, type(error).__name__, error)
        return None
