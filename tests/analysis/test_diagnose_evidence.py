"""Rounding needs evidence, a gap without a reason is no rounding, and what engines get wrong is among the tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from moe_rl import cli
from moe_rl.analysis.diagnose import diagnose
from moe_rl.analysis.diagnose.diagnosis import _Case
from moe_rl.analysis.diagnose.explanations import Explanation, Gap
from moe_rl.analysis.diagnose.hypotheses import Hypothesis, list_hypotheses, set_values
from moe_rl.analysis.diagnose.locations import locate_gap
from moe_rl.analysis.diagnose.remedies import REMEDIES, list_remedies
from moe_rl.analysis.diagnose.report import tabulate_fits
from moe_rl.analysis.diagnose.responses import Rollouts, count_turns
from moe_rl.analysis.diagnose.scoring import STATED, Fit, Scorer, compute_left
from moe_rl.errors import ConfigError
from moe_rl.routing import layout_of
from tests.analysis.broken_engines import with_gates
from tests.analysis.engine_files import Engine


def answer(engine, entries, **settings):
    return diagnose(entries, engine.model, tokenizer=engine.tokenizer, **settings)


def scorer_of(engine, entries):
    return Scorer(engine.model, Rollouts(entries, layout_of(engine.model), vocabulary=48).responses)


def without_environment(entries):
    """As a file writes them: null where the environment wrote."""
    def own(e):
        first, words = e.get("said", (0, 0))
        return [None if first <= i < first + words else x for i, x in enumerate(e["logprobs"])]

    return [e | {"logprobs": own(e)} for e in entries]


@pytest.fixture(scope="module")
def bench():
    made = {}
    return lambda family, turns=1: made.setdefault((family, turns), Engine(family, 8, 3, None, turns))


# ---------------------------------------------------------------------- the decision, by hand
class ByHand(Scorer):
    rounded = 0.0


def gap_by_hand(base, *, dtype=torch.float32, tokens=100, engine_dtype=None):
    """Ten responses whose mean |log r| is `base` times rounding, which is 0.01 nats, with a KL of 5e-5."""
    scorer = object.__new__(ByHand)
    scorer.model, scorer.base = torch.nn.Linear(1, 1).to(dtype), fit(base)
    scorer.own, scorer.counts = np.ones(tokens, dtype=bool), np.full(10, tokens // 10)
    return Gap(scorer, fit(1e-6), fit(1.0), engine_dtype)


def fit(times, nearer=0.0):
    kl, distance = np.full(10, 5e-5 * times**2), np.full(10, 0.01 * times)
    return Fit("", kl, distance, kl, kl, np.full(10, nearer))


def tried(causes, left, base, nearer=0.0, fault=True):
    return Explanation(causes, "", fit(left * base, nearer), (left,) * 3, fault)


@pytest.mark.parametrize("left, nearer, base, small", [
    (0.5, 0.5, 1.0, True), (0.65, 0.3, 1.4, True),
    (0.5, 0.5, 1.8, True), (0.95, 0.05, 1.8, False),  # KL 3.2 times that of rounding, with and without evidence
    (0.82, 0.5, 1.45, False),  # nearer of most tokens, but not much
    (0.7, -0.6, 1.6, False),  # nearer on average, further away of most tokens
    (0.6, 0.5, 3.0, False),  # much nearer, and still twice as far as rounding leaves it
    (1.2, -0.2, 1.3, True), (1.2, -0.2, 1.5, False),  # of 100 tokens 1 + 4 / √100 times rounding needs no evidence
])  # fmt: skip
def test_a_gap_is_rounding_with_evidence_or_up_to_its_size(left, nearer, base, small):
    gap = gap_by_hand(base)
    gap.tried = [tried(("dtype",), left, base, nearer, fault=False)]
    assert gap.small is small


def test_rounding_of_another_dtype_is_no_excuse():
    """Of an engine that is known to compute in the trainer's float32; two sides in bfloat16 round twice."""
    assert gap_by_hand(0.9).small and gap_by_hand(0.9, engine_dtype="bfloat16").small
    assert not gap_by_hand(0.9, engine_dtype="float32").small
    assert not gap_by_hand(0.9, engine_dtype="float16").small, "whose rounding is an eighth"
    assert gap_by_hand(1.5, dtype=torch.bfloat16, engine_dtype="bfloat16").small
    assert not gap_by_hand(1.5, dtype=torch.bfloat16, engine_dtype="float16").small
    assert gap_by_hand(2.7, dtype=torch.bfloat16).small and not gap_by_hand(2.9, dtype=torch.bfloat16).small


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_square_of_one_token_is_no_alarm(dtype):
    """A tie between experts, decided otherwise: the KL is 20 times that of rounding, and the mean |log r| 1.3 times."""
    gap = gap_by_hand(1.3, dtype=dtype)
    gap.scorer.base = replace(gap.scorer.base, kl=np.where(np.arange(10) == 0, 1e-2, 1e-6))
    assert gap.scorer.base.mean > 10 * gap.rounding.mean and gap.small


