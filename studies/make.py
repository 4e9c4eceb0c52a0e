"""From the tables to what the pages show: `python studies/make.py` writes every table and every figure of the pages.

Pages are written by hand but for what stands between `<!-- made: NAME -->` and `<!-- end -->`: the set-up and the
results of a study, or one of BLOCKS.
"""

from __future__ import annotations

import importlib
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
from base import ENDPOINT, SECONDARY, noise
from contrasts import (
    NAMES,
    Both,
    Condition,
    Form,
    Outcome,
    Rule,
    joined,
    median_kl,
    outcomes,
    slots_changed,
    table_of,
    table_of_both,
    values_of,
)
from depth import study as depth
from lag_natural.study import COUNTED
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from ratio_gradient.study import MOVED, moved
from ratio_gradient.study import NONE as STILL
from ratio_gradient.study import SIGMAS as BOTH_SIGMAS
from router_noise_low.study import NONE, OTHERS, ROUTERS, SCALES, medians
from tuned_rates.study import CHOSEN
from tuned_rates.study import condition as tuned
from volatility_controls.study import NOISY, OTHER_RUNS, QUIET
from volatility_dial.study import SIGMAS

from moe_rl.metrics.rounding import number
from moe_rl.objectives.methods_page import head, row
from moe_rl.results import figures, plots
from moe_rl.results.stats import band, interval, student
from moe_rl.results.study_page import card
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames, load_study
from moe_rl.study.declaration import read_declaration

HERE = Path(__file__).parent
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MARGIN = 0.02
SLOTS = 12
"""Expert slots of a token: 6 MoE layers, 2 experts each."""
WITH_CARD = ("volatility_dial", "volatility_controls")
"""Studies whose pages show the comparisons of `card` beside the planned contrasts, which are corrected otherwise."""


# ---------------------------------------------------------------------- pages
def pages() -> list[Path]:
    """Every page with blocks."""
    return [page for page in sorted(HERE.rglob("*.md")) if BLOCK.search(page.read_text())]


