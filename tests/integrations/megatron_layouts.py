"""Layouts of Megatron-core by name, and what a policy in one does when the Hugging Face policy gets the same calls."""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_rl import ranks
from moe_rl.config import Optimizer
from moe_rl.integrations.megatron.layout import SIGMOID, SOFTMAX, Parallel
from moe_rl.objectives import objective_of
from moe_rl.policies.hf import HFPolicy
from moe_rl.routing.trace import Layout, MoeLayer, RoutingTrace
from tests.conftest import build, perturb
from tests.integrations.megatron_study import parts
from tests.policies.test_hf import make_batch, part_of
from tests.routing import families

LAYOUTS = {
    "dp2": Parallel(dp=2),
    "ep2": Parallel(dp=2, ep=2),
    "tp2": Parallel(tp=2),
    "pp2": Parallel(pp=2),
    "tp2+ep2": Parallel(tp=2, ep=2),
    "dp2+tp2": Parallel(dp=2, tp=2),
    "tp2+pp2": Parallel(tp=2, pp=2),
    "tp2+ep4": Parallel(dp=2, tp=2, ep=4),
    "pp2+ep2": Parallel(dp=2, pp=2, ep=2),
}
"""All that is tested; how many ranks one takes follows from it."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 4,
    "beta_slow": 1,
}
DENSE_FIRST = {"num_hidden_layers": 4, "num_key_value_heads": 2}
FAMILIES = {
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {"num_hidden_layers": 2, "sliding_window": None},
    "qwen2_moe": {"num_hidden_layers": 2, "num_key_value_heads": 2},
    "deepseek_v3": {"num_hidden_layers": 4, "qk_rope_head_dim": 4, "v_head_dim": 12, "rope_parameters": YARN},
    "moonlight": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-2},
    "glm4_moe": {**DENSE_FIRST, "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {},
    "dots1": {"num_key_value_heads": 2, "topk_group": 3},
}
"""Tiny configurations of the other families, as far as they differ from `tests/routing/families.py`: k is 3, of 8
experts in 4 groups, and DeepSeek's relatives begin with a dense layer."""
ON_RANKS = {
    "mixtral on ep2": "ep2",
    "deepseek_v3 on tp2+ep2": "tp2+ep2",
    "deepseek_v3 on pp2": "pp2",
    "glm4_moe on tp2": "tp2",
    "qwen2_moe on tp2": "tp2",
}
"""Which of them run on two ranks, in which layout. On pp2 one MoE layer is on the first stage, and two on the other."""
LR = 1e-3
SETTINGS = Optimizer(lr=LR, grad_clip=0.5)
OBJECTIVE = objective_of(parts)
ROWS = {"temperature": 0.8, "micro_batch": 4, "score_batch": 5}  # 9 rows: neither ranks nor micro-batches divide them


def ranks_of(name: str) -> int:
    parallel = LAYOUTS[name]
    return parallel.dp * parallel.tp * parallel.pp


def of_ranks(world: int) -> dict[str, Parallel]:
    """The layouts that take so many ranks."""
    return {name: parallel for name, parallel in LAYOUTS.items() if ranks_of(name) == world}


def megatron(model, parallel: Parallel, optimizer: Optimizer = SETTINGS, **settings):
    from moe_rl.integrations.megatron.policy import MegatronPolicy

    return MegatronPolicy(model, optimizer, parallel, **ROWS | settings)


