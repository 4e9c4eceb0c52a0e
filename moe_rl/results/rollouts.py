"""Rollouts of a run, to be read: on the terminal, and as a page that is one file and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from rich.console import Console

from moe_rl.errors import ConfigError, RunError
from moe_rl.metrics.rounding import number
from moe_rl.storage.folder import read_manifest, write_text
from moe_rl.storage.frames import read_table
from moe_rl.storage.links import replaced
from moe_rl.storage.terminal import say, visible

SORTS = ("reward", "length", "ratio", "advantage", "clipped", "flips", "step")
MOST = 1000
"""Most rollouts of a page; of more, the ends of every order are shown and steps at equal distances."""
KNOWN = ("group", "advantage", "response_tokens", "truncated", "log_ratio_min", "log_ratio_max", "clipped", "flips")
"""Columns that rollouts of another trainer may be without."""
STYLES = {1: "black on yellow", -1: "black on cyan", 0: ""}
"""Of a token that the upper or the lower clip bound took its gradient from."""


def load_rollouts(run: Path, steps: tuple[int, int] | None = None) -> pd.DataFrame:
    """The rows of `rollouts` of one run up to its last commit, with `length` and `ratio`, the largest |log r|; of the
    given steps, both included. Raises RunError where there are none."""
    if read_manifest(run) is None:
        raise RunError(f"{run} is not a run: it has no manifest.json. See `moe-rl runs list`.")
    rows = read_table(run, "rollouts")
    if not len(rows):
        raise RunError(f"{run} stores no rollouts: it has no checkpoint yet, or ran with measure.rollouts=0")
    rows = rows.reindex(columns=rows.columns.union(KNOWN))
    rows = rows.assign(
        length=rows["response_tokens"].astype("Int64"),
        ratio=rows[["log_ratio_min", "log_ratio_max"]].abs().max(axis=1),
    )
    if steps is not None:
        first, last = rows["step"].min(), rows["step"].max()
        if (rows := rows[rows["step"].between(*steps)]).empty:
            raise ConfigError(f"--step {steps[0]}:{steps[1]}: {run} stores rollouts of steps {first} to {last}")
    return rows


def ordered(rollouts: pd.DataFrame, by: str, ascending: bool = False) -> pd.DataFrame:
    """By one of SORTS; equal ones by their steps."""
    if by not in SORTS:
        raise ConfigError(f"--sort {by}: choose {', '.join(SORTS)}")
    return rollouts.sort_values([by, "step", "rollout"], ascending=[ascending, True, True], kind="stable")


def print_rollout(console: Console, row: Mapping[str, Any]) -> None:
    """One rollout: what training made of it, the prompt, and the response with the tokens that were clipped."""
    made = (
        ""
        if pd.isna(row["length"])
        else (
            f"  advantage {number(row['advantage'], '+.3g')}  {row['length']} tokens"
            f"{', cut off' * bool(row['truncated'])}"
            f"  log r {number(row['log_ratio_min'], '+.3g')} … {number(row['log_ratio_max'], '+.3g')}  "
            f"{row['clipped']} clipped  {row['flips']} flips"
        )
    )
    say(
        console,
        (f"step {row['step']}, rollout {row['rollout']}", "bold"),
        f"  reward {number(row['reward'], '.3g')}{made}",
    )
    say(console, (visible(row["prompt"]), "dim"), wrap=True)
    tokens = json.loads(row["response"])
    shown = [
        (visible(t[0]), ("dim" if t[1] is None else STYLES[t[2]]) + " underline" * bool(t[3]))
        if len(t) > 1
        else (f" […{t[0]} tokens…] ", "dim")
        for t in tokens
    ]
    say(console, *shown, wrap=True)
    far = sorted((t for t in tokens if len(t) > 1 and t[1] and not math.isnan(t[1])), key=lambda t: -abs(t[1]))[:5]
    if far:
        parts = (
            f"'{visible(t[0])}' {number(t[1], '+.3g')}{' clipped' * bool(t[2])}{f' {t[3]} flips' * bool(t[3])}"
            for t in far
        )
        say(console, (f"furthest: {', '.join(parts)}", "dim"), wrap=True)
    say(console, "")


def write_rollouts_page(run: Path, out: Path) -> None:
    """The page of a run's rollouts: a list that every column sorts, and beside it the one that was chosen."""
    rollouts = load_rollouts(run)
    if len(rollouts) > MOST:
        ends = [ordered(rollouts, by, way).index[: MOST // 40] for by in SORTS for way in (True, False)]
        steps = rollouts["step"].unique()[:: -(-2 * len(rollouts) // MOST)]
        rollouts = rollouts[rollouts["step"].isin(steps) | rollouts.index.isin(set().union(*ends))]
    rollouts = rollouts.astype(object).where(rollouts.notna(), None)  # JSON knows no NaN
    rows = [
        row | {"response": json.loads(row["response"], parse_constant=lambda _: None)}
        for row in rollouts.to_dict("records")
    ]
    write_page("moe_rl.results", "rollouts_page.html", f"rollouts of {run}", {"run": str(run), "rows": rows}, out)


def write_page(package: str, template: str, title: str, data: Mapping[str, Any], out: Path) -> None:
    """A template with its title and data, which its one script reads as escaped JSON, and which no other may run."""
    page = (resources.files(package) / template).read_text(encoding="utf-8")
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = json.dumps(data)  # in ASCII: what is left to escape is what could end the element it stands in
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    page = page.replace("@HASH@", f"sha256-{digest}").replace("@TITLE@", html.escape(title)).replace("@DATA@", text)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)


def write_pages(runs: pd.DataFrame, report: Path) -> Iterator[tuple[str, int, str]]:
    """Write a page of every run that keeps rollouts into a folder beside a report; its arm and condition, its seed, and
    how to link to it."""
    for run in runs.itertuples():
        path = Path(run.path)
        if (path / "manifest.json").exists() and len(read_table(path, "rollouts")):
            page = (
                report.with_name(f"{report.stem}_rollouts")
                .joinpath(*path.resolve().parts[1:][-3:])
                .with_suffix(".html")
            )
            write_rollouts_page(path, replaced(page, report.parent))
            row = f"{run.arm}, {run.condition}".removesuffix(", base")
            yield row, int(run.seed), quote(page.relative_to(report.parent).as_posix())
