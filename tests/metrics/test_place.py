"""Where ratios stand beside volatility_dial: worked by hand, and a yardstick that is what the tables say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import volatility_dial_yardstick as made
from volatility_dial import SIGMAS

from moe_rl.errors import ConfigError
from moe_rl.metrics.place import CAUTION, REPLAYED, added, described, place, yardstick
from moe_rl.metrics.ratios import grouped_ess
from moe_rl.runs.frames import load_study

SIGMA = (0.0, *SIGMAS)


@cache
def tables():
    return load_study(made.FOLDER)


def curve(quantity, arm="grpo", span="last"):
    return [row[span][quantity][0] for row in yardstick()["rows"] if row["arm"] == arm]


def test_the_yardstick_is_made_from_the_committed_tables_and_rises_with_the_dose():
    assert made.FILE.read_text() == made.written(yardstick()) and json.loads(made.FILE.read_text()) == yardstick()
    found = json.loads(made.written(made.yardstick(tables())))
    assert found["tokens"] == yardstick()["tokens"]
    for key in ("rows", "effects"):
        for mine, theirs in zip(found[key], yardstick()[key], strict=True):
            mine, theirs = flat(mine), flat(theirs)
            assert [x for x in mine.items() if not number(x[1])] == [x for x in theirs.items() if not number(x[1])]
            numbers = [{k: v for k, v in one.items() if number(v)} for one in (mine, theirs)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    for arm in ("grpo", "grpo-replay", "gspo"):
        for span in ("last", "step"):
            assert np.all(np.diff(curve("token_kl_k3", arm, span)) > 0)
            assert np.all(np.diff(curve("token_ess", arm, span)) < 0)


def number(x):
    return isinstance(x, float)


def flat(row, prefix=""):
    """Names and numbers of a nested row."""
    items = row.items() if isinstance(row, dict) else enumerate(row)
    return {k: v for key, value in items for k, v in (
        flat(value, f"{prefix}{key}.") if isinstance(value, dict | list) else {f"{prefix}{key}": value}).items()}


def test_its_numbers_are_those_of_the_page():
    """As printed on studies/volatility_dial.md, and one mean by pandas alone."""
    effects = {(e["sigma"], e["endpoint"], e["contrast"]): [round(x, 2) for x in e["effect"]] for e in
               yardstick()["effects"]}
    assert effects[2.0, "reward, second half", "grpo-replay − grpo"] == [0.05, 0.03, 0.07]
    assert effects[2.0, "greedy exact match, second half", "gspo − grpo"] == [0.06, 0.04, 0.09]
    assert [round(x, 2) for x in curve("token_ess", span="step")] == [0.98, 0.86, 0.55, 0.19]
    updates = tables()["updates"]
    mine = updates.query("arm == 'grpo' and factors == 'dial.form=weights,dial.sigma=1' and step > 25 and update == 8")
    assert len(mine) == 16 * 25 and curve("token_kl_k3")[2] == pytest.approx(mine["token_kl_k3"].mean(), rel=1e-5)
    slots = [row["slots"][0] for row in yardstick()["rows"] if row["arm"] == "grpo"]
    assert slots[2] == pytest.approx(mine["fresh_slot_change"].mean(), rel=1e-5) and slots == sorted(slots)


def test_a_dose_is_read_off_between_two_on_the_scale_of_a_standard_deviation():
    """Half way between √KL at .4 and at 1, and between √(−ln ESS) at 1 and at 2."""
    low, high = (math.sqrt(x) for x in curve("token_kl_k3")[1:3])
    first, second = (math.sqrt(-math.log(x)) for x in curve("token_ess")[2:])
    ess, kl = place(math.exp(-(((first + second) / 2) ** 2)), ((low + high) / 2) ** 2).readings
    assert (kl.sigma, [s for s, _ in kl.beside]) == (pytest.approx(0.7), [0.4, 1])
    assert (ess.sigma, [s for s, _ in ess.beside]) == (pytest.approx(1.5), [1, 2])
    assert "is between σ = 0.4 (0.12) and σ = 1 (0.8), near 0.70" in str(kl)
    quarter = place(kl=(low + (high - low) / 4) ** 2).readings[0]
    assert quarter.sigma == pytest.approx(0.55)


@pytest.mark.parametrize("arm", ["grpo", "grpo-replay", "gspo"])
@pytest.mark.parametrize("span", ["last", "step"])
def test_what_the_study_had_at_a_dose_is_at_that_dose(arm, span):
    for sigma, ess, kl in zip(SIGMA, curve("token_ess", arm, span), curve("token_kl_k3", arm, span), strict=True):
        found = place(ess, kl, arm=arm, span=span)
        assert [one.sigma for one in found.readings] == pytest.approx([sigma] * 2) and sigma in found.sigmas


def test_a_dose_that_was_left_out_comes_back_best_on_this_scale():
    """σ = 0.4 and 1 from their neighbours: within a factor of two, and on average nearer than on two other scales."""
    def spread(x):
        return -math.log(x)

    scales = {"this": ((math.sqrt, lambda x: math.sqrt(spread(x)))), "log": (math.log, lambda x: math.log(spread(x))),
              "linear": (lambda x: x, lambda x: 1 - x)}  # fmt: skip
    missed = {}
    for name, of in scales.items():
        curves = [[scale(x) for x in curve(quantity, arm, span)] for quantity, scale in
                  zip(("token_kl_k3", "token_ess"), of, strict=True) for arm in ("grpo", "grpo-replay", "gspo")
                  for span in ("last", "step")]  # fmt: skip
        missed[name] = [abs(math.log(np.interp(m[i], m[i - 1 : i + 2 : 2], SIGMA[i - 1 : i + 2 : 2]) / SIGMA[i]))
                        for m in curves for i in (1, 2)]
    assert max(missed["this"]) < math.log(2)
    assert np.mean(missed["this"]) < 0.2 < min(np.mean(missed["log"]), np.mean(missed["linear"]))


def test_outside_of_all_doses_nothing_is_read_off():
    quiet, loud = place(1.0, 0.0), place(0.0, math.inf)
    assert [one.sigma for one in (*quiet.readings, *loud.readings)] == [None] * 4
    assert [one.dose for one in (*quiet.readings, *loud.readings)] == ["quieter"] * 2 + ["beyond 2"] * 2
    assert str(quiet.readings[1]) == "KL (nats) 0 is quieter than σ = 0 (0.021)"
    assert str(loud.readings[0]) == "token ESS 0 is beyond σ = 2 (0.24)"
    assert (quiet.sigmas, loud.sigmas) == ({0.0}, {2.0})
    assert json.loads(json.dumps(asdict(quiet)))["readings"][0]["sigma"] is None


def test_an_ess_of_other_numbers_of_tokens_has_no_place():
    n = yardstick()["tokens"]["step"]
    for tokens, there in ((n, 2), (1.2 * n, 2), (n / 1.2, 2), (1.3 * n, 1), (n / 1.3, 1), (math.nan, 1)):
        assert len(place(0.9, 0.1, span="step", tokens=tokens).readings) == there, tokens
    assert len(place(math.nan, 0.1).readings) == 1


def test_what_cannot_be_is_said():
    for wrong, match in (({"kl": -0.1}, "0 at least"), ({"token_ess": 1.2}, "is a share"),
                         ({"kl": 1, "arm": "ppo"}, "choose grpo, grpo-replay"),
                         ({"kl": 1, "span": "run"}, "last or step")):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            place(**wrong)
    assert place() is None and place(0.9, tokens=9) is None and place(math.nan, math.nan) is None
    assert place(1 + 1e-12, -1e-17).readings[1].value == 0, "rounding"


def test_the_sentence_has_the_effects_at_its_doses_and_the_caution():
    said = described({"natural": place(kl=0.5), "replayed": place(kl=0.2, arm=REPLAYED)})
    assert said.startswith("Natural: KL (nats) 0.5 is between σ = 0.4 (0.12) and σ = 1 (0.8), near 0.80. Replayed: KL")
    assert ("In volatility_dial, at σ = 0.4 … 1 … 2: grpo-replay − grpo in reward, second half, +0.01 [+0.00, +0.02] … "
            "+0.01 [+0.00, +0.02] … +0.05 [+0.03, +0.07]; ") in said
    assert said.endswith(CAUTION) and str(place(kl=0.5)).endswith(CAUTION)
    assert added(iter([2.0])).count("[") == 4


def test_an_ess_of_groups_by_hand():
    """r = (1, 3), (2, 2): 16 / (2 · 10) and 1; the fifth token is in no group, and large ratios do not overflow."""
    log_ratio = torch.tensor([1.0, 3.0, 2.0, 2.0, 9.0]).log()
    assert grouped_ess(log_ratio, 2).tolist() == pytest.approx([0.8, 1.0])
    assert grouped_ess(log_ratio + 800, 2).tolist() == pytest.approx([0.8, 1.0], rel=1e-4)
    assert grouped_ess(log_ratio, 6).shape == (0,)


def test_the_page_shows_the_yardstick():
    page = (Path(__file__).parents[2] / "docs" / "volatility.md").read_text()
    for i, sigma in enumerate(SIGMA):
        slots = 100 * yardstick()["rows"][3 * i]["slots"][0]
        cells = [" / ".join(form.format(curve(quantity, arm, span)[i]) for arm in ("grpo", "grpo-replay", "gspo"))
                 for span in ("last", "step")
                 for quantity, form in (("token_ess", "{:.2f}"), ("token_kl_k3", "{:.2g}"))]  # fmt: skip
        assert f"| {sigma:g} | {slots:.0f} % | {' | '.join(cells)} |" in page
    last, step = yardstick()["tokens"].values()
    assert f"n = {last} tokens" in page and f"about {step:,} tokens" in page
