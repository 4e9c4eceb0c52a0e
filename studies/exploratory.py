"""Numbers that no declared rule asks for and that the pages need: doses as measured, and differences that qualify a
result. Exploratory: no p-value here is adjusted for their number. Printed by `answers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import lag_natural_verdicts
import pandas as pd
from dial_elsewhere import PLACES
from lag_natural import MARGIN
from per_seed import stored
from volatility_controls import study as controls_study
from volatility_dial import SIGMAS, noise

from moe_rl.results.stats import Interval, interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

ENDPOINTS = ("reward, second half", "greedy exact match, second half", "sampled exact match, second half")
CURES = (("grpo-replay", "grpo"), ("gspo", "grpo"), ("gspo", "grpo-replay"))
SLOTS = 12
"""Expert slots of a token: 6 MoE layers, 2 experts each, in every model here but the OLMoE of dial_elsewhere."""
SIGMA = max(SIGMAS)
PUBLISHED = {"engine, R3": 1.5e-3, "collapse, Fireworks": 0.013, "collapse, IcePop": 0.05}
"""Published KL per token in nats: between engine and trainer (arXiv 2510.11370), and where runs collapsed."""
NATURAL = (1, 2)
"""Lags at which GRPO's ratios spread although no noise is injected."""


# ---------------------------------------------------------------------- router noise
def volatility_dial() -> None:
    """Doses, all contrasts at every dose, what replay gives back, and GSPO with the seeds of stabilisers added."""
    frames = stored("volatility_dial")
    dial = {f"{form}, σ = {s:g}": frames.cell(noise(form, s)) for form in ("weights", "choice") for s in (0, *SIGMAS)
            if s or form == "weights"}
    print_doses(dial)
    for s in (0, *SIGMAS):
        for endpoint in ENDPOINTS:
            table = values(dial[f"weights, σ = {s:g}"], endpoint)
            print(f"Exploratory, weights, σ = {s:g}, {endpoint}: "
                  + "; ".join(f"{a} − {b} {difference(table[a], table[b])}" for a, b in CURES))
    quiet, noisy = (values(dial[f"weights, σ = {s:g}"], ENDPOINTS[0]) for s in (0, SIGMA))
    harm = quiet["grpo"] - noisy["grpo"]
    back = (noisy["grpo-replay"] - noisy["grpo"]).mean() / harm.mean()
    print(f"Of GRPO's harm at σ = {SIGMA:g}, in reward, replay gives back {back:.2f}; replay at σ = {SIGMA:g} − "
          f"GRPO at σ = 0: {difference(noisy['grpo-replay'], quiet['grpo'])}")
    print(f"Harm of σ = {SIGMA:g} by seed, reward: from {-harm.max():.2f} to {-harm.min():.2f}")
    further = stored("stabilisers").cell("dial")
    for endpoint in ENDPOINTS:
        both = pd.concat([values(f, endpoint)[["gspo", "grpo"]] for f in (dial[f"weights, σ = {SIGMA:g}"], further)])
        print(f"Exploratory, σ = {SIGMA:g}, with the seeds of stabilisers, {endpoint}: gspo − grpo "
              f"{difference(both['gspo'], both['grpo'])}")


