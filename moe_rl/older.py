"""Configurations as they were written before, so that every row of an older table can be made again.

Two combinations, which no committed row has, are no longer computed as they were: truncation with routes of the ratio's
own weighed by the wrong π_old, and a KL term scored its reference under natural routes where the arm replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_rl.registry import Use

RENAMED = {
    "placebos_sources:quarter": Use("random_share", share=0.25),
    "placebos_sources:half": Use("random_share", share=0.5),
    "placebos_sources:three_quarters": Use("random_share", share=0.75),
    "placebos_sources:flips": Use("false_flips", share=0.18),
    **{
        f"why_gspo_losses:{weigh}_{clip}": Use("crossed", weigh=weigh, clip=clip)
        for weigh in ("token", "sequence", "none")
        for clip in ("token", "sequence", "none")
    },
}
"""What had a name in a study's own module, to bind an option, before names took options."""


ENGINE = {"dtype": None, "routes": "raise", "experts": None, "int8": False, "router_noise": 0.0, "gpu_memory": 0.4,
          "max_tokens": None, "dialect": "openai"}
PARALLEL: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": None, "settings": {}, "compute_dtype": None}
QUEUE = {"lag": "lag", "lag_mode": "mode", "partial_tokens": "partial_tokens", "refills": "refills"}
"""Defaults of what had settings of its own before engines, policies and batch sources were named with options."""


def modern(run: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a `RunConfig` as it would be written now; what is modern already stays as it is."""
    run = dict(run)
    if options := run.pop("task_options", None):
        run["task"] = _use(Use(run["task"], **options))
    task = Use.of(run["task"]) if "task" in run else None
    if task is not None and task.name.startswith("jsonl:") and "match" not in task.options:
        run["task"] = _use(Use(task.name, **task.options, match="older"))
    if "arm" in run:
        run["arm"] = _modern_arm(dict(run["arm"]))
    engine = run.get("engine")
    if isinstance(engine, Mapping) and "options" not in engine:
        run["engine"] = _use(_modern_engine(dict(engine)))
    if "parallel" in run:
        run["policy"] = _use(Use(run["policy"], **_unlike(run.pop("parallel"), PARALLEL)))
    queue = {new: run.pop(old) for old, new in QUEUE.items() if old in run}
    if queue:
        changed = _unlike(queue, {"lag": 0, "mode": "fixed", "partial_tokens": None, "refills": 0})
        run["batches"] = _use(Use("fresh") if not changed else Use("lagged", lag=queue["lag"], **{
            k: v for k, v in changed.items() if k != "lag"}) if queue["lag"] else Use("dynamic", **changed))
    return run


def _unlike(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != defaults.get(key)}


def _modern_engine(engine: dict[str, Any]) -> Use:
    name, options = engine.pop("name"), _unlike(engine, ENGINE)
    if name.startswith("http"):
        return Use("server", url=name, **options)
    return Use("perturbed" if name == "hf" and options.keys() - {"routes"} else name, **options)


def _modern_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Arms had `clip`, `truncation`, `kl` and `entropy` of their own where they now have parts with options."""
    clip, cap, kl, entropy = (arm.pop(key, None) for key in ("clip", "truncation", "kl", "entropy"))
    for part in ("loss", "routes", "ratio_routes"):
        if isinstance(arm.get(part), str):
            arm[part] = _use(RENAMED.get(arm[part], Use(arm[part])))
    if clip is not None:
        loss = Use.of(arm.get("loss", "grpo"))
        arm["loss"] = _use(Use(loss.name, **loss.options, clip_low=clip[0], clip_high=clip[1]))
    if cap:
        arm["corrections"] = [_use(Use("truncated", cap=cap))]
    terms = [Use("kl", coef=kl)] * bool(kl) + [Use("entropy", coef=entropy)] * bool(entropy)
    return arm | ({"terms": [_use(term) for term in terms]} if terms else {})


def _use(use: Use) -> dict[str, Any]:
    return {"name": use.name, "options": dict(use.options)}