def resident() -> int:
    """Bytes of this process in memory, those that it shares divided by their owners; without what malloc keeps, and
    without libraries, which count for more here whenever a process elsewhere ends that has them, too."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    mapped = re.findall(
        r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)\n(?:.*\n)*?Pss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    return 1024 * sum(int(size) for file, size in mapped if not Path(file).is_file())


def growth(make, times: int = 5):
    """By how many bytes a rank grows where `make` gives it a trace, all of which it reads, the median of some calls,
    and the trace; collective. Single ones scatter by megabytes: buffers of gloo's threads, and pages that forked ranks
    cease to share."""
    make()
    found, made = [], None
    for _ in range(times):
        made = None  # what one gives up counts for the other, so both wait
        torch.distributed.barrier()
        before = resident()
        torch.distributed.barrier()
        made = make()
        made.experts.max()
        torch.distributed.barrier()
        found.append(resident() - before)
        torch.distributed.barrier()
    return statistics.median(found), made


def wide():
    """64 rows of 2,048 tokens, one of them shorter, and the layout of 48 layers whose recordings are large."""
    shape = 64, 2048
    mask = torch.ones(shape, dtype=torch.bool)
    mask[5, 1000:] = False
    per_token = {name: torch.zeros(shape) for name in ("rollout_logprobs", "old_logprobs", "advantages")}
    batch = replace(
        make_batch(1, 1),
        tokens=torch.zeros(shape, dtype=torch.long),
        attention_mask=mask,
        response_mask=mask,
        prompt_index=torch.zeros(64, dtype=torch.long),
        rewards=torch.zeros(64),
        ref_logprobs=None,
        finished=mask[:, 0],
        **per_token,
    )
    return batch, Layout(tuple(MoeLayer(f"l{i}", i, 128, 8) for i in range(48)), "wide")


def example():
    """Random rollouts. The engine's log-probs are so far from the policy's that `truncated` caps some tokens."""
    batch = make_batch(prompts=3, group=3)
    engine = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(5)) - 4.5
    here = batch.response_mask
    return replace(batch, ref_logprobs=here * torch.tensor(-3.0), rollout_logprobs=here * engine)


def layout(parallel: Parallel, recompute: bool, tied: bool) -> dict:
    """Everything about one layout, with two layers on each stage."""
    shape = {"num_hidden_layers": 2 * parallel.pp, "tie_word_embeddings": tied}
    return compared(partial(build, "qwen3_moe", **shape), parallel, recompute)


def of_family(name: str, seed: int = 0, **shape):
    """A tiny model of FAMILIES in which no norm is 1 and no bias 0, so that none can stand for another."""
    model_type = "deepseek_v3" if name == "moonlight" else name
    known = next(family for family in families.FAMILIES if family.model_type == model_type)
    model = families.build(replace(known, settings=FAMILIES[name] | shape), seed)
    if families.older_than("5.6") and getattr(model.config, "n_group", 1) > 1:
        pytest.skip("groups of experts that are closed have scores of 0 before transformers 5.6, so some are chosen")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def compared(make: Callable, parallel: Parallel, recompute: bool) -> dict:
    """Everything about one model in one layout; both policies get the same calls."""
    model = make()
    biases = [name for name in model.state_dict() if name.endswith("correction_bias")]
    optimizer = SETTINGS.replace(loss_free_bias=0.01) if biases else SETTINGS
    hf = HFPolicy(model, optimizer, **ROWS)
    ours = megatron(make(seed=9 * ranks.rank()), parallel, optimizer, recompute=recompute)
    batch, facts = example(), {"exported": same_weights(ours, hf)}
    a, b = (p.score(batch) for p in (hf, ours))
    facts["unconstrained"] = far(a.logprobs, b.logprobs)
    facts["entropy"] = far(a.entropy, b.entropy)
    facts["recorded"] = a.routes == b.routes and b.preferred is None

    perturb(hf.model, scale=0.3)
    ours.map.put(hf.model.state_dict())
    facts["imported"] = same_weights(ours, hf)
    routes = holes(a.routes)
    c, d = (p.score(batch, routes) for p in (hf, ours))
    facts["replayed"] = far(c.logprobs, d.logprobs)
    facts["replay matters"] = far(c.logprobs, hf.score(batch).logprobs)
    facts["replayed ids"] = c.routes == d.routes and torch.equal(
        d.routes.ids()[routes.known], routes.ids()[routes.known]
    )
    facts["preferred"] = c.preferred == d.preferred
    facts["preferred elsewhere"] = float((~d.preferred.same_sets(routes))[routes.known].float().mean())

    gradients = {}
    hf.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in hf.model.named_parameters()})
    )
    u, v = (p.update(part_of(batch, s, routes), OBJECTIVE) for p, s in ((hf, c), (ours, d)))
    facts["update"] = {
        "logprobs": far(u.logprobs, v.logprobs),
        "entropy": far(u.entropy, v.entropy),
        "loss": abs(u.loss - v.loss),
        "norm": abs(u.grad_norm - v.grad_norm) / u.grad_norm,
        "clipped": [u.grad_clipped, v.grad_clipped],
        "metrics": max(abs(u.metrics[name] - v.metrics[name]) for name in u.metrics),
        "least term": min(abs(value) for value in u.metrics.values()),
        "names": [sorted(u.metrics), sorted(v.metrics)],
        "routes": u.routes == v.routes and u.preferred == v.preferred and torch.equal(u.clipped_by, v.clipped_by),
    }
    facts["capped"] = float(((c.logprobs - batch.rollout_logprobs)[batch.response_mask].exp() > 2).float().mean())
    facts["gradients"], facts["router gradient"] = compare_gradients(ours, gradients)
    facts["stepped"] = far(hf.score(batch).logprobs, ours.score(batch).logprobs)
    facts["stepped weights"] = steps_apart(ours, hf, gradients)
    mine, theirs = weights_of(ours), weights_of(hf)
    facts["biases"] = all(torch.equal(mine[name], theirs[name]) for name in biases)
    if parallel.pp == 1:  # a stage that fails leaves the other one waiting: that ends the job, see below
        facts["after an exception"] = after_an_exception(ours, batch, d, routes)
    return facts


def require(found: dict) -> None:
    """Of `compared`: every number of the Hugging Face policy, to rounding."""
    update = found["update"]
    for fact in ("exported", "imported", "recorded", "replayed ids", "preferred", "biases"):
        assert found[fact], fact
    for kind in ("unconstrained", "entropy", "replayed", "gradients"):
        assert found[kind] < 1e-5, (kind, found[kind])
    assert found["stepped"] < 1e-4, "AdamW moves a weight whose gradient is rounding by as much as any other"
    assert max(update[kind] for kind in ("logprobs", "entropy", "loss", "norm")) < 1e-5 and update["routes"]
    assert update["clipped"] == [True, True] and update["metrics"] < 1e-6 < 1e-3 < update["least term"]
    assert update["names"] == [["corrected_tokens", "term_entropy", "term_kl"]] * 2
    assert 0.1 < found["capped"] < 0.9, "the cap of truncated must matter for some tokens, and not for others"
    assert found["stepped weights"] < 0.02, "in learning rates, where rounding does not decide the sign"
    assert min(found["replay matters"], found["preferred elsewhere"]) > 1e-3 and found["router gradient"] > 1e-6
    assert found.get("after an exception", True)


def table() -> str:
    """What of all this is tested, as docs/distributed.md has it."""
    columns = ["one process", *LAYOUTS]
    ran = {(name.replace("moonlight", "deepseek_v3"), "one process") for name in FAMILIES}
    ran |= {("qwen3_moe", name) for name in LAYOUTS} | {(name.split()[0], where) for name, where in ON_RANKS.items()}
    lines = ["| family | tested with |", "|---|---|"]
    lines += [f"| `{name}` | {', '.join(c for c in columns if (name, c) in ran)} |" for name in SOFTMAX + SIGMOID]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- comparing
def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def holes(routes: RoutingTrace) -> RoutingTrace:
    """The routes with a third of them unknown: those route freely."""
    gone = torch.rand(routes.shape[:3], generator=torch.Generator().manual_seed(3)) < 0.3
    return replace(routes, experts=routes.experts.masked_fill(gone[..., None], routes.layout.unknown))


def failing(*args, **kwargs):
    raise RuntimeError(f"rank {ranks.rank()} fails on purpose")


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in policy.weights()}


def same_weights(ours, hf) -> bool:
    mine, theirs = dict(ours.weights()), dict(hf.weights())
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs)


def compare_gradients(ours, gradients: dict) -> tuple[float, float]:
    """Largest difference in units of each tensor's largest entry, over all tensors; and the least router's largest."""
    weights = [p.detach().clone() for p in ours.gpt.parameters()]
    with torch.no_grad():
        for p in ours.gpt.parameters():
            p.copy_(p.main_grad)
    found = weights_of(ours)  # the weight map carries gradients as well
    with torch.no_grad():
        for p, w in zip(ours.gpt.parameters(), weights, strict=True):
            p.copy_(w)
    routers = [g.abs().max().item() for n, g in gradients.items() if n.endswith("mlp.gate.weight")]
    return max(far(found[n], g) / g.abs().max().item() for n, g in gradients.items()), min(routers)


def steps_apart(ours, hf, gradients: dict) -> float:
    """Largest difference of a weight after the step, in learning rates, where rounding does not decide its sign."""
    mine, theirs = dict(ours.weights()), dict(hf.weights())
    clear = {n: g.abs() > 1e-5 * g.abs().max() for n, g in gradients.items()}
    return max(((mine[n] - theirs[n]).abs() / LR * clear[n]).max().item() for n in clear)


def after_an_exception(ours, batch, old, routes) -> bool:
    """An update that fails on every rank leaves no route behind."""
    before = ours.score(batch)
    with suppress(RuntimeError):
        ours.update(part_of(batch, old, routes), replace(OBJECTIVE, loss=failing))
    clear = all(s.router_replay_action is None and not s.replay_backward_list for s in ours.routers.moe_layers)
    after = ours.score(batch)
    return clear and after.routes == before.routes and torch.equal(after.logprobs, before.logprobs)
