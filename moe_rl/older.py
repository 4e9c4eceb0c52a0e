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
    return run


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
