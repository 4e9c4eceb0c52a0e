"""Every figure of a study on one sheet, to look at after a change: `make gallery`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

from moe_rl.results import figures, plots
from moe_rl.storage.frames import load_study
from moe_rl.study.declaration import read_declaration

WIDTH, COLUMNS, GAP = 900, 4, 12
"""Pixels of a figure, figures in a row, pixels between them."""


def drawn(folder: Path) -> list[Image.Image]:
    """Each figure that can be drawn of the study, of each condition, and each for a paper."""
    declared, images = read_declaration(folder), []
    wanted = {**declared, "figures": [*dict.fromkeys((*figures.FIGURES, *declared["figures"]))]}
    for look in (plots.Look(), plots.Look(3.25, paper=True)):
        with plots.using(look):
            for name, condition, figure in figures.draw_planned(load_study(folder), wanted, every=True):
                print(name, condition or "all conditions", "" if hasattr(figure, "axes") else f"none: {figure}")
                if hasattr(figure, "axes"):
                    plots.write(figure, image := io.BytesIO(), format="png")
                    images.append(Image.open(image).convert("RGB"))
    return images


def sheet(images: list[Image.Image]) -> Image.Image:
    """All of them, each below the others of the column that is the shortest so far."""
    heights, places = [GAP] * COLUMNS, []
    for image in images:
        small = image.resize((WIDTH, image.height * WIDTH // image.width))
        column = heights.index(min(heights))
        places.append((small, (GAP + column * (WIDTH + GAP), heights[column])))
        heights[column] += small.height + GAP
    page = Image.new("RGB", (GAP + COLUMNS * (WIDTH + GAP), max(heights)), "#888888")
    for small, place in places:
        page.paste(small, place)
    return page


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.parent.mkdir(parents=True, exist_ok=True)
    sheet(drawn(Path(sys.argv[1]))).save(out)
    print(out)
