"""What figures are drawn with: one colour per arm everywhere, seeds and intervals, and a note that names method and n.

Up to SEEDS seeds are drawn one by one, up to LINES in a panel, and all where some end early; from FEWEST seeds on there
is an interval, on the scale of the quantity, so that it never leaves its range. Bands of more than ARMS are fainter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import ArrayLike

from moe_rl.errors import RunError
from moe_rl.results.stats import FEWEST, Band, band
from moe_rl.storage.columns import entry
from moe_rl.storage.links import replaced

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#8800FF",
    "#000000",
    "#66260D",
    "#112288",
    "#E69F00",
    "#56B4E9",
    "#B3B366",
    "#59004D",
    "#FF738C",
    "#33594D",
    "#A6008C",
    "#806633",
)
"""The first eight have a contrast of 3 : 1 or more on white: four of Okabe and Ito, and four that are as far from them
and each other as can be in CIELAB, seen with and without a common colour blindness."""
MARKERS = "os^DvPX*"
"""The marker that goes with each of the first eight colours, and again with each of the next."""
GREY = "#666666"
METHODS = {
    "grpo": 0,
    "grpo-replay": 1,
    "gspo": 2,
    "gspo_short": 2,
    "grpo-r3": 3,
    "r3": 3,
    "gspo-replay": 4,
    "grpo-tis": 5,
    "tis": 5,
    "dual-clip": 6,
    "grpo-clip-matched": 7,
}
"""Place in COLOURS of methods that many studies have: each has one colour and one marker in all figures."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "savefig.dpi": 160,
    "pdf.fonttype": 42,  # TrueType: conferences refuse Type 3
    "svg.hashsalt": "moe_rl",
    "text.parse_math": False,  # a name may hold a $
}
SEEDS, LINES, ARMS = 8, 24, 6
SIGNED = re.compile(r"_(mean|k1|q\d+)$|^(loss|value_|term_|own_)")
"""Columns that may be negative, or of which nobody knows."""
COLD_START = {"reward": "eval_reward_sampled", "exact": "eval_exact_sampled"}
"""What says of the model before the first step what the column says of the steps."""
BEFORE: dict[str, Any] = {"color": GREY, "linewidth": 1.2, "linestyle": (0, (6, 2)), "label": "before RL", "zorder": 1}
ROW = 3
"""Most panels in a row."""
LABEL = 70
"""Signs of a legend's label in one line."""
LEGEND = 1.3
"""Inches of a legend for which a figure has room; it grows by what is more."""
FORMATS = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
"""What figures are saved as, and the metadata without which the same tables give the same bytes."""


@dataclass(frozen=True)
class Look:
    """How figures are laid out: `width` inches, by default by the number of panels; on `paper` without a title and
    note, which a caption holds, in type of 7 to 8 points."""

    width: float = 0.0
    paper: bool = False

    @property
    def style(self) -> dict[Any, Any]:
        """The settings of matplotlib."""
        small = {"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "savefig.dpi": 300, "axes.linewidth": 0.6}
        small |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7)
        return STYLE | small if self.paper else STYLE


LOOK: ContextVar[Look] = ContextVar("look", default=Look())  # noqa: B039
"""That of the figures that are drawn now, where `using` has set one."""
Draw = TypeVar("Draw", bound=Callable[..., Any])


@contextlib.contextmanager
def using(look: Look) -> Iterator[None]:
    """Draw and save with this look."""
    token = LOOK.set(look)
    try:
        yield
    finally:
        LOOK.reset(token)


def styled(draw: Draw) -> Draw:
    """Makes a function draw with the settings of LOOK."""

    @functools.wraps(draw)
    def drawn(*args: Any, **options: Any) -> Any:
        with matplotlib.rc_context(LOOK.get().style):
            return draw(*args, **options)

    return cast(Draw, drawn)


def colour_of(arm: str, arms: Sequence[str]) -> str:
    """The colour of an arm; a difference `a − b` has that of `a`."""
    return COLOURS[_slot(arm, arms) % len(COLOURS)]


def symbol_of(arm: str, arms: Sequence[str] = ()) -> str:
    """What stands at the means of an arm, or of a difference `a − b`: that of `a`. Without an order only the METHODS
    have one of their own."""
    return MARKERS[_slot(arm, arms or (arm.partition(" − ")[0],)) % len(MARKERS)]


def _slot(arm: str, arms: Sequence[str]) -> int:
    """The place of a method, and of any other arm by the study's order among the places that are left."""
    arm = arm.partition(" − ")[0]
    taken = {METHODS[other]: other for other in reversed(arms) if other in METHODS}  # of two names the first has it
    if arm in METHODS and (arm not in arms or taken[METHODS[arm]] == arm):
        return METHODS[arm]
    if arms == (arm,):
        return 0
    free = [i for i in range(len(COLOURS)) if i not in taken]
    return free[[other for other in arms if other not in taken.values()].index(arm) % len(free)]


