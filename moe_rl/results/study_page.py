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

from moe_rl.config import RunConfig
from moe_rl.errors import RunError
from moe_rl.objectives.methods_page import head, row
from moe_rl.registry import Component
from moe_rl.results import figures, plots
from moe_rl.results.rollouts import write_pages
from moe_rl.results.summary import Metric, compare, configs_of, family, is_imported, metric, verdict_of
from moe_rl.results.tables import Shown, arms_of, left_out, study_tables, untrained
from moe_rl.storage.commits import replaced
from moe_rl.storage.frames import Frames, load_study
from moe_rl.storage.provenance import HARDWARE
from moe_rl.study.declaration import read_declaration

ABOUT = {"hypothesis": "Hypothesis", "endpoint": "Primary endpoint", "comparisons": "Contrasts",
         "decision_rule": "Decision rule", "verdict": "Verdict by that rule", "untrusted": "Left out",
         "untrained": "Warning",
         "differs_from_paper": "Differs from the paper", "caution": "Caution", "cost": "Cost, as planned"}
UNRECORDED = "not recorded"
HASH = re.compile(r"\b[0-9a-f]{40}\b")
"""A commit, of which a page shows ten digits."""


def write_study_page(folder: Path, out: Path, *, mix_code: bool = False, trust: bool = False) -> None:
    """Write the page of the finished runs of a study, from its runs or its collected tables, and its `card` in the
    file `card_file`. Code that the folder names is run only with `trust`: see `read_declaration`."""
    declared, frames = read_declaration(folder, trust), load_study(folder, mix_code=mix_code)
    texts = dict(declared) | {"comparisons": "; ".join(f"{a} − {b}" for a, b in declared["comparisons"]),
                              "verdict": "\n".join(verdict_of(frames, declared)), "untrained": untrained(frames)}
    template = resources.files("moe_rl.results").joinpath("study_page.html").read_text()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(Environment(autoescape=True).from_string(template).render(
        declared=declared, about={title: texts[key] for key, title in ABOUT.items()},
        tables=study_tables(frames, declared), figures=_figures(frames, declared), settings=_settings(frames),
        rollouts=list(write_pages(frames.runs, out)), runs=_runs(frames.runs),
        versions=_versions(frames.runs), left_out=frames.left_out, folder=folder.as_posix()))
    replaced(card_file(out)).write_text(card(frames, declared))


def card_file(out: Path) -> Path:
    """Where the card of a page goes: beside it, `report.html.md`. So it replaces neither the page nor a `report.md`."""
    return out.with_name(f"{out.name}.md")


def card(frames: Frames, declared: Mapping[str, Any]) -> str:
    """What a study's page begins with, as Markdown: its set-up, and the difference of each declared comparison in the
    primary and in every further endpoint, with its 95 % interval and its p-value after Holm."""
    endpoints = [metric(name) for name in (declared["endpoint"], *declared["further_endpoints"])]
    arms, asked, several = arms_of(frames, declared), family(declared), len(frames.cells) > 1
    lines = [*head("set-up", ""), *(_row(*pair) for pair in _set_up(frames, declared, endpoints))]
    tables = [{(c.cell, c.a, c.b): c for c in compare(frames, arms, declared["comparisons"], one, asked)}
              for one in endpoints] if declared["comparisons"] else [{}]
    if tables[0]:
        titles = [title for one in endpoints for title in (f"{one.name} [95 % CI]", "p")]
        lines += ["", *head("difference", *["condition"] * several, "n", *titles)]
        for (cell, a, b), first in tables[0].items():
            found = [table.get((cell, a, b)) for table in tables]
            cells = [f"{a} − {b}", *[cell] * several, str(first.result.n)]
            for c in found:
                other = f" (n = {c.result.n})" if c and c.result.n != first.result.n else ""
                cells += [f"{c.result.difference}{other}", f"{c.p_holm:.2g}"] if c else ["–", "–"]
            lines.append(_row(*cells))
        note = f"p: permuted signs of the seeds' differences, after Holm over the {asked} comparisons of an endpoint."
        lines += ["", note, *filter(None, (left_out(frames, arms, declared["comparisons"], one) for one in endpoints))]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    """A row of the card, which shows HTML, links and images in a name as text."""
    return row(*(re.sub("<(?=[a-zA-Z/!?])", "&lt;", cell).replace("](", "]\\(") for cell in cells))


