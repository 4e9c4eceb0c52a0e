"""Which measurement announces a collapse? An analysis of the runs of `learning_rates`, and a test on `confirmation`.

Declared before either study had ended.

Question: does any measurement of the natural routes say, earlier than the reward does, that a run is about to collapse?

Hypothesis: the share of expert slots changed in a step does.

Data: every step from the fifth on, up to the first collapse of a run (`metrics.convergence.collapse`); of runs without
one, up to HORIZON steps before the last step known to be free of one. Event: a collapse begins within the next HORIZON
steps. Baseline: logistic regression on log(EMA10(reward) / its best so far), the step's index (at most 100, which no
run of `learning_rates` exceeds) and the log of the learning rate, which a measurement may merely reveal. Candidates,
each added to the baseline as the log of its EMA5: CANDIDATES. Those of ratios are taken in arms that do not replay,
where they are of natural routes.

Decision rule: leave-one-seed-out log-loss per step, mean over the steps of a run, then over the runs of a seed;
baseline minus candidate, Student t over 4 seeds at the Bonferroni level for the candidates (99.2 %). An interval above
0: the measurement precedes collapse. "None" is an answer. On `confirmation`: models fitted to all of `learning_rates`,
bootstrap over 16 seeds. With it, for the baseline and each candidate, at the threshold that catches 80 % of the
collapses of the other seeds: share of collapses with an alarm in the HORIZON steps before, alarms that begin elsewhere
per 100 steps, and the share of the steps elsewhere that an alarm lasts. Exploratory: the same without the learning rate
in the baseline.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
from per_seed import RESULTS, stored
from scipy.optimize import minimize

from moe_rl.metrics.convergence import ema
from moe_rl.results.stats import interval
from moe_rl.results.summary import outcomes
from moe_rl.storage.frames import Frames

HORIZON = 10
FIRST = 5
CAUGHT = 0.8
CANDIDATES = (
    "expert_change_rate",
    "any_layer_change",
    "replay_gap_std",
    "token_log_ratio_var",
    "token_kl_k3",
    "grad_norm",
)
OF_RATIOS = ("token_log_ratio_var", "token_kl_k3")
RIDGE = 1.0
"""Of standardised coefficients, so that separable data have an answer."""


def moments(frames: Frames) -> pd.DataFrame:
    """A row per step at which a run is still whole: features, and whether a collapse is near."""
    fates = outcomes(frames).set_index(["arm", "factors", "seed"])
    configs = frames.runs.set_index(["arm", "factors", "seed"])["config"].map(json.loads)
    parts = []
    for key, run in frames["steps"][frames["steps"]["reward"].notna()].groupby(["arm", "factors", "seed"]):
        run, fate = run.sort_values("step"), fates.loc[key]
        collapses = fate["fate"] != "stable"
        average = np.maximum(ema(run["reward"], 10), 1e-3)
        rows = {"step": np.minimum(run["step"], 100), "reward": np.log(average / np.maximum.accumulate(average)),
                "soon": collapses & (run["step"] >= fate["time"] - HORIZON)}
        rows |= {c: np.log(np.maximum(ema(run[c].fillna(0), 5), 1e-9)) for c in CANDIDATES}
        end = fate["time"] - 1 if collapses else fate["time"] - HORIZON
        lr = np.log(configs[key]["optimizer"]["lr"])
        labels = {"run": "/".join(map(str, key)), "arm": key[0], "seed": key[2], "lr": lr}
        parts.append(pd.DataFrame(rows)[run["step"].between(FIRST, end)].assign(**labels))
    return pd.concat(parts, ignore_index=True)


def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Ridge logistic regression on standardised columns: coefficients on the scale of x, the constant first."""
    mean, spread = x.mean(0), x.std(0) + 1e-12
    z = np.column_stack([np.ones(len(x)), (x - mean) / spread])

    def loss(b: np.ndarray) -> tuple[float, np.ndarray]:
        at = z @ b
        penalty = np.r_[0, b[1:]]
        value = np.logaddexp(0, at).sum() - y @ at + RIDGE / 2 * penalty @ penalty
        return value, z.T @ (1 / (1 + np.exp(-at)) - y) + RIDGE * penalty

    b = minimize(loss, np.zeros(z.shape[1]), jac=True, method="L-BFGS-B").x
    return np.r_[b[0] - (b[1:] * mean / spread).sum(), b[1:] / spread]


