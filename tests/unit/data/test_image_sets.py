"""Sets of rows with images: every row is checked before the start."""

import base64
import json
from pathlib import Path
from typing import Any

from PIL import Image

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.data.rows import SetReport, examine_set
from tests.support.image_models import draw_picture, save


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


def test_rows_may_leave_images_to_turns(tmp_path: Path) -> None:
    report = examine(tmp_path, [{}, {"prompt": "What now?"}])
    assert (report.problems, list(report.usable)) == ([], [0, 1])


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


def test_damaged_files_are_named_by_their_rows_before_the_start(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    files = {
        "a.png": draw_picture(8, 8)[:-300],
        "b.png": save(Image.new("1", (10_000, 8_000))),
        "c.webp": save(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=100),
        "d.gif": save(frames[0], "GIF"),
        "e.png": draw_picture(1, 2),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    report = examine(tmp_path, [*({"image": name} for name in files), {"image": ["e.png"] * 50}])
    assert list(report.usable) == [4]
    assert [problem.text.partition(": ")[2] for problem in report.problems] == [
        "image 1 cannot be decoded: Truncated File Read",
        "image 1 has 10000 x 8000 pixels, more than 67,108,864 together",
        "image 1 is an animation of 2 images; give one of them",
        "image 1 is no image that can be read; give PNG, JPEG, WEBP",
        "the prompt has 50 images, more than data.max_images=8",
    ]
