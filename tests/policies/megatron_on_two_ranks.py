"""What two ranks of Megatron-core do, against a Hugging Face policy on rank 0: facts as JSON, for `test_megatron.py`.

    torchrun --nproc-per-node 2 tests/policies/megatron_on_two_ranks.py FOLDER

Megatron's process groups belong to a process, so everything is done in this one launch, layout after layout. At the
end rank 1 fails in the middle of an update, on purpose: the job must end, and say why.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch

from moe_rl import ranks
from moe_rl.config import Arm, Optimizer, Parallel
from moe_rl.lookup import Use
from moe_rl.objectives import objective_of
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.checked import CheckedEngine
from moe_rl.rollouts.http import ServerEngine
from moe_rl.rollouts.push import Tolerance, probe_prompts
from moe_rl.routing.trace import RoutingTrace
from moe_rl.runs.folder import RunFolder
from tests.conftest import build, perturb
from tests.policies.megatron_study import study
from tests.policies.test_hf import make_batch, part_of
from tests.rollouts.fake_engine import small
from tests.rollouts.test_http import Server

torch.set_num_threads(1)
LAYOUTS = {
    "dp2": Parallel(dp=2),
    "ep2": Parallel(dp=2, ep=2),
    "tp2": Parallel(tp=2),
    "pp2": Parallel(pp=2),
}
LR = 1e-3
SETTINGS = Optimizer(lr=LR, grad_clip=0.5)
OBJECTIVE = objective_of(Arm(name="grpo", terms=(Use("kl", coef=0.1), Use("entropy", coef=0.01))))
ROWS = {"temperature": 0.8, "micro_batch": 4, "score_batch": 5}  # 9 rows: neither ranks nor micro-batches divide them


def main(folder: Path) -> None:
    ranks.join("cpu")
    facts = {}
    for name, parallel in LAYOUTS.items():
        for recompute in (False, True):  # and with tied embeddings
            facts[name + "+recompute" * recompute] = layout(parallel, recompute, tied=recompute)
    facts["tp2+ep2"] = layout(Parallel(tp=2, ep=2), recompute=False, tied=True)
    gathering = replace(LAYOUTS["ep2"], settings={"moe_token_dispatcher_type": "allgather"})
    facts["mixtral"] = family(gathering, "mixtral")
    facts["unnormalised"] = family(LAYOUTS["ep2"], "qwen3_moe", norm_topk_prob=False, num_experts_per_tok=3)
    facts["checkpoint"] = checkpoint(folder)
    facts["resumed"] = resumed(folder)
    facts["server"] = server(folder)
    if ranks.rank() == 0:
        (folder / "facts.json").write_text(json.dumps(facts))
    die_on_rank_1()


def megatron(model, parallel: Parallel, **settings):
    from moe_rl.policies.megatron.policy import MegatronPolicy

    return MegatronPolicy(model, SETTINGS, parallel, **ROWS | settings)


def example():
    batch = make_batch(prompts=3, group=3)
    return replace(batch, ref_logprobs=torch.where(batch.response_mask, -3.0, 0.0))


def layout(parallel: Parallel, recompute: bool, tied: bool) -> dict:
    """Everything about one layout, with two layers on each stage; both policies get the same calls."""
    shape = {"num_hidden_layers": 2 * parallel.pp, "tie_word_embeddings": tied}
    hf = HFPolicy(build("qwen3_moe", **shape), SETTINGS, **ROWS)
    ours = megatron(build("qwen3_moe", seed=9 * ranks.rank(), **shape), parallel, recompute=recompute)
    batch, facts = example(), {"exported": same_weights(ours, hf)}
    a, b = (p.score(batch, scores=True) for p in (hf, ours))
    facts["natural"] = far(a.logprobs, b.logprobs)
    facts["entropy"] = far(a.entropy, b.entropy)
    facts["recorded"] = a.routes == b.routes and b.preferred is None
    rows = batch.response_mask[:, 1:]
    for kind in ("gates", "margins", "log_probs"):
        facts[kind] = far(*(getattr(s.scores, kind)[:, :-1][rows] for s in (a, b)))

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
        "metrics": max(abs(u.metrics[name] - v.metrics[name]) for name in ("term_kl", "term_entropy")),
        "routes": u.routes == v.routes and u.preferred == v.preferred and torch.equal(u.clipped_by, v.clipped_by),
    }
    facts["gradients"], facts["router gradient"] = compare_gradients(ours, gradients)
    facts["stepped"] = far(hf.score(batch).logprobs, ours.score(batch).logprobs)
    facts["stepped weights"] = steps_apart(ours, hf, gradients)
    if parallel.pp == 1:  # a stage that fails leaves the other one waiting: that ends the job, see below
        facts["after an exception"] = after_an_exception(ours, batch, d, routes)
    return facts


def family(parallel: Parallel, name: str, **shape) -> dict:
    """Another family, or another kind of router."""
    hf = HFPolicy(build(name, **shape), SETTINGS, **ROWS)
    ours = megatron(build(name, **shape), parallel)
    batch = example()
    a, b = (p.score(batch, scores=True) for p in (hf, ours))
    perturb(hf.model, scale=0.3)
    ours.map.put(hf.model.state_dict())
    c, d = (p.score(batch, a.routes) for p in (hf, ours))
    for p, s in ((hf, c), (ours, d)):
        p.update(part_of(batch, s, a.routes), OBJECTIVE)
    return {
        "natural": far(a.logprobs, b.logprobs),
        "recorded": a.routes == b.routes,
        "gates": far(*(s.scores.gates[:, :-1][batch.response_mask[:, 1:]] for s in (a, b))),
        "replayed": far(c.logprobs, d.logprobs),
        "stepped": far(hf.score(batch).logprobs, ours.score(batch).logprobs),
    }


def server(folder: Path) -> dict:
    """Pushes to a server on rank 0, of weights that every rank holds parts of; the second one follows a step."""
    loaded, facts = small(), {}
    policy = megatron(small().model, LAYOUTS["ep2"])
    served = Server(folder / "served", loaded) if ranks.rank() == 0 else None
    engine = served and ServerEngine(served.url, served.fake.folder, loaded.tokenizer, dialect="vllm")
    probes = probe_prompts(loaded.tokenizer, loaded.model.config.vocab_size)
    checked = CheckedEngine(engine, policy.score, probes, Tolerance.of("float32"), ROWS["temperature"])
    facts["gap"] = checked.load(policy.weights())
    batch = example()
    before = weights_of(policy)
    policy.update(part_of(batch, policy.score(batch)), OBJECTIVE)
    facts["gap after a step"] = checked.load(policy.weights())
    facts["moved"] = max(far(w, before[n]) for n, w in policy.weights())
    if served:
        facts["pushes"] = served.fake.pushes
        served.stop()
    return facts


def checkpoint(folder: Path) -> dict:
    """Written under EP2 after a step; read under EP2 and under TP2, and trained on."""
    hf = HFPolicy(build("qwen3_moe"), SETTINGS, **ROWS)
    batch, facts = example(), {}
    writer = megatron(build("qwen3_moe"), LAYOUTS["ep2"])
    for policy in (hf, writer):
        policy.update(part_of(batch, policy.score(batch)), OBJECTIVE)
    target = folder / "checkpoint"
    ranks.from_rank_0(target.mkdir)
    writer.save(target)
    written = weights_of(writer)
    writer.update(part_of(batch, writer.score(batch)), OBJECTIVE)
    hf.update(part_of(batch, hf.score(batch)), OBJECTIVE)
    second = weights_of(writer)
    for name in ("ep2", "tp2"):
        reader = megatron(build("qwen3_moe", seed=5), LAYOUTS[name])
        reader.load(target)
        facts[f"{name} weights"] = all(torch.equal(w, written[n]) for n, w in reader.weights())
        reader.update(part_of(batch, reader.score(batch)), OBJECTIVE)
        facts[f"{name} next step"] = far(hf.score(batch).logprobs, reader.score(batch).logprobs)
        facts[f"{name} next step, bits"] = all(torch.equal(w, second[n]) for n, w in reader.weights())
    facts["moved"] = max(far(w, second[n]) for n, w in written.items())
    return facts


def resumed(folder: Path) -> dict:
    """A run interrupted after its first step and gone on with, against one that was not."""
    from moe_rl.execute import execute
    from moe_rl.runs.frames import diff

    less = {"prompts_per_step": 2, "eval_prompts": 2, "mini_batches": 2, "measure.detail_every": 10}
    run = study.base.replace(policy="megatron", parallel=LAYOUTS["ep2"], steps=2, save_every=1, **less)

    def interrupt(rows: dict) -> None:
        if rows["steps"][0]["step"] == 1:
            raise KeyboardInterrupt

    def nothing(rows: dict) -> None:
        pass

    whole, parts = folder / "whole", folder / "parts"
    for path, listen in ((whole, nothing), (parts, interrupt), (parts, nothing)):
        real = RunFolder.open(path, run.to_dict(), run.hash) if ranks.rank() == 0 else nullcontext()
        with real as opened, suppress(KeyboardInterrupt):
            execute(run, ranks.SharedFolder(opened), cache=folder / "cache", listen=listen)
    manifests = (whole / "manifest.json", parts / "manifest.json")
    digests = ranks.from_rank_0(lambda: [json.loads(file.read_text())["checkpoint"] for file in manifests])
    return {"tables": ranks.from_rank_0(lambda: diff(whole, parts) is None), "weights": digests[0] == digests[1]}


def die_on_rank_1() -> None:
    """In the forward of an update, while rank 0 waits for the other half of the experts."""
    policy = megatron(build("qwen3_moe"), LAYOUTS["ep2"])
    batch = example()
    old = policy.score(batch)
    policy.update(part_of(batch, old), replace(OBJECTIVE, loss=failing if ranks.rank() else OBJECTIVE.loss))
    raise AssertionError("rank 0 went on without rank 1")


def failing(*args, **kwargs):
    raise RuntimeError("rank 1 fails on purpose")


# ---------------------------------------------------------------------- comparing
def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def holes(routes: RoutingTrace) -> RoutingTrace:
    """The routes with a third of them unknown: those route freely."""
    gone = torch.rand(routes.shape[:3], generator=torch.Generator().manual_seed(3)) < 0.3
    return replace(routes, experts=routes.experts.masked_fill(gone[..., None], routes.layout.unknown))


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
    clear = all(s.router_replay_action is None and not s.replay_backward_list for s in ours.routers.sites)
    after = ours.score(batch)
    return clear and after.routes == before.routes and torch.equal(after.logprobs, before.logprobs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
