"""What a conversation is asked and earns, and the two environments that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.models.tokens import byte_tokenizer, demonstrated, encode_prompts, reply_tokens
from moe_rl.rollouts import batches
from moe_rl.tasks.base import Environment, draw, held_out, load_task
from moe_rl.tasks.corrected_sums import CorrectedSums
from moe_rl.types import Prompt, Rollout, Sampling, Turn

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def says(*texts, finished=True):
    """An engine that writes these in turn, as far as it is answered."""

    def generate(prompts, group_size, *, key, sampling, reply=None):
        rollouts = []
        for row, prompt in enumerate(p for p in prompts for _ in range(group_size)):
            turns: list[Turn] = []
            for n, text in enumerate(texts):
                said = reply(row, text) if finished or n + 1 < len(texts) else None
                turns.append(Turn(0, 1, text, said or ""))
                if said is None:
                    break
            rollouts.append(Rollout(prompt, (1,), torch.zeros(1), "", finished, turns=tuple(turns)))
        return rollouts

    return generate


def earned(task, prompt, *texts, **how):
    (rollout,) = batches.sample_rollouts(says(*texts, **how), task, [prompt], 1, key=(0,), sampling=Sampling())
    assert batches.compute_rewards(task, [rollout]) == [sum(turn.reward for turn in rollout.turns)]
    return [(turn.text, turn.reply, turn.reward) for turn in rollout.turns]


SUMS = CorrectedSums(digits=3)
P372 = SUMS.prompt([3, 7, 2])


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("302",), [("302", "", 1.0)]),
        (("312", "302"), [("312", "2?", 0.0), ("302", "", 0.5)]),
        (("312", "300"), [("312", "2?", 0.0), ("300", "", 0.0)]),
        (("30", "302"), [("30", "3?", 0.0), ("302", "", 0.5)]),
        (("3021", "302"), [("3021", "4?", 0.0), ("302", "", 0.5)]),
        (("", "302"), [("", "1?", 0.0), ("302", "", 0.5)]),
    ],
)
def test_the_checker_names_the_first_wrong_digit_once(texts, found):
    assert earned(SUMS, P372, *texts) == found


def test_a_conversation_that_was_cut_off_is_rewarded_for_what_it_has():
    assert earned(SUMS, P372, "312", "30", finished=False)[-1] == ("30", "", 0.0)


def test_prompts_are_drawn_alike_and_demonstrations_are_conversations_that_can_happen():
    task = CorrectedSums()
    assert isinstance(load_task("corrected_sums"), Environment) and task.prompts(4, 1) == task.prompts(9, 1)[:4]
    shown = [task.demonstration(p) for p in task.prompts(300, 0)]
    assert {len(transcript) for transcript in shown} == {1, 3}
    for prompt, transcript in zip(task.prompts(300, 0), shown, strict=True):
        rewarded = earned(task, prompt, *transcript[::2], finished=False)
        assert [reply for _, reply, _ in rewarded[:-1]] == transcript[1::2]
        assert rewarded[-1][2] == (1.0 if len(transcript) == 1 else 0.5)


class Odd(CorrectedSums):
    """Says or gives what a test wants."""

    said, given = "x", 0.0

    def start(self, prompt):
        return self

    def reply(self, transcript):
        if self.said is ValueError:
            raise ValueError("on purpose")
        return self.said if len(transcript) == 1 else None

    def rewards(self, transcript):
        return self.given


@pytest.mark.parametrize(
    ("said", "given", "error", "message"),
    [
        (ValueError, 0, RunError, r"on purpose.*'372='.*\['1'\]"),
        (3, 0, ConfigError, "returned 3"),
        ("x", [1.0], ConfigError, r"\[1.0\] for the 2 turns"),
        ("x", [0.7, 0.7], ConfigError, r"\[0.7, 0.7\]"),
        ("x", [-0.5, 0.2], ConfigError, r"\[-0.5, 0.2\]"),
        ("x", [float("nan"), 0.5], ConfigError, "nan"),
        ("x", None, ConfigError, "None"),
    ],
)
def test_an_environment_that_breaks_is_told_with_its_prompt(said, given, error, message):
    task = Odd(digits=3)
    object.__setattr__(task, "said", said)
    object.__setattr__(task, "given", given)
    with pytest.raises(error, match=message):
        earned(task, P372, "1", "2")


def test_rewards_may_be_one_number_or_one_per_turn():
    task = Odd(digits=3)
    for given, rewards in ((0.5, [0.0, 0.5]), ([-0.25, 1.0], [-0.25, 1.0]), (torch.tensor([0.25, 0.5]), [0.25, 0.5])):
        object.__setattr__(task, "given", given)
        assert [reward for *_, reward in earned(task, P372, "1", "2")] == rewards


def test_the_environments_of_the_page_run_as_they_stand():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    mine: dict = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), mine)
    longer, down = mine["Longer"](), mine["CountingDown"]()
    rewards = [reward for *_, reward in earned(longer, longer.prompts(1, 0)[0], "a", "abc", "ab")]
    assert rewards == pytest.approx([1 / 3, 1 / 3, 0])
    assert down.prompts(5, 3) == down.prompts(5, 3) and isinstance(down, Environment)
    prompt = Prompt("1023>", entry={"seed": 9023})
    assert earned(down, prompt, "1022", "1021") == [("1022", "1022>", 0.5), ("1021", "", 0.5)]
    assert earned(down, prompt, "1022", "1022") == [("1022", "1022>", 0.5), ("1022", "", 0.0)]
    assert earned(down, prompt, "1022", "", finished=False) == [("1022", "1022>", 0.5), ("", "", 0.0)]
    for task in (longer, down):  # as a run has it that leaves eval_prompts as it is
        asked = {p.text for p in held_out(task, RunConfig(arm=Arm(name="grpo")).eval_prompts)}
        assert len({p.text for p in draw(task, 64, 5, asked)}) > 32


# ---------------------------------------------------------------------- as ids
def test_replies_are_bytes_where_there_is_no_template():
    tokenizer = byte_tokenizer()
    assert reply_tokens("2?", tokenizer, ended=True) == (50, 63) and reply_tokens("", tokenizer, ended=True) == ()


@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_template_goes_around_a_reply_and_never_over_what_is_there(ended):
    """The ids of the whole conversation are those that the template makes of it, whatever the policy's own ids were."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens, tokenizer.chat_template = False, CHATML
    asked = encode_prompts([Prompt("hi")], tokenizer)[0].tokens
    own = (*tokenizer.encode("no", add_special_tokens=False), *[tokenizer.eos_token_id] * ended)
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "why?"},
    ]
    whole = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert [*asked, *own, *reply_tokens("why?", tokenizer, ended)] == whole


def test_a_template_that_drops_thoughts_from_earlier_turns_changes_nothing_of_a_reply():
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHATML
    plain = reply_tokens("why?", tokenizer, True)
    tokenizer.chat_template = CHATML.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    )
    assert reply_tokens("why?", tokenizer, True) == plain
    tokenizer.chat_template = CHATML.replace("<|end|>\n", "{% if loop.last %}!{% endif %}")
    with pytest.raises(ConfigError, match="a multi-turn rollout cannot continue"):
        reply_tokens("why?", tokenizer, True)


def test_a_cold_start_reads_the_turns_before_the_one_it_imitates():
    tokenizer, task = byte_tokenizer(), CorrectedSums(digits=3, spoiled=1.0)
    (shown,) = demonstrated(task, encode_prompts([P372], tokenizer), tokenizer)
    wrong, said, answer = task.demonstration(P372)
    assert wrong != answer == shown.answer == "302" and sum(a != b for a, b in zip(wrong, answer, strict=True)) == 1
    assert shown.tokens == (*b"372=", *wrong.encode(), 256, *said.encode())
    plain = [Prompt("1=", answer="1", tokens=(49, 61))]
    assert demonstrated(load_task("running_sums"), plain, tokenizer) is plain