@pytest.mark.parametrize("of_one, small", [(0.1, True), (6.0, False)])
def test_one_response_with_a_gap_among_ten_without_is_no_rounding_if_it_is_large(of_one, small):
    """A tenth of rounding is what another dtype may leave, of one response alone; six times is not, though its mean
    over responses is less than rounding."""
    gap, only = gap_by_hand(1.0), np.arange(10) == 0
    gap.scorer.base = replace(fit(0), kl=5e-5 * of_one**2 * only / 4, distance=0.01 * of_one * only)
    gap.rounding = replace(fit(1.0), kl=np.full(10, 5e-5))
    assert gap.small is small


def test_one_score_explains_and_a_dtype_has_to_be_beaten():
    gap = gap_by_hand(5.0)
    gap.tried = [tried(("top_k",), 0.39, 5.0), tried(("sinks",), 0.41, 5.0), tried(("gates_raw",), 0.45, 5.0)]
    assert [e.causes for e in gap.find_explanations()] == [("top_k",)]
    gap.tried[1] = tried(("sinks",), 0.4, 5.0)
    assert [e.causes for e in gap.find_explanations()] == [("top_k",), ("sinks",)], "fit equally well"
    gap.tried.append(tried(("dtype",), 0.38, 5.0, fault=False))
    assert [e.causes for e in gap.find_explanations()] == [("dtype",)]


@pytest.mark.parametrize("left_of_rest, explained", [(0.03, True), (0.05, False)])
def test_one_token_alone_explains_nothing(left_of_rest, explained):
    """A tie between experts, 1 nat in one token of a response, where the others have 0.1 and 0.03 or 0.05 is left."""
    gap, one = gap_by_hand(5.0), np.arange(10) == 0
    gap.scorer.base = replace(fit(1), distance=0.1 + 0.09 * one, peak=np.where(one, 0.1, 0.01))  # of ten tokens each
    left = replace(fit(1), distance=np.full(10, left_of_rest), peak=np.full(10, left_of_rest / 10))
    explanation = Explanation(("top_k",), "", left, (0.2, 0.1, 0.3), True)
    assert gap.explains(explanation) is explained


def test_what_rounding_makes_equal_is_told_apart_in_its_dtype():
    gap = gap_by_hand(5.0)
    gap.tried = [tried(("softcap",), 0.2, 5.0), tried(("temperature",), 0.21, 5.0)]
    assert len(gap.find_explanations()) == 2
    gap.tried += [tried(("temperature", "dtype"), 0.15, 5.0), tried(("softcap", "dtype"), 0.05, 5.0)]
    assert gap.find_explanations() == gap.tried[:1]


def test_a_pair_is_needed_only_where_its_fault_is():
    gap = gap_by_hand(5.0)
    both = tried(("top_k", "dtype"), 0.3, 5.0)
    gap.tried = [both, tried(("top_k",), 0.42, 5.0), tried(("dtype",), 0.95, 5.0, fault=False)]
    assert gap.find_explanations() == [both], "the dtype need not be much"
    gap.tried[2] = tried(("dtype",), 0.45, 5.0, fault=False)
    assert gap.find_explanations() == [], "the fault has to be"


