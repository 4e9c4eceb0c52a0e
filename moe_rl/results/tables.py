"""A study's numbers as tables of words, for the terminal and for the page alike; every number with its n and method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.errors import RunError
from moe_rl.results.stats import Interval, interval
from moe_rl.results.summary import (
    FATES,
    GAINED,
    HalfLost,
    Metric,
    against,
    compare,
    configs_of,
    factor_of,
    family,
    gaps,
    half_lost_points,
    metric,
    name_of,
    noise_scale,
    numeric,
    outcomes,
    pairs_of,
    per_run,
    replaying,
    summarise,
    unlearned,
    without_value,
)
from moe_rl.storage.frames import Frames

OF_REPLAY = "replay gap std, nats"
"""What replay would do, measured in every arm."""
WITHOUT_NOISE = ("expert slots changed", OF_REPLAY)
"""Rows that describe the network without the router noise, in runs that have it."""


@dataclass(frozen=True)
class Shown:
    """A table to show: its first column holds words, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def arms_of(frames: Frames, declared: Mapping[str, Any]) -> list[str]:
    """The study's arms that have runs, in its order."""
    known = [arm["name"] for arm in declared["arms"]] or sorted(frames.runs["arm"].unique())
    return [arm for arm in known if (frames.runs["arm"] == arm).any()]


def study_tables(frames: Frames, declared: Mapping[str, Any], *, cells: bool = False) -> list[Shown]:
    """All tables of a study. Several combinations of factors are shown side by side, each by itself with `cells`."""
    arms, endpoint, several = arms_of(frames, declared), metric(declared["endpoint"]), len(frames.cells) > 1
    tables = [overview(frames, arms, endpoint), collapse_overview(frames, arms)] if several else []
    gained = [one for one in GAINED if several and len(per_run(frames.cell(frames.cells[0]), one))]
    tables[1:1] = [overview(frames, arms, one) for one in gained]
    for cell in frames.cells if cells or not several else ():
        name = declared["name"] + (f", {cell}" if cell != "base" else "")
        here = frames.cell(cell)
        tables.append(summary_table(here, arms_of(here, declared), name, declared["metrics"]))
    if declared["comparisons"] or not several:
        for one in (endpoint, *map(metric, declared["further_endpoints"])):
            tables += comparison_table(frames, arms, one, declared)
    for factor in dict.fromkeys(f for f in map(factor_of, declared["figures"]) if f):
        tables += half_lost_table(frames, arms, factor, endpoint, declared["comparisons"])
    return tables


SHORT = ((metric("token_ess"), "token\nESS", ".2f"), (metric("expert_change_rate"), "experts\nchanged", ".1%"))
"""What the short table shows beside the endpoint: metric, heading, format of the mean."""


