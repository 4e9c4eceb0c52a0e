"""Evaluations as people report them: avg@k, pass@k, maj@k, lengths, with intervals over problems.

The unit of replication is the problem: the completions of one belong together, and two checkpoints are compared on the
problems that both were asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from moe_rl.errors import ConfigError
from moe_rl.recorder import GREEDY
from moe_rl.results import stats
from moe_rl.results.printed import print_table
from moe_rl.results.stats import printed_p
from moe_rl.results.tables import Shown
from moe_rl.tasks.base import RIGHT

MEANS = ["reward", "math_verify", "response_tokens", "truncated"]
Problems = Mapping[int, float]


def pass_at(k: int, n: int, right: int) -> float:
    """Probability that one of k completions is right, estimated without bias from `right` right ones of n:
    1 − C(n − right, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374). Raises ConfigError unless 1 ≤ k ≤ n."""
    if not (1 <= k <= n and 0 <= right <= n):
        raise ConfigError(
            f"pass@{k} of {n} completions with {right} right: k must be from 1 to the completions, and "
            "so many must be right at most. Sample more, or lower k."
        )
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def majority(votes: Sequence[int | None], right: Sequence[float]) -> float:
    """Score of the answer that most completions give (Wang et al. 2022, arXiv 2203.11171), in [0, 1].

    `votes` are equal where answers are, None where there is none: such a completion does not vote, and where none does
    the score is 0. Of answers with equally many votes one is drawn: the score is the mean over them, hence its
    expectation. An answer's score is the mean of `right` over its completions.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    scores = [
        sum(r for v, r in zip(votes, right, strict=True) if v == vote) / most
        for vote, count in counts.items()
        if count == most
    ]
    return sum(scores) / len(scores) if scores else 0.0


def of_problems(rows: pd.DataFrame) -> Mapping[str, Problems]:
    """Every metric as a value per problem, from the rows of `evaluations` of one checkpoint on one benchmark.

    With k drawn completions: `avg@k`, the share of right ones, which pass@1 is too; `pass@2`, `pass@4` … and `pass@k`;
    `maj@k`; `greedy`, whether the greedy one is right; and of drawn ones the MEANS that there are.
    """
    drawn = rows[rows["sample"] != GREEDY]
    metrics: dict[str, dict[int, float]] = {}
    for problem, group in drawn.groupby("problem"):
        right = [float(reward >= RIGHT) for reward in group["reward"]]
        n, votes = len(right), [None if pd.isna(vote) else int(vote) for vote in group["vote"]]
        values = {f"avg@{n}": sum(right) / n}
        if n > 1:
            powers = sorted({2**i for i in range(1, n.bit_length())} | {n})
            values |= {f"pass@{k}": pass_at(k, n, int(sum(right))) for k in powers}
            values[f"maj@{n}"] = majority(votes, right)
        means = group.reindex(columns=MEANS).astype("float64").mean().dropna()
        values |= {str(name): float(value) for name, value in means.items()}
        for name, value in values.items():
            metrics.setdefault(name, {})[int(problem)] = value
    greedy = rows[rows["sample"] == GREEDY]
    if len(greedy):
        metrics["greedy"] = {
            int(p): float(r >= RIGHT) for p, r in zip(greedy["problem"], greedy["reward"], strict=True)
        }
    return metrics


def summarise(rows: pd.DataFrame, by: str = "checkpoint") -> pd.DataFrame:
    """A row per benchmark, `by` (a run's own table has `step`) and metric, both in the order of the rows.

    `mean`, `low`, `high` over `n` problems with their `method`; `difference` from the first `by` over the problems both
    have, with its interval, and the sign-flip `p`, by Holm over those that are compared with it: `p_holm`.
    """
    summary: list[dict[str, Any]] = []
    for benchmark, of_benchmark in rows.groupby("benchmark", sort=False):
        points = {name: of_problems(part) for name, part in of_benchmark.groupby(by, sort=False)}
        first = next(iter(points.values()))
        for metric in first:
            compared: dict[int, float] = {}
            for name, metrics in points.items():
                if metric not in metrics:
                    continue
                values = metrics[metric]
                row = {"benchmark": benchmark, by: name, "metric": metric, **_interval(metric, values)}
                if metrics is not first and set(values) & set(first[metric]):
                    change = stats.paired(values, first[metric])
                    row |= {
                        "difference": change.difference.mean,
                        "difference_low": change.difference.low,
                        "difference_high": change.difference.high,
                        "p": change.p,
                    }
                    compared[len(summary)] = change.p
                summary.append(row)
            for place, p in zip(compared, stats.holm([*compared.values()]), strict=True):
                summary[place]["p_holm"] = p
    columns = ["mean", "low", "high", "n", "method", "difference", "difference_low", "difference_high", "p", "p_holm"]
    return pd.DataFrame(summary).reindex(columns=["benchmark", by, "metric", *columns])


def _interval(metric: str, values: Problems) -> dict[str, Any]:
    """Where all problems are solved, or none, resampling them would say that nothing is uncertain: exact instead."""
    numbers, scale = np.array(list(values.values())), "log" if metric == "response_tokens" else "logit"
    extreme = scale == "logit" and set(numbers) in ({0.0}, {1.0})
    return asdict(stats.rate(int(numbers.sum()), len(numbers)) if extreme else stats.interval(numbers, scale=scale))


def print_evaluation(console: Console, summary: pd.DataFrame) -> None:
    """A table per benchmark: a row per metric and checkpoint, with the last part of its name where these differ."""
    names = {name: Path(name).name for name in summary["checkpoint"]}
    names = names if len(set(names.values())) == len(names) else {name: name for name in names}
    for benchmark, part in summary.groupby("benchmark", sort=False):
        passes = [m for m in part["metric"].unique() if m.startswith("pass@")]
        hidden = {*passes[:-1], "reward"}
        rows = []
        for row in part[~part["metric"].isin(hidden)].to_dict("records"):
            changed = not math.isnan(row["difference"])
            interval = _printed_interval(row, "difference", "+") if changed else ""
            p = printed_p(row["p_holm"], row["n"], ".2g") if changed else ""
            rows.append((row["metric"], names[row["checkpoint"]], _printed_interval(row), interval, p))
        note = (
            f"{part['n'].max():.0f} problems; in brackets 95 % intervals over problems. Δ: from the first "
            "checkpoint, paired by problem; p: sign flips, Holm over the checkpoints."
        )
        print_table(console, Shown(str(benchmark), ("metric", "checkpoint", "mean", "Δ", "p"), rows, note))


def _printed_interval(row: Mapping[str, Any], mean: str = "mean", sign: str = "") -> str:
    form = sign + (".1f" if row["metric"] == "response_tokens" else ".3f")
    low, high = (row["low"], row["high"]) if mean == "mean" else (row[f"{mean}_low"], row[f"{mean}_high"])
    return f"{row[mean]:{form}} [{'–' if math.isnan(low) else f'{low:{form}}, {high:{form}}'}]"
