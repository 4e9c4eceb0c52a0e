"""The loop in one file is the algorithm: it earns what `train` earns, and measures what its tables say."""

from __future__ import annotations

import pytest

from moe_rl.config import ColdStart, Measure, RunConfig
from notebooks import the_loop
from tests.test_trainer import carry_out


@pytest.mark.parametrize("method", the_loop.METHODS)
def test_the_loop_in_one_file_is_the_trainer(method, tmp_path, capsys):
    mine = the_loop.main(method, steps=2)
    run = RunConfig(
        arm=the_loop.METHODS[method],
        task="notebooks.the_loop:Letters",
        model=the_loop.MODEL,
        cold_start=ColdStart(target=0.0),
        optimizer=the_loop.OPTIMIZER,
        measure=Measure(full=True),
        steps=2,
        prompts_per_step=the_loop.PROMPTS_PER_STEP,
        group_size=the_loop.GROUP_SIZE,
        mini_batches=the_loop.MINI_BATCHES,
        max_new_tokens=the_loop.SAMPLING.max_new_tokens,
        eval_every=1,
        eval_prompts=the_loop.TEST_PROMPTS,
    )
    tables = carry_out(run, tmp_path / "run")
    steps = tables["steps"].query("step > 0")
    last = tables["updates"].query(f"update == {the_loop.MINI_BATCHES}")
    for name, column in (("reward", "reward"), ("held_out", "eval_reward_greedy"), ("entropy", "entropy")):
        assert [row[name] for row in mine] == steps[column].tolist(), name
    assert [row["experts_changed"] for row in mine] == pytest.approx(steps["expert_change_rate"].tolist(), rel=1e-12)
    assert [row["log_ratio_var"] for row in mine] == last["token_log_ratio_var"].tolist()
    assert [row["clipped"] for row in mine] == last["clip_tokens_all"].tolist()
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert mine[0]["experts_changed"] > 0 and mine[0]["reward"] > 0
