"""A trainer that needs the small install alone: a tiny Qwen3-MoE, recorded, replayed, trained and monitored.

A program, since it also runs in environments without `tests`. It prints its numbers, and which of the packages that its
arguments name can be imported.
"""

import importlib.util
import json
import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_rl
from moe_rl.metrics.volatility import route_change
from moe_rl.objectives import policy_loss
from moe_rl.routing import record_routing, replay_routing

torch.manual_seed(0)
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.0,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
tokens = torch.randint(3, 48, (4, 8))
inputs, mask, advantages = tokens[:, :-1], torch.ones(4, 7, dtype=torch.bool), torch.tensor([1.0, -1.0, 0.5, -0.5])


def logprobs() -> torch.Tensor:
    return model(input_ids=inputs).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


with torch.no_grad(), record_routing(model) as recording:
    old = logprobs()
routes = recording.trace(inputs)
monitor = moe_rl.monitor(model, probe={"input_ids": inputs, "attention_mask": torch.ones_like(inputs)})
rows = []
for _ in range(2):
    with monitor, replay_routing(model, routes) as replay:
        new = logprobs()
        policy_loss("grpo", logprobs=new, old_logprobs=old, advantages=advantages, mask=mask).loss.backward()
        monitor.ratios(new, old, mask)
    optimizer.step()
    optimizer.zero_grad()
    rows.append(monitor.row())
with torch.no_grad(), record_routing(model) as recording:
    logprobs()
change = route_change(routes.ids(), recording.trace(inputs).ids(), mask)
print(
    json.dumps(
        {
            "installed": [name for name in sys.argv[1:] if importlib.util.find_spec(name)],
            "rows": rows,
            "expert_change_rate": change.row()["expert_change_rate"],
            "preferred": replay.preferred.agreement(routes),
        }
    )
)