def volatility_controls() -> None:
    """Doses, the harms that the rule does not name, and whether the harms of ratio and gradient add up."""
    frames, dial = stored("volatility_controls"), stored("volatility_dial")
    print_doses({cell: frames.cell(cell) for cell in controls_study.cells if cell != "wrong-replay"})
    for endpoint in ENDPOINTS:
        none, both = (values(dial.cell(noise("weights", s)), endpoint)["grpo"] for s in (0, SIGMA))
        ratio, gradient, beside, twin, still = (values(frames.cell(cell), endpoint)["grpo"] for cell in (
            "applied_to=ratio", "applied_to=gradient", "beside", "twin", "twin-still"))
        print(f"Exploratory, harm to GRPO, {endpoint}: both at once {difference(both, none)}; ratio alone "
              f"{difference(ratio, none)}; gradient alone {difference(gradient, none)}; beside "
              f"{difference(beside, none)}; twin {difference(twin, still)}")
        print(f"  both at once, noise in routers minus noise beside them: {difference(both, beside)}")
        print(f"  gradient alone − both at once {difference(gradient, both)}; ratio alone − both at once "
              f"{difference(ratio, both)}; by how much the two harms exceed the harm of both at once "
              f"{interval(both - ratio - gradient + none).printed('.3f')}")
        replay = [values(f, endpoint) for f in (dial.cell(noise("weights", SIGMA)), frames.cell("beside"))]
        routers, others = (table["grpo-replay"] - table["grpo"] for table in replay)
        print(f"  replay − GRPO, noise in routers minus noise beside them: {difference(routers, others)}")


def open_side() -> None:
    """The dose, as measured on these seeds."""
    print_doses({"σ = 2": stored("open_side")})


def stabilisers() -> None:
    """KL of GRPO with and without noise; which slots change under the noise was not kept."""
    frames = stored("stabilisers")
    print_doses({cell: frames.cell(cell) for cell in ("quiet", "dial")})


def dial_elsewhere() -> None:
    """The dose at every place."""
    frames = stored("dial_elsewhere")
    print_doses({f"{place}, σ = {s:g}": frames.cell(f"{place},sigma={s:g}") for place in PLACES for s in (0, SIGMA)},
                slots={f"olmoe, σ = {s:g}": 2 * SLOTS for s in (0, SIGMA)})


def print_doses(cells: Mapping[str, Frames], slots: Mapping[str, int] | None = None) -> None:
    """What router noise does to GRPO, cell by cell: KL over all updates of the second half; expert slots of the network
    that gives the gradient that differ from π_old's when the last update of a step begins, over all steps."""
    print("Dose as measured, GRPO, noise included; slots are those of the network that gives the gradient:")
    for name, frames in cells.items():
        line = f"  {name}: KL k3 {interval(values(frames, 'token_kl_k3')['grpo']).printed('.3f')} nats per token"
        if len(by_seed := slots_changed(frames)):
            changed = interval(by_seed)
            each = (slots or {}).get(name, SLOTS)
            line += (f"; slots changed before the last update {changed.printed('.3f')}, "
                     f"{each * changed.mean:.1f} of the {each} of a token")
        print(line)


def slots_changed(frames: Frames) -> pd.Series:
    """By seed, of GRPO: the share of expert slots of the network that gives the gradient that differ from π_old's when
    the last update of a step begins, mean over all steps. Empty where that was not kept."""
    updates, column = frames["updates"].query("arm == 'grpo'"), "fresh_expert_change_rate"
    if column not in updates:
        return pd.Series(dtype=float)
    return updates[updates["update"] == updates["update"].max()].groupby("seed")[column].mean()


# ---------------------------------------------------------------------- no router noise
def engine_mismatch() -> None:
    """R3 and GSPO where another engine samples: here, and at 2e-4 with warm-up in stabilisers."""
    here, there = stored("engine_mismatch"), stored("stabilisers").cell("mismatch")
    for where, frames, r3 in (("3e-4", here, "grpo-r3"), ("2e-4 with warm-up, in stabilisers", there, "r3")):
        for endpoint in ENDPOINTS[:2]:
            table = values(frames, endpoint)
            print(f"  {where}, {endpoint}: " + "; ".join(
                f"{arm} − grpo {difference(table[arm], table['grpo'])}" for arm in (r3, "gspo")))


