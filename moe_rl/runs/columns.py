"""The data dictionary: every column of every table, with its unit, formula and source.

One place. `RunFolder.add` refuses a row with a column that has no entry here, and `docs/columns.md` is generated
from it. A name in braces is a family: `token_{mean,var}` stands for `token_mean` and `token_var`; one that ends in `_*`
is open, since code from outside the package names its members.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

TABLES = {
    "steps": ("step",),
    "updates": ("step", "update"),
    "layers": ("step", "site"),
    "lags": ("step", "lag"),
    "evaluations": ("step", "benchmark", "problem", "sample"),
    "rollouts": ("step", "rollout"),
}
"""Each table and the columns that name one of its rows, the first of which is its step. A table more is an entry here,
and one for each of its columns below."""
TEXTS = ("rollouts",)
"""Those that people read, run by run; the others are pooled."""
COMPLETIONS = ("evaluations", "rollouts")
"""Those of which a row is one completion; their means are columns of `steps`."""

GSPO = "GSPO (2507.18071)"
R3 = "R3 (2510.11370)"
RSPO = "RSPO (2510.23027)"


@dataclass(frozen=True)
class Column:
    """One entry. `tables` are those the column may appear in, separated by spaces."""

    name: str
    tables: str
    unit: str
    formula: str
    source: str = ""


DICTIONARY: dict[str, tuple[Column, ...]] = {
    "Keys": (
        Column("step", "steps updates layers lags evaluations rollouts", "index",
               "batch of rollouts, from 1; 0 is the cold start"),
        Column("update", "updates", "index", "optimizer step within a step, from 1: the mini-batch index, which goes on "
               "through the epochs"),
        Column("epoch", "updates", "index", "pass over the step's rollouts, from 1; where there are several"),
        Column("site", "layers", "index", "routing site in forward order, from 0"),
        Column("layer", "layers", "index", "absolute decoder layer of the site"),
        Column("lag", "lags", "steps", "from the weights that drew a token to those that begin to train on it; in runs "
               "with a lag, a row for each that response tokens have"),
        Column("benchmark", "evaluations", "name", "whose problems: `held_out` in a run"),
        Column("problem", "evaluations", "index", "problem of the benchmark, from 0"),
        Column("sample", "evaluations", "index", "completion of the problem: 0 the greedy one, from 1 those drawn"),
        Column("rollout", "rollouts", "index", "row of the step's batch, from 0; some are kept to be read"),
    ),
    "Learning": (
        Column("reward", "steps evaluations rollouts", "0–1", "mean reward of the step's rollouts; of one completion"),
        Column("exact", "steps", "share", "rollouts with reward 1"),
        Column("reward_std", "steps", "0–1", "standard deviation of the rewards over the step"),
        Column("groups_without_signal", "steps", "share", "groups whose rewards are all equal: their advantages are 0"),
        Column("response_tokens", "steps evaluations rollouts", "tokens", "mean response length, EOS included; of one"),
        Column("turns", "steps", "turns", "mean number of the policy's turns; where a task has several"),
        Column("environment_tokens", "steps", "tokens", "mean number of tokens that an environment wrote between them, "
               "which no other column counts"),
        Column("truncated", "steps evaluations rollouts", "share", "responses cut off by max_new_tokens; of one 0 or 1"),
        Column("vote", "evaluations", "sample", "first drawn completion of the problem with the same answer; none: it "
               "gives none, or is greedy"),
        Column("entropy", "steps updates", "nats", "mean over response tokens of −Σ p log p at the run's temperature"),
        Column("kept_tokens", "steps", "tokens", "mean number of tokens that a response token was drawn from; runs with "
               "top_p, top_k or min_p whose engine says which: 4 bytes each while the step lasts"),
        Column("eval_exact_{greedy,sampled}", "steps", "share", "exact matches on the fixed held-out prompts"),
        Column("eval_reward_{greedy,sampled}", "steps", "0–1", "mean reward on the fixed held-out prompts"),
        Column("eval_n", "steps", "prompts", "held-out prompts evaluated"),
        Column("lr", "updates", "1", "learning rate of the optimizer step"),
        Column("term_*", "updates", "as loss", "what the arm's term of that name adds to the loss, coefficient included"),
        Column("dial_dose", "updates", "1", "how far the routers were moved for the update, in standard deviations"),
        Column("loss", "updates", "1", "the minimised objective, before the step"),
        Column("value_loss", "updates", "1", "½ Σ W · max((V − R)², (clip(V, V_old ± ε) − R)²) of the critic, before its "
               "step; arms with a critic", "PPO (1707.06347)"),
        Column("value_explained_variance", "updates", "share", "1 − Var(R − V) / Var(R) over response tokens, before the "
               "critic's step; where Var(R) > 0"),
        Column("value_grad_norm", "updates", "1", "global L2 norm of the critic's gradient before clipping"),
        Column("grad_norm", "steps updates", "1", "global L2 norm before clipping; in steps the mean over updates"),
        Column("grad_clipped", "steps updates", "share", "updates whose gradient norm was clipped"),
        Column("grad_cosine", "steps updates", "1", "cos(g_t, g_{t−1}) of the gradients of an update and of the one before "
               "it, before clipping; in steps the mean over updates; with measure.gradient_cosine", "GAC (2603.01501)"),
    ),
    "Importance ratios (the arm's own, before each update, of every epoch; token_: r, sequence_: s, the geometric mean "
    "of r)": (
        Column("{token,sequence}_n", "steps updates lags", "count", "response tokens, or sequences, behind the row"),
        Column("{token,sequence}_log_ratio_{mean,var}", "steps updates lags", "nats, nats²", "mean and variance of log r"),
        Column("{token,sequence}_log_ratio_kurtosis", "steps updates lags", "1", "m4 / m2² of log r: 3 for a Gaussian"),
        Column("token_log_ratio_var_within", "steps updates lags", "nats²", "mean over sequences of the variance inside one",
               "SAPO (2511.20347)"),
        Column("{token,sequence}_log_ratio_q{001,01,10,50,90,99,999}", "steps updates lags", "nats",
               "quantile of log r: 0.001, 0.01, 0.10, 0.50, 0.90, 0.99, 0.999"),
        Column("{token,sequence}_log_ratio_max", "steps updates lags", "nats", "largest |log r|"),
        Column("{token,sequence}_ess", "steps updates lags", "share", "(Σ r)² / (n Σ r²): effective sample size over n"),
        Column("{token,sequence}_kl_{k1,k3}", "steps updates lags", "nats", "means of −log r and of r − 1 − log r",
               "Schulman 2020; of s they are no KL"),
        Column("{token,sequence}_ratio_mean", "steps updates lags", "1", "mean of r (expected: 1) or s (expected: ≤ 1)"),
        Column("{token,sequence}_beyond_2", "steps updates lags", "share", "max(r, 1/r) > 2", f"F(2) of {R3}"),
        Column("first_update_log_ratio_max", "steps", "nats", "largest |log r| of mini-batch 1: 0 but for noise; "
               "where the engine is the anchor, its gap and all staleness"),
        Column("push_gap_max", "steps", "nats",
               "largest |log p(engine) − log p(policy)| over a few completions right after the weights were pushed"),
    ),
    "Staleness (runs with a lag; stale_: log r = log p(policy that begins to train) − log p(engine that sampled), which "
    "holds the engine's mismatch too; engine_* is measured in steps whose tokens all have lag 0)": (
        Column("lag_{mean,max}", "steps", "steps", "over response tokens"),
        Column("lag_tokens", "lags", "count", "response tokens of the lag"),
        Column("stale_logprob_{mean,max}", "lags", "nats", "as engine_logprob_*, over the tokens of the lag"),
        Column("stale_kl_k3", "lags", "nats", "mean of r − 1 − log r", "Schulman 2020"),
        Column("stale_beyond_2", "lags", "share", "max(r, 1/r) > 2", f"F(2) of {R3}"),
        Column("stale_{slot,set,any_layer}_change", "lags", "share", "as engine_*_change: S policy, S′ what sampled"),
    ),
    "Dynamic sampling (runs with refills; of all groups that were drawn for the step's batch, also those left out)": (
        Column("drawn_groups", "steps", "count", "groups: `prompts_per_step` and every one drawn in their place",
               "DAPO (2503.14476)"),
        Column("drawn_groups_without_signal", "steps", "count", "of these, groups whose rewards are all equal"),
        Column("drawn_tokens", "steps", "tokens", "response tokens"),
        Column("drawn_reward", "steps", "0–1", "mean reward: that of the policy, where `reward` is of what was kept"),
    ),
    "Clipping (elements that lose their gradient; over those with non-zero advantage, _all: over all; "
    "none that filters took out)": (
        Column("clip_{tokens,sequences}{,_all}", "steps updates lags", "share", "by either bound; sequence: all its tokens",
               f"{GSPO}, Fig. 2: clip_tokens_all"),
        Column("clip_{tokens,sequences}{,_all}_{high,low}", "steps updates lags", "share", "by the upper or lower bound"),
    ),
    "Volatility (natural routes of the same tokens; S, S′ the sets chosen before and after, k their size)": (
        Column("slot_change{,_prompt}", "steps updates layers", "share",
               "1 − |S ∩ S′| / k; steps, layers: over all updates of the step; updates: over one, on the probe",
               f"our reading of {GSPO}, section 5.3, which gives no formula"),
        Column("set_change{,_prompt}", "steps updates layers", "share", "1[S ≠ S′]", R3),
        Column("any_layer_change{,_prompt}", "steps updates", "share", "tokens with S ≠ S′ at any site", R3),
        Column("layers_changed{,_prompt}", "steps updates", "sites", "sites with S ≠ S′ per token", R3),
        Column("jaccard_distance{,_prompt}", "steps updates layers", "0–1", "1 − |S ∩ S′| / |S ∪ S′|"),
        Column("gate_mass_moved{,_prompt}", "steps layers", "0–1",
               "Σ of old gates over S \\ S′ / Σ over S; in rows of older code not divided: above 1 where gates are scaled"),
        Column("response_set_change{,_prompt}", "steps layers", "share",
               "1 − |U ∩ U′| / |U|, U the union of S over a response"),
        Column("response_usage_change{,_prompt}", "steps layers", "0–1",
               "½ Σ |f − f′|, f(e) the share of a response's slots that expert e fills"),
        Column("router_shift{,_prompt}", "steps layers", "nats", "mean |log p′(e) − log p(e)| over the experts e of S",
               RSPO),
        Column("router_shift_ratio{,_prompt}", "steps", "0–1", "γ = Π over sites of the mean of exp(−|log p′ − log p|)",
               RSPO),
        Column("router_shift_ratio_low{,_prompt}", "steps", "share", "tokens with γ < 0.7", RSPO),
        Column("volatility_{tokens,unknown}{,_prompt}", "steps layers", "tokens",
               "tokens compared (known at every site), and token × site pairs left out as unknown"),
        Column("fresh_{slot_change,set_change,any_layer_change,layers_changed,jaccard_distance}", "updates", "as above",
               "π_old against the weights before this update, on its own mini-batch; live arms"),
    ),
    "Engine mismatch (at equal weights, response tokens; log r = log p(policy) − log p(engine))": (
        Column("engine_logprob_{mean,max}", "steps", "nats", "mean and largest |log r|"),
        Column("engine_kl_k3", "steps", "nats", "mean of r − 1 − log r: KL(engine ‖ policy) per token",
               "Schulman 2020"),
        Column("engine_beyond_2", "steps", "share", "max(r, 1/r) > 2", f"F(2) of {R3}"),
        Column("engine_{slot,set}_change", "steps layers", "share", "as slot_change, set_change: S policy, S′ engine"),
        Column("engine_any_layer_change", "steps", "share", "tokens with S ≠ S′ at any site", R3),
        Column("engine_unknown", "steps", "share",
               "token × site pairs, prompts included, whose route the engine did not report or that were refused"),
        Column("engine_{logprob_mean,logprob_max,kl_k3,beyond_2}_{natural,replayed}", "steps", "as above",
               "the same on the probe: as the policy routes, and replaying the engine's routes"),
    ),
    "Replay (old routes under the new weights: in arms that do not replay, counterfactual; steps: on the probe, updates: on the mini-batch)": (
        Column("replay_gap_{mean,std,max}", "steps", "nats", "log π(natural) − log π(replayed) per token; max of |·|"),
        Column("pull", "steps updates", "share", "slots where the router, under replay, would pick another expert"),
        Column("coverage", "updates", "share", "token × site pairs whose experts replay forced"),
        Column("probe_{responses,tokens}", "steps", "count", "size of the probe"),
    ),
    "Load and margins (natural routes of the new weights, response tokens; f the share of slots of an expert)": (
        Column("load_entropy", "layers", "0–1", "−Σ f log f / log E: 1 is balanced"),
        Column("load_max_violation", "layers", "1", "max f / mean f − 1", "MaxVio (2408.15664)"),
        Column("load_cv", "layers", "1", "standard deviation of f / mean f"),
        Column("load_dead_experts", "layers", "experts", "f < 0.01 / E"),
        Column("router_confidence", "layers", "share", "Σ of the router's softmax over the experts of S; detail steps",
               "prime-rl#2545, of its own scores"),
        Column("margin_n", "layers", "tokens", "tokens behind the margins"),
        Column("margin_q{01,10,50,90}", "layers", "score", "quantile of the gap between the k-th and k+1-th score"),
        Column("margin_below_{0.01,0.1}", "layers", "share", "tokens with a gap below the threshold"),
    ),
    "Noise floor (same weights scored again: permuted rows, other micro-batches, extra padding)": (
        Column("noise_floor_logprob", "steps", "nats", "largest |Δ log-prob|"),
        Column("noise_floor_kl_k3", "steps", "nats", "as engine_kl_k3, between the two scorings"),
        Column("noise_floor_beyond_2", "steps", "share", "as engine_beyond_2, between the two scorings"),
        Column("noise_floor_slot_change", "steps", "share", "routes that differ, as slot_change"),
        Column("noise_floor_set_change", "steps layers", "share", "routes that differ, as set_change"),
        Column("noise_floor_any_layer_change", "steps", "share", "tokens with a route that differs at any site"),
    ),
    "Attribution (mini-batch about to be updated; log-ratios D natural, R replayed, J = D − R, same weights)": (
        Column("attribution_n", "updates", "tokens", "tokens behind the sums; in the first epoch not yet trained on"),
        Column("attribution_sum_{d,r}", "updates", "nats", "Σ D and Σ R; sums are pooled before anything is divided"),
        Column("attribution_sum_{dd,rr,jj,rj}", "updates", "nats²", "Σ D², Σ R², Σ J², Σ R·J"),
        Column("attribution_top_share", "updates", "share", "part of Σ D² carried by the top 0.1 % of tokens"),
    ),
    "Rollouts that are kept to be read (log r, clipping and flips as in the last update on a token)": (
        Column("group", "rollouts", "index", "prompt of the step that it answers, from 0"),
        Column("advantage", "rollouts", "1", "mean over the response tokens"),
        Column("log_ratio_{min,max}", "rollouts", "nats", "smallest and largest log r of its response tokens"),
        Column("clipped", "rollouts", "tokens", "response tokens that lose their gradient to a clip bound"),
        Column("flips", "rollouts", "token × site", "response tokens and sites whose router chose, or under replay would "
               "have chosen, another set than π_old"),
        Column("prompt", "rollouts", "text", "as the model reads it, its middle left out where it is long"),
        Column("response", "rollouts", "JSON", "per token [text, log r, clipped by ±1 or 0, flips], null for log r of what "
               "an environment wrote; [n] alone: n tokens are left out"),
    ),
    "Cost (ignored when two runs are compared)": (
        Column("seconds_{sample,score,update,measure,evaluate,step}", "steps", "s", "wall-clock time of the phase"),
        Column("memory_peak_mb", "steps", "MB", "peak resident memory of the process so far"),
    ),
    "Yours": (
        Column("own_*", "steps updates layers lags evaluations rollouts", "own", "what a recorder or a loss from outside the package measures"),
    ),
}


def pooled() -> dict[str, tuple[str, ...]]:
    """The tables that are read of many runs at once, and their keys."""
    return {name: keys for name, keys in TABLES.items() if name not in TEXTS}


def expand(name: str) -> list[str]:
    """The names of a family: `a_{x,y}` gives `a_x` and `a_y`; several braces give all combinations."""
    parts = [p[1:-1].split(",") if p.startswith("{") else [p] for p in re.split(r"(\{[^}]*\})", name)]
    return ["".join(choice) for choice in itertools.product(*parts)]


COLUMNS: dict[str, Column] = {n: c for group in DICTIONARY.values() for c in group for n in expand(c.name)}
"""Every single column name and the entry that explains it, in the order in which tables show them."""


def entry(name: str) -> Column | None:
    """What explains a column: its own entry, or that of its open family."""
    return COLUMNS.get(_listed(name))


def ordered(names: Iterable[str]) -> list[str]:
    """Columns in the order of the dictionary, those of an open family by name; without those it does not explain."""
    place = {name: i for i, name in enumerate(COLUMNS)}
    return sorted((name for name in names if entry(name)), key=lambda name: (place[_listed(name)], name))


def _listed(name: str) -> str:
    """The name under which the dictionary would list a column."""
    return name if name in COLUMNS else f"{name.partition('_')[0]}_*"


def unknown(table: str, names: set[str]) -> set[str]:
    """Those of the names that the dictionary does not allow in this table."""
    return {n for n in names if (column := entry(n)) is None or table not in column.tables.split()}


def timing(name: str) -> bool:
    """Whether a column may differ between two runs that are otherwise identical."""
    return name.startswith(("seconds_", "memory_"))


def markdown() -> str:
    """The dictionary as the page `docs/columns.md`."""
    tables = ", ".join(f"`{name}` ({' × '.join(keys)})" for name, keys in TABLES.items())
    lines = [
        "# Data dictionary",
        "",
        f"Generated by `make docs/columns.md` from `moe_rl/runs/columns.py`. Tables and their rows: {tables}. A name in",
        "braces is a family of columns; `_*` stands for names that come from outside the package. A missing value means",
        "that the quantity was not measured in that row.",
    ]
    for title, columns in DICTIONARY.items():
        lines += ["", f"## {title}", "", "| column | tables | unit | formula | source |", "|---|---|---|---|---|"]
        for c in columns:
            cells = (f"`{c.name}`", c.tables, c.unit, c.formula, c.source)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
