"""`python -m unittest`, or pytest. Parts against numbers worked by hand and against the package's own."""

import tempfile
import unittest
from pathlib import Path

import torch
from my_study import study
from my_study_parts import Largest, responses

from moe_rl.config import ModelConfig
from moe_rl.models.load import load
from moe_rl.objectives import policy_loss
from moe_rl.registry import Component
from moe_rl.results import printed
from moe_rl.routing import record_routing
from moe_rl.study.workers import preflight
from moe_rl.types import Prompt, Rollouts, Scored

MINE = Component("my_study_parts:clipped", bound=0.2)
SAME = Component("grpo", clip_low=0.2, clip_high=0.2)


class Parts(unittest.TestCase):
    def test_the_task_asks_the_same_under_the_same_seed_and_rewards_the_answer_alone(self):
        task = Largest(digits=5)
        self.assertEqual(task.prompts(3, seed=1), task.prompts(5, seed=1)[:3])
        self.assertNotEqual(task.prompts(3, seed=1), task.prompts(3, seed=2))
        prompt = Prompt(text="30814=", answer="8")
        self.assertEqual([task.reward(prompt, text) for text in ("8", "3", "88", "")], [1, 0, 0, 0])
        self.assertTrue(all(p.answer == max(p.text[:-1]) for p in task.prompts(9, seed=0)))

    def test_the_loss_is_the_clip_of_the_package_with_one_bound(self):
        draw = torch.Generator().manual_seed(0)
        old, advantages = torch.randn(4, 6, generator=draw) - 2, torch.randn(4, generator=draw)
        new = (old + 0.4 * torch.randn(4, 6, generator=draw)).requires_grad_()
        given = {"logprobs": new, "old_logprobs": old, "advantages": advantages, "mask": torch.ones(4, 6).bool()}
        found, wanted = (policy_loss(loss, **given) for loss in (MINE, SAME))
        torch.testing.assert_close(found.loss, wanted.loss)
        self.assertTrue(torch.equal(found.clipped_by, wanted.clipped_by) and found.clipped_by.any())
        slopes = [torch.autograd.grad(one.loss, new)[0] for one in (found, wanted)]
        torch.testing.assert_close(*slopes)

    def test_the_source_replays_what_decides_responses_and_nothing_else(self):
        model, tokens = load(ModelConfig(), 0).model, torch.arange(40, 56).view(2, 8)
        with torch.no_grad(), record_routing(model) as recording:
            model(tokens)
        routes, response = recording.trace(tokens), torch.arange(8).expand(2, 8) >= 5
        none = torch.zeros(2, 8)
        batch = Rollouts(
            tokens=tokens,
            attention_mask=torch.ones(2, 8).bool(),
            response_mask=response,
            prompt_index=torch.tensor([0, 1]),
            rollout_logprobs=none,
            rewards=torch.zeros(2),
            finished=torch.ones(2).bool(),
        )
        replayed = responses(batch, Scored(none, none, routes))
        decide = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0]).bool().expand(2, 8)  # what is read before each response token
        self.assertTrue(torch.equal(replayed.known, decide[..., None].expand_as(replayed.known)))
        self.assertTrue(torch.equal(replayed.ids()[decide], routes.ids()[decide]))


class Declaration(unittest.TestCase):
    def test_the_study_can_be_carried_out_and_reported(self):
        printed.check(study)
        with tempfile.TemporaryDirectory() as out:
            planned = study.runs(Path(out))
            self.assertEqual(len(planned), len(study.arms) * len(study.seeds))
            self.assertEqual(preflight(study, planned), [], "nothing would make the comparison void")


if __name__ == "__main__":
    unittest.main()
