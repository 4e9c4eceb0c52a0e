"""How far runs are: what is shown of each."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from moe_rl.config import Arm, RunConfig
from moe_rl.study import display
from moe_rl.study.declaration import Planned
from moe_rl.study.display import Display


@pytest.mark.parametrize("width, more", [(200, " · KL 2.0e-03 · 3.1% of slots changed · 1,200 tokens/s"), (80, "")])
def test_the_line_of_a_run_shows_its_last_step(monkeypatch, width, more):
    last = {"reward": 0.5, "token_kl_k3": 2e-3, "expert_change_rate": 0.031, "tokens_per_second": 1200.4}
    monkeypatch.setattr(display.runs, "state", lambda path, steps: {"state": "running", "step": 3, **last})
    out = Console(file=io.StringIO(), width=width)
    with Display([Planned(Path("a"), RunConfig(arm=Arm(name="grpo"), steps=9))], out) as shown:
        shown.update()
    assert out.file.getvalue().splitlines() == [f"a  3/9  running · reward 0.50{more}"]
