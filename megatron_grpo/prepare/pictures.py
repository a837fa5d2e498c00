"""Pictures of squares to count: rows whose images are data URLs."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from typing import Any

CELL = 8  # pixels along a side of a cell, of which a picture has a grid; a cell becomes one token
QUESTION = "How many squares?"
SIDES = (3, 4)  # cells from top to bottom, and from left to right
LARGEST = 8  # number of squares


def draw_counting_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Draw pictures with 1 to 8 dark squares on a light ground."""
    randomness = random.Random(seed)
    for _ in range(count):
        squares = randomness.randint(1, LARGEST)
        yield {
            "prompt": QUESTION,
            "answer": str(squares),
            "image": draw_squares(squares, randomness),
            "task_name": "counting",
        }


def draw_squares(squares: int, randomness: random.Random) -> str:
    """Draw squares, each in a cell of its own; returns a PNG data URL."""
    from PIL import Image

    rows, columns = randomness.choice(SIDES), randomness.choice(SIDES)
    ground = tuple(randomness.randint(200, 255) for _ in range(3))
    picture = Image.new("RGB", (columns * CELL, rows * CELL), ground)
    for cell in randomness.sample(range(rows * columns), squares):
        colour = tuple(randomness.randint(0, 140) for _ in range(3))
        side = randomness.randint(CELL // 2, CELL - 2)
        x, y = (randomness.randint(1, CELL - 1 - side) for _ in range(2))
        corner = (cell % columns * CELL + x, cell // columns * CELL + y)
        picture.paste(colour, (*corner, corner[0] + side, corner[1] + side))
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
