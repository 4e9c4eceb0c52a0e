"""Broken engines are named, honest ones are not: a few of the kinds of tests/benchmarks/broken_engines.py."""

from __future__ import annotations

import html

import numpy as np
import pytest
import torch

from moe_rl.analysis.diagnose import diagnose
from moe_rl.analysis.diagnose.causes import CAUSES
from moe_rl.analysis.diagnose.forwards import STATED, Scorer
from moe_rl.analysis.diagnose.hypotheses import Hypothesis, list_hypotheses
from moe_rl.analysis.diagnose.locations import locate_gap
from moe_rl.analysis.diagnose.report import tabulate_fits, write_page
from moe_rl.analysis.diagnose.responses import Rollouts, count_turns, hash_sets
from moe_rl.analysis.diagnose.scopes import (
    change_routers,
    change_weights,
)
from moe_rl.routing import layout_of
from tests.benchmarks.broken_engines import (
    LISTED,
    STRANGE,
    Engine,
    compute_logits,
    make_file,
    make_near_tie,
    pick,
    without,
)

HALF = "bfloat16/bfloat16", "float32/bfloat16", "float32/float16"


@pytest.fixture(scope="module")
def engine():
    made = {}
    return lambda family, turns=1: made.setdefault((family, turns), Engine(family, 8, 3, None, turns))


def answer(engine, entries, **settings):
    return diagnose(entries, engine.model, tokenizer=engine.tokenizer, **settings)


def scorer_of(engine, entries):
    return Scorer(engine.model, Rollouts(entries, layout_of(engine.model), vocabulary=48).responses)


def broken(kind, engine):
    return (LISTED.get(kind) or STRANGE[kind]).make(engine)


# ---------------------------------------------------------------------- what is named
@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        ("router_fp8_row", "float32/bfloat16"),
        ("scaled_twice", "float32/float32"),
        ("gates_of_half", "float32/float16"),
        ("old_head", "bfloat16/bfloat16"),
        ("old_head", "float32/bfloat16"),
        ("old_layer", "float32/float32"),
        ("prompt_cut", "float32/float32"),
        ("positions_of_padding", "float32/float16"),
        ("temperature_between", "float32/bfloat16"),
        ("min_p_kept", "float32/float32"),
        ("one_late", "float32/bfloat16"),
        ("row_late_in_response", "float32/float16"),
        ("stale_routes", "float32/bfloat16"),
        ("copied_layer", "float32/float32"),
        ("stale_prefix_of_some", "float32/float32"),
        ("swapped_responses", "float32/float32"),
        ("reported_gates_scaled", "float32/float32"),
    ],
)
def test_a_broken_engine_is_named(kind, pair):
    file = make_file(kind, 40, pair)
    found = diagnose(file.entries, file.model, tokenizer=file.tokenizer, also=file.also)
    assert found.causes[0] == file.cause and found.fault and not found.equally, found.verdict


@pytest.mark.parametrize("kind", ["reversed_layers", "half_garbage", "one_slot"])
@pytest.mark.parametrize("pair", HALF)
def test_wrong_routes_do_not_hide_behind_a_dtype(kind, pair):
    file = make_file(kind, 41, pair)
    found = diagnose(file.entries, file.model, tokenizer=file.tokenizer)
    assert found.causes[0] == "unexplained" and found.fault, found.verdict


def test_two_faults_are_both_named(engine):
    """One of log-probs, and one of routes."""
    deepseek = engine("deepseek_v3")
    shifted = [e | {"routes": np.roll(e["routes"], -1, axis=1)} for e in broken("lost_bias", deepseek)]
    assert answer(deepseek, shifted).causes == ("lost_bias", "layer_shift")


def test_other_weights_are_unexplained_and_the_table_is_complete(engine):
    qwen = engine("qwen3_moe")
    found = answer(qwen, without(broken("unknown_weights", qwen)))
    assert found.causes == ("unexplained",) and found.fault
    rows = {most: {row[0] for row in tabulate_fits(found, most).rows} for most in (12, None)}
    far = {name for name, left in found.left.items() if left[0] > 0.7}
    assert rows[None] == {fit.name for fit in found.fits} and rows[12] == rows[None] - far and len(far) > 20


