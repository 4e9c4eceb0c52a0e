"""One reward function, called by TRL's trainer and by our task: it sees the same keywords, and gives the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from moe_rl.registry import Component
from moe_rl.tasks.base import load_task, rewards_of

trl = pytest.importorskip("trl", reason="tests against the real TRL are run by `make test-trl`")

SOURCE = """
SEEN = []
def even(completions, answer, trainer_state=None, **kwargs):
    SEEN.append({"completions": completions, "answer": answer, **kwargs})
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if text == "?" else 0.5 * (text == gold) for text, gold in zip(texts, answer)]
async def long(completions, **kwargs):
    return [len(c) / 4 for c in completions]
"""


@pytest.mark.parametrize("chat", [False, True])
def test_trl_and_a_task_call_a_function_alike(tmp_path, monkeypatch, chat):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shared_rewards", raising=False)
    (tmp_path / "shared_rewards.py").write_text(SOURCE)
    lines = [{"question": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(3)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    import shared_rewards

    names, texts, ids = ["shared_rewards:even", "shared_rewards:long"], ["1", "3", "?"], [[1], [2], [3]]
    task = load_task(Component(f"jsonl:{tmp_path}/pairs.jsonl", rewards=names))
    prompts = [type(p)(p.text, p.answer, p.entry, chat=chat) for p in task.lines]
    ours = rewards_of(task, prompts, texts, ids)

    asked = [[{"role": "user", "content": p.text}] if chat else p.text for p in prompts]
    said = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), state=None, environments=None)
    trainer.reward_funcs = [shared_rewards.even, shared_rewards.long]
    trainer.reward_processing_classes, trainer.reward_func_names = [None, None], ["even", "long"]
    trainer._log_completion_extra = trainer._log_metric = trainer.args = None
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    trainer.async_loop = loop
    module = sys.modules[trl.GRPOTrainer.__module__]
    monkeypatch.setattr(module, "gather", lambda x: x)
    monkeypatch.setattr(module, "profiling_context", lambda *_: contextlib.nullcontext())
    measure = trl.GRPOTrainer._calculate_rewards.__wrapped__
    rows = [{"prompt": prompt, **line} for prompt, line in zip(asked, lines, strict=True)]
    theirs = measure(trainer, rows, asked, said, ids)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()

    mine, trls = shared_rewards.SEEN
    assert mine == {key: value for key, value in trls.items() if key not in ("log_extra", "log_metric")}
    parts = [[one if one is not None else torch.nan for one in reward.parts.values()] for reward in ours]
    assert torch.equal(torch.tensor(parts).nan_to_num(9), theirs.nan_to_num(9))
    assert torch.allclose(torch.tensor(ours), theirs.nansum(1))
