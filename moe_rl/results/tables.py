"""A study's numbers as tables of words, for the terminal and for the page alike; every number with its n and method."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.config import Arm, leaves
from moe_rl.metrics.rounding import number
from moe_rl.objectives.methods import spell_out
from moe_rl.objectives.spelling import fill_in
from moe_rl.results.stats import FEWEST, TOO_FEW, Interval, difference, interval, printed_p
from moe_rl.results.summary import (
    FATES,
    MAIN,
    RUN,
    Metric,
    compare,
    configs_by_text,
    configs_of,
    family,
    gaps,
    metric,
    outcomes,
    pairs_of,
    per_run,
    summarise,
)
from moe_rl.storage.frames import Frames


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


def study_tables(
    frames: Frames, declared: Mapping[str, Any], *, every: bool = False, compared: bool = False
) -> list[Shown]:
    """The short table, the summary of a study with one condition, or with `every` of each, and the comparisons: those
    that are declared or, for one condition and where `compared`, all pairs."""
    arms, several = arms_of(frames, declared), len(frames.conditions) > 1
    tables = [short_table(frames, declared)]
    for condition in frames.conditions if every or not several else ():
        here = frames.condition(condition)
        title = declared["name"] + (f", {condition}" if condition != "base" else "")
        tables.append(summary_table(here, arms_of(here, declared), title, declared["metrics"]))
    if declared["comparisons"] or compared or not several:
        for endpoint in map(metric, (declared["endpoint"], *declared["further_endpoints"])):
            tables += comparison_table(frames, arms, endpoint, declared)
    return tables


SHORT = ((metric("token_ess"), "token\nESS", ".2f"), (metric("expert_change_rate"), "experts\nchanged", ".1%"))
"""What the short table shows beside the endpoint: metric, heading, format of the mean."""


def short_table(frames: Frames, declared: Mapping[str, Any]) -> Shown:
    """A row for each arm at each condition: the endpoint, its difference from the arm that the study
    compares with, the means of SHORT and of the study's own metrics, and how many runs collapsed."""
    arms, endpoint, several = arms_of(frames, declared), metric(declared["endpoint"]), len(frames.conditions) > 1
    baselines = [b for _, b in pairs_of(arms, declared["comparisons"])]
    base = max(baselines, key=baselines.count, default="")
    further = [column for column in SHORT if column[0].column in frames["steps"]]
    columns = {column[0].column for column in SHORT}
    further += [
        (column, column.name, ".3g") for column in map(metric, declared["metrics"]) if column.column not in columns
    ]
    fates, intervals, counts = outcomes(frames), list[Interval](), set[int]()
    header = (
        "",
        endpoint.name.replace(", ", ",\n"),
        *[f"difference\nfrom {base}"] * bool(base),
        *(name for _, name, _ in further),
        "collapsed",
    )
    rows: list[tuple[str, ...]] = []
    for condition in frames.conditions:
        here = frames.condition(condition)
        rows += [(condition, *[""] * (len(header) - 1))] * several
        values = [per_run(here, chosen).dropna() for chosen in (endpoint, *(chosen for chosen, _, _ in further))]
        differences = gaps(here, [(arm, base) for arm in arms if base and arm != base], endpoint)
        for arm in (arm for arm in arms if (here.runs["arm"] == arm).any()):
            seeds, *others = (_of(series, arm) for series in values)
            mean = interval(seeds) if seeds else None
            gap = differences.get((arm, base), ())
            apart = difference(gap) if len(gap) else None
            ended = fates[(fates["arm"] == arm) & (fates["condition"] == condition)]["fate"]
            rows.append(
                (
                    f"{'  ' * several}{arm}",
                    str(mean or "–"),
                    *[str(apart or "–")] * bool(base),
                    *(_mean(v, form, len(seeds)) for v, (_, _, form) in zip(others, further, strict=True)),
                    f"{ended.isin(list(FATES)).sum()} of {len(ended)}",
                )
            )
            intervals += [value for value in (mean, apart) if value]
            counts.add(len(seeds))
    n = " to ".join(map(str, sorted({min(counts, default=0), max(counts, default=0)})))
    means = f"Means over n = {n} seed{'s' * (n != '1')}. {_methods(intervals)}"
    note = [means if any(counts) else f"No run has a value of {endpoint.column!r}.", *_lengths(frames)]
    note.append(left_out(frames, arms, declared["comparisons"], endpoint))
    spelled = {config.arm.name: spell_out(config.arm) for config in configs_of(frames)}
    note += ["Arms: " + "; ".join(f"{arm} is {spelled[arm]}" for arm in arms if arm in spelled) + "."] * bool(spelled)
    return Shown(f"{declared['name']}: {_made_of(frames)}", header, rows, " ".join(filter(None, note)))