def dashes_of(arm: str, arms: Sequence[str]) -> str:
    """The line of an arm, which helps to tell colours apart: solid for the first seven, and for differences."""
    return ("-", "--", ":", "-.")[list(arms).index(arm) // 7 % 4] if arm in arms else "-"


def scale_of(column: str, values: np.ndarray) -> str:
    """The scale of a column's intervals: `logit` for shares, `log` for what is never negative, else `linear`."""
    known, (low, high) = entry(column), (np.nanmin(values, initial=0), np.nanmax(values, initial=0))
    if known is None or SIGNED.search(column) or low < 0:
        return "linear"
    return "log" if known.unit not in ("share", "0–1") else "logit" if high <= 1 else "linear"


# ---------------------------------------------------------------------- figures
def new_figure(panels: int, title: str, width: float = 0.0, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels in rows of three at most; `width` in inches, by default by their number. A width that
    LOOK has decides instead, and how many panels fit into a row."""
    look = LOOK.get()
    rows = -(-panels // min(ROW, max(1, int(look.width / (2 if look.paper else 3.2))) if look.width else ROW))
    columns = -(-panels // rows)
    layout = ConstrainedLayoutEngine(w_pad=0.03 if look.paper else 0.08, h_pad=0.03 if look.paper else 0.06)
    size = (width or 4.2 * max(columns, 2), 4.4 + 3.2 * (rows - 1))
    if look.width:
        share, least = (0.4, 1.3) if look.paper else (0.9, 2.5)
        size = look.width, rows * min(max(share * look.width / columns, least), 2.4 if look.paper else 3.4)
    figure = Figure(figsize=size, layout=layout)
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False).flatten()
    for ax in axes[panels:]:
        ax.remove()
    if not look.paper:
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure, list(axes[:panels])


def finish(figure: Figure, axes: list[Axes], note: str, legend: bool = True) -> Figure:
    """Legend and note below the panels; the note alone where panels have legends of their own. The note is also the
    figure's label, for a caption."""
    look = LOOK.get()
    figure.set_label(f"{note[:1].upper()}{note[1:]}." if note else "")
    for ax in figure.axes:  # of panels that share a scale only the first of a row names it
        spec = ax.get_subplotspec()
        if spec and not spec.is_first_col() and len(ax.get_shared_y_axes().get_siblings(ax)) > 1:
            ax.set_ylabel("")
    if look.paper:
        _thin(figure)
    texts: dict[Text, str] = {}
    for _ in range(2 * bool(look.width)):  # what is broken leaves less room for the rest
        _wrap(figure, texts)
    note = "" if look.paper else textwrap.fill(note, int(13 * figure.get_figwidth()))
    entries = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if legend and (entries or note):
        most = min(LABEL, int(15 * figure.get_figwidth() - 10)) if look.width else LABEL
        handles, labels = list(entries.values()), [_in_lines(label, most) for label in entries]
        for columns in range(max(len(labels), 1), 0, -1):
            box = figure.legend(
                handles, labels, loc="outside lower center", ncols=columns, title=note or None, title_fontsize=9
            )
            if columns == 1 or box.get_window_extent().width < figure.bbox.width:
                break
            box.remove()
        box.get_title().set_color("#555555")
        above = box.get_window_extent().height / figure.dpi - LEGEND * (not look.width)
        figure.set_figheight(figure.get_figheight() + max(above, 0))
    elif note:
        figure.supxlabel(note, fontsize=9, color="#555555")
    return figure


def _thin(figure: Figure) -> None:
    """Lines and markers for a page on which text has 7 to 8 points."""
    for artist in figure.findobj(lambda one: isinstance(one, Line2D | LineCollection)):
        artist.set_linewidth(np.maximum(0.55 * np.asarray(artist.get_linewidth()), 0.5))  # type: ignore[attr-defined]
        if isinstance(artist, Line2D):
            artist.set_markersize(0.7 * artist.get_markersize())


def _wrap(figure: Figure, whole: dict[Text, str]) -> None:
    """Break titles and labels that are longer than their panel; turn ticks that would overlap, or make it higher;
    `whole` keeps the texts."""
    figure.draw_without_rendering()
    more = 0.0
    for ax in figure.axes:
        box = ax.get_window_extent()
        titles = [text for text in ax.get_children() if isinstance(text, Text) and text.get_text()]
        for text in (*titles, ax.xaxis.label, ax.yaxis.label):
            long, lines = text.get_window_extent(), text.get_text().split("\n")
            over = long.height / box.height if text is ax.yaxis.label else long.width / box.width
            if over > 1:
                most = int(max(map(len, lines)) / over)
                lines = whole.setdefault(text, text.get_text()).split("\n")
                text.set_text("\n".join(textwrap.fill(line, most) for line in lines))
        boxes = [
            tick.get_window_extent() for tick in ax.get_xticklabels() if tick.get_text() and not tick.get_rotation()
        ]
        if any(a.x1 > b.x0 and a.x0 < b.x1 for a, b in itertools.pairwise(boxes)):
            for tick in ax.get_xticklabels():
                tick.set(rotation=30, ha="right", rotation_mode="anchor")
        rows, heights = ax.get_subplotspec(), [tick.get_window_extent().height for tick in ax.get_yticklabels()]
        least = (0.95 if LOOK.get().paper else 1.1) * figure.dpi
        need = 1.3 * sum(heights) if isinstance(ax.yaxis.get_major_locator(), FixedLocator) else least
        more = max(more, (need - box.height) * (rows.get_gridspec().nrows if rows else 0))
    figure.set_figheight(figure.get_figheight() + more / figure.dpi)


def same_limits(axes: Sequence[Axes], which: str = "y") -> None:
    """Give panels one scale, which holds what each of them holds, so that they can be compared."""
    limits = [getattr(ax, f"get_{which}lim")() for ax in axes]
    for ax in axes:
        getattr(ax, f"set_{which}lim")(min(low for low, _ in limits), max(high for _, high in limits))


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `<name>.<format>` in every format, the same bytes for the same tables; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [replaced(folder / f"{name}.{form}") for form in formats]
    for path, form in zip(paths, formats, strict=True):
        write(figure, path, metadata=FORMATS[form])
    return paths


def write(figure: Figure, file: Path | BytesIO, **how: Any) -> None:
    """What `figure.savefig` writes, with the numbers of log axes, such as 10⁻³, as the formulas that they are."""
    scaled = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() != "linear"]
    for text in (text for axis in scaled for text in axis.get_ticklabels(which="both")):
        text.set_parse_math(True)
    with matplotlib.rc_context(LOOK.get().style | {"text.parse_math": bool(scaled)}):
        figure.savefig(file, **how)


# ---------------------------------------------------------------------- what stands in a panel
def curves(
    ax: Axes,
    frame: pd.DataFrame,
    column: str,
    x: str,
    arms: Sequence[str],
    *,
    marker: str = "",
    linestyle: str = "-",
    label: str = "",
    order: Sequence[str] = (),
    scale: str = "",
) -> str:
    """Per arm: few seeds thin, their mean thick, the interval as a band. Returns the note that names it.

    `order` fixes the colours, by default `arms`; `scale` that of the interval, by default `scale_of` the column. Raises
    RunError when no arm was measured.
    """
    require_columns(frame, column, x)
    scale = scale or scale_of(column, frame[column].to_numpy(dtype=float))
    present = [arm for arm in arms if (frame["arm"] == arm).any()]
    bands, seeds_drawn = [], False
    for arm in present:
        every = frame[frame["arm"] == arm].dropna(subset=[column]).pivot(index="seed", columns=x, values=column)
        values = every.dropna(axis=1)  # mean and interval only where every seed was measured: n never changes
        if values.empty:
            continue
        colour, b = colour_of(arm, order or arms), band(values.to_numpy(), scale=scale)
        bands.append(b)
        if b.n <= SEEDS and b.n * len(present) <= LINES or values.shape[1] < every.shape[1]:
            seeds_drawn = True
            thin: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.8, "linestyle": linestyle}
            for seed, row in every.iterrows():
                ax.plot(row.dropna(), color=colour, gid=f"{arm} seed={seed} {column}", **thin)
        if b.n >= FEWEST:
            alpha = 0.15 if len(present) <= ARMS else 0.06
            ax.fill_between(values.columns, b.low, b.high, color=colour, alpha=alpha, linewidth=0)
        ax.plot(
            values.columns,
            b.mean,
            color=colour,
            linestyle=dashes_of(arm, order or arms) if linestyle == "-" else linestyle,
            marker=marker and symbol_of(arm, order or arms),
            markersize=4.5,
            markerfacecolor=colour if linestyle == "-" else "white",
            label=label or arm,
            gid=f"{arm} mean {column}",
        )
    if not bands and frame.loc[frame["arm"].isin(arms), column].notna().any():
        raise RunError(f"no {x} has {column!r} of every seed, so there is no mean to draw")
    if not bands:
        raise RunError(f"no run measured {column!r}, so there is nothing to draw")
    if x in ("step", "update", "moe_layer"):
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    return note_of(bands, "band", "thin lines" if seeds_drawn else "")