def test_a_score_is_bounded_over_tokens_where_one_makes_most_of_the_gap(bench):
    """Of one response with a gap of 1 nat at one token and 0.01 at nine, 0.2 and 0.02 are left: 35 % ± 28."""
    a, b = np.array([0.2, *[0.02] * 9]), np.array([1.0, *[0.01] * 9])
    one = np.ones(1)
    left, base = (Fit("", one, x.mean() * one, one, one, one, squares=(x * x).sum() / 100 * one,
                      products=(x * b).sum() / 100 * one) for x in (a, b))
    ratio, low, high = compute_left(left, base)
    error = 1.96 * np.sqrt(((a - ratio * b) ** 2).sum()) / b.sum()
    assert ratio == pytest.approx(0.38 / 1.09) and (low, high) == pytest.approx((ratio - error, ratio + error))
    assert 0.6 < high < 0.65
    scorer = scorer_of(bench("qwen3_moe"), bench("qwen3_moe").greedy())
    natural = np.split(np.abs(scorer.natural.logprobs[STATED] - scorer.engine), np.cumsum(scorer.counts)[:-1])
    assert scorer.base.squares == pytest.approx([(x * x).sum() / len(x) ** 2 for x in natural])
    assert scorer.base.products == pytest.approx(scorer.base.squares)


def test_a_quantised_router_has_to_beat_the_dtype():
    """Of an honest engine in bfloat16, int8 may bring 65 % of the tokens nearer; its dtype leaves less."""
    gap, votes = gap_by_hand(1.0), 0.3 + 0.1 * (np.arange(10) % 3)
    router = replace(tried(("router_int8",), 0.78, 1.0), fit=replace(fit(0.78), nearer=votes))
    gap.tried = [router]
    assert gap.find_explanations() == [router]
    gap.tried.append(tried(("dtype",), 0.45, 1.0, 0.5, fault=False))
    assert gap.find_explanations() == []


@pytest.mark.parametrize("base, left, cause", [
    (0.5, 0.2, "rounding"),  # KL a quarter of that of rounding, of which forced weights leave some
    (0.5, 1e-3, "combine_weights"),  # ... and nothing
    (5.0, 0.2, "combine_weights")])  # fmt: skip
def test_combine_weights_within_rounding_are_not_accused(base, left, cause):
    gap = gap_by_hand(base)
    case = _Case(gap.scorer, gap, {"ids forced": fit(0.9 * base), "ids and combine weights forced": fit(left * base)})
    causes, _, fault = case._conclude([], [])
    assert causes == (cause,) and fault is (cause != "rounding")


# ---------------------------------------------------------------------- the decision, on engines
def test_a_gap_of_the_size_of_rounding_without_evidence_is_unexplained():
    """One expert of an engine in float32 is half on its way to a permutation of its columns."""
    engine = Engine("glm4_moe", 8, 1, None, 1)

    def change(model):
        weight = model.model.layers[engine.moe[1]].mlp.experts.down_proj[0]
        weight.lerp_(weight.flip(-1), 0.6)

    found = answer(engine, [{k: v for k, v in e.items() if k != "routes"} for e in engine.honest(change=change)])
    natural, _, rounding = found.fits[:3]
    assert 1 < natural.mean / rounding.mean < 4
    assert found.causes == ("unexplained",) and found.fault
    assert f"a gap of {natural.mean / rounding.mean:.2g} times the rounding" in found.verdict
    assert "The gap is largest in tokens" in " ".join(found.evidence)


@pytest.fixture(scope="module")
def rounded():
    engine = Engine("qwen3_moe", 8, 0, torch.bfloat16, 2)
    return engine, without_environment(engine.honest())


