"""Whether the rows of several runs may stand in one table: they are of one study, one code, one set of settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from moe_rl.errors import RunError
from moe_rl.storage.folder import DECLARATION, differing

ELSE = "Run them again in another --out, or pool them with --mix-code"


def require_comparable(root: Path, runs: pd.DataFrame) -> None:
    """Raise RunError for the runs below `root`, rows of `Frames.runs`, that were written by different versions of the
    code, made from different versions of data, checkpoints or code of one's own, or have different settings; for one
    that is not the run that its folder says, or is a copy, and for runs of another study in the folder of one."""
    if (Path(root) / DECLARATION).exists() and len(studies := runs["study"].unique()) > 1:
        raise RunError(f"the runs below {root}, the folder of one study, are of {len(studies)} studies "
                       f"({', '.join(studies)}). {ELSE}, or move the other studies out of it.")
    codes = runs["code"]
    if runs.groupby("study")["code"].nunique().max() > 1 or codes.str.contains(" then ").any():
        counts = ", ".join(f"{n} by {code}" for code, n in codes.value_counts().items())
        raise RunError(f"the runs below {root} were written by different versions of the code ({counts}). {ELSE}.")
    if names := _parted_inputs(runs):
        raise RunError(f"the runs below {root} were made from different versions of {', '.join(names)}. {ELSE}.")
    for text in _mislabelled(runs):
        raise RunError(f"the runs below {root} are not in their folders: {text}. {ELSE}, or delete a copy.")
    require_equal_settings(root, runs)


def require_equal_settings(root: Path, runs: pd.DataFrame) -> None:
    """Raise RunError for runs below `root`, rows with LABELS and `config`, that have different settings in one cell."""
    parted: dict[str, str] = {}
    for setting, text in _parted_settings(runs):
        parted.setdefault(setting, text)
    if parted:
        raise RunError(f"the runs below {root} have different settings ({'; '.join(parted.values())}). {ELSE}.")


def _parted_inputs(runs: pd.DataFrame) -> list[str]:
    """What the runs of one study were made from in more than one version. Older tables do not say."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in runs.itertuples():
        for name, value in json.loads(run.inputs or "{}").items():
            found.setdefault((run.study, name), set()).update(value.split(" then "))
    return sorted({name for (_, name), values in found.items() if len(values) > 1})


def _mislabelled(runs: pd.DataFrame) -> Iterator[str]:
    """Runs whose configuration names another arm or seed than their folder, or that were created as another one was: a
    copy would count as a run more."""
    first: dict[tuple[Any, ...], Any] = {}
    for run, config in _configs(runs):
        if (said := (config["arm"]["name"], config["seed"])) != (run.arm, run.seed):
            yield f"{_place(run)} contains a run of arm {said[0]!r}, seed {said[1]}"
        there = first.setdefault((run.study, run.hash, run.created), run)
        if there is not run and pd.notna(run.created):  # older tables do not say
            yield f"{_place(run)} contains a copy of {_place(there)}"


def _parted_settings(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Settings in which runs of one cell part, and how: those of an arm among its runs, the others among all. What is
    not part of a run's hash may part: more steps extend runs one by one, and they are read in between."""
    for _, cell in runs.groupby(["study", "factors"], sort=False):
        found = list(_configs(cell))
        own = all(_cold_start(config).get("seed") == config["seed"] for _, config in found)  # `Study.own_cold_starts`
        first: dict[str, tuple[Any, dict[str, Any]]] = {}
        for run, config in found:
            del config["seed"], config["steps"]
            config.get("measure", {}).pop("rollouts", None)
            if own:
                _cold_start(config).pop("seed", None)
            for whose, settings in ((f"arm {run.arm}", {"arm": config.pop("arm")}), ("all", config)):
                other, there = first.setdefault(whose, (run, settings))
                for setting, (a, b) in differing(there, settings).items():
                    yield setting, f"{setting}: {a!r} in {_place(other)}, {b!r} in {_place(run)}"


def _configs(runs: pd.DataFrame) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The runs and their configurations; tables of others may have none."""
    return ((run, json.loads(run.config)) for run in runs[runs["config"].notna()].itertuples())


def _cold_start(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("cold_start", {})


def _place(run: Any) -> str:
    return f"{run.arm}/{run.factors}/seed={run.seed}"
