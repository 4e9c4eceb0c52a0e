"""How `flip_effects` measures: single swaps of experts under replay, and the route changes of a real step.

A run trains `steps` steps with GRPO. At the weights θ it stands at, it takes one more step, θ to θ + u, and goes back.
At θ it swaps one expert at one (token, site) at a time, in responses sampled from θ: everything else replays θ's own
routes, so whatever a log-prob changes by, that swap did. Only ids are forced: the family's code makes the gates, so
that with normalised gates those of the other chosen experts move as well, as they do in a real flip.

- `effects.parquet`: a row per kind of swap, site and bin of x, sums over its swaps.
- `flips.parquet`: SAMPLE swaps, one by one.
- `law.parquet`: a row per α and site: how many slots change between θ and θ + α·u, and what the swaps at θ, weighed by
  how likely their margins make them, say one of these does.
- `moves.parquet`: a row per α: mean squares of log-ratios of the same tokens, natural, replayed, and their difference.
- `single.parquet`: the flips of θ + u, one by one at θ + u, against J of the same tokens.

x of a swap is the gate it moves × the relative distance of the two experts' outputs: ‖E_in − E_out‖ / ‖residual stream
after the block‖. At a margin of 0 it is the relative displacement of the stream, ‖Δ block‖ / ‖stream‖, which is
recorded as well (`moved`). δ is the change of a log-prob in nats; `own` that of the token that the swapped position
produces, `total` the sum of δ² over it and all later tokens of the response. Margins are differences of logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from flip_effects_swaps import PROBES, Flips, View, made, swapped
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from moe_rl.build import build, check  # noqa: F401  runs are checked by it before they start
from moe_rl.config import RunConfig
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import Recorder
from moe_rl.routing.trace import RoutingTrace
from moe_rl.seeds import derive
from moe_rl.storage.folder import RunFolder
from moe_rl.trainer import Listener, Parts, roll_out, train, train_step
from moe_rl.types import Scored

ALPHAS = (0.125, 1.0)
SINGLE = 700
"""Flips of the real step that are made one by one: those of whole responses, until there are so many."""
SAMPLE = 250
SUMS = ("gate", "distance", "x2", "moved2", "own2", "total2", "in_response")


def execute(run: RunConfig, folder: RunFolder, *, cache: Path, listen: Listener = lambda rows: None) -> None:
    """Carry out a run of the study from its beginning; nothing is kept of one that was interrupted."""
    parts = build(run, folder.path, cache)
    diverged = train(run, parts, folder, listen)
    for name, table in measured(run, parts).items():
        table.to_parquet(folder.path / f"{name}.parquet", index=False)
    folder.finish(diverged)


def measured(run: RunConfig, parts: Parts) -> dict[str, pd.DataFrame]:
    """The tables of a run, from the weights that its policy has; they are left as they were found."""
    policy = parts.policy
    views = [View.of(policy, roll_out(run, parts, run.steps + 2 + i)) for i in range(PROBES)]
    generator = torch.Generator().manual_seed(derive(run.seed, run.steps, PROBES))
    swaps = pd.concat([made(policy, view, generator) for view in views], ignore_index=True)
    start = {name: weight.clone() for name, weight in policy.weights()}
    train_step(run, parts, run.steps + 1, Recorder(run, policy))
    end = {name: weight.clone() for name, weight in policy.weights()}
    law, moves = [], []
    for alpha in ALPHAS:
        policy.model.load_state_dict({k: torch.lerp(start[k], end[k], alpha) for k in start})
        after = [policy.score(view.batch) for view in views]
        moves.append({"alpha": alpha, **spread(policy, views, after)})
        law.append(expected(swaps, views, after).assign(alpha=alpha))
    single = one_by_one(policy, views[0], after[0])
    policy.model.load_state_dict(start)
    return {
        "effects": binned(swaps), "flips": swaps.sample(min(SAMPLE, len(swaps)), random_state=run.seed),
        "law": pd.concat(law), "moves": pd.DataFrame(moves),
        "single": pd.DataFrame([single | views[0].noise(policy)]),
    }


# ---------------------------------------------------------------------- real updates
def binned(swaps: pd.DataFrame) -> pd.DataFrame:
    """Sums by kind, site and bin of log2 x."""
    table = swaps.assign(bin=np.floor(np.log2(swaps["x"].clip(lower=2.0**-30))).astype(int),
                         x2=swaps["x"] ** 2, moved2=swaps["moved"] ** 2, own2=swaps["own"] ** 2)
    groups = table.groupby(["kind", "site", "bin"])
    return groups.agg(n=("x", "size"), **{name: (name, "sum") for name in SUMS}).reset_index()


def spread(policy: HFPolicy, views: list[View], after: list[Scored]) -> dict[str, float]:
    """Mean squares over the response tokens of D = log r under natural routes, R under θ's, and J = D − R."""
    d, r = [], []
    for view, scored in zip(views, after, strict=True):
        mask = view.batch.response_mask
        replayed = policy.score(view.batch, view.scored.routes)
        d.append((scored.logprobs - view.scored.logprobs)[mask].double())
        r.append((replayed.logprobs - view.scored.logprobs)[mask].double())
    whole, left = torch.cat(d), torch.cat(r)
    squares = {"dd": whole, "rr": left, "jj": whole - left}
    return {"tokens": len(whole), **{name: float((x**2).mean()) for name, x in squares.items()}}