def lag() -> None:
    """The spread of ratios that replay keeps, without injected noise, and what the arms earn there."""
    frames = stored("lag")
    print("Exploratory, natural routing: token ESS of a step, GRPO with its own routes and with replay:")
    for of in (0, *NATURAL, 4):
        ess = values(frames.cell(f"lag={of}"), "token_ess")
        print(f"  lag {of}: grpo {interval(ess['grpo'])}, grpo-replay {interval(ess['grpo-replay'])}")
    updates = frames.cell("lag=2")["updates"]
    last = updates[(updates["update"] == updates["update"].max()) & (updates["step"] > updates["step"].max() / 2)]
    spread = last.groupby("arm")["token_log_ratio_var"].mean()
    print(f"  lag 2, variance of log-ratios before the last update: grpo {spread['grpo']:.3f}, grpo-replay "
          f"{spread['grpo-replay']:.3f}")
    for endpoint in (ENDPOINTS[2], ENDPOINTS[1]):
        table = sum(values(frames.cell(f"lag={of}"), endpoint) for of in NATURAL) / len(NATURAL)
        print(f"  {endpoint}, mean of lags 1 and 2: "
              + "; ".join(f"{a} − {b} {difference(table[a], table[b])}" for a, b in CURES))


def processors(frames: Frames) -> pd.Series:
    """The processor that made the runs of each seed."""
    found = frames.runs["packages"].map(lambda text: json.loads(text)["processor"])
    return found.groupby(frames.runs["seed"]).agg(lambda of_seed: " and ".join(of_seed.unique()))


def lag_natural() -> None:
    """Every contrast at each lag by itself, and what old rollouts do to GRPO."""
    frames = stored("lag_natural")
    for endpoint in lag_natural_verdicts.ENDPOINTS:
        tables = lag_natural_verdicts.by_lag(frames, endpoint)
        for of, table in tables.items():
            print(f"Exploratory, lag {of}, {endpoint}: "
                  + "; ".join(f"{a} − {b} {difference(table[a], table[b])}" for a, b in lag_natural_verdicts.PAIRS))
        both = lag_natural_verdicts.mean_of_lags(frames, endpoint)
        print(f"Exploratory, mean of lags 1 and 2, {endpoint}: "
              + "; ".join(f"{a} − {b} {difference(both[a], both[b])}" for a, b in (
                  ("gspo", lag_natural_verdicts.HALF_RATE), ("sequence-token", "none-token"),
                  ("gspo", "sequence-token"), ("gspo", "token-sequence"))))
        for processor, of_seeds in both.groupby(processors(frames).reindex(both.index), sort=False):
            print(f"Exploratory, seeds on {processor}, mean of lags 1 and 2, {endpoint}: " + "; ".join(
                f"{a} − {b} {difference(of_seeds[a], of_seeds[b])}" for a, b in CURES))
        print(f"Exploratory, grpo, {endpoint}: "
              + "; ".join(f"lag {of} − lag 0 {difference(tables[of]['grpo'], tables[0]['grpo'])}" for of in NATURAL))
    gap = lag_natural_verdicts.mean_of_lags(frames, lag_natural_verdicts.ENDPOINTS[0])
    gap = gap["grpo-replay"] - gap["grpo"]
    narrow = [interval(gap.drop(seed), 0.9) for seed in gap.index]
    beyond = sum(not (one.low >= -MARGIN and one.high <= MARGIN) for one in narrow)
    print(f"Exploratory: without one of {beyond} of the {len(gap)} seeds the 90 % interval of grpo-replay − grpo would "
          "end outside the margin")


# ---------------------------------------------------------------------- parts
def values(frames: Frames, name: str) -> pd.DataFrame:
    """A metric, seed × arm."""
    return per_run(frames, metric(name)).unstack(0)


def difference(a: pd.Series, b: pd.Series) -> str:
    """a − b within seeds, with its interval, p by exact sign flips, and n."""
    found = paired(a.dropna().to_dict(), b.dropna().to_dict())
    return f"{found.difference.printed(form(found.difference))}, p {found.p:.2g} (n = {found.n})"


def form(found: Interval) -> str:
    """Three decimals, or four where the interval is narrower than .01."""
    return ".3f" if found.high - found.low >= 0.01 else ".4f"