def refilled(text: str) -> str:
    """A page with its blocks made anew."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[3], text)


def block(name: str) -> str:
    """What stands between the markers of that name."""
    if name in BLOCKS:
        return BLOCKS[name]()
    of = name.removesuffix("_rule")
    if of != name:
        return planned(of)
    frames, declared = stored(name), declaration(name)
    if name not in WITH_CARD and hasattr(importlib.import_module(f"{name}.study"), "CORRECTED"):
        return card(frames, declared | {"comparisons": []}) + "\n" + planned(name)
    return card(frames, declared)


def planned(name: str) -> str:
    """The planned contrasts of a study, as its file declares them."""
    study = importlib.import_module(f"{name}.study")
    if isinstance(getattr(study, "RULE", None), Both):
        return table_of_both(study.RULE, stored_with_others(name), study.CORRECTED)
    return table_of(study.judged(stored(name)), study.CORRECTED, getattr(study, "TITLES", NAMES.values()))


@cache
def stored(name: str) -> Frames:
    """The tables of a study, read once."""
    return load_study(HERE / name)


@cache
def stored_with_others(name: str) -> Frames:
    """The same, with the runs of another study that its contrasts take."""
    return (
        joined(stored(name), stored("volatility_dial"), OTHER_RUNS) if name == "volatility_controls" else stored(name)
    )


def declaration(name: str) -> dict:
    """What a study declares."""
    return read_declaration(HERE / name, trust=True)


# ---------------------------------------------------------------------- tables of one page
def dial_doses() -> str:
    """What each σ does to GRPO."""
    frames = stored("volatility_dial")
    lines = [
        *head(
            "σ",
            "KL to π_old, nats per token",
            "expert slots changed before the eighth update",
            f"of the {SLOTS} slots of a token",
        )
    ]
    for sigma in (0, *SIGMAS):
        kl = values_of(frames, noise("weights", sigma), "token_kl_k3")["grpo"].mean()
        slots = slots_changed(frames, noise("weights", sigma))
        lines.append(row(f"{sigma:g}", f"{kl:.2g}", f"{100 * slots:.1f} %", f"{SLOTS * slots:.1f}"))
    return "\n".join(lines) + "\n"


def low_doses() -> str:
    """What each σ does to GRPO, in the routers and beside them."""
    frames = stored("router_noise_low")
    lines = [
        *head(
            "σ in the routers",
            "KL in routers",
            "KL beside",
            f"expert slots changed, of {SLOTS}, in routers",
            "beside",
        )
    ]
    for scale in SCALES:
        slots = [f"{SLOTS * slots_changed(frames, place[scale]):.2f}" for place in (ROUTERS, OTHERS)]
        lines.append(row(f"{scale:g}", *(f"{kl:.4f}" for kl in medians(frames)[scale]), *slots))
    none = f"{SLOTS * slots_changed(frames, NONE):.2f}"
    return "\n".join([*lines, row("no noise", f"{median_kl(frames, NONE):.4f}", "–", none, "–")]) + "\n"


def part_doses() -> str:
    """What noise in each part does to GRPO."""
    frames = stored("ratio_gradient")
    lines = [*head("noise in", "σ", "KL, nats per token", f"expert slots changed, of {SLOTS}")]
    conditions = {("nothing", "0"): STILL}
    for sigma in BOTH_SIGMAS:
        words = {part: part if part == "both" else f"the {part}" for part in MOVED}
        conditions |= {(words[part], f"{sigma:g}"): moved(part, sigma) for part in MOVED}
    for (part, sigma), name in conditions.items():
        lines.append(row(part, sigma, f"{median_kl(frames, name):.4f}", f"{SLOTS * slots_changed(frames, name):.1f}"))
    return "\n".join(lines) + "\n"


LOSSES = {
    "in ratio and gradient (runs of [volatility_dial](../volatility_dial/README.md), σ = 2)": (NOISY.name, QUIET.name),
    "in the ratio alone (`applied_to=ratio`)": ("applied_to=ratio", QUIET.name),
    "in the gradient alone (`applied_to=gradient`)": ("applied_to=gradient", QUIET.name),
    "on other weights than the routers (`beside`)": ("beside", QUIET.name),
    "in the routers of a model in which every token uses all experts (`twin`)": ("twin", "twin-still"),
}
"""Noise → the condition with it, and the one without."""


def losses() -> str:
    """What each kind of noise costs GRPO."""
    frames = stored_with_others("volatility_controls")
    lines = [*head("noise", "reward [95 % CI]", "sampled match [95 % CI]", "KL, nats per token")]
    for words, (noisy, still) in LOSSES.items():
        form = Form({(noisy, "grpo"): 1.0, (still, "grpo"): -1.0})
        found = [interval(form.values(frames, name)).printed(".3f") for name in ("reward, second half", ENDPOINT)]
        kl = values_of(frames, noisy, "token_kl_k3")["grpo"].mean()
        lines.append(row(words, *found, f"{kl:.3f}"))
    return "\n".join(lines) + "\n"


SPREAD_AND_CLIPPED = {"token ESS": "token_ess", "clipped": "clip_tokens"}
MOVES = {"KL": "token_kl_k3", **SPREAD_AND_CLIPPED}
GAPS = {
    "KL to the engine": "engine_kl_k3",
    "slots it chooses otherwise": "engine_expert_change_rate",
    **SPREAD_AND_CLIPPED,
}


def movements(study: str, names: Mapping[str, str]) -> str:
    """How far each arm of a study moves in a step: medians over seeds of columns, by their words."""
    frames = stored(study)
    lines = [*head("arm", *(f"{words}, {condition}" for condition in frames.conditions for words in names))]
    medians = {
        (condition, column): values_of(frames, condition, column).median()
        for condition in frames.conditions
        for column in names.values()
    }
    arms = [arm["name"] for arm in declaration(study)["arms"]]
    lines += [
        row(arm, *(number(values[arm], ".3g") if arm in values else "–" for values in medians.values())) for arm in arms
    ]
    return "\n".join(lines) + "\n"


def gap_control() -> str:
    """What GSPO gains with each engine, on the same seeds."""
    frames = joined(stored("engine_gap"), stored("engine_gap/control_runs"), {"float32": "float32"})
    wide, narrow = (Condition(name)["gspo_short"] - Condition(name)["grpo"] for name in ("float32", "bfloat16"))
    lines = [*head("GSPO − GRPO", *(f"{name} [95 % CI]" for name in NAMES.values()))]
    for name, form in {"float32": wide, "bfloat16": narrow, "bfloat16 − float32": narrow - wide}.items():
        values = (student(form.values(frames, endpoint)).printed(".3f") for endpoint in NAMES)
        lines.append(row(name, *values))
    return "\n".join(lines) + "\n"


def depths() -> str:
    """What a step does to models of each depth: means over seeds; of what has a log, geometric ones."""
    frames = depth.with_logs(stored("depth"))
    columns = {
        "slots changed by a step": (depth.STEP, "grpo", ".1%"),
        "tokens changed by a step": ("any_layer_change", "grpo", ".0%"),
        "slots changed by an update": (depth.UPDATE, "grpo", ".2%"),
        "KL": (depth.KL, "grpo", ".4f"),
        "slots by a step / √KL": (depth.per_kl(depth.STEP), "grpo", ".2f"),
        "token ESS": ("token_ess", "grpo", ".3f"),
        **{f"variance of log-ratios, {arm}": ("token_log_ratio_var", arm, ".3f") for arm in depth.ARMS},
    }

    def cell(condition: str, column: str, arm: str, form: str) -> str:
        values = values_of(frames, condition, column).get(arm)
        if values is None:
            return "–"
        mean = math.exp(values.mean()) if column.startswith("log ") else values.mean()
        return number(mean, form).replace("%", " %")

    lines = [*head("layers, rate", *columns)]
    for name in depth.study.conditions:
        lines.append(row(name.replace("=", " ").replace(",", ", "), *(cell(name, *how) for how in columns.values())))
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- every comparison with GRPO
KINDS = {"replay": "grpo-replay", "GSPO": "gspo_short", "another method": "r3"}
"""Kind of a method → the arm whose colour and symbol it has."""


@dataclass(frozen=True)
class Place:
    """Runs in which methods are compared with GRPO: one row of the figure of the index."""

    band: str
    label: str
    study: str
    condition: str = "base"
    replay: str = "grpo-replay"
    others: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[str, str]:
        """Arm → kind; not every arm was run everywhere."""
        return dict.fromkeys(self.others, "another method") or {self.replay: "replay", "gspo_short": "GSPO"}


WEIGHTS = {s: noise("weights", s) for s in (0, 0.4, 1, 2)}
ALONE = {"ratio": "ratio alone", "gradient": "gradient alone", "both": "more seeds"}
"""Part that has the noise → its words."""
OLD = Place("no noise", "rollouts 1 and 2 steps old, mean", "lag_natural", "mean of lags 1 and 2")
"""Decided by the study's own declaration of the rule, over its seven comparisons."""
PLACES = (
    Place("no noise", "rate 2e-4", "volatility_dial", WEIGHTS[0]),
    Place("no noise", "rate 2e-4, other seeds", "router_noise_low", NONE),
    Place("no noise", "rate 2e-4, more seeds", "ratio_gradient", STILL),
    Place("no noise", "rate 4e-4", "confirmation"),
    OLD,
    *(Place("no noise", f"rollouts {lag} step{'s' * (lag > 1)} old", "lag", f"lag={lag}") for lag in (1, 2, 4, 8)),
    Place("no noise", "conversations", "many_turns"),
    Place("no noise", "another engine, rate 3e-4", "engine_mismatch", replay="grpo-r3"),
    Place("no noise", "another engine, rate 2e-4", "stabilisers", "mismatch", replay="r3"),
    *(Place("noise in routers", f"σ = {s:g}", "router_noise_low", name) for s, name in ROUTERS.items()),
    Place("noise in routers", "σ = 0.4, other seeds", "volatility_dial", WEIGHTS[0.4]),
    *(Place("noise in routers", f"σ = {s:g}", "volatility_dial", WEIGHTS[s]) for s in (1, 2)),
    Place("noise in routers", "σ = 2, other seeds", "stabilisers", "dial"),
    *(
        Place("noise in routers", f"σ = {s:g}, {ALONE[part]}", "ratio_gradient", moved(part, s))
        for s in BOTH_SIGMAS
        for part in MOVED
    ),
    Place("noise in routers", "σ = 2, ratio alone", "volatility_controls", "applied_to=ratio"),
    Place("noise in routers", "σ = 2, gradient alone", "volatility_controls", "applied_to=gradient"),
    Place("noise elsewhere", "all weights but the routers", "volatility_controls", "beside"),
    Place("noise elsewhere", "all experts always active", "volatility_controls", "twin"),
    *(
        Place("other methods, σ = 2", name, "stabilisers", "dial", others=(name.lower(),))
        for name in ("GMPO", "RSPO", "CISPO", "SAPO", "MiniRL")
    ),
    Place("other methods, σ = 2", "GRPO, ratio bounded where A < 0", "open_side", others=("grpo-bounded",)),
)