def latex(frames: Frames, metrics: Sequence[str], arms: Sequence[str] = ()) -> str:
    """Arms × metrics with intervals over seeds, for booktabs; the first line is a comment on n and method."""
    chosen = [metric(name) for name in metrics or (MAIN.name,)]
    frames, several = frames.of_arms(arms) if arms else frames, len(frames.conditions) > 1
    head, rows, shown = ["arm", *["condition"] * several, *(measured.name for measured in chosen)], [], list[Interval]()
    for condition in frames.conditions:
        values = [per_run(frames.condition(condition), measured).dropna() for measured in chosen]
        for arm in arms or frames.runs["arm"].unique():
            means = [interval(of) if (of := _of(column, arm)) else None for column in values]
            cells = (
                "$" + str(mean).removesuffix(" [–]").replace(" [", "\\ [") + "$" if mean else "--" for mean in means
            )
            rows.append(" & ".join([*map(_tex, [arm, *[condition] * several]), *cells]) + r" \\")
            shown += filter(None, means)
    seeds = " to ".join(map(str, sorted({f(mean.n for mean in shown) for f in (min, max)}))) if shown else "0"
    body = [" & ".join(map(_tex, head)) + r" \\", r"\midrule", *rows]
    columns = "l" * (1 + several) + "r" * len(chosen)
    start = [f"% Means over n = {seeds} seeds. {_methods(shown)}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    return "\n".join([*start, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _tex(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", "/"))


def _mean(values: Sequence[float], form: str, seeds: int) -> str:
    """A mean, with the number of its values where it is not that of the endpoint."""
    if not values:
        return "–"
    return format(float(np.mean(values)), form) + f" (n = {len(values)})" * (len(values) != seeds)


def _made_of(frames: Frames) -> str:
    """Model, task and length of the runs."""
    configs = configs_of(frames)
    parts = [
        {config.model.name for config in configs},
        {str(config.task) for config in configs},
        {f"{config.steps} steps" for config in configs},
    ]
    return ", ".join(" or ".join(sorted(part)) for part in parts if part)


def _of(values: pd.Series, arm: str) -> list[float]:
    return values.xs(arm).to_list() if arm in values.index.get_level_values(0) else []


def summary_table(frames: Frames, arms: Sequence[str], title: str, own: Sequence[str] = ()) -> Shown:
    """Metric × arm at one condition; `own` names further metrics."""
    cells = summarise(frames, arms, own)
    count = frames.runs["arm"].value_counts().to_dict()
    rows = [(str(name), *("–" if pd.isna(value) else str(value) for value in row)) for name, row in cells.iterrows()]
    intervals = [value for _, row in cells.iterrows() for value in row.dropna()]
    note = f"{_methods(intervals)} Means are over the second half of training, where no row says end, gained or run."
    return Shown(
        title,
        ("mean over seeds, interval", *(f"{arm}\n{_seeds(count[arm])}" for arm in arms)),
        rows,
        " ".join([note, *_lengths(frames)]),
    )