def expected(swaps: pd.DataFrame, views: list[View], after: list[Scored]) -> pd.DataFrame:
    """A row per site: slots changed per pair, the spread σ of logit differences that makes margins flip so often, and
    means over swaps at that site, weighed by how likely each is then: P(flip | margin) = Q(margin / σ)."""
    rows, tokens = [], sum(int(view.batch.response_mask.sum()) for view in views)
    runner_up = swaps[swaps["kind"] != "random"]
    for site in range(len(views[0].scored.routes.layout.sites)):
        slots = torch.cat([slots_changed(v.scored.routes, a.routes)[*v.pairs.T, site]
                           for v, a in zip(views, after, strict=True)])
        margins = torch.cat([view.boundary(site)[2] for view in views]).clamp(min=0).double().numpy()
        sigma = sigma_of(margins, float(slots.double().mean()))
        here = runner_up[runner_up["site"] == site]
        weights = (here["weight"] * norm.sf(here["margin"].clip(lower=0) / sigma)).to_numpy() if sigma else None
        rows.append({"site": site, "pairs": len(slots), "slots": int(slots.sum()), "tokens": tokens, "sigma": sigma,
                     **weighed(here, weights)})
    return pd.DataFrame(rows)


def weighed(swaps: pd.DataFrame, weights: NDArray[np.float64] | None) -> dict[str, float]:
    """Weighted means of what swaps did; NaN where no swap is likely at all."""
    columns = {"total2": swaps["total2"], "own2": swaps["own"] ** 2, "x2": swaps["x"] ** 2, "gate": swaps["gate"],
               "moved2": swaps["moved"] ** 2, "jump2": swaps["jump"] ** 2, "block2": swaps["block"] ** 2,
               "distance2": swaps["distance"] ** 2, "in_response": swaps["in_response"], "margin": swaps["margin"]}
    if weights is None:
        return dict.fromkeys((*columns, "effective"), np.nan)
    means = {name: float(np.average(values, weights=weights)) for name, values in columns.items()}
    return means | {"effective": float(weights.sum() ** 2 / (weights**2).sum())}


def sigma_of(margins: NDArray[np.float64], share: float) -> float:
    """σ at which the mean of Q(margin / σ) is `share`: margins move by a Gaussian of that spread, and flip where they
    become negative. 0 where nothing flips; the largest that is tried where no σ flips so many, as only half can."""
    if share == 0:
        return 0.0

    def excess(log_sigma: float) -> float:
        return float(norm.sf(margins / np.exp(log_sigma)).mean() - share)

    low, high = np.log(1e-6), np.log(1e6)
    if excess(low) >= 0:
        return float(np.exp(low))
    return float(np.exp(brentq(excess, low, high))) if excess(high) > 0 else float(np.exp(high))


def slots_changed(before: RoutingTrace, after: RoutingTrace) -> Tensor:
    """|S \\ S′| of every token and site, [batch, time, site]."""
    was, now = before.ids(), after.ids()
    return ((was[..., None] != now[..., None, :]).all(-1) & (was >= 0)).sum(-1)


def one_by_one(policy: HFPolicy, view: View, after: Scored) -> dict[str, float]:
    """At the weights of now, every route change of some whole responses by itself, all else under θ's routes: whether
    squares of single effects add up to J², and their sum to J, as they do where effects are small and independent."""
    base = policy.score(view.batch, view.scored.routes)
    changes = (slots_changed(view.scored.routes, after.routes) > 0)[:, :-1] & view.batch.attention_mask[:, 1:, None]
    rows = int((changes.sum((1, 2)).cumsum(0) <= SINGLE).sum())
    row, time, site = changes[:rows].nonzero().T
    flips = Flips(row, time, site, after.routes.ids()[row, time, site])
    delta, _ = swapped(policy, view.batch, base, flips)
    summed = torch.zeros(view.batch.tokens.shape, dtype=torch.double).index_add(0, row, delta)[:rows]
    mask = view.batch.response_mask[:rows]
    j, summed = (after.logprobs - base.logprobs)[:rows][mask].double(), summed[mask]
    return {"responses": rows, "tokens": len(j), "flips": len(row), "flips_squares": float((delta**2).sum()),
            "sum_squares": float(summed @ summed), "j_squares": float(j @ j), "product": float(summed @ j)}