@pytest.mark.parametrize("dtype, fault", [(None, False), ("bfloat16", False), ("float32", True)])
def test_an_honest_engine_in_bfloat16_is_rounding_unless_it_is_known_to_be_in_float32(rounded, dtype, fault):
    engine, entries = rounded
    found = answer(engine, entries, engine_dtype=dtype)
    assert found.fault is fault, found.verdict
    repeated = found.causes == ("dtype",)  # a processor without products in bfloat16 repeats the engine's to the bit
    assert found.causes == ("unexplained",) if fault else repeated or found.causes == ("rounding",), found.verdict
    assert ("Nothing to mend" in found.verdict) is (not fault and not repeated)
    assert not repeated or "0 when the trainer does the same" in found.verdict
    assert any("attention" in f.name for f in found.fits) is fault, "where rounding is evident, it is not tried"


def test_an_honest_engine_in_float16_has_a_test_of_its_own():
    engine = Engine("deepseek_v3", 8, 1, torch.float16, 1)
    found = answer(engine, engine.honest())
    assert not found.fault and found.causes == ("dtype",) and "in float16" in found.verdict
    with pytest.raises(ConfigError, match="'int8' is unknown. Use float32, bfloat16, float16"):
        answer(engine, [], engine_dtype="int8")


# ---------------------------------------------------------------------- what engines get wrong
FORWARDS = {
    "swapped_layers": ("qwen3_moe", 1), "shared_expert": ("deepseek_v3", 1), "sigmoid": ("mixtral", 1),
    "rope_base": ("olmoe", 1), "attention_scale": ("glm4_moe", 1), "qk_norm": ("qwen3_moe", 1),
    "sinks": ("gpt_oss", 1), "window_lost": ("gpt_oss", 1), "visible_padding": ("mixtral", 1),
    "positions_per_turn": ("qwen3_moe", 2), "rope_scaling": ("glm4_moe", 1), "window_size": ("mixtral", 2),
    "softcap": ("olmoe", 2), "positions_of_padding": ("deepseek_v3", 1)}  # fmt: skip


@pytest.mark.parametrize("fault", FORWARDS)
def test_a_forward_under_the_hypothesis_is_the_engines(bench, fault):
    """To the bit of another order of summation: without it the KL is beyond 1e-4."""
    engine = bench(*FORWARDS[fault])
    scorer = scorer_of(engine, without_environment(getattr(engine, fault)()))
    tried = [h for h in list_hypotheses(scorer.model, scorer.responses, engine.tokenizer, {}) if h.cause == fault]
    left = [scorer.compare("", scorer.score_under([h]).logprobs[STATED]).mean for h in tried]
    assert min(left) < 1e-9 < 1e-4 < scorer.base.mean and not scorer.skipped
    assert sum(x < 1e-9 for x in left) == 1, "no other form of it fits"


def test_a_layer_of_another_checkpoint_is_named(bench):
    engine = bench("mixtral")
    entries = [{k: v for k, v in e.items() if k != "routes"} for e in engine.stale_layer()]
    found = answer(engine, entries, also={"older": engine.older()})
    assert found.causes == ("layer_not_pushed",) and "layer 3 of older" in found.verdict
    assert "Compare the names" in " ".join(found.remedies)


def test_a_model_with_a_soft_cap_may_meet_an_engine_without():
    """Gemma's logits, about 15, are capped at 30."""
    if "gemma4_text" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no gemma4_text")
    engine = Engine("gemma4_text", 8, 1, None, 1)
    found = answer(engine, [{k: v for k, v in e.items() if k != "routes"} for e in engine.softcap_lost()])
    assert found.causes == ("softcap",) and "leaves out the soft-cap" in found.verdict
    assert found.remedies == ("Compare the engine's copy of the model's configuration with the trainer's: "
                              "final_logit_softcapping.",)


def test_a_window_of_another_size_is_named(bench):
    engine = bench("gpt_oss")  # of 6, where the engine has one of 3
    found = answer(engine, [{k: v for k, v in e.items() if k != "routes"} for e in engine.window_size()])
    size = (3, 5, 7, 12)[engine.place % 4]
    assert found.causes == ("window_size",) and f"window of {size} tokens, the trainer one of 6" in found.verdict


