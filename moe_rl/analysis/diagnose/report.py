"""A diagnosis as a command prints it and as a web page: verdict, evidence, a table of forwards, where the gap is.

The page is one file that loads nothing and runs no script; all text that comes from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment
from rich.console import Console

from moe_rl.analysis.diagnose.decide import Fit
from moe_rl.analysis.diagnose.diagnosis import LEAD, Diagnosis
from moe_rl.analysis.diagnose.locations import Location
from moe_rl.results.printed import print_table
from moe_rl.results.tables import Shown
from moe_rl.storage.folder import write_text
from moe_rl.storage.terminal import say

SHOWN = 12
"""Hypotheses that a terminal shows at most, none of which leaves more than LEAD; the page shows all."""
KINDS = {
    "turn": "by turn, from 1",
    "expert": "by expert that the token uses, the largest",
    "position": "by token of the response, from 0",
    "weight version": "by weight version",
    "prefix": "by prefix",
    "sets": "sets of experts that the checkpoint would not pick itself, by layer",
}


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Verdict, evidence, and the table of forwards."""
    say(console, (diagnosis.verdict, "bold"), wrap=True)
    for text in diagnosis.evidence:
        say(console, f"• {text}", wrap=True)
    say(console, f"What to do: {' '.join(diagnosis.remedies)}", wrap=True)
    print_table(console, tabulate_fits(diagnosis, SHOWN))
    for text in diagnosis.notes:
        say(console, f"note: {text}", wrap=True)


def write_page(diagnosis: Diagnosis, out: Path, *, rollouts: str, checkpoint: str) -> None:
    """Write the same as one page, with every forward and where the gap is."""
    template = resources.files("moe_rl.analysis.diagnose").joinpath("page.html").read_text(encoding="utf-8")
    by_kind = {kind: [x for x in diagnosis.locations if x.kind == kind] for kind in KINDS}
    out.parent.mkdir(parents=True, exist_ok=True)
    page = Environment(autoescape=True).from_string(template)
    text = page.render(
        found=diagnosis,
        tests=tabulate_fits(diagnosis),
        bars={KINDS[kind]: [_bar(x, places) for x in places] for kind, places in by_kind.items() if places},
        rollouts=rollouts,
        checkpoint=checkpoint,
        counts=counts(diagnosis),
    )
    write_text(out, text)


def counts(diagnosis: Diagnosis) -> str:
    """What was looked at."""
    drawn = ", drawn at random" if diagnosis.responses < diagnosis.of else ""
    return f"{diagnosis.responses} of {diagnosis.of} responses{drawn}, {diagnosis.tokens:,} tokens of the engine"


def tabulate_fits(diagnosis: Diagnosis, most: int | None = None) -> Shown:
    """A row per forward: unconstrained, noise, rounding and forced routes first, then hypotheses, the best first."""
    known = [r for r in diagnosis.fits if r.name in ("unconstrained", "noise floor", "rounding") or "forced" in r.name]
    rest = diagnosis.fits[len(known) :]
    shown = rest if most is None else [r for r in rest if diagnosis.left[r.name][0] <= LEAD][:most]
    more = f" {len(rest) - len(shown)} more hypotheses are on the page." if len(rest) > len(shown) else ""
    return Shown(
        "The tests",
        ("forward", "KL to the engine,\nnats per token", "score"),
        [_row(r, diagnosis) for r in [*known, *shown]],
        "KL: k3 = r − 1 − log r, r = p(forward)/p(engine), mean over responses with its 95 % interval. Noise floor "
        "(other batches, padding) and rounding (float32 against bfloat16) are the checkpoint against itself. Score: "
        f"share of the mean |log r| of the unconstrained forward that is left. {counts(diagnosis)}.{more}",
    )


def _row(fit: Fit, diagnosis: Diagnosis) -> tuple[str, ...]:
    interval, left = fit.interval, diagnosis.left.get(fit.name)
    bounds = "" if math.isnan(interval.low) else f" [{interval.low:.2g}, {interval.high:.2g}]"
    score = "" if left is None else f"{100 * left[0]:.3g} % [{100 * left[1]:.2g}, {100 * left[2]:.2g}]"
    return fit.name, f"{fit.mean:.2g}{bounds}", score


def _bar(place: Location, places: Sequence[Location]) -> tuple[str, str, str, int]:
    """The name, value and tokens of a place, and the width of its bar in per cent of the largest."""
    value = f"{100 * place.value:.3g} %" if place.kind == "sets" else f"{place.value:.2g}"
    most = max((x.value for x in places if not math.isnan(x.value)), default=0.0)
    width = round(100 * place.value / most) if most > 0 and not math.isnan(place.value) else 0
    return place.name, value, f"{place.tokens:,}" if place.tokens else "", width
