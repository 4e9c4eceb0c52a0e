"""What one flip does, worked by hand on a tiny model; and the law's parts, on numbers made for it."""

from __future__ import annotations

from dataclasses import replace

import flip_effects_swaps as swaps
import flip_effects_trainer as trainer
import flip_effects_verdicts as verdicts
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

from moe_rl.errors import ConfigError
from moe_rl.metrics.volatility import route_change
from moe_rl.types import response_rows
from tests.conftest import build, perturb
from tests.policies.test_hf import make_batch, policy_of

SITE = 1


@pytest.fixture(scope="module")
def seen():
    policy = policy_of(build("qwen3_moe"))
    return policy, swaps.View.of(policy, make_batch())


def flips_of(view, every):
    """The weakest chosen expert for the runner-up, at every so many pairs of one site."""
    out, into, _ = (x[::every] for x in view.boundary(SITE))
    row, time = view.pairs[::every].T
    ids = view.scored.routes.ids()[row, time, SITE]
    ids = torch.where(ids == out[:, None], into[:, None], ids)
    return swaps.Flips(row, time, torch.full_like(row, SITE), ids), out, into


def test_a_swap_is_what_the_model_says_with_the_blocks_output_put_in_by_hand(seen):
    """The block's output at one token, from router logits, single experts, and the swapped set's gates normalised."""
    policy, view = seen
    block = policy.model.model.layers[SITE].mlp
    flips, out, into = flips_of(view, 7)
    delta, _ = swaps.swapped(policy, view.batch, view.scored, flips)
    table = swaps.described(policy, view, flips, out, into)
    assert delta.abs().max() > 1e-3 and (table["x"] > 0).all()
    for i, (row, time) in enumerate(zip(flips.row, flips.time, strict=True)):
        hidden, stream = view.inputs[row, time, SITE], view.stream[row, time, SITE].norm()
        scores = (hidden @ block.gate.weight.T).softmax(0)
        alone = {int(e): block.experts(hidden[None], e.view(1, 1), torch.ones(1, 1))[0].detach()
                 for e in (*flips.ids[i], out[i])}
        gates = scores[flips.ids[i]] / scores[flips.ids[i]].sum()
        by_hand = sum(g * alone[int(e)] for g, e in zip(gates, flips.ids[i], strict=True)).detach()

        def put_in(module, args, output, time=time, by_hand=by_hand):
            return output.index_put((torch.tensor([0]), time[None]), by_hand[None])

        part = view.batch.rows(row[None])
        held = view.scored.routes.rows(row[None], part.tokens.shape[1])
        handle = block.register_forward_hook(put_in)
        expected = policy.score(part, held).logprobs[0] - view.scored.logprobs[row, : part.tokens.shape[1]]
        handle.remove()
        torch.testing.assert_close(delta[i, : len(expected)].float(), expected, atol=3e-6, rtol=1e-3)
        was = scores[view.scored.routes.ids()[row, time, SITE]].sum()
        assert table["gate"][i] == pytest.approx((scores[out[i]] / was).item(), rel=1e-5)
        apart = (alone[int(into[i])] - alone[int(out[i])]).norm() / stream
        assert table["distance"][i] == pytest.approx(float(apart), rel=1e-4)
        moved = (by_hand - view.outputs[row, time, SITE]).norm() / stream
        assert table["moved"][i] == pytest.approx(float(moved), rel=1e-3)
        assert table["own"][i] == float(delta[i, time + 1])
        assert table["total2"][i] == pytest.approx(float((expected.double() ** 2).sum()), rel=1e-2, abs=1e-10)


def test_without_a_swap_nothing_changes_and_a_swap_changes_nothing_before_it(seen):
    policy, view = seen
    noise = view.noise(policy)
    assert noise["noise_self_replay"] == 0 and noise["noise_other_rows"] < 1e-5
    flips, _, _ = flips_of(view, 5)
    delta, _ = swaps.swapped(policy, view.batch, view.scored, flips)
    before = torch.arange(delta.shape[1]) <= flips.time[:, None]
    assert delta[before].abs().max() < 1e-5 < 3e-4 < delta[~before].abs().max()
    with pytest.raises(ConfigError, match="12 responses per step are more than one forward's 5"):
        swaps.View.of(policy_of(policy.model, score_batch=5), view.batch)