def test_a_dtype_and_another_change_are_tried_together_in_either_order(bench):
    """A dtype is tried on a copy of the model: what it is changed to beforehand goes with it."""
    engine = bench("olmoe")
    scorer = scorer_of(engine, engine.honest())
    tried = list_hypotheses(scorer.model, scorer.responses, engine.tokenizer, {})
    low, scale = (next(h for h in tried if h.name == name) for name in ("all in bfloat16", "attention without a scale"))
    one, two = (scorer.score_under(pair).logprobs[STATED] for pair in ((low, scale), (scale, low)))
    assert one.tolist() == two.tolist() != scorer.score_under([low]).logprobs[STATED].tolist()


@pytest.mark.parametrize("fault", ["swapped_turns", "shifted_mask"])
def test_a_mask_that_is_off_by_a_turn_is_named(bench, fault):
    engine = bench("qwen3_moe", 2)
    found = answer(engine, without_environment(getattr(engine, fault)()))
    assert found.causes == ("response_mask",) and not found.equally


def test_the_turn_beside_by_hand(bench):
    """Of three turns the log-probs are each time those of the next one, of the last those of the first: 2, 3, 1."""
    engine = bench("mixtral")
    entries = [{k: v for k, v in e.items() if k != "routes"} for e in engine.honest() if len(e["logprobs"]) >= 8]
    turns = [slice(0, 2), slice(3, 5), slice(6, 8)]
    moved = []
    for e in entries:
        given = [None] * len(e["logprobs"])
        for here, there in zip(turns, [*turns[1:], turns[0]], strict=True):
            given[here] = e["logprobs"][there]
        moved.append(e | {"logprobs": given})
    scorer = scorer_of(engine, moved)
    assert scorer.compare_turns(1).distance == pytest.approx(0, abs=1e-4) and (scorer.compare_turns(-1).kl > 1e-4).all()


@pytest.mark.parametrize("fault", ["log_base", "greedy", "others_logprobs"])
def test_what_is_no_log_prob_of_the_token_is_read_so(bench, fault):
    engine = bench("qwen3_moe", 2)
    scorer = scorer_of(engine, without_environment(getattr(engine, fault)()))
    left = {cause: 1.0 for cause, _, _ in scorer.compare_readings()}
    for cause, _, found in scorer.compare_readings():
        left[cause] = min(left[cause], found.mean)
    assert left[fault] < 1e-9 < 1e-2 < min(left[x] for x in left if x != fault)


# ---------------------------------------------------------------------- routes
def test_numbers_of_experts_by_place_or_from_one(bench):
    engine = bench("qwen3_moe")
    assert answer(engine, engine.physical_ids()).causes == ("physical_ids",)
    with pytest.raises(ConfigError, match="ids run from 0 to 7 .* Are they counted from 1"):
        answer(engine, [e | {"routes": e["routes"] + 1} for e in engine.honest()])


def test_routes_of_the_weights_before_are_theirs_only_while_log_probs_are_not(bench):
    engine = bench("olmoe")
    found = answer(engine, engine.stale_routes(), also={"older": engine.older()})
    assert found.causes == ("stale_routes",)
    found = answer(engine, engine.weight_version(), also={"older": engine.older()})
    assert found.causes == ("weight_version",), "the engine is the older one, and its routes are its own"


def test_layers_in_reverse_are_no_shift(bench):
    """One layer of four agrees three layers further: that is a copy, and no shift of all."""
    engine = bench("mixtral")
    found = answer(engine, [e | {"routes": e["routes"][:, ::-1]} for e in engine.honest()])
    assert found.fault and "layer_shift" not in found.causes


