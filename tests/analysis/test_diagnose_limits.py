"""What must not be named: patterns that something else makes, and anything at all where tokens are few."""

from __future__ import annotations

import numpy as np
import pytest

from moe_rl.analysis.diagnose import diagnose
from moe_rl.analysis.diagnose.report import write_page
from moe_rl.analysis.diagnose.responses import Rollouts
from moe_rl.analysis.diagnose.scoring import Scorer
from moe_rl.routing import layout_of
from tests.analysis.broken_engines import Bench, with_gates


@pytest.fixture(scope="module")
def bench():
    return Bench("qwen3_moe", count=8)


@pytest.fixture(scope="module")
def honest(bench):
    return bench.honest()


def answer(bench, entries):
    return diagnose(entries, bench.model, tokenizer=bench.tokenizer)


def without_routes(entries):
    return [{k: v for k, v in e.items() if k != "routes"} for e in entries]


def cut(entry, tokens):
    """The first tokens of a response."""
    end = entry["prompt_length"] + tokens
    return entry | {"tokens": entry["tokens"][:end], "logprobs": entry["logprobs"][:tokens],
                    "routes": entry["routes"][: end - 1]}


def garbage(bench, entry):
    """Any experts for the inputs that decide the response."""
    draw, ids = np.random.default_rng(0), entry["routes"].copy()
    for row in ids[entry["prompt_length"] - 1 :].reshape(-1, ids.shape[-1]):
        row[:] = draw.permutation(bench.routers(bench.model)[0].num_experts)[: len(row)]
    return entry | {"routes": ids}


# ---------------------------------------------------------------------- log-probs
def test_a_single_token_names_nothing(bench):
    """One of some hundred things tried fits one number; honest numbers agree all the same."""
    other = without_routes([cut(bench.weight_version()[0], 1)])
    found = answer(bench, other)
    assert found.causes == ("few_tokens",) and "have 1 tokens of the engine: 8 are needed" in found.verdict
    assert found.remedies == ("Look at more responses (--responses), or give a file with more.",)
    assert answer(bench, [cut(bench.honest()[0], 1)]).causes == ()


def test_a_lone_token_of_the_engine_has_no_neighbour_to_be_off_by_one_from(bench, honest):
    """All but the last token are an environment's: there the shifted reading is the natural one, bit for bit."""
    alone = [e | {"logprobs": [None] * (len(e["logprobs"]) - 1) + [-1.0]} for e in without_routes(honest)]
    scorer = Scorer(bench.model, Rollouts(alone, layout_of(bench.model), vocabulary=48).responses)
    assert scorer.compare_shifted(1).kl.tolist() == scorer.base.kl.tolist()


def test_versions_that_differ_by_chance_are_not_the_cause(bench):
    """A gap that all responses have, of one token and of a version each: some are small, and none is absent."""
    other = [cut(e, 1) | {"weight_version": i} for i, e in enumerate(bench.weight_version())]
    found = answer(bench, without_routes(other))
    versions = [p.value for p in found.locations if p.kind == "weight version"]
    assert min(versions) < 0.1 * max(versions) and found.causes == ("unexplained",)


def test_the_version_that_has_the_gap_is_found_behind_a_dozen_others(bench, honest):
    """Responses are looked at by length: the last two, of weights of their own, are as long as any."""
    most = max(range(8), key=lambda i: len(honest[i]["tokens"]))
    older = [bench.weight_version()[most]] * 2
    entries = [e | {"weight_version": i} for i, e in enumerate([*honest, *honest, *older])]
    found = answer(bench, without_routes(entries))
    assert found.causes == ("weight_version",)
    assert found.verdict.partition("(weight version ")[2][:2] in ("16", "17")


# ---------------------------------------------------------------------- routes
def test_a_layer_that_holds_anothers_routes_is_no_shift_of_all_layers():
    """Of two layers, where reading one layer further leaves only the copy to be looked at."""
    engine = Bench("qwen3_moe", count=8, num_hidden_layers=2)
    copied = [e | {"routes": e["routes"][:, [0, 0]]} for e in engine.honest()]
    found = answer(engine, copied)
    assert found.causes == ("overwritten_layer",) and "layer 1 holds the routes of layer 0" in found.verdict


