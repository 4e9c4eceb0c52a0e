"""Figures by the names that studies give them: FIGURES, `against:<factor>[:<metric>]`, and a user's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from moe_rl.errors import RunError
from moe_rl.registry import Use, lookup, unknown
from moe_rl.results import engine_figures, training_figures
from moe_rl.results.comparison_figures import against_factor, learning_by_cell, survival
from moe_rl.results.factors import ACROSS, factor_of
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames

Draw = Callable[[Frames, Sequence[str]], Figure]
FIGURES: dict[str, Draw] = {
    **{name: getattr(training_figures, name) for name in training_figures.FIGURES},
    **{name: getattr(engine_figures, name) for name in engine_figures.FIGURES},
    "survival": survival,
    "learning_by_cell": learning_by_cell,
}
TOGETHER = ("learning_by_cell",)
"""Figures of all combinations of factors, as `against:…` are."""


def draw(name: str, endpoint: str, contrasts: Sequence[Sequence[str]] = ()) -> Draw:
    """The figure of a name: one of FIGURES, or a user's own `pkg.module:function`. `against:optimizer.lr` draws the
    endpoint over a factor, `against:optimizer.lr:slot_change` another metric. One that has keyword parameters
    `endpoint` or `contrasts` gets the study's. Raises ConfigError for an unknown one."""
    if name.startswith(ACROSS):
        factor, _, column = name.removeprefix(ACROSS).partition(":")
        return partial(against_factor, factor=factor, metric=metric(column or endpoint), contrasts=contrasts)
    if name not in FIGURES and not Use(name).own:
        unknown("figure", name, [*FIGURES, f"{ACROSS}<factor>", f"{ACROSS}<factor>:<metric>", "pkg.module:name"])
    found = lookup("figure", name, FIGURES)
    study = {"endpoint": metric(endpoint), "contrasts": contrasts}
    return partial(found, **{k: v for k, v in study.items() if k in inspect.signature(found).parameters})


def planned(names: Sequence[str], cells: Sequence[str], *, every: bool = False) -> list[tuple[str, str | None]]:
    """Which figures to draw of which combination of factors (None: of all together).

    A figure of one combination is drawn where there is only one, or of `every` one.
    """
    across = [name for name in names if factor_of(name) or name in TOGETHER]
    return [(name, None) for name in across] + [(name, cell) for cell in cells if every or len(cells) == 1
                                                for name in names if name not in across]


def drawn(frames: Frames, declared: Mapping[str, Any], *,
          every: bool = False) -> Iterator[tuple[str, str | None, Figure | RunError]]:
    """The figures that are `planned` of a study: name, combination of factors, and the figure, or why there is none:
    nobody measured its columns, or a user's own function fails."""
    arms = [arm["name"] for arm in declared["arms"]] or sorted(frames.runs["arm"].unique())
    for name, cell in planned(declared["figures"], frames.cells, every=every):
        own, here = Use(name).own and not name.startswith(ACROSS), frames if cell is None else frames.cell(cell)
        found: Figure | RunError
        try:
            found = draw(name, declared["endpoint"], declared["contrasts"])(here, arms)
            if own:
                _check(found)
        except RunError as error:
            found = error
        except (Exception, SystemExit) as error:  # their code may raise anything
            if not own:
                raise
            found = RunError(f"{type(error).__name__}: {error}")
        yield name, cell, found


def _check(figure: object) -> None:
    """Raise what saving it would raise."""
    if not isinstance(figure, Figure):
        raise RunError(f"its function gave {figure!r}, and no matplotlib Figure: it should return the one that it drew")
    figure.draw_without_rendering()


def file_name(name: str) -> str:
    """The name of a figure's files."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def title_of(name: str) -> str:
    """The first sentence about a figure, for a caption."""
    about = against_factor if name.startswith(ACROSS) else lookup("figure", name, FIGURES)
    return " ".join((about.__doc__ or "").split("\n\n")[0].split())