@dataclass(frozen=True)
class Row:
    """A place and what the rule says of each of its arms."""

    place: Place
    found: dict[str, Outcome]
    kl: float


def rows() -> Iterator[Row]:
    """Every place of the figure."""
    for place in PLACES:
        conditions = [f"lag={lag}" for lag in COUNTED] if place == OLD else [place.condition]
        kl = float(np.mean([median_kl(stored(place.study), condition) for condition in conditions]))
        family = outcomes_of(place.study, place.condition)
        yield Row(place, {arm: one for arm, one in family.items() if arm in place.kinds}, kl)


@cache
def outcomes_of(study: str, condition: str) -> dict[str, Outcome]:
    """Every arm of a condition minus GRPO, by name; Holm over the arms of this condition, or over the comparisons that
    the study's own declaration of the rule names."""
    if (study, condition) == (OLD.study, OLD.condition):
        declared = importlib.import_module("lag_natural.study").judged(stored(study))
        return {one.name.removesuffix(" − grpo"): one for one, _ in declared if one.name.endswith(" − grpo")}
    first, second = (values_of(stored(study), condition, name) for name in (ENDPOINT, SECONDARY))
    pairs = {
        arm: tuple([table[name].dropna().to_dict() for table in (first, second)] for name in (arm, "grpo"))
        for arm in first.columns.drop("grpo")
    }
    return {one.name: one for one in outcomes(pairs, MARGIN)}