def predict(b: np.ndarray, x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-(b[0] + x @ b[1:])))


def alarms(p: np.ndarray, soon: np.ndarray, threshold: float) -> tuple[bool, int, int]:
    """Whether a step before the collapse is above the threshold; how many times the others begin to be, and are."""
    above = p >= threshold
    begins = above & ~np.r_[False, above[:-1]]
    return bool((above & soon).any()), int((begins & ~soon).sum()), int((above & ~soon).sum())


def left_out(table: pd.DataFrame, columns: list[str], test: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row per run: mean log-loss, whether its collapse was announced, false alarms and the steps they could come in.

    Runs are predicted from all other seeds, or those of `test` from all of `table`.
    """
    found = []
    x, y = table[columns].to_numpy(), table["soon"].to_numpy(bool)
    groups = list((table if test is None else test).groupby(["seed", "run"]))
    for seed, mine in itertools.groupby(groups, key=lambda group: group[0][0]):
        others = np.ones(len(table), bool) if test is not None else (table["seed"] != seed).to_numpy()
        b = fit(x[others], y[others].astype(float))
        near = others & y
        peaks = pd.Series(predict(b, x[near])).groupby(table["run"].to_numpy()[near]).max()
        threshold = peaks.quantile(1 - CAUGHT, interpolation="lower") if len(peaks) else 1.0
        for _, run in mine:
            p, soon = predict(b, run[columns].to_numpy()), run["soon"].to_numpy(bool)
            loss = -np.log(np.where(soon, p, 1 - p).clip(1e-12)).mean()
            announced, begun, lasting = alarms(p, soon, threshold)
            found.append({"seed": seed, "loss": loss, "event": soon.any(), "announced": announced, "begun": begun,
                          "lasting": lasting, "quiet": int((~soon).sum())})
    return pd.DataFrame(found)


def compare(table: pd.DataFrame, base: list[str], test: pd.DataFrame | None = None) -> pd.DataFrame:
    """Per candidate: by how much it lowers the baseline's log-loss, and its alarms beside the baseline's."""
    rows: list[dict] = []
    natural = [t if t is None else t[~t["arm"].str.contains("replay")] for t in (table, test)]
    sides = [(train, held, left_out(train, base, held)) for train, held in ((table, test), natural)]
    for candidate in CANDIDATES:
        train, held, without = sides[candidate in OF_RATIOS]
        with_it = left_out(train, [*base, candidate], held)
        gains = (without["loss"] - with_it["loss"]).groupby(without["seed"]).mean()
        gain = interval(gains, 1 - 0.05 / len(CANDIDATES))
        row = {"candidate": candidate, "gain": gain, "runs": len(without), "collapses": int(without["event"].sum())}
        for name, side in (("baseline", without), ("with it", with_it)):
            row |= {f"{k}, {name}": v for k, v in rates(side).items()}
        rows.append(row)
    return pd.DataFrame(rows).set_index("candidate")


def rates(side: pd.DataFrame) -> dict[str, float]:
    return {"announced": side.loc[side["event"], "announced"].mean(),
            "false alarms per 100 steps": 100 * side["begun"].sum() / side["quiet"].sum(),
            "steps in false alarm": side["lasting"].sum() / side["quiet"].sum()}


def main() -> None:
    frames = stored("learning_rates")
    table, base, fates = moments(frames), ["reward", "step", "lr"], outcomes(frames)
    early = (fates["fate"] != "stable") & (fates["time"] <= FIRST)
    print(f"{(fates['fate'] != 'stable').sum()} collapses in {len(fates)} runs; {early.sum()} before step {FIRST + 1}")
    for title, columns in (("leave one seed out", base), ("without the learning rate", base[:2])):
        print(f"\nlearning_rates, {title}\n{compare(table, columns).T.to_string()}")
    if (RESULTS / "confirmation").exists():
        print(f"\nconfirmation\n{compare(table, base, moments(stored('confirmation'))).T.to_string()}")


if __name__ == "__main__":
    main()
