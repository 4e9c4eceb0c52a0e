"""How far the runs of a study are: a bar per run on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from moe_rl.storage import folder as runs
from moe_rl.storage.terminal import duration, say
from moe_rl.study.declaration import Planned

QUIET = 15.0
"""Seconds between lines about running runs when nobody watches a terminal."""
SHARE = 0.05
"""Of the time, how much may go to reading folders, however many there are and however slow their file system."""
LONGEST = 60.0
"""Seconds between readings at most: a file system may be slow once."""
SHOWN = {
    "reward": "reward {:.2f}",
    "token_kl_k3": "KL {:.1e}",
    "expert_change_rate": "{:.1%} of slots changed",
    "tokens_per_second": "{:,.0f} tokens/s",
}
"""Columns of the last step that are shown of a run, and how; the reward alone on a line shorter than WIDE."""
WIDE = 120


class Display:
    """Reads what the folders of the runs say, so it sees runs of any process."""

    def __init__(self, planned: Sequence[Planned], console: Console) -> None:
        self.console, self.planned = console, planned
        self.reported: dict[Path, tuple[str, float]] = {}
        self.ended: set[Path] = set()
        self.due = 0.0
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self.rows = [self.bars.add_task(_name(p.path), total=p.config.steps, text="") for p in planned]

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.due = 0.0
        self.update()
        if self.console.is_terminal:
            self.bars.stop()

    def update(self) -> None:
        """Read how far every run is that has not ended, unless that was done just now, and show it."""
        if (began := time.monotonic()) < self.due:
            return
        for row, p in zip(self.rows, self.planned, strict=True):
            if p.path in self.ended:
                continue
            now = runs.state(p.path, p.config.steps)
            if now["state"] in runs.ENDED:
                self.ended.add(p.path)
            text = now["state"] if now["step"] or now["state"] != "running" else preparing(now)
            for name, how in SHOWN.items():
                if now.get(name) is not None and (name == "reward" or self.console.width >= WIDE):
                    text += " · " + how.format(now[name])
            if now["state"] == "running" and now.get("seconds_left"):
                text += f" · {duration(now['seconds_left'])} left"
            self.bars.update(row, completed=min(now["step"], p.config.steps), text=text)
            if not self.console.is_terminal:
                self._line(p, now, text)
        ended = time.monotonic()
        self.due = ended + min((ended - began) / SHARE, LONGEST)

    def _line(self, p: Planned, now: dict[str, Any], text: str) -> None:
        shown, when = self.reported.get(p.path, (None, 0.0))
        due = now["state"] == "running" and time.monotonic() - when > QUIET
        if now["state"] != "waiting" and (now["state"] != shown or due):
            self.reported[p.path] = (now["state"], time.monotonic())
            say(self.console, f"{_name(p.path)}  {now['step']}/{p.config.steps}  {text}")


def preparing(now: Mapping[str, Any]) -> str:
    """What a run does before its first step is done, by the state of its folder."""
    cold = now.get("cold_start")
    if not cold:
        return "first step" if "seconds_per_step" in now else "preparing"
    if cold.get("waiting"):
        return "waiting for the supervised warm-up of another run"
    return (
        f"supervised warm-up {cold['step']}/{cold['steps']}, success {cold['rate']:.0%} of {cold['target']:.0%}, "
        f"at most {duration(cold['seconds_left'])} left"
    )


def _name(path: Path) -> str:
    return "  ".join(part for part in path.parts[-3:] if part != "base")