def short_table(frames: Frames, declared: Mapping[str, Any]) -> Shown:
    """A row for each arm at each combination of factors: the endpoint, its difference from the arm that the study
    compares with, and means of what the ratios and the routes did and of the study's own metrics."""
    arms, endpoint = arms_of(frames, declared), metric(declared["endpoint"])
    pairs = pairs_of(arms, declared["comparisons"])
    base = max((b for _, b in pairs), key=[b for _, b in pairs].count, default="")
    shown = {one[0].column for one in SHORT}
    own = [(one, one.name, ".3g") for one in map(metric, declared["metrics"]) if one.column not in shown]
    measured = [one for one in SHORT if one[0].column in frames["steps"]]
    further = measured + own
    fates = outcomes(frames)
    fell, rows, counts = set(fates["fate"]) & {*FATES}, [], set()
    used: list[Interval] = []
    labels = _labels(frames)
    for cell in frames.cells:
        here = frames.cell(cell)
        values = {one.column: per_run(here, one).dropna() for one in (endpoint, *(f[0] for f in further))}
        rows += [(labels[cell], *[""] * (1 + bool(base) + len(further) + bool(fell)))] if len(frames.cells) > 1 else []
        apart = gaps(here, [(arm, base) for arm in arms if base and arm != base], endpoint)
        for arm in (a for a in arms if (here.runs["arm"] == a).any()):
            seeds = _of(values[endpoint.column], arm)
            estimate = interval(seeds) if seeds else None
            difference = interval(gap) if len(gap := apart.get((arm, base), ())) else None
            ended = fates[(fates["arm"] == arm) & (fates["factors"] == cell)]["fate"]
            means = [_of(values[one.column], arm) for one, _, _ in further]
            rows.append((f"{'  ' * (len(frames.cells) > 1)}{arm}", str(estimate or "–"),
                         *[str(difference or "–")] * bool(base),
                         *(_mean(v, f[2], len(seeds)) for v, f in zip(means, further, strict=True)),
                         *[f"{ended.isin(list(FATES)).sum()} of {len(ended)}"] * bool(fell)))
            used += [one for one in (estimate, difference) if one]
            counts.add(len(seeds))
    n = f"{min(counts, default=0)}" if len(counts) < 2 else f"{min(counts)} to {max(counts)}"
    note = [f"Means over n = {n} seed{'s' * (counts != {1})}. {_methods(used)}" if any(counts) else
            f"No run has a value of {endpoint.column!r}."]
    if measured:
        named = " and ".join(f"{' '.join(name.split())} is {one.column}" for one, name, _ in measured)
        note.append(f"{named[0].upper()}{named[1:]} of the table `steps`, over the second half of training.")
    if noise_scale(frames) and any(one.column == "expert_change_rate" for one, _, _ in further):
        note.append("Experts changed: of the network without the router noise.")
    lost = left_out(frames, arms, declared["comparisons"], endpoint)
    note += filter(None, (*_lengths(frames), *_dips(frames), lost))
    header = ("", endpoint.name.replace(", ", ",\n"), *[f"difference\nfrom {base}"] * bool(base),
              *(name for _, name, _ in further), *["collapsed"] * bool(fell))
    return Shown(f"{declared['name']}: {_made_of(frames)}", header, rows, " ".join(note))


def _mean(values: Sequence[float], form: str, seeds: int) -> str:
    """A mean, with the number of its values where it is not that of the endpoint."""
    if not values:
        return "–"
    return format(float(np.mean(values)), form) + f" (n = {len(values)})" * (len(values) != seeds)


def _labels(frames: Frames) -> dict[str, str]:
    """The names of conditions and, where conditions with names of their own differ in router noise, its scale."""
    scales = {cell: noise_scale(frames.cell(cell)) for cell in frames.cells}
    if len({*scales.values()}) == 1:
        return {cell: cell for cell in scales}
    return {cell: cell if "=" in cell else f"{cell}: router noise σ = {scale:g}" if scale else
            f"{cell}: no router noise" for cell, scale in scales.items()}


def _made_of(frames: Frames) -> str:
    """Model, task and length of the runs."""
    configs = configs_of(frames)
    parts = [{one.model.name for one in configs}, {str(one.task) for one in configs},
             {f"{one.steps} steps" for one in configs}]
    return ", ".join(" or ".join(sorted(part)) for part in parts if part)


def _of(values: pd.Series, arm: str) -> list[float]:
    return values.xs(arm).to_list() if arm in values.index.get_level_values(0) else []


def summary_table(frames: Frames, arms: Sequence[str], title: str, own: Sequence[str] = ()) -> Shown:
    """Metric × arm at one combination of factors; `own` names further metrics."""
    cells, replay = summarise(frames, arms, own), replaying(frames)
    count = frames.runs["arm"].value_counts().to_dict()
    rows = [(str(name), *("–" if pd.isna(value) else str(value) for value in row)) for name, row in cells.iterrows()]
    found = [value for _, row in cells.iterrows() for value in row.dropna()]
    note = f"{_methods(found)} Means are over the second half of training, where no row says end, gained or run."
    if (live := [arm for arm in arms if replay.get(arm) is False]) and OF_REPLAY in cells.index:
        note += f" {OF_REPLAY}: counterfactual for {', '.join(live)}, which do{'es' * (len(live) == 1)} not replay."
    if noise_scale(frames) and (still := [name for name in WITHOUT_NOISE if name in cells.index]):
        note += f" {', '.join(still)}: of the network without the router noise."
    return Shown(title, ("mean over seeds, interval", *(f"{arm}\n{_seeds(count[arm])}" for arm in arms)), rows,
                 " ".join([note, *_lengths(frames), *_dips(frames)]))


