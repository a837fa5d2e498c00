"""Sets of rows with images: every row is checked before the start."""

import base64
import json
from pathlib import Path
from typing import Any

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.data.rows import SetReport, examine_set
from tests.support.image_models import draw_picture


def examine(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> SetReport:
    file = folder / f"rows{len(list(folder.iterdir()))}.jsonl"
    file.write_text("".join(json.dumps({"prompt": "Which?", "answer": "1", **row}) + "\n" for row in rows))
    data = DataConfig(train_path=str(file), image_key="image", **settings)
    return examine_set(DatasetConfig(path=str(file)), data, {"math": "math"})


def test_rows_with_their_images_are_usable(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(draw_picture(1, 2))
    url = f"data:image/png;base64,{base64.b64encode(draw_picture(2, 2)).decode()}"
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which?"}]
    rows = [
        {"image": "a.png"},
        {"image": [url, "a.png"], "prompt": "<image> or <image>?"},
        {"image": None},
        {"prompt": [{"role": "user", "content": parts}]},
        {"image": url},
        {"image": str(tmp_path / "a.png")},
    ]
    report = examine(tmp_path, rows)
    assert report.problems == []
    assert list(report.usable) == list(range(6))
    assert report.duplicates == 1, "the same text with another image is another prompt"


def test_rows_whose_images_are_wrong_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(draw_picture(1, 2))
    rows = [
        {"image": "b.png"},
        {"image": ["a.png"] * 3},
        {"image": "a.png", "prompt": "<image> and <image>"},
        {"image": "https://example.com/a.png"},
        {"image": "a.png"},
    ]
    report = examine(tmp_path, rows, max_images=2)
    texts = [problem.text for problem in report.problems]
    assert list(report.usable) == [4]
    assert f"image 1 is not there: {tmp_path / 'b.png'}" in texts[0]
    assert texts[1].endswith("the prompt has 3 images, more than data.max_images=2")
    assert "has 1 images in its column, and 2 places for images" in texts[2]
    assert "nothing is fetched" in texts[3]
    assert all("data.image_key" in text for text in texts)