def comparison_table(frames: Frames, arms: Sequence[str], endpoint: Metric, declared: Mapping[str, Any]) -> list[Shown]:
    """The contrasts, or all pairs of arms; nothing where no two arms share a seed. Of a study of which a part has run,
    p values are adjusted for all that it declares. Seeds that are left out are counted."""
    comparisons, asked = declared["comparisons"], family(declared)
    results = compare(frames, arms, comparisons, endpoint, asked)
    lost = left_out(frames, arms, comparisons, endpoint)
    if not results and not lost:
        return []
    n = len(results)
    of = f"{n} rows" if n >= asked else f"{asked} comparisons declared, of which {n} are here"
    what = "comparisons of the study, within each condition" if comparisons else "none declared: exploratory"
    several = len(frames.conditions) > 1
    header = ("difference", "mean, interval", "n", "p", "p,\nHolm", "smallest\np")
    rows = [
        (
            f"{c.a} − {c.b}" + f", {c.condition}" * several,
            str(c.result.difference),
            str(c.result.n),
            *(printed_p(p, c.result.n) for p in (c.result.p, c.p_holm, c.result.p_smallest)),
        )
        for c in results
    ]
    methods_of_p = (f"two-sided, {c.result.method} within seeds" if c.result.n >= FEWEST else TOO_FEW for c in results)
    tests = "; ".join(dict.fromkeys(methods_of_p))
    methods = _methods(c.result.difference for c in results)
    note = f"{methods} p: {tests}; Holm over the {of}; the smallest p of this n. "
    return [Shown(f"{endpoint.name}: {what}", header, rows, note * bool(results) + lost)]


def left_out(frames: Frames, arms: Sequence[str], comparisons: Sequence[Sequence[str]], endpoint: Metric) -> str:
    """A sentence on the seeds that `compare` leaves out, as a run of the pair diverged or has no number."""
    named = []
    for condition in frames.conditions:
        lost = per_run(frames.condition(condition), endpoint).isna().astype(float).unstack(0)
        for a, b in pairs_of(arms, comparisons):
            either = (lost[a] + lost[b]).dropna() if {a, b} <= {*lost} else pd.Series(dtype=float)
            if either.any():
                where = f", {condition}" * (len(frames.conditions) > 1)
                named.append(f"{a} − {b}{where}: {int((either > 0).sum())} of {len(either)}")
    text = "Seeds left out, because a run of the pair diverged or has no value, which favours the arm that fails more: "
    return f"{text}{'; '.join(named)}." if named else ""


def untrained(frames: Frames) -> str:
    """A sentence on the runs in which no reward of any step differed within a group; empty if there are none."""
    steps = frames["steps"]
    if "zero_variance_groups" not in steps or frames.runs.empty:
        return ""
    least = steps.groupby(RUN)["zero_variance_groups"].min()
    named = [
        f"{arm} {condition} seed={seed}".replace(" base ", " ") for arm, condition, seed in least.index[least == 1]
    ]
    some = ", ".join(named[:6]) + f" and {len(named) - 6} more" * (len(named) > 6)
    text = f"no gradient in {len(named)} of {len(frames.runs)} runs ({some}): all rewards of every group were equal."
    return text if named else ""


def cautions(frames: Frames, declared: Mapping[str, Any]) -> str:
    """The declared caution, and what this number of seeds cannot show."""
    n = int(frames.runs.groupby(["arm", "condition"]).size().min())
    few = f"{_seeds(n)}: no interval and no p-value. Run at least {FEWEST}."
    small = f"{_seeds(n)}: no p-value can be below {2.0 ** (1 - n):g}."
    return " ".join([*filter(None, [declared["caution"]]), *[few] * (n < FEWEST), *[small] * (FEWEST <= n < 6)])


def cost_table(frames: Frames, declared: Mapping[str, Any]) -> Shown:
    """What each arm took: runs, hours, seconds of a step, response tokens."""
    configs = configs_by_text(frames)
    lengths = frames["steps"].reindex(columns=[*RUN, "response_tokens"]).groupby(RUN)["response_tokens"].sum()
    rows = []
    for arm in arms_of(frames, declared):
        runs = frames.runs[frames.runs["arm"] == arm]
        seconds = runs["seconds"].astype(float)
        known = [
            (configs[run.config], lengths.get((arm, run.condition, run.seed), 0))
            for run in runs.itertuples()
            if run.config in configs
        ]
        tokens = sum(config.prompts_per_step * config.group_size * length for config, length in known)
        each = seconds.sum() / runs["step"][seconds.notna()].sum() if seconds.notna().any() else math.nan
        cells = (number(seconds.sum() / 3600, ".2f"), number(each, ".3g"), f"{tokens / 1e6:.3g}")
        rows.append((arm, str(len(runs)), *("–" if cell in ("nan", "0") else cell for cell in cells)))
    header = ("", "runs", "hours\nof steps", "seconds\nper step", "response tokens,\nmillions")
    return Shown("", header, rows, "Runs that have not ended have no hours. A dash: not recorded.")


