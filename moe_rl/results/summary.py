"""What a study found, as numbers: arm × metric with intervals over seeds, collapses, the arms compared in pairs, a
metric against a factor, and what the study's own rule says.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.metrics.convergence import collapse, second_half_mean
from moe_rl.registry import Component, lookup
from moe_rl.results.stats import Paired, holm, interval, paired, rate
from moe_rl.storage.columns import unknown
from moe_rl.storage.frames import Frames, settings_of
from moe_rl.study.declaration import ACROSS, find_study_file, load_verdict

RUN = ["arm", "condition", "seed"]
FATES = {"lasting": "lasting collapses", "recovered": "recovered collapses"}
"""Fates of a run that count as collapse, and the names of their rows."""


Steps = Int[np.ndarray, " measured"]
"""Those of a run in which a quantity was measured, ascending."""
Values = Float[np.ndarray, " measured"]


def last(steps: Steps, values: Values) -> float:
    """The last value that was measured."""
    return float(values[-1])


def mean(steps: Steps, values: Values) -> float:
    """Over the whole run, all steps that were measured."""
    return float(values.mean())


def second_half(steps: Steps, values: Values) -> float:
    """Mean of the later half of what was measured."""
    return second_half_mean(values)


def gained(steps: Steps, values: Values) -> float:
    """The last value minus that before the first step."""
    return float(values[-1] - values[0])


def after_start(steps: Steps, values: Values) -> float:
    """Mean of the evaluations after steps of the second half of the run."""
    return float(values[steps > steps[-1] / 2].mean())


@dataclass(frozen=True)
class Metric:
    """One row of the summary: a column of `steps`, reduced to a number per run."""

    name: str
    column: str
    reduce: Callable[[Steps, Values], float] = second_half
    after_divergence: float = math.nan
    """What each step, or evaluation, counts that a diverged run did not live to see: a model of NaNs earns no reward,
    while most quantities no longer exist."""
    since_start: bool = False
    """It compares with the model before the first step: a run that did not measure that one has no number."""
    of: Callable[[Frames], float] | None = None
    """A metric of a user's own: from the tables of one run to its number, instead of `reduce`."""


METRICS = (
    Metric("reward, second half", "reward", after_divergence=0.0),
    Metric("greedy exact match, end", "eval_exact_greedy", last, after_divergence=0.0),
    Metric("greedy exact match, gained since the start", "eval_exact_greedy", gained, 0.0, since_start=True),
    Metric("sampled exact match, end", "eval_exact_sampled", last, after_divergence=0.0),
    Metric("sampled exact match, gained since the start", "eval_exact_sampled", gained, 0.0, since_start=True),
    Metric("expert slots changed", "expert_change_rate"),
    Metric("log-ratio variance, nats²", "token_log_ratio_var"),
    Metric("clipped tokens", "clip_tokens"),
    Metric("clipped sequences", "clip_sequences"),
    Metric("replay gap std, nats", "replay_gap_std"),
)
"""Without `end` or `gained`: means over the second half of training. Exact match is on the held-out prompts."""
MAIN = METRICS[0]
ON_REQUEST = (
    Metric("greedy exact match, second half", "eval_exact_greedy", after_start, after_divergence=0.0),
    Metric("sampled exact match, second half", "eval_exact_sampled", after_start, after_divergence=0.0),
    Metric("effective sample size of tokens", "token_ess"),
    Metric("entropy, nats", "entropy"),
)
"""Shown where a study names them."""
ENGINE = (
    Metric("engine: expert sets changed, run", "engine_any_change_rate", mean),
    Metric("engine: tokens with a change, run", "engine_any_layer_change", mean),
    Metric("engine: KL k3, nats, run", "engine_kl_k3", mean),
    Metric("engine: F(2), run", "engine_beyond_2", mean),
    Metric("engine: KL k3 unconstrained, probe, run", "engine_kl_k3_unconstrained", mean),
    Metric("engine: KL k3 replayed, probe, run", "engine_kl_k3_replayed", mean),
    Metric("noise floor: KL k3, probe, run", "noise_floor_kl_k3", mean),
)
"""Shown where engine and policy differ. Means over the whole run: the gap is there from the first step on."""
SAME_ENGINE = 1e-4
"""KL k3 per token, in nats, mean over a run, above which engine and policy differ. Float32 leaves 1e-13 between two
scorings of the same weights, but routes near ties elsewhere on some processors: margins of a nat are within rounding of
six layers (6e-6) at 4e-5 of the tokens of six routers, half a nat of KL each, 2e-5. Bfloat16 makes 1e-3."""