@pytest.mark.parametrize(("kind", "mark"), [("some_versions", "6"), ("stale_cache", "cached")])
def test_a_gap_of_some_responses_is_theirs(engine, kind, mark):
    qwen = engine("qwen3_moe")
    found = answer(qwen, broken(kind, qwen))
    largest = max((x for x in found.locations if x.kind in ("weight version", "prefix")), key=lambda x: x.value)
    assert found.causes == (LISTED[kind].cause or kind,) and largest.name == mark


def test_combine_weights_are_forced_with_the_ids(engine):
    """Both of an engine whose routers are others take the whole gap away; ids alone leave some of it."""
    qwen = engine("qwen3_moe")
    twin = qwen.twin(lambda m: [r.weight.mul_(0.9) for r in qwen.routers(m)])
    found = answer(qwen, qwen.score(qwen.honest(), twin, gates=True))
    kl = {fit.name: fit.mean for fit in found.fits}
    assert kl["ids and combine weights forced"] < 1e-9 < kl["ids forced"] < kl["unconstrained"]
    assert found.causes == ("combine_weights",)


# ---------------------------------------------------------------------- what is not
@pytest.mark.parametrize(("family", "temperature"), [("qwen3_moe", 1.0), ("deepseek_v3", 0.7)])
def test_an_honest_engine_is_not_accused(engine, family, temperature):
    honest = engine(family)
    found = answer(honest, honest.honest(temperature=temperature))
    assert found.causes == () and not found.fault and found.fits[0].mean < 1e-9


@pytest.mark.parametrize("pair", ["float32/float32", *HALF])
def test_a_near_tie_of_an_honest_engine_is_no_fault(pair):
    file = make_near_tie(42, pair)
    found = diagnose(file.entries, file.model, tokenizer=file.tokenizer)
    assert not found.fault, found.verdict


@pytest.mark.parametrize(("dtype", "fault"), [(None, False), ("bfloat16", False), ("float32", True)])
def test_rounding_of_another_dtype_is_no_excuse_for_an_engine_in_the_trainers(dtype, fault):
    qwen = Engine("qwen3_moe", 8, 0, torch.bfloat16)
    found = answer(qwen, qwen.honest(), engine_dtype=dtype)
    assert found.fault is fault, found.verdict
    assert found.causes in ([("unexplained",)] if fault else [("dtype",), ("rounding",)])  # by its processor


def test_missing_routes_are_no_fault(engine):
    qwen = engine("qwen3_moe")
    found = answer(qwen, [e | {"routes": np.full_like(e["routes"], -1)} for e in qwen.honest()])
    assert found.causes == () and any("none" in note for note in found.notes)


# ---------------------------------------------------------------------- the hypotheses
def test_every_hypothesis_leaves_the_model_as_it_was(engine):
    glm = engine("glm4_moe", 2)
    responses = Rollouts(without(glm.honest()), layout_of(glm.model), vocabulary=48).responses
    before = {n: x.clone() for n, x in glm.model.state_dict().items()}
    modules, implementation = dict(glm.model.named_modules()), glm.model.config._experts_implementation
    hypotheses = list_hypotheses(glm.model, responses, glm.tokenizer, {"older": glm.older()})
    assert {h.cause for h in hypotheses} <= CAUSES.keys()
    assert len({h.name for h in hypotheses}) == len(hypotheses)
    for hypothesis in hypotheses:
        with hypothesis.model(glm.model):
            pass
        after = glm.model.state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before), hypothesis.name
        assert dict(glm.model.named_modules()) == modules, hypothesis.name
    assert glm.model.config._experts_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules.values())