def test_boundaries_are_the_routers_own_and_swaps_stay_sets(seen):
    policy, view = seen
    out, into, margin = view.boundary(SITE)
    row, time = view.pairs.T
    order = view.scores.all_log_probs[SITE][row, time].argsort(1, descending=True)
    assert torch.equal(out, order[:, 1]) and torch.equal(into, order[:, 2]) and (margin >= 0).all()
    table = swaps.made(policy, view, torch.Generator().manual_seed(0))
    stand_for = table.groupby(["kind", "site"])["weight"].sum().unstack()
    assert stand_for.loc["random"].tolist() == pytest.approx([len(view.pairs)] * 3)
    assert (stand_for.loc["near"] + stand_for.loc["far"]).tolist() == pytest.approx([len(view.pairs)] * 3)
    assert table[table["kind"] == "near"]["margin"].max() <= table[table["kind"] == "far"]["margin"].max()
    ids = view.scored.routes.ids()[row, time, SITE]
    old, new = swaps.at_random(ids, 8, torch.Generator().manual_seed(0))
    assert (ids == old[:, None]).any(1).all() and not (ids == new[:, None]).any()


def test_flips_one_by_one_are_j_where_each_response_has_one(seen):
    policy, view = seen
    row = torch.arange(0, len(view.batch), 2)
    out, into, _ = view.boundary(SITE)
    first = torch.tensor([int((view.pairs[:, 0] == r).nonzero()[0]) for r in row])
    ids = view.scored.routes.ids()[row, 0, SITE]
    ids = torch.where(ids == out[first, None], into[first, None], ids)
    experts = view.scored.routes.experts.clone()
    experts[row, 0, SITE] = ids.to(experts.dtype)
    after = policy.score(view.batch, replace(view.scored.routes, experts=experts))
    found = trainer.one_by_one(policy, view, after)
    assert found["flips"] == len(row) and found["responses"] == len(view.batch)
    j = (after.logprobs - view.scored.logprobs)[view.batch.response_mask].double()
    assert found["j_squares"] == pytest.approx(float(j @ j), rel=1e-3) and found["j_squares"] > 1e-6
    for name in ("flips_squares", "sum_squares", "product"):
        assert found[name] == pytest.approx(found["j_squares"], rel=1e-3)


def test_what_is_expected_of_a_step(seen):
    """Slots as `route_change` counts them; E[δ²] as the mean over swaps, weighed by Q(margin / σ)."""
    policy, view = seen
    moved = policy_of(build("qwen3_moe"))
    perturb(moved.model, scale=0.5)
    after = moved.score(view.batch)
    table = swaps.made(policy, view, torch.Generator().manual_seed(0))
    law = trainer.expected(table, [view], [after])
    pairs = torch.zeros(after.logprobs.shape, dtype=torch.bool)
    pairs[tuple(view.pairs.T)] = True
    share = route_change(view.scored.routes.ids(), after.routes.ids(), pairs).row()["expert_change_rate"]
    assert law["slots"].sum() / law["pairs"].sum() == pytest.approx(2 * share) and share > 0
    here = table[(table["site"] == 0) & (table["kind"] != "random")]
    weights = here["weight"] * norm.sf(here["margin"] / law["sigma"][0])
    assert law["total2"][0] == pytest.approx((weights * here["total2"]).sum() / weights.sum())
    found = trainer.spread(moved, [view], [after])
    mask = view.batch.response_mask
    assert found["dd"] == pytest.approx(float(((after.logprobs - view.scored.logprobs)[mask] ** 2).mean()), rel=1e-5)
    left = moved.score(view.batch, view.scored.routes).logprobs
    assert found["rr"] == pytest.approx(float(((left - view.scored.logprobs)[mask] ** 2).mean()), rel=1e-5)
    assert found["jj"] == pytest.approx(float(((after.logprobs - left)[mask] ** 2).mean()), rel=1e-3)
    assert found["tokens"] == int(response_rows(view.batch).sum())
    bins = trainer.binned(table)
    assert bins["n"].sum() == len(table) and bins["total2"].sum() == pytest.approx(table["total2"].sum())


