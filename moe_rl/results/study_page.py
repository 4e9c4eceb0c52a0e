"""A study as one web page: what was asked, what was found, with what. It loads nothing, and prints well.

All text from tables and declarations is escaped, and the page's content security policy allows no script at all.
"""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment

from moe_rl.config import Arm, RunConfig, leaves
from moe_rl.errors import RunError
from moe_rl.metrics.rounding import number
from moe_rl.objectives.methods import spell_out
from moe_rl.objectives.methods_page import head, row
from moe_rl.results import figures, plots
from moe_rl.results.rollouts import write_pages
from moe_rl.results.stats import printed_p
from moe_rl.results.summary import RUN, Metric, compare, configs_of, family, is_imported, metric, verdict_of
from moe_rl.results.tables import (
    Shown,
    arms_of,
    cautions,
    cost_table,
    left_out,
    study_tables,
    untrained,
    without_effect,
)
from moe_rl.storage.commits import last_step
from moe_rl.storage.folder import ENDED, run_folders, state, write_text
from moe_rl.storage.frames import Frames, labels_of, load_study
from moe_rl.storage.links import replaced
from moe_rl.storage.provenance import HARDWARE
from moe_rl.storage.terminal import duration
from moe_rl.study.declaration import read_declaration
from moe_rl.study.display import preparing

ANSWER = {
    "verdict": "Verdict by the declared rule",
    "seeds": "Seeds",
    "cautions": "Caution",
    "untrained": "Warning",
    "untrusted": "Left out",
}
ABOUT = {
    "hypothesis": "Hypothesis",
    "endpoint": "Primary endpoint",
    "comparisons": "Contrasts",
    "decision_rule": "Decision rule",
    "differs_from_paper": "Differs from the paper",
    "cost": "Cost, as planned",
}
UNRECORDED = "not recorded"
HASH = re.compile(r"\b[0-9a-f]{40}\b")
"""A commit, of which a page shows ten digits."""


def write_study_page(
    folder: Path, out: Path, *, mix_code: bool = False, trust: bool = False, everything: bool = False
) -> None:
    """Write the page of the finished runs of a study, from its runs or its collected tables, and its `card` in the
    file `card_file`; with `everything`, all tables and the figures of each condition. Code that the folder names is run
    only with `trust`: see `read_declaration`."""
    declared, frames = read_declaration(folder, trust), load_study(folder, mix_code=mix_code)
    render(out, declared, shown(frames, declared, out, everything=everything))
    write_text(replaced(card_file(out)), card(frames, declared))


class Live:
    """The page of a study that trains. Tables and figures are made again where a run has a new commit."""

    def __init__(self, folder: Path, out: Path, *, mix_code: bool = False, trust: bool = False) -> None:
        self.folder, self.out, self.mix_code = folder, out, mix_code
        self.declared = read_declaration(folder, trust)
        self.commits: list[int] = []
        self.values: dict[str, Any] = {}
        self.rewards: dict[tuple[str, ...], pd.DataFrame] = {}

    def write(self, refresh: float) -> None:
        """Write the page; a browser reads it again every `refresh` seconds, while a run is running. With 0 it is the
        last one, for which no table is read. Raises RunError for collected tables."""
        runs = [(path, state(path)) for path in run_folders(self.folder)]
        if not runs and (self.folder / "runs.parquet").exists():
            raise RunError(f"{self.folder} has tables of runs that ended: moe-rl report writes their page")
        commits = [last_step(path) for path, _ in runs]
        if refresh and commits != self.commits and any(commits):
            frames = load_study(self.folder, unfinished=True, mix_code=self.mix_code)
            self.values = shown(frames, self.declared, self.out, live=True)
            self.rewards = dict(list(frames["steps"].groupby(RUN)))
            self.commits = commits
        going = [now["seconds_left"] or 0.0 for _, now in runs if now["state"] == "running"]
        ended = sum(now["state"] in ENDED for _, now in runs)
        text = f"{ended} of {len(runs)} runs have ended, {len(going)} are running. "
        text += f"The longest needs {duration(max(going))} more. " if any(going) else ""
        live = [self._row(path, now) for path, now in runs]
        values = {
            "live": live,
            "now": f"{text}Written at {time.strftime('%H:%M:%S')}.",
            "refresh": refresh if going else 0,
        }
        render(self.out, self.declared, self.values | values)

    def _row(self, path: Path, now: Mapping[str, Any]) -> dict[str, Any]:
        """Name, progress and curve of a run: at most 60 points in a box of 128 × 24."""
        labels = labels_of(path)
        steps = self.rewards.get(tuple(labels[label] for label in RUN))
        points = (
            "" if steps is None or "reward" not in steps else _points(steps.dropna(subset=["reward"]), now["steps"])
        )
        left = f"{duration(now['seconds_left'])} left" if now["state"] == "running" and now["seconds_left"] else ""
        begun = now["step"] or now["state"] != "running"
        return {
            "name": f"{labels['arm']}, {labels['condition']}, seed {labels['seed']}".replace(", base,", ","),
            "state": left or (now["state"] if begun else preparing(now)),
            "reward": "–" if now.get("reward") is None else number(now["reward"], ".3f"),
            "points": points,
            **{key: now[key] for key in ("step", "steps")},
        }