def test_a_forward_that_fails_or_overflows_is_a_note(engine):
    scorer = scorer_of(engine("qwen3_moe"), engine("qwen3_moe").honest())
    head = engine("qwen3_moe").model.lm_head.weight
    nan = Hypothesis("dtype", "head of NaN", change_weights(lambda m: [head], lambda x: x * torch.nan))
    wide = Hypothesis("top_k", "top 99", change_routers(lambda spec: setattr(spec.module, "top_k", 99)))
    assert scorer.score_under(nan) is None and scorer.score_under(wide) is None
    assert ["head of NaN" in scorer.skipped[0], "top 99" in scorer.skipped[1]] == [True, True]
    again = scorer.score_under(Hypothesis("dtype", "as it is")).logprobs[STATED]
    assert again.tolist() == scorer.unconstrained.logprobs[STATED].tolist()


# ---------------------------------------------------------------------- numbers and places
def test_k3_of_an_engine_by_hand(engine):
    qwen = engine("qwen3_moe")
    entries = qwen.honest()
    for e in entries:
        e["logprobs"] = [None, *(x - 0.1 for x in pick(compute_logits(qwen.model, e), e)[1:])]
    found = answer(qwen, entries)
    assert found.fits[0].mean == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-4)
    assert found.tokens == sum(len(e["logprobs"]) - 1 for e in entries), "the environment's do not count"


def test_turns_and_keys_by_hand():
    x, none = -1.0, np.nan
    assert count_turns(np.array([x, x, none, none, x, none, x])).tolist() == [1, 1, 1, 1, 2, 2, 3]
    assert count_turns(np.array([none, x, x])).tolist() == [1, 1, 1], "the first tokens are the environment's"
    a, b, c, nothing = hash_sets(np.array([[[0, 3]], [[3, 0]], [[1, 2]], [[-1, -1]]], dtype=np.int8))[:, 0]
    assert a == b != c and nothing == -1


def test_the_gap_is_located_by_turn_and_expert(engine):
    """Log-probs are wrong in the second turn; and where layer 1 uses expert 2."""
    qwen = engine("qwen3_moe", 2)
    scorer = scorer_of(qwen, qwen.honest())
    unconstrained = scorer.unconstrained.logprobs[STATED]
    turn = np.concatenate([count_turns(r.logprobs) for r in scorer.responses])
    rows = [ids[r.prompt - 1 :] for r, ids in zip(scorer.responses, scorer.unconstrained.routes, strict=True)]
    used = (np.concatenate(rows)[:, 1] == 2).any(-1)
    wrong = pytest.approx(np.expm1(0.1) - 0.1, rel=1e-3)
    scorer.engine = np.where(scorer.own, unconstrained - 0.1 * (turn == 2), np.nan)
    scorer.base = scorer.compare("unconstrained", unconstrained)
    places = {p.name: p.value for p in locate_gap(scorer) if p.kind == "turn"}
    assert places["1"] < 1e-9 and places["2"] == wrong
    scorer.engine = np.where(scorer.own, unconstrained - 0.1 * used, np.nan)
    scorer.base = scorer.compare("unconstrained", unconstrained)
    first = next(p for p in locate_gap(scorer) if p.kind == "expert")
    assert first.name == "layer 1, expert 2" and first.value == wrong


def test_the_page_escapes_what_comes_from_outside(engine, tmp_path):
    deepseek = engine("deepseek_v3")
    entries = [e | {"weight_version": "\x1b[31m9" if n else "<i>"} for n, e in enumerate(deepseek.honest())]
    out = tmp_path / "new" / "x.html"
    diagnosis = answer(deepseek, entries)
    write_page(diagnosis, out, rollouts="<script>alert(1)</script>", checkpoint="&")
    page = out.read_text()
    assert all(f"<td>{html.escape(fit.name)}" in page for fit in diagnosis.fits)
    assert "<script" not in page and "<i>" not in page and "&lt;i&gt;" in page and "\\x1b[31m9" in page


def test_the_model_is_in_the_mode_it_was_in(engine):
    qwen = engine("qwen3_moe")
    qwen.model.train()
    qwen.model.lm_head.eval()
    answer(qwen, qwen.honest()[:2])
    assert qwen.model.training and qwen.model.model.training and not qwen.model.lm_head.training
    qwen.model.eval()