def conditions() -> dict[tuple[str, str], str]:
    """Every condition of the studies of the figure in which methods were compared with GRPO → its words."""
    words: dict[tuple[str, str], str] = {}
    for place in PLACES:
        label = place.label if not place.others else "σ = 2, other seeds" if place.condition == "dial" else "σ = 2"
        words.setdefault((place.study, place.condition), f"{place.band}: {label}")
    for study in dict.fromkeys(place.study for place in PLACES):
        frames = stored(study)
        for condition in frames.conditions:
            if {"grpo"} < {*frames.condition(condition).runs["arm"]}:
                words.setdefault((study, condition), condition)
    return words


def every_outcome() -> str:
    """Every comparison with GRPO, both endpoints, and what the rule says."""
    titles = [f"{name} [95 % CI]" for name in ("held-out match, sampled", "held-out match, greedy")]
    lines = [*head("where", "study", "arm − GRPO", "n", titles[0], "Holm p", titles[1], "rule")]
    for (study, condition), words in conditions().items():
        for arm, one in outcomes_of(study, condition).items():
            first, second = (test.difference.printed(".3f") for test in (one.primary, one.secondary))
            said = {1: "helps", -1: "harms"}.get(one.sign, one.said)
            lines.append(row(words, study, arm, str(one.primary.n), first, f"{one.adjusted:.2g}", second, said))
    return "\n".join(lines) + "\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "every_outcome": every_outcome,
    "old_rollouts": lambda: planned("lag_natural"),
    "dial_doses": dial_doses,
    "low_doses": low_doses,
    "part_doses": part_doses,
    "losses": losses,
    "movements": lambda: movements("stale_or_spread", MOVES),
    "deep_movements": lambda: movements("deep", MOVES | {"slots changed": "expert_change_rate"}),
    "task_movements": lambda: movements("other_tasks", MOVES),
    "gaps": lambda: movements("engine_gap", GAPS),
    "gap_control": gap_control,
    "depths": depths,
}