def test_a_few_swapped_responses_are_named(bench, honest):
    first, second = next((a, b) for a in range(8) for b in range(a) if len(honest[a]["tokens"]) == len(
        honest[b]["tokens"]))
    swapped = list(honest)
    swapped[first] = honest[first] | {"routes": honest[second]["routes"]}
    swapped[second] = honest[second] | {"routes": honest[first]["routes"]}
    found = answer(bench, swapped)
    assert found.causes == ("swapped_responses",) and "2 of 8 responses" in " ".join(found.evidence)


def test_a_prompt_in_common_makes_no_swap_and_hides_none(bench):
    group = bench.honest(asked=[bench.asked[0]] * 8)
    broken = [cut(group[0], 1), *(garbage(bench, e) for e in group[1:])]
    assert answer(bench, broken).causes == ("unexplained",), "a short neighbour shares all but the response"
    size = max({len(e["tokens"]) for e in group}, key=[len(e["tokens"]) for e in group].count)
    same = [e for e in group if len(e["tokens"]) == size]
    rolled = [e | {"routes": other["routes"]} for e, other in zip(same, same[1:] + same[:1], strict=True)]
    assert answer(bench, rolled).causes == ("swapped_responses",)


def test_an_expert_twice_is_no_route(bench, honest):
    """A replay leaves such rows free, so that nothing moves; where expert 0 is never first, no row is all zero."""
    twice = [e | {"routes": np.where(e["routes"][..., :1] > 0, e["routes"][..., :1], e["routes"])} for e in honest]
    found = answer(bench, twice)
    assert found.causes == ("repeated_ids",) and found.fault
    assert not any((e["routes"] == 0).all(-1).any() for e in twice)


def test_routes_that_are_not_known_are_said_to_be_so(bench, honest):
    found = answer(bench, [e | {"routes": np.full_like(e["routes"], -1)} for e in honest])
    assert found.causes == () and "nan" not in " ".join(found.evidence) and "none is known" in " ".join(found.notes)


def test_combine_weights_times_a_constant_are_neither_raw_nor_renormalised(bench, honest):
    given = with_gates(bench.model, honest)
    scaled = [e | {"gates": (0.4 * np.array(e["gates"])).tolist()} for e in given]
    found = answer(bench, scaled)
    assert found.causes == ("gates_scaled",) and "times 0.4," in found.verdict


def test_a_family_that_fails_where_it_is_changed_is_not_changed_so(bench):
    """As LongCat's experts do in transformers where one is used per token."""
    def of_one(module, arguments):
        if arguments[1].shape[-1] == 1:
            raise ValueError("not enough values to unpack")

    handle = bench.model.model.layers[0].mlp.experts.register_forward_pre_hook(of_one)
    found = answer(bench, bench.temperature())
    handle.remove()
    assert found.causes == ("temperature",)
    (note,) = [note for note in found.notes if note.startswith("not tried: top 1 experts (")]
    assert "ValueError: not enough values" in note


# ---------------------------------------------------------------------- around it
def test_the_model_is_in_the_mode_it_was_in(bench, honest):
    bench.model.train()
    bench.model.lm_head.eval()
    answer(bench, honest[:2])
    assert bench.model.training and bench.model.model.training and not bench.model.lm_head.training
    bench.model.eval()


def test_a_version_of_any_text_is_shown(bench, tmp_path):
    """Digits that no int takes, and what would colour a terminal."""
    other = [e | {"weight_version": "\x1b[31m" + "9" * 5000} for e in bench.weight_version()[:2]]
    found = answer(bench, other)
    write_page(found, tmp_path / "x.html", rollouts="r", checkpoint="c")
    assert found.example.response.version.startswith("\\x1b[31m9")
