"""Writing the page of a run, or of two side by side: report.html in the first one's folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from megatron_grpo.observability.json_files import write_text
from megatron_grpo.observability.page.embed import json_element, packed_element, page
from megatron_grpo.observability.page.run_data import config_of, run_data
from megatron_grpo.observability.page.token_text import TokenBytes, token_bytes_of
from megatron_grpo.observability.page.trajectories import Embedded, embed_steps, token_table

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"
STYLE = "report.css"
SCRIPTS = (
    "elements.js",
    "data.js",
    "chart.js",
    "curves.js",
    "tokens.js",
    "table.js",
    "trajectories.js",
    "configuration.js",
    "report.js",
)
"""In the order in which they are read: the last one begins."""


def write_report(folders: Sequence[Path]) -> Path:
    """Write the page of one run, or of two that are shown side by side.

    Args:
        folders: of the runs; the page appears in the first one, in one piece.

    Returns:
        Path of the page.

    Raises:
        ValueError: a folder is not that of a run.
        OSError: something cannot be read or written.
    """
    runs, data = [], []
    for number, folder in enumerate(folders):
        run = run_data(folder)
        embedded = Embedded()
        vocabulary = _vocabulary(folder, embedded)
        for step, table in embed_steps(folder, vocabulary, embedded):
            data.append(packed_element(f"run{number}-step{step}", table))
        data.append(packed_element(f"run{number}-tokens", token_table(vocabulary, embedded.used)))
        trajectories = {"steps": embedded.steps, "written": embedded.written, "rows": embedded.rows}
        runs.append(run | {"trajectories": {**trajectories, "full": embedded.full, "remark": embedded.remark}})
    assets = resources.files("megatron_grpo.observability.page") / "assets"
    texts = {name: (assets / name).read_text(encoding="utf-8") for name in (STYLE, "body.html", *SCRIPTS)}
    script = '"use strict";\n' + "\n".join(texts[name] for name in SCRIPTS)
    file = folders[0] / REPORT_FILE
    write_text(file, page(texts[STYLE], script, texts["body.html"], [json_element("runs", runs), *data]))
    return file


def try_to_write_report(folder: Path) -> Path | None:
    """Write the page of a run that has ended, whatever is in its folder; None: that failed, and the log says why."""
    try:
        return write_report([folder])
    except Exception as error:  # noqa: BLE001  # the run is over, and how it ended is what counts
        logger.warning("%s could not be written: %s: %s", folder / REPORT_FILE, type(error).__name__, error)
        return None


def _vocabulary(folder: Path, embedded: Embedded) -> TokenBytes | None:
    """The tokens of a run's model; None, with a remark: they are not known on this machine."""
    policy = config_of(folder).get("policy")
    model = policy.get("model") if isinstance(policy, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    try:
        found = token_bytes_of(path) if isinstance(path, str) else None
        reason = f"the tokenizer of {path} is not on this machine"
    except ValueError as error:
        found, reason = None, str(error)
    if found is None:
        embedded.remark = f"Responses are shown as text, not as tokens: {reason}."
    return found