def test_sigma_makes_margins_flip_as_often_as_they_did():
    assert trainer.sigma_of(np.full(5, 0.3), 0.1) == pytest.approx(0.3 / norm.isf(0.1))
    margins = np.random.default_rng(0).exponential(size=500)
    assert norm.sf(margins / trainer.sigma_of(margins, 0.07)).mean() == pytest.approx(0.07)
    assert trainer.sigma_of(margins, 0.0) == 0 and trainer.sigma_of(margins, 0.6) > 1e5
    assert np.isnan(trainer.weighed(pd.DataFrame(columns=["total2", "own", "x", "gate", "moved", "jump", "block",
                                                          "distance", "in_response", "margin"]), None)["total2"])


def law_of(cells):
    """Rows of law.parquet, where x is 0.1 and E[δ²] = c x² at both sites, with 30 and 10 slots for 20 tokens."""
    rows = [{"factors": cell, "seed": seed, "alpha": 1.0, "site": site, "pairs": 400, "slots": slots, "tokens": 20,
             "total2": c * 0.01, "x2": 0.01, "own2": c * 0.004, "in_response": 0.5, "gate": 0.5, "distance2": 0.04,
             "moved2": 0.01, "jump2": 0.06, "block2": 0.2}
            for cell, c in cells.items() for seed in (0, 1) for site, slots in ((0, 30), (5, 10))]  # fmt: skip
    return pd.DataFrame(rows)


def test_predictions_are_flips_times_effects_and_with_the_c_of_other_cells():
    """40 flips for 20 tokens at δ² = c · .01: .02 c; with the others' c, √(4 · 9) = 6 for the first cell. The sites
    are the first and the last of six."""
    law = law_of({"a": 1.0, "b": 4.0, "c": 9.0})
    moves = law.drop_duplicates(verdicts.KEYS)[verdicts.KEYS].assign(dd=1.0, rr=0.5, jj=0.02)
    runs = verdicts.predictions(law, moves).set_index(["factors", "seed"])
    assert runs["predicted"].xs(0, level=1).tolist() == pytest.approx([0.02, 0.08, 0.18])
    assert verdicts.by_third(law)["flips"].xs(("a", 0, 1.0)).to_dict() == {0: 1.5, 2: 0.5}
    assert runs["transported"]["a", 1] == pytest.approx(0.02 * 6) and runs["transported"]["b", 0] == pytest.approx(0.06)
    flips = verdicts.per_flip(law)
    assert flips["own2"][0] == pytest.approx(0.008), "of those flips alone whose own token is the policy's"
    assert flips["flips"][0] == 2


def test_verdicts_follow_the_interval_and_else_the_mean():
    cases = {" holds": (1.0, 1.1, 0.9), " fails": (3.0, 3.1, 2.9), "holds at the mean": (1.2, 4.0, 0.5),
             "fails at the mean": (2.5, 0.5, 9.0)}
    for verdict, values in cases.items():
        assert verdicts.said(pd.Series(values)).endswith(verdict)


def test_powers_are_those_of_the_data():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"factors": rng.choice(["a", "b"], 300), "site": rng.integers(0, 6, 300), "in_response": 1.0,
                         **{name: rng.uniform(0.1, 1, 300) for name in ("gate", "distance", "margin")},
                         "logprob": -rng.uniform(0.01, 3, 300)})
    rows["own"] = -(rows["gate"] * rows["distance"] ** 2 * -np.expm1(rows["logprob"])
                    * np.exp(0.3 * rows["margin"] - rows["site"] / 5) * rows["factors"].map({"a": 1.0, "b": 7.0}))
    rows.loc[:9, "own"] = 0.0
    found = verdicts.powers(rows)
    assert list(found.values()) == pytest.approx([1.0, 2.0, 1.0, 0.3, -1.0], abs=1e-6)


def test_the_slope_is_that_within_sites():
    x = np.logspace(-3, 0, 10)
    rows = pd.concat([pd.DataFrame({"site": s, "bin": range(10), "n": 20, "x2": 20 * (s + 1) ** 2 * x**2,
                                    "total2": 20 * c * x**1.5}) for s, c in enumerate((1.0, 50.0))])
    assert verdicts.log_slope(rows) == pytest.approx(1.5)
