"""The reward function that verl is given for a task of ours: `reward.custom_reward_function.path` is this file."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from moe_rl.registry import Component
from moe_rl.tasks.base import RIGHT, load_task, rewards_of
from moe_rl.types import Prompt


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], **_: Any
) -> dict[str, float]:
    """The task's reward, in [0, 1], and as `acc` whether it is 1."""
    answer, entry = json.loads(extra_info["answer"]), json.loads(extra_info["entry"])
    prompt = Prompt(text=extra_info["text"], answer=answer, entry=entry, chat=extra_info["chat"])
    reward = float(rewards_of(_task(extra_info["task"]), [prompt], [solution_str])[0])
    return {"score": reward, "acc": float(reward >= RIGHT)}


def row_of(task: str, prompt: Prompt, index: int) -> dict[str, Any]:
    """A row of verl's dataset; `task` is the JSON of the task's component."""
    answer, entry = json.dumps(prompt.answer), json.dumps(prompt.entry)
    extra = {"index": index, "task": task, "text": prompt.text, "answer": answer, "entry": entry, "chat": prompt.chat}
    return {
        "data_source": "moe_rl",
        "prompt": [{"role": "user", "content": prompt.text}],
        "ability": "task",
        "reward_model": {"style": "rule", "ground_truth": prompt.answer or ""},
        "extra_info": extra,
    }


@functools.cache
def _task(text: str) -> Any:
    return load_task(Component.of(json.loads(text)))