def overview(frames: Frames, arms: Sequence[str], endpoint: Metric) -> Shown:
    """Combination of factors × arm: the endpoint."""
    rows, found = [], []
    for cell in frames.cells:
        values = per_run(frames.cell(cell), endpoint)
        known = set(values.index.get_level_values(0))
        row = [interval(values[arm].to_list()) if arm in known else None for arm in arms]
        found += [i for i in row if i]
        rows.append((cell, *(f"{i}, n = {i.n}" if i else "–" for i in row)))
    return Shown(f"{endpoint.name}: mean over seeds, interval", ("factors", *arms), rows,
                 " ".join([_methods(found), *_lengths(frames)]))


def collapse_overview(frames: Frames, arms: Sequence[str]) -> Shown:
    """Combination of factors × arm: how many runs collapsed, lasting and recovered apart."""
    fates, rows = outcomes(frames), []
    for cell in frames.cells:
        of_arms = [fates[(fates["factors"] == cell) & (fates["arm"] == arm)]["fate"] for arm in arms]
        rows.append((cell, *(f"{(f == 'lasting').sum()} + {(f == 'recovered').sum()} of {len(f)}" for f in of_arms)))
    return Shown("runs that collapsed: lasting + recovered", ("factors", *arms), rows, " ".join(_dips(frames)))


def comparison_table(frames: Frames, arms: Sequence[str], endpoint: Metric,
                     declared: Mapping[str, Any]) -> list[Shown]:
    """The contrasts, or all pairs of arms; nothing where no two arms share a seed. Of a study of which a part has run,
    p values are adjusted for all that it declares. Seeds that are left out are counted."""
    comparisons, asked = declared["comparisons"], family(declared)
    found, lost = compare(frames, arms, comparisons, endpoint, asked), left_out(frames, arms, comparisons, endpoint)
    if not found and not lost:
        return []
    n = len(found)
    of = f"{n} rows" if n >= asked else f"{asked} comparisons declared, of which {n} are here"
    what = "contrasts decided on beforehand" if comparisons else "all pairs of arms, exploratory"
    several = len(frames.cells) > 1
    header = ("difference", "mean, interval", "n", "p", "p,\nHolm", "smallest\np", "p, log-\nrank")
    rows = [(f"{c.a} − {c.b}" + f", {c.cell}" * several, str(c.result.difference), str(c.result.n),
             *map(_p, (c.result.p, c.p_holm, c.result.p_smallest, c.p_log_rank))) for c in found]
    note = (f"{_methods(c.result.difference for c in found)} p: two-sided, {found[0].result.method} within seeds; "
            f"Holm over the {of}; the smallest p is what this n can reach at all. Log-rank: of times to "
            "the first collapse, unpaired, not adjusted, exploratory; – where nothing collapsed.") if found else ""
    return [Shown(f"{endpoint.name}: {what}", header, rows, " ".join(filter(None, (note, lost))))]


def left_out(frames: Frames, arms: Sequence[str], comparisons: Sequence[Sequence[str]], endpoint: Metric) -> str:
    """The seeds that comparisons leave out, as a sentence; empty where there are none."""
    found = without_value(frames, pairs_of(arms, comparisons), endpoint)
    named = [f"{a} − {b}" + f", {cell}" * (len(frames.cells) > 1) + f": {lost} of {n}"
             for (cell, a, b), (lost, n) in found.items()]
    return (f"Seeds left out, because a run of the pair diverged or has no value, which favours the arm that fails "
            f"more: {'; '.join(named)}.") if named else ""


