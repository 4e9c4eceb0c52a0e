"""The pages of the studies and their numbers, made from the tables: `python studies/pages.py`.

`printed/NAME.txt` is what a study's tables print. Pages are written by hand but for what stands between
`<!-- printed: NAME -->` and `<!-- end -->`: the set-up and results of a study, or one of LISTS. A test holds both to
the tables, and the numbers of the words to numbers that are printed.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import answers
import lag_natural_verdicts
import overview
import pandas as pd
import ratio_gradient_verdicts
import router_noise_low_verdicts
import stabilisers_verdicts
from per_seed import RESULTS, stored
from rule import Outcome

from moe_rl.metrics.rounding import number
from moe_rl.objectives.methods_page import head, row
from moe_rl.results.stats import detectable, interval
from moe_rl.results.study_page import card, provenance
from moe_rl.results.summary import Metric, compare, family, metric, outcomes, per_run, verdict_of
from moe_rl.storage.frames import Frames
from moe_rl.study.declaration import load_study_file, read_declaration

HERE = Path(__file__).parent
PRINTED, ARCHIVE = HERE / "printed", HERE / "archive"
BLOCK = re.compile(r"(<!-- printed: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
LENGTH = 13
"""Response tokens of most studies: a product's thirteenth root is what GSPO clips."""
COMPARED = 20
"""Steps over which the rewards of two runs must be equal, and earn something, to be called one run."""


def pages() -> list[Path]:
    """Every page, the index first."""
    return sorted((*HERE.glob("*.md"), *ARCHIVE.glob("*.md")), key=lambda p: (p.parent != HERE, p.stem != "README", p))


def names() -> list[str]:
    """Every study with tables, and every analysis of tables of another."""
    return sorted({folder.name for folder in RESULTS.iterdir()} | {*answers.ANSWERS})