# ---------------------------------------------------------------------- figures
QUESTIONS = {
    "deep": "Do replay or GSPO help in a model of 24 layers, with fresh rollouts?",
    "engine_gap": "Does an engine in bfloat16 harm GRPO, and does a cure help?",
    "other_tasks": "Words spelled backward, rollouts two steps old: what helps at the best rates?",
    "stale_or_spread": "Rollouts two steps old: what helps at each rate?",
    "tuned_rates": "Who gains when every method has its own best rate and clip range?",
}
"""Studies whose figure is `draw_rules`, and its title."""


def every_figure() -> Iterator[tuple[Path, Callable[[], Figure]]]:
    """The files of the pages' figures, and what draws them."""
    for name in sorted(page.parent.name for page in HERE.glob("*/study.json")):
        if name in QUESTIONS:
            study = importlib.import_module(f"{name}.study")
            rules = [*study.RULES.values()] if hasattr(study, "RULES") else [study.RULE]
            yield HERE / name / "figure.png", partial(draw_rules, stored(name), rules, QUESTIONS[name])
        elif (HERE / name / "figure.py").exists():
            module, frames = importlib.import_module(f"{name}.figure"), stored_with_others(name)
            yield HERE / name / "figure.png", partial(module.draw, frames)
            if name == "stabilisers":
                yield HERE / name / "mismatch.png", partial(module.draw_mismatch, frames)
        elif (HERE / name / "figure.png").exists():
            declared = declaration(name)
            draw = figures.draw(declared["figures"][0], declared["endpoint"], declared["comparisons"])
            yield HERE / name / "figure.png", partial(draw, stored(name), [arm["name"] for arm in declared["arms"]])
    yield HERE / "overview.png", draw_overview
    yield HERE / "front.png", draw_front


def save(figure: Figure, file: Path) -> None:
    """As PNG with a palette, a third as large as without."""
    image = io.BytesIO()
    plots.write(figure, image, format="png", metadata={"Software": None})
    drawn = Image.open(image).convert("RGB")
    drawn.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(file, optimize=True)


@plots.styled
def draw_rules(frames: Frames, rules: Sequence[Rule], title: str) -> Figure:
    """Every contrast of the rules, in the colour of its first arm and in both endpoints, which the rules share."""
    figure, axes = plots.new_figure(2, title, width=12)
    forms = {name: form for rule in rules for family in rule.families.values() for name, form in family.items()}
    figure.set_figheight(max(figure.get_figheight(), 1.5 + 0.42 * len(forms)))
    first = {
        name: next(arm for _, arm in form.weights).replace("gspo-wide", "gspo_short") for name, form in forms.items()
    }
    colours = {name: plots.colour_of(arm, [*dict.fromkeys(first.values())]) for name, arm in first.items()}
    for ax, endpoint in zip(axes, (rules[0].endpoint, rules[0].secondary), strict=True):
        rows = plots.rows_of(ax, {name: form.values(frames, endpoint) for name, form in forms.items()}, colours)
        ax.axvspan(-rules[0].margin, rules[0].margin, color=plots.GREY, alpha=0.15)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="difference; shaded: the margin")
        ax.grid(axis="y", visible=False)
    last = int(frames["steps"]["step"].max())
    return plots.finish(figure, axes, f"steps {last // 2 + 1}–{last}; {rows}", legend=False)


