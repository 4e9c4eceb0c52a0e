"""A diagnosis as a command prints it and as a web page: verdict, evidence, a table of forwards, where the gap is.

The page is one file that loads nothing and runs no script; all text that comes from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment
from rich.console import Console

from moe_rl.analysis.diagnose.diagnosis import Diagnosis
from moe_rl.analysis.diagnose.explanations import LEAD
from moe_rl.analysis.diagnose.locations import Location, write_example
from moe_rl.analysis.diagnose.scoring import Fit
from moe_rl.results.printed import print_table
from moe_rl.results.tables import Shown
from moe_rl.storage.terminal import say

SHOWN = 12
"""Hypotheses that a terminal shows at most, none of which leaves more than LEAD; the page shows all."""
LOCATED = {"unexplained", "routing", "combine_weights", "weight_version", "stale_cache", "overwritten_layer"}
"""Causes with which a terminal shows where the gap is; the page always does."""
KINDS = {"turn": "by turn, from 1", "expert": "by expert that the token uses, the largest",
         "position": "by token of the response, from 0", "length": "by length of the response, in tokens",
         "weight version": "by weight version", "prefix": "by prefix", "layer": "by layer, its ids alone forced",
         "sets": "sets of experts that the checkpoint would not pick itself, by layer"}


def print_diagnosis(console: Console, found: Diagnosis) -> None:
    """Verdict, evidence, the table of forwards, and where the gap is."""
    say(console, (found.verdict, "bold"), wrap=True)
    for text in found.evidence:
        say(console, f"• {text}", wrap=True)
    say(console, f"What to do: {' '.join(found.remedies)}", wrap=True)
    for shown in tables(found, SHOWN):
        print_table(console, shown)
    for text in found.notes:
        say(console, f"note: {text}", wrap=True)


def write_page(found: Diagnosis, out: Path, *, rollouts: str, checkpoint: str) -> None:
    """The same as one page to open in a browser, with every forward, and beside it the page of a response, to which it
    links, where there is one to show."""
    template = resources.files("moe_rl.analysis.diagnose").joinpath("page.html").read_text(encoding="utf-8")
    bars = {kind: [(p.name, _value(p), _tokens(p), _width(p.value, places)) for p in places]
            for kind, places in _by_kind(found)}
    out.parent.mkdir(parents=True, exist_ok=True)
    view = found.example and write_example(found.example, out).name
    out.write_text(Environment(autoescape=True).from_string(template).render(
        found=found, tables=[tabulate_fits(found)], bars={KINDS[kind]: rows for kind, rows in bars.items()},
        rollouts=rollouts, checkpoint=checkpoint, counts=counts(found), view=view), encoding="utf-8")


def counts(found: Diagnosis) -> str:
    """What was looked at."""
    return (f"{found.responses} of {found.of} responses" + (", drawn at random" if found.responses < found.of else "")
            + f", {found.tokens:,} tokens that the engine sampled")


def tables(found: Diagnosis, most: int) -> Iterator[Shown]:
    """The table of forwards, and where the gap is, unless its place follows from its cause."""
    yield tabulate_fits(found, most)
    for kind, places in _by_kind(found) if LOCATED & {*found.causes} else ():
        if len(places) > 1:
            yield Shown(f"Where: {KINDS[kind]}", ("", "share" if kind == "sets" else "KL, nats", "tokens"),
                        [(p.name, _value(p), _tokens(p)) for p in places])


def tabulate_fits(found: Diagnosis, most: int | None = None) -> Shown:
    """A row per forward: natural, noise, rounding and forced routes first, then hypotheses, the best first."""
    known = [r for r in found.fits if r.name in ("natural", "noise floor", "rounding") or "forced" in r.name]
    rest = [r for r in found.fits if r not in known]
    shown = rest if most is None else [r for r in rest if found.left[r.name][0] <= LEAD][:most]
    rows = [_row(r, found) for r in [*known, *shown]]
    left = f" {len(rest) - len(shown)} more hypotheses are on the page." if len(rest) > len(shown) else ""
    return Shown(
        "The tests", ("forward", "KL to the engine,\nnats per token", "score", "beyond a\nfactor 2",
                      "top-1\nflips"), rows,
        "KL: k3 = r − 1 − log r, r = p(forward)/p(engine), mean over responses with its 95 % interval. Noise floor "
        "(other batches, padding) and rounding (float32 against bfloat16) are the checkpoint against itself. Score: "
        "share of the mean |log r| of the natural forward that is left. Beyond a factor 2: tokens whose r is above 2 "
        "or below ½. Flips: tokens whose most likely token is not that of the natural forward. A response that a "
        f"hypothesis brings no nearer to the engine counts as in the natural forward. {counts(found)}.{left}")


def _row(fit: Fit, found: Diagnosis) -> tuple[str, ...]:
    interval, left = fit.interval, found.left.get(fit.name)
    bounds = "" if math.isnan(interval.low) else f" [{interval.low:.2g}, {interval.high:.2g}]"
    share = "" if left is None else f"{100 * left[0]:.3g} %"
    if left is not None and left[1] < left[2]:
        share += f" [{100 * left[1]:.2g}, {100 * left[2]:.2g}]"
    return (fit.name, f"{fit.mean:.2g}{bounds}", share, f"{100 * fit.beyond_2.mean():.2g} %",
            f"{100 * fit.flips.mean():.2g} %")


def _by_kind(found: Diagnosis) -> Iterator[tuple[str, Sequence[Location]]]:
    for kind in KINDS:
        if places := [p for p in found.locations if p.kind == kind]:
            yield kind, places


def _value(place: Location) -> str:
    return f"{100 * place.value:.3g} %" if place.kind == "sets" else f"{place.value:.2g}"


def _tokens(place: Location) -> str:
    return f"{place.tokens:,}" if place.tokens else ""


def _width(value: float, places: Sequence[Location]) -> int:
    """Of a bar, in per cent of the largest."""
    most = max((p.value for p in places if not math.isnan(p.value)), default=0.0)
    return round(100 * value / most) if most > 0 and not math.isnan(value) else 0