def require_columns(frame: pd.DataFrame, *columns: str) -> None:
    """Raise RunError for a column that no run has."""
    if missing := [c for c in columns if c not in frame.columns]:
        raise RunError(f"no run measured {', '.join(missing)}, so there is nothing to draw")


def whiskers(ax: Axes, at: ArrayLike, b: Band, colour: str, *, upright: bool = True, linewidth: float = 1.4) -> None:
    """The intervals of a band, where there are seeds enough for one: lines up and down at x = `at`, or along y = it."""
    if b.n >= FEWEST:
        x, y = (at, b.mean) if upright else (b.mean, at)
        reach = [b.mean - b.low, b.high - b.mean]
        ax.errorbar(
            x,
            y,
            reach if upright else None,
            None if upright else reach,
            fmt="none",
            ecolor=colour,
            capsize=3,
            linewidth=linewidth,
        )


def marks(ax: Axes, rows: pd.DataFrame, arm: str, arms: Sequence[str], offset: float) -> Band:
    """One arm at every column of `rows` [seed, column]: each seed a small dot, their mean a large one with its
    interval."""
    values = rows.to_numpy(dtype=float)
    scale = "linear" if np.nanmin(values) < 0 else "log"
    b, x, colour = band(values, scale=scale), np.arange(rows.shape[1]) + offset, colour_of(arm, arms)
    for seed, row in rows.iterrows():
        ax.plot(x, row, ".", color=colour, alpha=0.35, markersize=5, gid=f"{arm} seed={seed} {rows.columns[0]}")
    whiskers(ax, x, b, colour)
    ax.plot(x, b.mean, symbol_of(arm, arms), color=colour, markersize=6, gid=f"{arm} mean {rows.columns[0]}")
    return b