@plots.styled
def draw_overview() -> Figure:
    """Replay, GSPO and other methods minus GRPO in both endpoints, beside the KL of GRPO."""
    found = [*rows()]
    title = "What replay and GSPO gain over GRPO, by condition"
    figure, axes = plots.new_figure(3, title, width=15, sharey=True)
    figure.set_figheight(0.25 * len(found) + 2.2)
    for ax, endpoint in zip(axes, (ENDPOINT, SECONDARY), strict=False):
        draw_forest(ax, found, endpoint)
    draw_kl(axes[-1], found)
    names = [f"{one.place.label}  (n = {next(iter(one.found.values())).primary.n})" for one in found]
    axes[0].set(yticks=range(len(found)), yticklabels=names, ylim=(len(found) - 0.4, -0.8))
    for i, one in enumerate(found):
        if i == 0 or found[i - 1].place.band != one.place.band:
            for ax in axes:
                ax.axhline(i - 0.5, color=plots.GREY, linewidth=0.8)
            where, style = axes[0].get_yaxis_transform(), {"fontsize": 8, "color": plots.GREY, "va": "top"}
            axes[0].text(0.01, i - 0.48, one.place.band, transform=where, **style)
    note = (
        "mean and 95 % interval over n seeds; filled: helps or harms by the one rule (exploratory for studies that "
        "declared another); shaded: differences below .02"
    )
    return plots.finish(figure, axes, note, legend=False)


def draw_forest(ax: Axes, found: Sequence[Row], endpoint: str) -> None:
    """One endpoint: an interval per comparison, filled where the rule finds an effect."""
    for i, of_place in enumerate(found):
        for at, (arm, one) in enumerate(of_place.found.items()):
            test, arm_of = one.primary if endpoint == ENDPOINT else one.secondary, KINDS[of_place.place.kinds[arm]]
            colour = plots.colour_of(arm_of, [arm_of, "grpo"])
            y, d = i + 0.3 * (at - (len(of_place.found) - 1) / 2), test.difference
            style = {"color": colour, "markersize": 6, "markerfacecolor": colour if one.sign else "white"}
            ax.plot([d.low, d.high], [y, y], color=colour, linewidth=1.4)
            ax.plot(d.mean, y, plots.symbol_of(arm_of), **style)
    for kind, arm in KINDS.items():
        ax.plot([], [], plots.symbol_of(arm), color=plots.colour_of(arm, [arm, "grpo"]), label=kind)
    ax.axvspan(-MARGIN, MARGIN, color=plots.GREY, alpha=0.15)
    ax.axvline(0, color="black", linewidth=1)
    ax.set(title=NAMES[endpoint], xlabel="difference from GRPO")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right", fontsize=8)


def draw_kl(ax: Axes, found: Sequence[Row]) -> None:
    """The KL of GRPO at each place."""
    for i, one in enumerate(found):
        if not one.place.others:
            ax.plot(one.kl, i, "o", color="black", markersize=5)
    unit = "KL to the policy at the start of the step, nats per token"
    ax.set(xscale="log", xlim=(1e-3, 4), title="KL of GRPO, median over seeds", xlabel=unit)
    ax.grid(axis="y", visible=False)


