"""A mixture asks each of its tasks, and lets it reward its own prompts."""

import pytest

from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.tasks.base import load_task, split_of
from moe_rl.tasks.mixture import Mixture
from moe_rl.tasks.running_sums import RunningSums

MIXED = Component("mixture", tasks=("reasoning_gym:spell_backward", Component("running_sums", digits=3)))


def test_prompts_are_those_of_its_tasks_in_equal_shares():
    mixture = load_task(MIXED)
    prompts = mixture.prompts(400, 7)
    sums = [p for p in prompts if p.text.endswith("=")]
    assert 160 < len(sums) < 240
    assert [p.text for p in sums] == [p.text for p in RunningSums(digits=3).prompts(len(sums), 7)]
    assert [p.text for p in mixture.prompts(40, 7)] == [p.text for p in prompts[:40]]
    assert prompts[:40] != mixture.prompts(40, 8)


def test_each_prompt_is_rewarded_by_its_own_task():
    mixture = load_task(MIXED)
    prompts = mixture.prompts(40, 0)
    assert {p.entry["task"] for p in prompts} == {0, 1}
    assert all(mixture.reward(p, p.answer) == 1 for p in prompts)
    wrong = {p.entry["task"]: mixture.reward(p, p.answer[:-1]) for p in prompts}
    assert wrong[1] == 0 and 0 < wrong[0] < 1  # spell_backward gives partial credit, running sums none


def test_a_conversation_cannot_be_mixed():
    with pytest.raises(ConfigError, match="corrected_sums"):
        Mixture(["corrected_sums", "running_sums"])


class Three(RunningSums):
    def prompts(self, count, seed):
        return super().prompts(min(count, 3), seed)


def test_a_task_that_runs_out_of_prompts_says_so():
    with pytest.raises(ConfigError, match="Three returned 3"):
        Mixture(["running_sums", f"{__name__}:Three"]).prompts(40, 7)


class Fifty(RunningSums):
    def __len__(self):
        return 50


def test_no_task_of_a_mixture_is_held_out_whole():
    """64 in equal shares would be more than half of the 50."""
    mixture = Mixture(["running_sums", f"{__name__}:Fifty"])
    assert split_of(mixture, 50).different == 100
    with pytest.raises(ConfigError, match="100 .*eval_prompts=64"):
        split_of(mixture, 64)
    assert split_of(Mixture(["running_sums", "running_sums"]), 64).different is None
