"""The pilot of other_tasks, where the best rate was the lowest of its grid: half of it."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from other_tasks.pilot import TASKS  # noqa: E402
from other_tasks.pilot import study as pilot  # noqa: E402

LOWER = {"spell_backward": (2.5e-5, ("grpo", "gspo-narrow", "gspo-wide"))}
"""Task → the rate below the grid, and the arms that were best at the grid's lowest."""

study = replace(
    pilot,
    name="other_tasks_extension",
    hypothesis="Half the lowest rate of the pilot is not better.",
    conditions={
        f"{task},rate={rate:g}": {**TASKS[task], "optimizer.lr": rate, "arms": arms}
        for task, (rate, arms) in LOWER.items()
    },
    cost="12 runs of 50 steps.",
)