def rows_of(ax: Axes, values: Mapping[str, pd.Series], colours: Mapping[str, str], arms: Sequence[str] = ()) -> str:
    """A row per name: its seeds as dots, their mean, its interval; `arms` fix the markers. Returns the note."""
    bands = []
    for i, (name, seeds) in enumerate(values.items()):
        b = band(seeds.to_numpy(dtype=float)[:, None])
        ax.plot(seeds, np.full(len(seeds), i), ".", color=colours[name], alpha=0.4, markersize=6, gid=f"{name} seeds")
        whiskers(ax, i, b, colours[name], upright=False)
        ax.plot(b.mean, i, symbol_of(name, arms), color=colours[name], markersize=5.5, gid=f"{name} mean")
        bands.append(b)
    names = [_in_lines(name, 16 if LOOK.get().width else 24) for name in values]
    ax.set(yticks=range(len(values)), yticklabels=names, ylim=(len(values) - 0.4, -0.6))
    return note_of(bands, "whisker", "dots") if bands else ""


def cold_start(ax: Axes, steps: pd.DataFrame, column: str) -> None:
    """A line at what the model did before the first step, mean over runs, where that was measured."""
    before = before_training(steps, column)
    if len(before):
        ax.axhline(before.mean(), **BEFORE, gid=f"before RL {column}")


def before_training(steps: pd.DataFrame, column: str) -> pd.Series:
    """What each run measured of the model before the first step, indexed by its condition."""
    measured = COLD_START.get(column, column)
    rows = steps[steps["step"] == 0].reindex(columns=["condition", measured])
    return rows.set_index("condition")[measured].dropna()


# ---------------------------------------------------------------------- words
def note_of(bands: Sequence[Band], interval: str, seeds: str) -> str:
    """What a figure shows of its seeds: n, what the interval is, and how each seed is drawn."""
    counts = sorted({b.n for b in bands})
    if counts == [1]:
        return "n = 1 seed: no interval"
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    methods = dict.fromkeys(b.method for b in bands if b.n >= FEWEST)
    parts = [f"mean over n = {n} seeds", *(f"{interval}: {method} interval" for method in methods)]
    parts += [f"{seeds}: each seed"] if seeds else []
    return "; ".join(parts + ([] if methods else [f"no interval of fewer than {FEWEST}"]))


def _in_lines(label: str, width: int = LABEL) -> str:
    """The label, broken after its + and commas, or before its −, where it is longer than a line."""
    lines = [""]
    for piece in re.split(r"(?<=[+,])|(?= − )", label):
        for part in textwrap.wrap(piece, width - 4, drop_whitespace=False) or [piece]:
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append("    ")
            lines[-1] += part
    return "\n".join(lines)
