"""A study as one web page: what was asked, what was found, with what. It loads nothing, and prints well.

All text from tables and declarations is escaped, and the page's content security policy allows no script at all.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import matplotlib

from moe_rl.config import RunConfig
from moe_rl.errors import RunError
from moe_rl.lookup import Use
from moe_rl.results import figures, plots
from moe_rl.results.tables import Shown, study_tables
from moe_rl.runs.frames import Frames, load_study
from moe_rl.study.declaration import read_declaration

ABOUT = {"hypothesis": "Hypothesis", "endpoint": "Primary endpoint", "contrasts": "Contrasts",
         "decision_rule": "Decision rule", "differs_from_paper": "Differs from the paper", "caution": "Caution",
         "cost": "Cost, as planned"}


def write_page(folder: Path, out: Path, *, mix_code: bool = False) -> None:
    """Write the page of the finished runs of a study, from its runs or its collected tables."""
    declared, frames = read_declaration(folder), load_study(folder, mix_code=mix_code)
    template = resources.files("moe_rl.results").joinpath("page.html").read_text()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(Template(template).substitute(
        title=escape(declared["name"]),
        question=escape(declared["question"]),
        about=_about(declared),
        tables="\n".join(map(_table, study_tables(frames, declared))),
        figures="\n".join(_figures(frames, declared)),
        settings=_settings(frames),
        runs=_runs(frames),
        folder=escape(folder.as_posix()),
    ))


def _about(declared: Mapping[str, Any]) -> str:
    texts = dict(declared) | {"contrasts": "; ".join(f"{a} − {b}" for a, b in declared["contrasts"])}
    return "\n".join(f"<dt>{title}</dt><dd>{escape(texts[key])}</dd>" for key, title in ABOUT.items() if texts[key])


def _table(shown: Shown, kind: str = "") -> str:
    rows = "\n".join(_row("td", row) for row in shown.rows)
    note = f'<p class="soft">{escape(shown.note)}</p>' if shown.note else ""
    return (f'<h3>{escape(shown.title)}</h3>\n<div class="wide"><table class="{kind}"><thead>'
            f"{_row('th', shown.header)}</thead>\n<tbody>{rows}</tbody></table></div>\n{note}")


def _row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def _figures(frames: Frames, declared: Mapping[str, Any]) -> Iterable[str]:
    arms = [arm["name"] for arm in declared["arms"]]
    for name, cell in figures.planned(declared["figures"], frames.cells):
        caption = escape(figures.title_of(name))
        try:
            figure = figures.draw(name, declared["endpoint"])(frames if cell is None else frames.cell(cell), arms)
        except RunError as error:
            yield f'<p class="soft">No figure {escape(name)}: {escape(str(error))}</p>'
            continue
        image = io.BytesIO()
        with matplotlib.rc_context(plots.STYLE):
            figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None})
        data = base64.b64encode(image.getvalue()).decode()
        yield (f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
               f"<figcaption>{escape(name)}. {caption}</figcaption></figure>")


def _settings(frames: Frames) -> str:
    """Each arm's own settings, and those of all runs; what differs between the runs of an arm shows all its values."""
    configs = [_flat(RunConfig.from_dict(json.loads(text)).to_dict()) for text in frames.runs["config"]]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    arms = dict.fromkeys(config["arm.name"] for config in configs)
    by_arm = {arm: [c for c in configs if c["arm.name"] == arm] for arm in arms}
    rows = [(key, *(_values(own, key) for own in by_arm.values())) for key in keys if key.startswith("arm.")]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    shared = [(key, _values(configs, key)) for key in keys if key not in [row[0] for row in differing]]
    return (_table(Shown("in which the arms differ", ("setting", *by_arm), differing), "words")
            + _table(Shown("of all runs", ("setting", "value"), shared), "words"))


def _values(configs: Sequence[Mapping[str, str]], key: str) -> str:
    return ", ".join(dict.fromkeys(config.get(key, "–") for config in configs))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted settings and their values as JSON."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if prefix == "arm." and key != "name":  # parts, as a study writes them
            parts = value if isinstance(value, list) else [value]
            found[prefix + key] = ", ".join(str(Use.of(part)) if part else "–" for part in parts) or "–"
        elif isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _runs(frames: Frames) -> str:
    """Seeds, states, cost and versions."""
    runs = frames.runs
    hours = runs["seconds"].sum() / 3600
    rows = [(f"{arm}, {cell}", _list(part["seed"]), _list(f"{n} {state}" for state, n in
             part["state"].value_counts().items()), f"{part['seconds'].sum() / 60:.1f}")
            for (arm, cell), part in runs.groupby(["arm", "factors"], sort=False)]
    packages: dict[str, list[str]] = {}
    for text in runs["packages"].unique():
        for name, version in (json.loads(text) or {}).items():
            packages.setdefault(name, []).append(version)
    versions = [(name, _list(found)) for name, found in packages.items()]
    commits = {str((json.loads(text) or {}).get("commit", "–")) for text in runs["git"]}
    versions = [("code", _list(runs["code"])), ("commit", _list(sorted(commits))), ("device", _list(runs["device"])),
                ("threads", _list(runs["threads"])), *versions]
    left_out = "".join(f"<li>{escape(text)}</li>" for text in frames.left_out)
    return (_table(Shown(f"{len(runs)} runs, {hours:.2f} hours in all, without cold starts",
                         ("arm, factors", "seeds", "state", "minutes"), rows))
            + (f'<p class="soft">Left out, unfinished:</p><ul class="soft">{left_out}</ul>' if left_out else "")
            + _table(Shown("versions", ("what", "which"), versions), "words"))


def _list(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))