def metric(name: str) -> Metric:
    """The metric of a name or of a column. Any other column of `steps`, and an `own_…` that a loss returns, is the mean
    over the second half; a `pkg.module:function` of a user's own takes the tables of each run.

    Raises ConfigError for a name that is none of these.
    """
    for known in (*METRICS, *ENGINE, *ON_REQUEST):
        if name in (known.name, known.column):
            return known
    if Component(name).own:
        return Metric(name.partition(":")[2].replace("_", " "), name, of=lookup("metric", name, {}))
    if unknown("steps", {name}):
        names = ", ".join(repr(m.name) for m in (*METRICS, *ENGINE, *ON_REQUEST))
        raise ConfigError(
            f"no metric is called {name!r}. Choose {names}, a column of `steps` (docs/columns.md), or "
            "your own function, as pkg.module:name."
        )
    return Metric(name, name)


def per_run(frames: Frames, metric: Metric) -> pd.Series:
    """One number per (arm, seed) of one condition. NaN where a diverged run has none.

    Raises ConfigError where a metric of a user's own fails.
    """
    numbers: dict[tuple[str, int], float] = {}
    if metric.of is not None:
        for (arm, seed), _ in frames.runs.groupby(["arm", "seed"], sort=False):
            try:
                numbers[arm, seed] = float(metric.of(frames.run(arm, seed)))
            except (Exception, SystemExit) as error:  # their code may raise anything
                raise ConfigError(
                    f"the metric {metric.column!r} returned no number for the tables of the run {arm}, "
                    f"seed={seed}: {type(error).__name__}: {error}"
                ) from error
    elif (rows := _measured(frames, metric.column)) is not None:
        all_steps, all_values = (rows[name].to_numpy() for name in ("step", metric.column))
        measured = rows.groupby(["arm", "seed"]).indices
        for run in frames.runs.sort_values(["arm", "seed"])[["arm", "seed", "state", "steps"]].itertuples():
            at = measured.get((run.arm, run.seed), np.array([], int))
            steps, values = all_steps[at], all_values[at].astype(float)
            if metric.since_start and (not len(at) or steps[0] != 0):
                continue
            if not len(at) and run.state != "diverged":
                continue  # of a run that diverged in its first step every one counts
            if run.state == "diverged":
                steps = np.append(steps, _unseen(steps, run.steps))
                values = np.append(values, np.full(len(steps) - len(values), metric.after_divergence))
            numbers[run.arm, run.seed] = metric.reduce(steps, values)
    index = pd.MultiIndex.from_tuples(numbers) if numbers else pd.MultiIndex.from_arrays([[], []])
    return pd.Series(list(numbers.values()), index=index, dtype=float)


def _measured(frames: Frames, column: str) -> pd.DataFrame | None:
    """A column of `steps`, by arm, seed and step; of an `own_…` that a loss returns, the mean over a step's updates."""
    at = [*dict.fromkeys(("arm", "seed", "step", column))]
    if column in frames["steps"]:
        return frames["steps"][at].dropna(subset=[column]).sort_values("step")
    if column.startswith("own_") and column in (updates := frames["updates"]):
        means = updates[at].groupby(at[:3], as_index=False).agg(lambda values: values.mean(skipna=False))
        return means.dropna(subset=[column]).sort_values("step")
    return None


def _unseen(measured: Steps, end: int) -> Int[np.ndarray, " unseen"]:
    """The steps up to the run's last that a diverged run did not live to see, as far apart as those it measured."""
    if not len(measured):
        return np.arange(1, end + 1)
    if measured[-1] >= end:  # it diverged in the evaluation after its last step
        return np.array([], int)
    apart = int(np.median(np.diff(measured))) if len(measured) > 1 else measured[0] or end
    return np.append(np.arange(measured[-1] + apart, end, apart), end)