def _set_up(frames: Frames, declared: Mapping[str, Any], endpoints: Sequence[Metric]) -> Iterable[tuple[str, str]]:
    configs = configs_of(frames)
    seeds = sorted(frames.runs["seed"].unique())
    whole = len(seeds) == seeds[-1] - seeds[0] + 1 > 2
    yield "model", _list(one.model.name for one in configs)
    yield "task", _list(one.task for one in configs)
    yield "length", _list(f"{one.steps} steps of {one.prompts_per_step * one.group_size} responses and "
                          f"{one.mini_batches * one.epochs} updates" for one in configs)
    yield "learning rate", _list(f"{one.optimizer.lr:g}" for one in configs)
    yield "seeds", f"{len(seeds)}: {f'{seeds[0]} to {seeds[-1]}' if whole else _list(seeds)}"
    yield "arms", _list(arms_of(frames, declared))
    yield "endpoints", "; ".join(one.name for one in endpoints)
    yield "compute", f"{len(frames.runs)} runs, {frames.runs['seconds'].sum() / 3600:.1f} hours of steps"
    packages = [json.loads(text or "null") or {} for text in frames.runs["packages"].unique()]
    yield "processor", _list(one.get("processor", UNRECORDED) for one in packages)
    for name, values in provenance(frames.runs).items():
        if name != "study files":
            yield name, _list(HASH.sub(lambda found: found[0][:10], value) for value in values)


def _figures(frames: Frames, declared: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    """Name, caption and SVG in base64 of each; for one that cannot be drawn, why."""
    for name, _, figure in figures.draw_planned(frames, declared):
        if isinstance(figure, RunError):
            yield name, "", "", str(figure)
            continue
        image = io.BytesIO()
        plots.write(figure, image, format="svg", metadata={"Date": None, "Creator": None})
        yield name, figures.title_of(name), base64.b64encode(image.getvalue()).decode(), ""


def _settings(frames: Frames) -> tuple[Shown, Shown]:
    """Each arm's own settings, and those of all runs; what differs between the runs of an arm shows all its values."""
    stored = [json.loads(text) for text in frames.runs["config"].unique()]
    configs = [_flat(one if is_imported(one) else RunConfig.from_dict(one).to_dict()) for one in stored]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    arms = dict.fromkeys(config["arm.name"] for config in configs)
    by_arm = {arm: [c for c in configs if c["arm.name"] == arm] for arm in arms}
    rows = [(key, *(_values(own, key) for own in by_arm.values())) for key in keys if key.startswith("arm.")]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    shared = [(key, _values(configs, key)) for key in keys if key not in [row[0] for row in differing]]
    return (Shown("in which the arms differ", ("setting", *by_arm), differing),
            Shown("of all runs", ("setting", "value"), shared))


def _values(configs: Sequence[Mapping[str, str]], key: str) -> str:
    return ", ".join(dict.fromkeys(config.get(key, "–") for config in configs))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted settings and their values as JSON."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if prefix == "arm." and key != "name":  # parts, as a study writes them
            parts = value if isinstance(value, list) else [value]
            found[prefix + key] = ", ".join(str(Component.of(part)) if part else "–" for part in parts) or "–"
        elif isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _runs(runs: pd.DataFrame) -> Shown:
    """Seeds, states and cost."""
    rows = [(f"{arm}, {cell}", _list(part["seed"]), _list(f"{n} {state}" for state, n in
             part["state"].value_counts().items()), f"{part['seconds'].sum() / 60:.1f}")
            for (arm, cell), part in runs.groupby(["arm", "factors"], sort=False)]
    hours = runs["seconds"].sum() / 3600
    return Shown(f"{len(runs)} runs, {hours:.2f} hours in all, without supervised warm-ups",
                 ("arm, factors", "seeds", "state", "minutes"), rows)


def _versions(runs: pd.DataFrame) -> Shown:
    packages: dict[str, list[str]] = {}
    for text in runs["packages"].unique():
        for name, version in (dict.fromkeys(HARDWARE, UNRECORDED) | (json.loads(text or "null") or {})).items():
            packages.setdefault(name, []).append(version)
    found = {"code": runs["code"], **provenance(runs), "device": runs["device"], "threads": runs["threads"]}
    return Shown("versions", ("what", "which"), [(name, _list(values)) for name, values in (found | packages).items()])


def provenance(runs: pd.DataFrame) -> dict[str, list[str]]:
    """When runs were made, from which commit, and by which study file; what a row does not know is `not recorded`."""
    states = [json.loads(text or "null") or {} for text in runs["git"]]
    declared = [json.loads(text or "null") or {} for text in runs["declared"]]
    ends = [pick(times) for column, pick in (("created", min), ("finished_at", max))
            if len(times := runs[column].dropna().astype(float))]
    days = " to ".join(time.strftime("%Y-%m-%d %H:%M", time.gmtime(end)) for end in ends)
    files = [[f"{name} {value[:10]}" for name, value in one.get("sources", {}).items()] for one in declared]
    commits = [f"{git['commit']}{' (dirty)' * bool(git['dirty'])}" if git.get("commit") else "" for git in states]
    return {"made": [f"{days} UTC" if days else UNRECORDED], "commit": [commit or UNRECORDED for commit in commits],
            "study files": [", ".join(names) or UNRECORDED for names in files]}


def _list(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values)) or UNRECORDED
