"""What a study's own rule says of its tables: the function that its declaration names, asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import lookup
from moe_rl.storage.frames import Frames


def verdict_of(frames: Frames, declared: Mapping[str, Any]) -> list[str]:
    """The sentences of `Study.verdict`; one that says why there are none, where it cannot be had; none without one."""
    if not declared["verdict"]:
        return []
    try:
        rule = lookup("verdict", declared["verdict"], {})
    except ConfigError as error:
        return [f"not to be had here: {error} Or look for it beside the tables, too: --trust"]
    except (Exception, SystemExit) as error:  # of its module
        return [f"not to be had here: {type(error).__name__}: {error}"]
    try:
        return list(rule(frames))
    except (Exception, SystemExit) as error:  # of runs that a rule has not foreseen: fewer arms, one seed, three steps
        return [f"not to be had from these runs: {type(error).__name__}: {error}"]