SPREAD = ("lag=0", "lag=1", "lag=2")
"""Conditions of lag_natural, whose rollouts are fresh, one and two steps old."""
GAINS = {
    "fresh,\none rate": ("lag_natural", Condition("lag=0"), ("lag_natural", "grpo"), "gspo_short"),
    "two steps old,\none rate": ("lag_natural", Condition("lag=2"), ("lag_natural", "grpo"), "gspo_short"),
    "fresh,\nbest rates": ("tuned_rates", tuned(0), ("tuned_rates", CHOSEN[0][1].name), "gspo-wide"),
    "two steps old,\nbest rates": ("tuned_rates", tuned(2), ("tuned_rates/default_clip", "grpo"), "gspo-wide"),
    "fresh,\nbest rate,\n24 layers": ("deep", Condition("rate=0.0001"), ("deep", "grpo"), "gspo_short"),
}
"""Rollouts and rates → a study, its condition, the folder and the name of its GRPO, and the name of its GSPO. With old
rollouts the GRPO of tuned_rates has its default clip range: the one that the pilot chose is worse."""


def gains_of(study: str, condition: Condition, grpo: tuple[str, str], arm: str) -> pd.Series:
    """An arm minus GRPO, by seed."""
    folder, name = grpo
    return condition[arm].values(stored(study), ENDPOINT) - condition[name].values(stored(folder), ENDPOINT)


@plots.styled
def draw_front() -> Figure:
    """The figure of the README: by age of the rollouts, how far ratios spread; and what replay, GSPO and half the rate
    gain over GRPO at one rate for all, and the former two where each method has its best rate and clip range."""
    arms = ["grpo", "grpo-replay", "gspo_short"]
    lines = [("grpo", "GRPO"), ("grpo-replay", "GRPO + replay (R2)"), ("gspo_short", "GSPO")]
    figure, (spread, gain) = plots.new_figure(2, "", width=10)
    for arm, label in lines:
        ess = [values_of(stored("lag_natural"), age, "token_ess")[arm] for age in SPREAD]
        draw_places(spread, ess, 0, label, plots.colour_of(arm, arms), plots.symbol_of(arm) + "-")
    for at, (arm, label) in zip((-1, 0.5), lines[1:], strict=True):
        gains = [
            gains_of(study, condition, grpo, gspo if arm == "gspo_short" else arm)
            for study, condition, grpo, gspo in GAINS.values()
        ]
        draw_places(gain, gains, at, label, plots.colour_of(arm, arms), plots.symbol_of(arm))
    slower = [
        (Condition(f"rate=half,{age}")["grpo"] - Condition(age)["grpo"]).values(stored("lag_natural"), ENDPOINT)
        for age in (SPREAD[0], SPREAD[-1])
    ]
    draw_places(gain, slower, 2, "GRPO at half the rate", "black", "o")
    gain.axhline(0, color=plots.GREY, linewidth=1)
    gain.axvline(1.5, color=plots.GREY, linewidth=0.6)
    ages = ["fresh", "1 step old", "2 steps old"]
    spread.set(title="How even are the ratios?", ylabel="token ESS (1: all ratios are equal)", xlabel="rollouts")
    spread.set(xticks=range(3), xticklabels=ages)
    gain.set(title="What helps?", ylabel="gain over GRPO, held-out match", xlabel="rollouts, learning rates")
    gain.set(xticks=range(len(GAINS)), xticklabels=[*GAINS])
    gain.tick_params(axis="x", labelsize=8)
    for ax in (spread, gain):
        ax.legend(fontsize=8)
    seeds = "32 seeds; best rates: 24 other seeds, 24 layers: 24 more"
    return plots.finish(figure, [spread, gain], f"mean and 95 % interval over {seeds}", legend=False)


def draw_places(ax: Axes, values: Sequence[pd.Series], at: float, label: str, colour: str, style: str) -> None:
    """Means and intervals over seeds, one per place on the axis, moved sideways by `at`."""
    x, bands = np.arange(len(values)) + 0.05 * at, [band(one.dropna().to_numpy()[:, None]) for one in values]
    for place, found in zip(x, bands, strict=True):
        plots.whiskers(ax, place, found, colour)
    ax.plot(x, [found.mean for found in bands], style, label=label, color=colour)


def main() -> None:
    for page in pages():
        page.write_text(refilled(page.read_text()))
    for file, draw in every_figure():
        save(draw(), file)


if __name__ == "__main__":
    main()