def test_weights_in_another_order_are_sorted_ids_only_beside_ids_that_ascend(bench):
    engine = bench("mixtral")
    given = with_gates(engine.model, engine.honest())
    ascending = [e | {"routes": np.sort(e["routes"], -1)} for e in given]
    descending = [e | {"routes": np.sort(e["routes"], -1)[..., ::-1]} for e in given]
    assert "sorted_ids" in answer(engine, ascending).causes
    assert "sorted_ids" not in answer(engine, descending).causes


# ---------------------------------------------------------------------- where, and what to do
def test_turns_by_hand():
    x, none = -1.0, np.nan
    assert count_turns(np.array([x, x, none, none, x, none, x])).tolist() == [1, 1, 1, 1, 2, 2, 3]
    assert count_turns(np.array([none, x, x])).tolist() == [1, 1, 1], "the first tokens are the environment's"


def test_the_gap_is_located_by_turn_and_expert(bench):
    """Log-probs are wrong in the second turn; and where layer 1 uses expert 2."""
    engine = bench("qwen3_moe", 2)
    scorer = scorer_of(engine, without_environment(engine.honest()))
    turn = np.concatenate([count_turns(r.logprobs) for r in scorer.responses])
    scorer.engine = scorer.engine - 0.1 * (turn == 2)
    places = {p.name: p.value for p in locate_gap(scorer) if p.kind == "turn"}
    assert places["1"] < 1e-9 and places["2"] == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-3)
    used = np.concatenate([ids[r.prompt - 1 :] for r, ids in zip(
        scorer.responses, scorer.natural.routes, strict=True)])[:, 1]
    scorer.engine = scorer.natural.logprobs[STATED] - np.where((used == 2).any(-1), 0.1, 0.0)
    first = next(p for p in locate_gap(scorer) if p.kind == "expert")
    assert first.name == "layer 1, expert 2" and first.value == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-3)


def test_every_cause_has_a_remedy(bench):
    engines = [bench("qwen3_moe", 2), bench("deepseek_v3"), bench("gpt_oss"), bench("mixtral")]
    for engine in engines:
        entries = without_environment(engine.honest())
        responses = Rollouts(entries, layout_of(engine.model), vocabulary=48).responses
        tried = list_hypotheses(engine.model, responses, engine.tokenizer, {"older": engine.model})
        assert {h.cause for h in tried} <= set(REMEDIES), engine.family
        names = [h.name for h in tried]
        assert len(names) == len(set(names))
    assert list_remedies(()) == ("Nothing.",)
    assert list_remedies(("bos", "special_tokens")) == ("Send token ids to the engine, not text, and store the ids "
                                                        "that it read.",)


def test_leads_that_leave_more_than_70_percent_are_on_the_page_alone(bench):
    engine = bench("qwen3_moe")
    found = answer(engine, [{k: v for k, v in e.items() if k != "routes"} for e in engine.attention_warmer()])
    rows = {most: {row[0]: row[2] for row in tabulate_fits(found, most).rows} for most in (12, None)}
    assert found.causes == ("unexplained",) and len(rows[None]) == len(found.fits)
    tested = {r.name for r in found.fits[3:]}
    far = {name for name in tested if found.left[name][0] > 0.7}
    assert len(far) > 20 and rows[12].keys() == rows[None].keys() - far
    assert f"{len(far)} more hypotheses are on the page" in tabulate_fits(found, 12).note


def test_a_forward_that_overflows_is_a_note(bench):
    engine = bench("qwen3_moe")
    scorer, head = scorer_of(engine, engine.honest()), engine.model.lm_head.weight
    broken = Hypothesis("", "head of NaN", "", model=set_values([head], [torch.full_like(head, torch.nan)]))
    assert scorer.score_under([broken]) is None
    assert scorer.skipped == ["not tried: head of NaN (log-probs are not finite)"]
    assert scorer.score_under([]).logprobs[STATED].tolist() == scorer.natural.logprobs[STATED].tolist()


def test_help_names_both_exit_codes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["diagnose", "--help"])
    said = capsys.readouterr().out
    assert "Exit code: 1 for a fault" in said and "2 for wrong input" in said and "\\" not in said
