"""The policy that FSDP2 cuts over two and four CPU ranks (gloo) against the Hugging Face policy of one process.
Three groups of forked ranks serve all tests here: see `fsdp_on_ranks.py`."""

from __future__ import annotations

import shutil
from signal import SIGKILL

import pytest

from moe_rl.build import execute
from moe_rl.storage.commits import latest_commit
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import read_table
from tests.integrations.fsdp_on_ranks import ARMS, CASES, RUN, four, killed, on_ranks, one, two

pytestmark = pytest.mark.ranks
COLUMNS = ("reward", "exact", "eval_reward_greedy", "eval_reward_sampled", "response_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def dead(folder):
    """Exit codes of ranks that were killed in step 2, between its updates or as they write its checkpoint, and what was
    committed then."""
    codes = {
        "one-killed": killed(2, folder, "one-killed", "update", 4, {1}),
        "all-killed": killed(2, folder, "all-killed", "save", 2, {0, 1}),
        "1-to-2": killed(1, folder, "1-to-2", "update", 4, {0}),
    }
    for name in ("2-to-1", "2-to-4"):
        shutil.copytree(folder / "one-killed", folder / name)
    return [(ended, latest_commit(folder / name).name) for name, ended in codes.items()]


@pytest.fixture(scope="module")
def on_two(folder, dead):
    return on_ranks(2, folder, two)


@pytest.fixture(scope="module")
def on_four(folder, on_two):
    return on_ranks(4, folder, four)


@pytest.fixture(scope="module")
def on_one(folder, on_two):
    return on_ranks(1, folder, one)


@pytest.fixture(params=[(2, name) for name in CASES] + [(4, "budget")], ids=lambda p: f"{p[1]} on {p[0]}")
def found(request, on_two):
    world, name = request.param
    return world, (on_two if world == 2 else request.getfixturevalue("on_four"))[name]


def test_every_rank_holds_its_part_and_hands_out_the_whole(found):
    world, facts = found
    assert facts["exported"] and facts["share"] <= 1 / world + 0.01


def test_log_probs_entropy_scores_and_routes_are_those_of_one_process(found):
    _, facts = found
    assert facts["recorded"] and facts["replayed ids"]
    assert max(facts[kind] for kind in ("unconstrained", "scores", "replayed")) < 1e-5 < 1e-2 < facts["replay matters"]


def test_gradients_loss_terms_and_a_clipped_step_are_those_of_one_process(found):
    _, facts = found
    assert facts["updated routes"] and facts["buffers"]
    assert facts["gradient"] < 1e-5, "in units of the largest entry"
    assert max(facts["updated"], facts["stepped"]) < 1e-5 < 1e-2 < facts["moved"]
    assert {"term_kl", "term_entropy", "term_load_balance", "term_router_kl"} <= facts["metrics"].keys()
    for alone, ours in facts["metrics"].values():
        assert ours == pytest.approx(alone, rel=1e-6, abs=1e-6) and alone != 0


def test_padding_is_counted_over_all_ranks(found):
    world, facts = found
    of_ranks, of_all = facts["padding"]
    assert of_ranks == [of_all] * world and 0 < of_all < 1


def test_a_dial_moves_the_routers_that_ranks_hold_parts_of_and_puts_them_back(on_two):
    for apart, moved, routes in on_two["dial"]["doses"].values():
        assert apart < 1e-5 < 1e-2 < moved and routes
    assert len(on_two["dial"]["doses"]) == 4 and on_two["dial"]["put back"]


def test_a_large_vocabulary_goes_in_pieces_and_a_rank_may_have_no_row_of_its_own(on_two):
    assert max(on_two["large"].values()) < 1e-5


def test_mixed_precision_computes_coarsely_what_it_keeps_finely(on_two):
    facts = on_two["mixed"]
    assert facts["kept in"] == ["torch.float32"] and facts["routers computed finely"]
    assert 1e-4 < facts["log-probs"] < 0.1 and 1e-4 < facts["gradient"] < 0.05


def test_ranks_add_up_their_gradients_once_per_update_where_that_is_set(on_two):
    """Two layers and the rest of the model are three groups; an update and a gradient, each in two micro-batches."""
    facts = on_two["reduced"]
    assert facts["micro_batch"][0] == 2 * 2 * 3 and facts["update"][0] == 2 * 3
    assert max(facts["micro_batch"][1], facts["update"][1], facts["after"]) < 1e-5 < 1e-2 < facts["moved"]


def test_routes_are_recorded_and_replayed_under_ddp_and_fsdp2_in_a_loop_of_ones_own(on_two):
    for right, gradient in (on_two["hooks"]["FSDP2"], on_two["hooks"]["DDP"]):
        assert right and gradient < 1e-5


def test_a_rank_holds_its_share_of_a_recording(on_two):
    assert on_two["memory"]["right"] and on_two["memory"]["shards held"] <= 1.4


def test_a_rank_holds_its_share_of_what_the_engine_reported(on_two):
    assert on_two["memory"]["right"] and on_two["memory"]["shards held of the engine's"] <= 1.4
    assert on_two["sent"] and on_two["nothing"], "with weights and versions; and what is no batch"


def test_rank_0_takes_over_a_checkpoint_in_the_memory_of_its_part_and_of_single_weights(on_two):
    """The parts of a weight, and the weight that is made of them."""
    facts = on_two["start"]
    bound = facts["whole"] / 2 + 2 * facts["largest"]
    assert facts["right"] and facts["grown"] < bound < facts["whole"]


# ---------------------------------------------------------------------- checkpoints and runs
def test_a_checkpoint_is_read_bit_for_bit_on_as_many_ranks_and_within_rounding_on_others(on_two, on_four, on_one):
    facts = on_two["checkpoint"]
    assert facts["same bytes"] and facts["goes on"] and facts["updates"] == 2
    assert facts["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for other in (on_four["checkpoint"], on_one["checkpoint"]):
        assert other["apart"] < 1e-5 and other["updates"] == 2


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The tables of every arm in one process."""
    path = tmp_path_factory.mktemp("hf")
    for arm in ARMS:
        run = RUN.replace(arm=arm)
        with RunFolder.open(path / arm.name, run.to_dict(), run.hash) as opened:
            execute(run, opened, cache=path)
    return path


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_three_steps_of_an_arm_earn_what_they_earn_in_one_process(arm, on_two, folder, alone):
    require_alike(folder / arm.name, alone / arm.name)


def require_alike(ours, theirs):
    (steps, one), (updates, others) = ([read_table(p, n) for p in (ours, theirs)] for n in ("steps", "updates"))
    assert len(one) == 4 and one["reward"].nunique() > 1
    for column in COLUMNS:
        assert steps[column].equals(one[column]), column
    assert steps["push_gap_max"].dropna().between(0, 1e-5).sum() == 3
    columns = ["loss", "grad_norm"]
    assert len(updates) == 6 and ((updates[columns] - others[columns]).abs() < 1e-4).all().all()


def test_ranks_that_were_killed_go_on_and_end_identical(dead, on_two):
    for codes, committed in dead:
        assert -SIGKILL in codes and all(codes) and committed == "step=000001"
    assert on_two["resumed"] == dict.fromkeys(("one-killed", "all-killed"), {"tables": True, "weights": True})


@pytest.mark.parametrize("name", ["2-to-1", "2-to-4", "1-to-2"])
def test_a_run_that_was_killed_goes_on_on_another_number_of_ranks(name, on_one, on_four, folder, alone):
    require_alike(folder / name, alone / ARMS[-1].name)


def test_a_server_is_pushed_to_and_a_step_exported_without_a_whole_model_on_rank_0(on_two, folder):
    facts = on_two["served"]
    assert facts["pushes"] == 2 and facts["exported"] and facts["moved"] > 1e-4 and facts["whole models"] == 0
    steps = read_table(folder / "with-server", "steps")
    assert steps["push_gap_max"].dropna().between(0, 1e-5).sum() == 1