CLIPS = re.compile(r"(^|\.)(clip_low|clip_high|low|high|threshold|dual|log_clamp)$")
"""Options of losses that bound a ratio."""


def without_effect(frames: Frames, declared: Mapping[str, Any]) -> str:
    """What parts of arms did to no token in all steps of all runs, and which arms have equal rows: a caution; empty
    where there is nothing to say."""
    clips = {config.arm.name for config in configs_of(frames) if _clips(config.arm)}
    cautions = []
    for table, column, what in (
        ("steps", "clip_tokens", "no token was clipped"),
        ("updates", "corrected_tokens", "no weight of a correction was more than 1e-6 from 1"),
        ("updates", "pull", "no replayed expert was another than the router preferred"),
    ):
        if column in frames.tables.get(table, ()):
            most = frames[table].groupby(["condition", "arm"], sort=False)[column].max()
            cautions += [
                f"{arm}, {condition}".removesuffix(", base") + f": {what}"
                for condition, arm in most[most == 0].index
                if column != "clip_tokens" or arm in clips
            ]
    measured = ["reward", "entropy", "grad_norm", metric(declared["endpoint"]).column]
    columns = ["seed", "step", *frames["steps"].columns.intersection(measured)]
    for condition, rows in frames["steps"].groupby("condition", sort=False):
        alike: dict[bytes, list[str]] = {}
        for arm, own in rows.sort_values(["seed", "step"]).groupby("arm", sort=False):
            alike.setdefault((own[columns].to_numpy(float) + 0.0).tobytes(), []).append(str(arm))
        cautions += [
            f"{' and '.join(equal)}, {condition}".removesuffix(", base") + ": equal rows"
            for equal in alike.values()
            if len(equal) > 1
        ]
    why = "An arm of which a part never acts is the arm without that part (arXiv 2610.02911)."
    return f"without effect, in every step of every run: {'; '.join(cautions)}. {why}" if cautions else ""


def _clips(arm: Arm) -> bool:
    """Whether the loss has a bound at which tokens lose their gradient; of one's own loss that is unknown."""
    options = fill_in(arm.loss).options
    bounds = [value for key, value in leaves(options) if CLIPS.search(key)]
    return "none" not in (options.get("clip"), options.get("mask")) and any(value != math.inf for value in bounds)


def _lengths(frames: Frames) -> list[str]:
    """A sentence if runs of one condition are measured at different intervals, or differ in length."""
    settings: dict[str, set[tuple[int, int, int]]] = {}
    for condition, rows in frames.runs.groupby("condition"):
        configs = configs_of(replace(frames, runs=rows))
        settings[str(condition)] = {
            (config.steps, config.eval_every, config.measure.detail_every) for config in configs
        }
    different = "; ".join(str(sorted(values)) for values in settings.values() if len(values) > 1)
    text = f"Runs differ in (steps, eval_every, measure.detail_every), {different}: means are not of the same steps."
    ended = frames.runs[frames.runs["state"] != "diverged"].groupby("condition")["step"]
    unequal = [f"{name}: {sorted(set(steps))}" for name, steps in ended if steps.nunique() > 1]
    lengths = f"Runs end at different steps, {'; '.join(unequal)}: means are not of the same steps."
    return [text] * bool(different) + [lengths] * bool(unequal)


def _methods(intervals: Iterable[Interval]) -> str:
    return f"Intervals: {'; '.join(dict.fromkeys(i.method for i in intervals))}."


def _seeds(n: int) -> str:
    return f"n = {n} seed{'s' if n > 1 else ''}"