def _points(steps: pd.DataFrame, last: int) -> str:
    """Rewards over the steps of a run as the points of an SVG, from 0 below to 1 above, or to the highest."""
    points = steps.sort_values("step").iloc[:: -(-len(steps) // 60) or 1]
    low, high = min(points["reward"].min(), 0), max(points["reward"].max(), 1)
    y = 23 - 22 * (points["reward"] - low) / (high - low)
    return " ".join(f"{128 * x / last:.1f},{height:.1f}" for x, height in zip(points["step"], y, strict=True))


def render(out: Path, declared: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Fill the template, and write the page."""
    template = resources.files("moe_rl.results").joinpath("study_page.html").read_text(encoding="utf-8")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, Environment(autoescape=True).from_string(template).render(declared=declared, **values))


def shown(
    frames: Frames, declared: Mapping[str, Any], out: Path, *, everything: bool = False, live: bool = False
) -> dict[str, Any]:
    """What the template shows of a study's tables, and the pages of rollouts, which a `live` one has not."""
    exploratory = "No rule was declared, so all differences are exploratory."
    seeds = sorted(map(int, frames.runs["seed"].unique()))
    texts = dict(declared) | {
        "comparisons": "; ".join(f"{a} − {b}" for a, b in declared["comparisons"]),
        "verdict": "\n".join(verdict_of(frames, declared)) or ("" if declared["decision_rule"] else exploratory),
        "seeds": f"n = {len(seeds)} ({_range(seeds)}); {len(frames.runs)} runs, {len(frames.left_out)} left out",
        "cautions": cautions(frames, declared),
        "untrained": " ".join([untrained(frames), without_effect(frames, declared)]).strip(),
    }
    rollouts: dict[str, dict[int, str]] = {}
    for arm, seed, page in () if live else write_pages(frames.runs, out):
        rollouts.setdefault(arm, {})[seed] = page
    return {
        "answer": {title: texts[key] for key, title in ANSWER.items()},
        "about": {title: texts[key] for key, title in ABOUT.items()},
        "tables": study_tables(frames, declared, every=everything, compared=True),
        "figures": list(_figures(frames, declared, every=everything)),
        "rollouts": rollouts,
        "seeds": seeds,
        "cost": cost_table(frames, declared),
        "settings": _settings(frames),
        "runs": _made_with(frames, declared),
        "left_out": frames.left_out,
        "folder": declared["folder"],
    }


def card_file(out: Path) -> Path:
    """Where the card of a page goes: beside it, `report.html.md`. So it replaces neither the page nor a `report.md`."""
    return out.with_name(f"{out.name}.md")


def card(frames: Frames, declared: Mapping[str, Any]) -> str:
    """What a study's page begins with, as Markdown: its set-up, and the difference of each declared comparison in the
    primary and in every further endpoint, with its 95 % interval and its p-value after Holm."""
    endpoints = [metric(name) for name in (declared["endpoint"], *declared["further_endpoints"])]
    arms, asked, several = arms_of(frames, declared), family(declared), len(frames.conditions) > 1
    lines = [*head("set-up", ""), *(_row(*pair) for pair in _set_up(frames, declared, endpoints))]
    tables = (
        [
            {(c.condition, c.a, c.b): c for c in compare(frames, arms, declared["comparisons"], endpoint, asked)}
            for endpoint in endpoints
        ]
        if declared["comparisons"]
        else [{}]
    )
    if tables[0]:
        titles = [title for endpoint in endpoints for title in (f"{endpoint.name} [95 % CI]", "p")]
        lines += ["", *head("difference", *["condition"] * several, "n", *titles)]
        for (condition, a, b), first in tables[0].items():
            by_endpoint = [table.get((condition, a, b)) for table in tables]
            cells = [f"{a} − {b}", *[condition] * several, str(first.result.n)]
            for c in by_endpoint:
                other = f" (n = {c.result.n})" if c and c.result.n != first.result.n else ""
                cells += [f"{c.result.difference}{other}", printed_p(c.p_holm, c.result.n, ".2g")] if c else ["–", "–"]
            lines.append(_row(*cells))
        note = f"p: permuted signs of the seeds' differences, after Holm over the {asked} comparisons of an endpoint."
        lines += [
            "",
            note,
            *filter(None, (left_out(frames, arms, declared["comparisons"], endpoint) for endpoint in endpoints)),
        ]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    """A row of the card, which shows HTML, links and images in a name as text."""
    return row(*(re.sub("<(?=[a-zA-Z/!?])", "&lt;", cell).replace("](", "]\\(") for cell in cells))


def _set_up(frames: Frames, declared: Mapping[str, Any], endpoints: Sequence[Metric]) -> Iterable[tuple[str, str]]:
    configs = configs_of(frames)
    seeds = sorted(map(int, frames.runs["seed"].unique()))
    yield "model", _list(config.model.name for config in configs)
    yield "task", _list(config.task for config in configs)
    yield (
        "length",
        _list(
            f"{config.steps} steps of {config.prompts_per_step * config.group_size} responses and "
            f"{config.mini_batches * config.epochs} updates"
            for config in configs
        ),
    )
    yield "learning rate", _list(f"{config.optimizer.lr:g}" for config in configs)
    yield "seeds", f"{len(seeds)}: {_range(seeds)}"
    yield "arms", _list(arms_of(frames, declared))
    yield "endpoints", "; ".join(config.name for config in endpoints)
    yield "compute", f"{len(frames.runs)} runs, {frames.runs['seconds'].sum() / 3600:.1f} hours of steps"
    runs = frames.runs
    packages, states = ([json.loads(text or "null") or {} for text in runs[name]] for name in ("packages", "git"))
    yield "processor", _list(versions.get("processor", UNRECORDED) for versions in packages)
    times = [runs[column].dropna().astype(float) for column in ("created", "finished_at")]
    ends = [pick(column) for column, pick in zip(times, (min, max), strict=True) if len(column)]
    days = " to ".join(time.strftime("%Y-%m-%d %H:%M", time.gmtime(end)) for end in ends)
    yield "made", f"{days} UTC" if days else UNRECORDED
    commits = [f"{git['commit']}{' (dirty)' * bool(git['dirty'])}" if git.get("commit") else "" for git in states]
    yield "commit", _list(HASH.sub(lambda match: match[0][:10], commit) or UNRECORDED for commit in commits)


def _figures(frames: Frames, declared: Mapping[str, Any], every: bool = False) -> Iterable[tuple[str, str, str, str]]:
    """Name and condition, caption and SVG in base64 of each; for one that cannot be drawn, why. The figures of
    TOGETHER are drawn of every study, and then those that it declares."""
    names = [*dict.fromkeys((*figures.TOGETHER, *declared["figures"]))]
    for name, condition, figure in figures.draw_planned(frames, {**declared, "figures": names}, every=every):
        title = name if condition in (None, "base") else f"{name}, {condition}"
        if isinstance(figure, RunError):
            yield title, "", "", str(figure)
            continue
        image = io.BytesIO()
        plots.write(figure, image, format="svg", metadata=plots.FORMATS["svg"])
        yield title, figures.title_of(name), base64.b64encode(image.getvalue()).decode(), ""


def _settings(frames: Frames) -> tuple[Shown, Shown, Shown]:
    """The arms as texts, the settings that differ from their defaults, and the others; each with all its values."""
    arms = {config.arm.name: spell_out(config.arm) for config in configs_of(frames)}
    usual = {(key, json.dumps(value)) for key, value in leaves(RunConfig(arm=Arm(name="any")).to_dict())}
    values: dict[str, dict[str, None]] = {}
    chosen = set[str]()
    for config in (json.loads(text) for text in frames.runs["config"].unique()):
        stored = config if is_imported(config) else RunConfig.from_dict(config).to_dict()
        for key, value in leaves({**stored, "arm": None, "seed": None}):
            values.setdefault(key, {})[value if isinstance(value, str) else json.dumps(value)] = None
            chosen |= {key} - {key for key, usually in usual if usually == json.dumps(value)}
    rows = {key: (key, ", ".join(texts)) for key, texts in values.items() if key not in ("arm", "seed")}
    head = ("setting", "value")
    return (
        Shown("Arms", ("arm", "text"), [*arms.items()]),
        Shown("Settings that were chosen", head, [row for key, row in rows.items() if key in chosen]),
        Shown("", head, [row for key, row in rows.items() if key not in chosen]),
    )


def _made_with(frames: Frames, declared: Mapping[str, Any]) -> Shown:
    """The set-up, and the versions of code and packages."""
    packages: dict[str, list[str]] = {"code": list(frames.runs["code"])}
    for text in frames.runs["packages"].unique():
        for name, version in (dict.fromkeys(HARDWARE, UNRECORDED) | (json.loads(text or "null") or {})).items():
            packages.setdefault(name, []).append(version)
    versions = [(name, _list(values)) for name, values in packages.items()]
    return Shown("", ("what", "which"), [*_set_up(frames, declared, [metric(declared["endpoint"])]), *versions])


def _range(seeds: Sequence[int]) -> str:
    consecutive = len(seeds) == seeds[-1] - seeds[0] + 1 > 2
    return f"{seeds[0]} to {seeds[-1]}" if consecutive else _list(seeds)


def _list(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values)) or UNRECORDED