def gaps(frames: Frames, pairs: Sequence[Sequence[str]], metric: Metric) -> dict[tuple[str, str], pd.Series]:
    """a − b of each pair over the seeds that have both, at one condition."""
    values = per_run(frames, metric).dropna()
    by_arm = {arm: values.xs(arm) for arm in dict.fromkeys(values.index.get_level_values(0))}
    none = pd.Series(dtype=float)
    return {(a, b): (by_arm.get(a, none) - by_arm.get(b, none)).dropna() for a, b in pairs}


def configs_of(frames: Frames) -> list[RunConfig]:
    """The different configurations of the runs; without those of runs whose rows do not hold one."""
    return [*configs_by_text(frames).values()]


def configs_by_text(frames: Frames) -> dict[str, RunConfig]:
    """The same, by what the rows of their runs hold in the column `config`."""
    texts = frames.runs["config"].unique() if "config" in frames.runs else ()
    settings = {text: json.loads(text) for text in texts}
    return {text: RunConfig.from_dict(config) for text, config in settings.items() if not is_imported(config)}


def is_imported(config: Mapping[str, Any]) -> bool:
    """Whether a run is the log of another trainer, whose settings nobody knows but for the few in `config`."""
    return "task" not in config


def outcomes(frames: Frames) -> pd.DataFrame:
    """The fate of every run: arm, factors, seed and `fate`, which is stable, lasting or recovered
    (`metrics.convergence.collapse`). A diverged run has collapsed for good."""
    measured = frames["steps"].reindex(columns=[*RUN, "step", "reward"]).dropna(subset=["reward"])
    curves = {key: rows.sort_values("step") for key, rows in measured.groupby(RUN)}
    rows = []
    for run in frames.runs.itertuples():
        curve = curves.get((run.arm, run.condition, run.seed), measured.iloc[:0])
        seen = collapse(curve["step"], curve["reward"])
        lasting = run.state == "diverged" or seen.step is not None and not seen.recovered
        fate = "lasting" if lasting else "stable" if seen.step is None else "recovered"
        rows.append({"arm": run.arm, "condition": run.condition, "seed": run.seed, "fate": fate})
    return pd.DataFrame(rows)


def summarise(frames: Frames, arms: Sequence[str], own: Sequence[str] = ()) -> pd.DataFrame:
    """Metric × arm, each cell an Interval over seeds; the last two rows are rates of lasting and recovered collapses.

    `frames` holds one condition, `own` names further metrics. A metric nobody measured has no row.
    """
    table, gap = {}, per_run(frames, metric("engine_kl_k3"))
    for measured in (*METRICS, *map(metric, own), *(ENGINE if gap.max() > SAME_ENGINE else ())):
        values = per_run(frames, measured)
        if len(values):
            table[measured.name] = {a: interval(values[a].to_list()) for a in arms if a in values.index.levels[0]}
    fates = outcomes(frames)
    for fate, name in FATES.items():
        table[name] = {arm: rate(int((rows["fate"] == fate).sum()), len(rows)) for arm, rows in fates.groupby("arm")}
    return pd.DataFrame.from_dict(table, orient="index").reindex(columns=list(arms))


@dataclass(frozen=True)
class Comparison:
    """Two arms at one condition: a minus b."""

    condition: str
    a: str
    b: str
    result: Paired
    p_holm: float
    """Adjusted for all comparisons of the list it came in, or of the family it belongs to."""