def half_lost_table(frames: Frames, arms: Sequence[str], factor: str, endpoint: Metric,
                    comparisons: Sequence[Sequence[str]]) -> list[Shown]:
    """Where half of the endpoint is lost along a factor of positive numbers, three at least; else nothing."""
    try:
        values = list(set(against(frames, factor, endpoint)["x"]))
    except RunError:  # the figure says so
        return []
    if not numeric(values) or min(values) <= 0 or len(values) < 3:
        return []
    pairs = pairs_of(arms, comparisons)
    found = half_lost_points(frames, factor, endpoint, pairs)
    rows = [row for one in found for row in _half_lost_rows(one)]
    used = [i for one in found for i in (*one.points.values(), *(s.ratio for s in one.shifts.values()))]
    name = name_of(factor)
    note = (f"Per seed: where its curve, linear over log {name}, falls below half of its best past that best; "
            f"geometric means. A seed that never does counts at {max(values):g}, so its row is a lower bound and its "
            f"ratio one bounded. {_methods(used)} Ratios: 95 % for the {len(pairs)} together "
            "(Bonferroni); p: sign flips of the logs within seeds, not adjusted.")
    note += "" if comparisons else " All pairs: exploratory."
    return [Shown(f"{name} at which half of the {endpoint.name} is lost", ("arm, or ratio of two", "mean, interval",
                  "n", "never lost", "p"), rows, note)] if rows else []


def _half_lost_rows(one: HalfLost) -> Iterable[tuple[str, ...]]:
    where = f", {one.others}" * bool(one.others)
    for arm, point in one.points.items():
        yield f"{arm}{where}", point.printed(".3g"), str(point.n), f"{one.censored[arm]} of {point.n}", ""
    for (a, b), s in one.shifts.items():
        yield f"{a} / {b}{where}", str(s.ratio), str(s.ratio.n), f"{s.censored} of {s.ratio.n}", _p(s.p)


def untrained(frames: Frames) -> str:
    """What to say where no reward of a run ever differed within a group; empty where they did."""
    runs = unlearned(frames)
    some = ", ".join(runs[:6]) + f" and {len(runs) - 6} more" * (len(runs) > 6)
    which = "in every run" if len(runs) == len(frames.runs) else f"in {len(runs)} of {len(frames.runs)} runs ({some})"
    said = f"no gradient {which}: all rewards of every group were equal, so every advantage was 0."
    return said if runs else ""


def _lengths(frames: Frames) -> list[str]:
    """The lengths of runs, as a sentence, where those of one combination of factors differ."""
    lengths = frames.runs["step"].where(frames.runs["state"] != "diverged", frames.runs["steps"])
    if (lengths.groupby(frames.runs["factors"]).nunique() <= 1).all():
        return []
    named = [f"{length} steps ({n} run{'s' * (n > 1)})" for length, n in lengths.value_counts().sort_index().items()]
    return [f"Runs are of different lengths, {', '.join(named)}: second halves and ends are not of the same steps."]


def _dips(frames: Frames) -> list[str]:
    """Runs that end in a dip too short to be called, as a sentence."""
    fates = outcomes(frames)
    open_ends = fates[fates["dip"].notna()]
    named = [f"{r.arm} {r.factors} seed={r.seed} (from step {r.dip:.0f})".replace(" base ", " ")
             for r in open_ends.itertuples()]
    return [f"End in a dip too short to be called a collapse: {', '.join(named)}."] if named else []


def _methods(intervals: Iterable[Interval]) -> str:
    return f"Intervals: {'; '.join(dict.fromkeys(i.method for i in intervals))}."


def _seeds(n: int) -> str:
    return f"n = {n} seed{'s' if n > 1 else ''}"


def _p(p: float) -> str:
    return "–" if math.isnan(p) else f"{p:.3g}"
