"""What token ratios look like at each dose of volatility_dial, and what replay and GSPO add there: a yardstick.

    python studies/volatility_dial_yardstick.py

writes the file that `moe_rl.metrics.place` reads, from the committed tables; a test holds the two together. Of the form
`weights`, in which gates and sets move. Every quantity is [mean over seeds, low, high] of its means over steps 26–50,
with the 95 % intervals of the study's page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from volatility_dial import SIGMAS, dose, study
from volatility_dial_verdicts import ARMS, ENDPOINTS, FOLDER, by_dose

from moe_rl.metrics import place
from moe_rl.metrics.convergence import second_half_mean
from moe_rl.results.stats import interval
from moe_rl.runs.frames import Frames, load_study

FILE = Path(place.__file__).with_name("volatility_dial.json")
RATIOS = ("token_ess", "token_kl_k3")


def yardstick(frames: Frames) -> dict[str, Any]:
    """Rows by dose and arm, and the effects at each dose. `last` is of the last mini-batch of a step, `step` of all its
    mini-batches together; `slots` the share of expert slots that differ from π_old's in the former, where routes are
    natural; `tokens` how many response tokens the ESS of a row is over."""
    values = {name: by_dose(frames, name) for name in (*RATIOS, *ENDPOINTS, "response_tokens")}
    base, doses = study.base, (0.0, *SIGMAS)
    tokens = {s: values["response_tokens"]["weights", s]["grpo"].mean() for s in doses}
    responses = base.prompts_per_step * base.group_size
    rows = []
    for sigma in doses:
        last = last_mini_batch(frames.cell(dose("weights", sigma))["updates"])
        for arm in ARMS:
            step = {name: three(values[name]["weights", sigma][arm]) for name in RATIOS}
            slots = last["fresh_slot_change"][arm]
            rows.append({"sigma": sigma, "arm": arm, "last": {name: three(last[name][arm]) for name in RATIOS},
                         "step": step, "slots": None if slots.isna().all() else three(slots)})
    effects = [{"sigma": sigma, "endpoint": name, "contrast": f"{a} − {b}", "effect": three(
                values[name]["weights", sigma][a] - values[name]["weights", sigma][b])}
               for sigma in doses for name in ENDPOINTS for a, b in study.contrasts]
    mean = sum(tokens.values()) / len(tokens) * responses
    return {"tokens": {"last": round(mean / base.mini_batches), "step": round(mean)}, "rows": rows, "effects": effects}


def last_mini_batch(updates: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By column, seed × arm: means over the second half of the steps, of the last update of each."""
    last = updates[updates["update"] == updates["update"].max()].sort_values("step")
    runs = last.groupby(["seed", "arm"])
    return {name: runs[name].agg(lambda x: second_half_mean(x.to_numpy())).unstack()
            for name in (*RATIOS, "fresh_slot_change")}


def three(values: pd.Series) -> list[float]:
    """Mean and interval, to six digits."""
    found = interval(values)
    return [float(f"{x:.6g}") for x in (found.mean, found.low, found.high)]


def written(found: dict[str, Any]) -> str:
    """JSON with a row per line."""
    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    parts = [f'"{key}": ' + ("[\n" + ",\n".join(map(text, value)) + "]" if isinstance(value, list) else text(value))
             for key, value in found.items()]
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    FILE.write_text(written(yardstick(load_study(FOLDER))))
