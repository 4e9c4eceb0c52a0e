"""Whether the rows of several runs may be pooled: one study, one code, one set of inputs, one set of settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from moe_rl.config import LATER
from moe_rl.errors import RunError
from moe_rl.storage.folder import DECLARATION, differing

ELSE = "Run them again in another --out, or pool them with --mix-code"


def require_comparable(root: Path, runs: pd.DataFrame) -> None:
    """Raise RunError for runs below `root` that must not be pooled. `runs` has the columns of LABELS, `config` and
    `inputs`, as `Frames.runs`.

    The runs must be written by one version of the code, made from one version of data, checkpoints and own code, and
    have equal settings in each condition. The folder of a study may contain no other study.
    """
    if (Path(root) / DECLARATION).exists() and len(studies := runs["study"].unique()) > 1:
        raise RunError(
            f"the runs below {root}, the folder of one study, are of {len(studies)} studies "
            f"({', '.join(studies)}). {ELSE}, or move the other studies out of it."
        )
    codes = runs["code"]
    if runs.groupby("study")["code"].nunique().max() > 1 or codes.str.contains(" then ").any():
        counts = ", ".join(f"{n} by {code}" for code, n in codes.value_counts().items())
        raise RunError(f"the runs below {root} were written by different versions of the code ({counts}). {ELSE}.")
    if names := _different_inputs(runs):
        raise RunError(f"the runs below {root} were made from different versions of {', '.join(names)}. {ELSE}.")
    settings: dict[str, str] = {}
    for _, condition in runs[runs["config"].notna()].groupby(["study", "condition"], sort=False):
        settings = _different_settings(condition) | settings
    if settings:
        raise RunError(f"the runs below {root} have different settings ({'; '.join(settings.values())}). {ELSE}.")


def _different_inputs(runs: pd.DataFrame) -> list[str]:
    """Names of the inputs of which the runs of one study used more than one version."""
    versions: dict[tuple[str, str], set[str]] = {}
    for run in runs.itertuples():
        for name, value in json.loads(run.inputs or "{}").items():
            versions.setdefault((run.study, name), set()).update(value.split(" then "))
    return sorted({name for (_, name), values in versions.items() if len(values) > 1})


def _different_settings(runs: pd.DataFrame) -> dict[str, str]:
    """Settings that differ between the runs of one condition, each with a text: those of an arm among its runs, the
    others among all. Settings of LATER may differ, and so may seeds of warm-ups that are those of the runs."""
    configs = [(run, json.loads(run.config)) for run in runs.itertuples()]
    own_warm_ups = all(config.get("cold_start", {}).get("seed") == config["seed"] for _, config in configs)
    first: dict[str, tuple[Any, dict[str, Any]]] = {}
    texts: dict[str, str] = {}
    for run, config in configs:
        del config["seed"]
        if own_warm_ups:
            del config["cold_start"]["seed"]
        for group, settings in ((f"arm {run.arm}", {"arm": config.pop("arm")}), ("all", config)):
            other, there = first.setdefault(group, (run, settings))
            for setting, (a, b) in differing(there, settings).items():
                if setting not in LATER:
                    texts.setdefault(setting, f"{setting}: {a!r} in {_place(other)}, {b!r} in {_place(run)}")
    return texts


def _place(run: Any) -> str:
    return f"{run.arm}/{run.condition}/seed={run.seed}"