def pairs_of(arms: Sequence[str], comparisons: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The contrasts; without any, all pairs, the later arm before the earlier, or of more than five arms each against
    the first."""
    pairs = [(b, a) for a, b in itertools.combinations(arms, 2)]
    return comparisons or (pairs if len(arms) <= 5 else pairs[: len(arms) - 1])


def family(declared: Mapping[str, Any]) -> int:
    """How many comparisons a declaration asks for: its pairs, at each condition that runs both arms."""
    pairs = pairs_of([arm["name"] for arm in declared["arms"]], declared["comparisons"])
    by_condition = [
        set(c.get("arms") or itertools.chain(*pairs)) for c in (declared["conditions"] or {"": {}}).values()
    ]
    combinations = math.prod(map(len, declared["factors"].values()))
    return combinations * sum(set(pair) <= arms for pair in pairs for arms in by_condition)


def compare(
    frames: Frames,
    arms: Sequence[str],
    comparisons: Sequence[Sequence[str]] = (),
    metric: Metric = MAIN,
    family: int = 0,
) -> list[Comparison]:
    """The contrasts (first minus second) over the seeds of which both arms have a value, at every combination of
    factors.

    Without contrasts: all pairs, the later arm minus the earlier. Holm's adjustment is over everything returned, or
    over a `family` of more that were declared, of which some have no runs yet.
    """
    pairs, results = pairs_of(arms, comparisons), []
    for condition in frames.conditions:
        here = frames.condition(condition)
        values = per_run(here, metric).dropna()
        by_arm = {arm: values.xs(arm).to_dict() for arm in dict.fromkeys(values.index.get_level_values(0))}
        results += [
            Comparison(condition, a, b, paired(by_arm[a], by_arm[b]), math.nan)
            for a, b in pairs
            if set(by_arm.get(a, ())) & set(by_arm.get(b, ()))
        ]
    adjusted = holm([comparison.result.p for comparison in results], family)
    return [replace(comparison, p_holm=p) for comparison, p in zip(results, adjusted, strict=True)]


# ---------------------------------------------------------------------- against a factor
NAMES = {
    "optimizer.lr": "learning rate",
    "router_noise.scale": "router noise σ",
    "mini_batches": "mini-batches per step",
    "cold_start.seed": "seed of the warm-up",
}


def name_of(factor: str) -> str:
    """What a reader calls a setting: `learning rate`, not `optimizer.lr`."""
    return NAMES.get(factor, factor.rpartition(".")[2].replace("_", " "))


def factor_of(name: str) -> str | None:
    """The factor that a figure is drawn against; None for a figure of one condition."""
    return name.removeprefix(ACROSS).partition(":")[0] if name.startswith(ACROSS) else None


def against(frames: Frames, factor: str, metric: Metric) -> pd.DataFrame:
    """One row per run: arm, seed, `x` (the factor's value), `value` (the metric's), `others` (the other factors) and
    `condition` (all of them).

    Rows are in increasing x, words in the order of the runs. Raises RunError when no run varies the factor.
    """
    parts = []
    for condition in frames.conditions:
        settings = settings_of(condition)
        if factor not in settings:
            continue
        x = settings.pop(factor)
        values = per_run(frames.condition(condition), metric).rename_axis(["arm", "seed"]).rename("value").reset_index()
        words = [part for part in condition.split(",") if "=" not in part]  # the name of a condition beside factors
        words += [
            f"{name_of(k)} = {v:g}" if isinstance(v, float) else f"{name_of(k)} = {v}" for k, v in settings.items()
        ]
        parts.append(values.assign(x=x, others=", ".join(words), condition=condition))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["x"])
    if table["x"].nunique() < 2:
        raise RunError(f"all runs have the same {factor}, so there is nothing to draw against it")
    return table.sort_values("x", kind="stable") if numeric(table["x"].to_list()) else table


def numeric(values: Sequence[float | str]) -> bool:
    """Whether a factor's values are numbers."""
    return all(isinstance(v, float) for v in values)


def geometrically_spaced(values: Sequence[float]) -> bool:
    """Whether a log axis suits: positive, and over more than a decade or in (nearly) equal ratios, three at least."""
    x = np.unique(np.asarray(values, dtype=float))
    if x[0] <= 0:
        return False
    steps = np.diff(np.log(x))
    return bool(x[-1] > 10 * x[0] or (len(x) > 2 and np.allclose(steps, steps.mean(), rtol=0.1)))


# ---------------------------------------------------------------------- the study's own rule
def verdict_of(frames: Frames, declared: Mapping[str, Any]) -> list[str]:
    """The sentences of `Study.verdict`; one with the reason where it fails; none without one."""
    if not declared["verdict"]:
        return []
    try:
        file = find_study_file(declared.get("file"), Path(declared.get("folder", "")))
        sentences = load_verdict(declared["verdict"], declared["name"], file)(frames)
        return [sentences] if isinstance(sentences, str) else list(sentences)
    except (Exception, SystemExit) as error:  # their code may raise anything: fewer arms, one seed, three steps
        return [
            f"none from these runs: {error if isinstance(error, ConfigError) else f'{type(error).__name__}: {error}'}"
        ]