def refilled(text: str) -> str:
    """A page with what its markers name made anew."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[3], text)


def block(name: str) -> str:
    """What stands between the markers of that name."""
    if name in LISTS:
        return LISTS[name]()
    of = name.removesuffix("_rule")
    if of != name:
        return f"{study(of)[1]['decision_rule']}\n\n{outcome(of)}"
    frames, declared = study(of)
    if of in PLANNED:
        return card(frames, declared | {"comparisons": []}) + "\n" + PLANNED[of](frames)
    return card(frames, declared)


def decided(found: Iterable[tuple[Outcome, str]], corrected: str) -> str:
    """A row per planned comparison of a study that declares the one rule: both endpoints, and the rule's words.
    `corrected` says how p-values are adjusted."""
    lines = [*head("difference", "n", f"{overview.NAMES[overview.PRIMARY]} [95 % CI]", "90 % CI", "p",
                   f"{overview.NAMES[overview.SECONDARY]} [95 % CI]", "rule")]
    for one, words in found:
        first, second = (test.difference.printed(".3f") for test in (one.primary, one.secondary))
        lines.append(row(one.name, str(one.primary.n), first, one.within, f"{one.adjusted:.2g}", second, words))
    return "\n".join([*lines, "", f"p: permuted signs of the seeds' differences, after {corrected}."]) + "\n"


def outcome(name: str) -> str:
    """What the rule of a study says of its tables, one sentence a line."""
    frames, declared = study(name)
    if rule := declared["verdict"] or load_study_file(str(HERE / f"{name}.py")).verdict:
        return "".join(f"- {sentence}\n" for sentence in verdict_of(frames, declared | {"verdict": rule}))
    if name in PLANNED:
        return ("What it says of the planned comparisons is in the last column of the table above, and all else in "
                f"[what the tables print](printed/{name}.txt).\n")
    return f"Its outcome is in [what the tables print](printed/{name}.txt).\n"


def printed(name: str) -> str:
    """All that the tables of a study print."""
    out = io.StringIO()
    with redirect_stdout(out):
        if (RESULTS / name).exists():
            facts(name)
        for answer in answers.ANSWERS.get(name, ()):
            answer()
        if (RESULTS / name).exists():
            answers.print_verdict(name)
    return f"{out.getvalue().strip()}\n"


@cache
def study(name: str) -> tuple[Frames, dict]:
    """The tables and the declaration of a study."""
    return stored(name), read_declaration(RESULTS / name, trust=True)


# ---------------------------------------------------------------------- what every study prints
def facts(name: str) -> None:
    """Where the runs come from, which other studies have them too, what they earned, and what could have been seen."""
    frames, declared = study(name)
    rows = {"code": frames.runs["code"], **provenance(frames.runs)}
    print(f"{len(frames.runs)} runs; " + "; ".join(f"{what} {_counted(values)}" for what, values in rows.items()))
    for theirs, seeds in shared(name).items():
        print(f"shared: {theirs}, seeds {_seeds(seeds)}")
    endpoint = metric(declared["endpoint"])
    for cell in frames.cells:
        here = frames.cell(cell)
        print(f"\n{cell}:" if len(frames.cells) > 1 else "")
        for what, values in measured(here, endpoint):
            print(f"  {what}: " + "; ".join(f"{arm} {value}" for arm, value in values.items()))
    if name not in OWN_FAMILY:
        comparisons(frames, declared)


def measured(frames: Frames, endpoint: Metric) -> Iterator[tuple[str, dict[str, str]]]:
    """Quantities of one combination of factors, by arm."""
    for one in dict.fromkeys((endpoint, metric("reward"))):
        yield one.name, {arm: str(interval(values)) for arm, values in per_run(frames, one).groupby(level=0)}
    steps = frames["steps"].sort_values("step")
    if "eval_exact_greedy" in steps:
        evaluated = steps.dropna(subset=["eval_exact_greedy"]).groupby(["arm", "seed"])["eval_exact_greedy"]
        yield "greedy exact match, start → end", {
            arm: f"{number(e['first'].mean(), '.3f')} → {number(e['last'].mean(), '.3f')}, gained "
                 f"{interval(e['last'] - e['first'])}"
            for arm, e in evaluated.agg(["first", "last"]).groupby(level=0)}
    for name in ("token_ess", "token_log_ratio_var", "expert_change_rate", "clip_tokens", "clip_tokens_all"):
        if name in steps:
            yield (f"{name}, second half",
                   {arm: str(interval(values)) for arm, values in per_run(frames, Metric(name, name)).groupby(level=0)})
    if (per_run(frames, Metric("length", "response_tokens")) - LENGTH).abs().max() < 0.5:
        ratio = per_run(frames, metric("sequence_log_ratio_var")) / per_run(frames, metric("token_log_ratio_var"))
        times = (LENGTH * ratio).dropna().groupby(level=0)
        yield (f"{LENGTH}·Var(log s)/Var(log w), second half, median over seeds (range)",
               {arm: f"{x.median():.2f} ({x.min():.2f} to {x.max():.2f})" for arm, x in times})
    fates = outcomes(frames)
    yield "collapses, lasting + recovered", {
        arm: f"{(rows['fate'] == 'lasting').sum()} + {(rows['fate'] == 'recovered').sum()} of {len(rows)}"
        for arm, rows in fates.groupby("arm")}
    layers = frames["layers"]
    if "load_dead_experts" in layers:
        dead = layers[layers["step"] == layers["step"].min()]["load_dead_experts"]
        yield "experts of a layer without load, first step", {
            "all arms": f"{dead.mean():.1f} ({dead.min():.0f} to {dead.max():.0f})"}


def comparisons(frames: Frames, declared: dict) -> None:
    """The declared contrasts: difference, p, and power."""
    arms = [arm["name"] for arm in declared["arms"]]
    if not declared["comparisons"]:
        return
    found = compare(frames, arms, declared["comparisons"], metric(declared["endpoint"]), family(declared))
    print(f"\n{declared['endpoint']}, contrasts declared beforehand; sd: of differences over seeds; could have seen: "
          "in 4 of 5 repetitions, by a paired t-test at 5 %, and at 5 % / their number")
    endpoints = {cell: per_run(frames.cell(cell), metric(declared["endpoint"])).unstack(0) for cell in frames.cells}
    for one in found:
        values = endpoints[one.cell]
        d = (values[one.a] - values[one.b]).dropna()
        n, sd, exact = len(d), d.std(ddof=1), one.result
        cell = f", {one.cell}" if len(frames.cells) > 1 else ""
        rank = "" if math.isnan(one.p_log_rank) else f", log-rank p {one.p_log_rank:.2g}"
        seen = f"{detectable(sd, n):.2g}, {detectable(sd, n, 0.05 / len(found)):.2g}"
        print(f"  {one.a} − {one.b}{cell}: {exact.difference}, above 0 on {(d > 0).sum()} of {n} seeds, "
              f"p {exact.p:.3g}, Holm p {one.p_holm:.2g}{rank}; sd {sd:.2g}, could have seen {seen}")


def shared(name: str) -> dict[str, list[int]]:
    """Runs of a study whose rewards are those of runs of other studies, step by step."""
    found: dict[str, list[int]] = {}
    mine = _rewards(name)
    for other in sorted(p.name for p in RESULTS.iterdir() if p.name != name):
        theirs = {values: key for key, values in _rewards(other).items()}
        for (arm, cell, seed), values in mine.items():
            if (key := theirs.get(values)) is not None:
                cells = [f" in {c}" if c != "base" else "" for c in (cell, key[1])]
                found.setdefault(f"{arm}{cells[0]} with {key[0]}{cells[1]} of {other}", []).append(seed)
    return found


@cache
def _rewards(name: str) -> dict[tuple[str, str, int], tuple[float, ...]]:
    """The first rewards of every run that earns something."""
    key = ["arm", "factors", "seed"]
    rows = study(name)[0]["steps"][[*key, "step", "reward"]].dropna(subset=["reward"]).sort_values("step").groupby(key)
    curves = {key: tuple(values.head(COMPARED)) for key, values in rows["reward"]}
    return {key: curve for key, curve in curves.items() if len(curve) == COMPARED and sum(curve) > 1}


def _counted(values) -> str:
    counts = pd.Series(list(values)).value_counts()
    return ", ".join(str(v) if len(counts) == 1 else f"{v} ({n})" for v, n in counts.items())


def _seeds(seeds: list[int]) -> str:
    seeds = sorted(seeds)
    return f"{seeds[0]}–{seeds[-1]}" if len(seeds) == seeds[-1] - seeds[0] + 1 > 1 else ", ".join(map(str, seeds))


# ---------------------------------------------------------------------- lists of the index
def power() -> str:
    """A row per contrast of the studies that compare arms: how seeds scatter, and what could have been seen."""
    lines = [*head("study", "difference, in the endpoint", "n", "sd", "seen in 4 of 5", "and after correction")]
    for folder in (one for one in sorted(RESULTS.iterdir()) if one.name not in OWN_FAMILY):
        frames, declared = study(folder.name)
        cells = SHOWN.get(folder.name, frames.cells)
        endpoints = {cell: per_run(frames.cell(cell), metric(declared["endpoint"])).unstack(0) for cell in cells}
        for cell, (a, b) in itertools.product(cells, declared["comparisons"]):
            values = endpoints[cell]
            if not {a, b} <= {*values}:
                continue
            d = (values[a] - values[b]).dropna()
            n, sd, number = len(d), d.std(ddof=1), len(declared["comparisons"]) * len(frames.cells)
            where = f", {cell}" if len(frames.cells) > 1 else ""
            lines.append(row(folder.name, f"{a} − {b}{where}", str(n), f"{sd:.2g}", f"{detectable(sd, n):.2g}",
                             f"{detectable(sd, n, 0.05 / number):.2g}"))
    return "\n".join(lines) + "\n"


SHOWN = {
    "volatility_dial": [
        "router_noise.target=weights,router_noise.scale=0.4",
        "router_noise.target=weights,router_noise.scale=2",
        "router_noise.target=choice,router_noise.scale=2",
    ],
    "volatility_controls": ["applied_to=ratio", "applied_to=gradient", "last-step"],
    "learning_rates": ["optimizer.lr=0.0002", "optimizer.lr=0.000566"],
    "controls": ["moe", "no-choice", "warm-up"],
    "staleness": ["N=1", "N=8"],
}
"""Of studies with many cells, those that the index shows."""
OWN_FAMILY = ("stabilisers", "lag", "lag_natural", "router_noise_low", "ratio_gradient")
"""Studies whose answers print the contrasts of their rule, which are others than those that tables and figures show."""
PLANNED: dict[str, Callable[[Frames], str]] = {
    "lag_natural": lambda frames: decided(lag_natural_verdicts.judged(frames), "Holm over the 7 comparisons"),
    "router_noise_low": lambda frames: decided(
        router_noise_low_verdicts.judged(frames), "the fixed sequence of each arm and Holm over arms; of slopes, after "
        "Holm over the 4 arms. Slopes are for ten times the KL"),
    "ratio_gradient": lambda frames: decided(ratio_gradient_verdicts.judged(frames), "Holm over the 3 comparisons"),
    "stabilisers": stabilisers_verdicts.table,
}
"""The table of studies whose rule compares and corrects otherwise than `card` does."""
LISTS: dict[str, Callable[[], str]] = {
    "power": power, "outcomes": overview.table, "planned": lambda: PLANNED["lag_natural"](stored("lag_natural"))}


def main() -> None:
    for name in names():
        (PRINTED / f"{name}.txt").write_text(printed(name))
    overview.main()
    for page in pages():
        page.write_text(refilled(page.read_text()))


if __name__ == "__main__":
    main()
