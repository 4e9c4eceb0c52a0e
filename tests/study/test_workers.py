"""What the display of a study prints of runs that prepare."""

from moe_rl.study.display import preparing


def test_what_a_run_does_before_its_first_step():
    now = {"step": 400, "steps": 3000, "rate": 0.05, "target": 0.35, "seconds_left": 40.2}
    assert all(word in preparing({"cold_start": now}) for word in ("400/3000", "5% of 35%", "40 s left"))
    assert "waiting" in preparing({"cold_start": {"waiting": True}})
    assert preparing({"step": 0}) == "preparing" and preparing({"step": 0, "seconds_per_step": None}) == "first step"
