"""What ranks of FSDP2 do, against a Hugging Face policy on each of them: facts, for `test_fsdp.py`.

Ranks are forks of the process that tests, with the environment that torchrun gives them: nothing is imported again.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_rl import build as execute_module
from moe_rl import ranks
from moe_rl.build import execute
from moe_rl.config import Arm, ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.integrations.fsdp import REDUCE, FSDPPolicy, take_over
from moe_rl.integrations.on_ranks import from_rank_0
from moe_rl.integrations.shards import outline
from moe_rl.models.load import LoadedModel, load, save_checkpoint
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.objectives import objective_of
from moe_rl.policies import hf as hf_module
from moe_rl.policies.hf import HFPolicy, checkpoint_activations
from moe_rl.registry import Component
from moe_rl.routing import Layout, MoeLayer, RoutingTrace, record_routing, replay_routing
from moe_rl.routing.router_noise import Noise
from moe_rl.storage.folder import RunFolder, SharedFolder, read_json
from tests.conftest import build, perturb
from tests.integrations.megatron_layouts import far, growth, holes, resident, weights_of, wide
from tests.integrations.test_server import Server
from tests.policies.test_hf import make_batch, part_of
from tests.rollouts.fake_engine import SIZES

TWO = {"num_hidden_layers": 2}
QWEN = ModelConfig(overrides=TWO)
SETTINGS = Optimizer(lr=1e-3, grad_clip=0.5, router_lr_scale=0.5, weight_decay=0.01, eps=1e-3)
"""With an ε at which rounding does not decide the sign of a step."""
ROWS = {"temperature": 0.8, "micro_batch": 3, "score_batch": 4}  # 7 rows: neither ranks nor forwards divide them
PARTS = objective_of(
    Arm(
        name="parts",
        corrections=(Component("truncated", cap=2.0),),
        terms=(
            Component("kl", coef=0.1),
            Component("entropy", coef=0.01),
            Component("load_balance", coef=0.01),
            Component("router_kl", coef=0.1),
        ),
    )
)
GRPO = objective_of(Arm(name="grpo"))
CASES = {
    "tied": (QWEN, SETTINGS, {}),
    "budget": (
        QWEN.replace(overrides={**TWO, "tie_word_embeddings": False}, router_dtype="float32"),
        SETTINGS,
        {"micro_batch_tokens": 14, "activation_checkpointing": True},
    ),
    "bias": (ModelConfig(name="deepseek_v3-tiny", overrides=TWO), SETTINGS.replace(loss_free_bias=1e-2, warmup=3), {}),
}
"""Configuration, optimizer and further settings of a policy."""
ARMS = (
    Arm(
        name="parts",
        routes="old_policy",
        corrections=("truncated",),
        terms=(Component("kl", coef=0.1), Component("entropy", coef=0.01)),
    ),
    Arm(name="gspo", loss=Component("gspo", clip_low=3e-2, clip_high=4e-2), routes="rollout", anchor="engine"),
)
RUN = RunConfig(
    arm=ARMS[0],
    task="tests.even_task:EvenCharacters",
    model=ModelConfig(overrides={**TWO, "num_local_experts": 8}),
    cold_start=ColdStart(target=0.0),
    optimizer=Optimizer(lr=1e-3),
    measure=Measure(responses=2, detail_every=100),
    steps=3,
    prompts_per_step=3,
    group_size=3,
    mini_batches=2,
    micro_batch=3,
    max_new_tokens=5,
    eval_every=100,
    eval_prompts=2,
    save_every=1,
)
LAST = RUN.replace(arm=ARMS[-1], policy="fsdp")
"""What is killed, and goes on."""


def on_ranks(world: int, folder: Path, states: Callable[[Path], dict]) -> dict:
    """What `states(folder)` gives on rank 0 of so many."""
    codes = exit_codes(world, folder, states)
    assert not any(codes), "\n".join(file.read_text() for file in sorted(folder.glob("error-*")))
    return json.loads((folder / f"{states.__name__}-{world}.json").read_text())


def exit_codes(world: int, folder: Path, states: Callable[[Path], dict]) -> list[int]:
    """Of so many ranks that do this; the first one that fails ends the others, as torchrun has it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    for file in folder.glob("error-*"):  # of those that were killed on purpose
        file.unlink()
    fork, out = multiprocessing.get_context("fork"), folder / f"{states.__name__}-{world}.json"
    processes = [fork.Process(target=_rank, args=(rank, world, port, folder, states, out)) for rank in range(world)]
    for process in processes:
        process.start()
    left = list(processes)
    while left:
        multiprocessing.connection.wait([process.sentinel for process in left])
        left = [process for process in left if process.is_alive()]
        if any(process.exitcode for process in processes if process not in left):
            for process in left:
                process.kill()
    return [process.exitcode for process in processes]


def _rank(rank: int, world: int, port: int, folder: Path, states: Callable[[Path], dict], out: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    warnings.simplefilter("ignore")
    try:
        ranks.join("cpu")
        facts = states(folder)
        if ranks.rank() == 0:
            out.write_text(json.dumps(facts))
        ranks.leave()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise
    os._exit(0)


# ---------------------------------------------------------------------- the verbs
def pair(config: ModelConfig, settings: Optimizer, further: dict) -> tuple[HFPolicy, FSDPPolicy]:
    """The same policy in one process and over all ranks."""
    hf = HFPolicy(load(config, 0).model, settings, **ROWS, **further)
    start = load(config, 0).weights() if ranks.rank() == 0 else None
    return hf, FSDPPolicy(config, start, settings, **ROWS, **further)


def weights_and_buffers(model) -> dict[str, torch.Tensor]:
    return LoadedModel(model, byte_tokenizer()).weights()


def equal_weights(ours: FSDPPolicy, hf: HFPolicy) -> bool:
    mine, theirs = dict(ours.weights()), dict(hf.weights())
    return [*mine] == [*theirs] and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def example():
    """Random rollouts. The engine's log-probs are so far from the policy's that `truncated` caps some tokens."""
    batch = make_batch(prompts=7, group=1)
    engine = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(5)) - 6
    here = batch.response_mask
    return replace(batch, ref_logprobs=here * torch.tensor(-3.0), rollout_logprobs=here * engine)


def case(name: str) -> dict:
    """Both policies get the same calls."""
    hf, ours = pair(*CASES[name])
    batch, facts = example(), {"exported": equal_weights(ours, hf)}
    share = [p.to_local().numel() / p.numel() for p in ours.model.parameters()]
    facts["share"] = max(share)
    a, b = (p.score(batch, scores=True) for p in (hf, ours))
    facts["unconstrained"] = far(a.logprobs, b.logprobs) + far(a.entropy, b.entropy)
    facts["recorded"] = a.routes == b.routes and b.preferred is None
    rows = batch.response_mask[:, 1:]
    pairs = [(a.scores.gates, b.scores.gates), *zip(a.scores.all_log_probs, b.scores.all_log_probs, strict=True)]
    facts["scores"] = max(far(x[:, :-1][rows], y[:, :-1][rows]) for x, y in pairs)

    perturb(hf.model, 0.3)
    take_over(ours.model, weights_and_buffers(hf.model) if ranks.rank() == 0 else None)
    routes = holes(a.routes)
    c, d = (p.score(batch, routes, scores=True) for p in (hf, ours))
    facts["replayed"], facts["replay matters"] = far(c.logprobs, d.logprobs), far(c.logprobs, hf.score(batch).logprobs)
    facts["replayed ids"] = c.routes == d.routes and c.preferred == d.preferred
    part = replace(PARTS.attach_weights(part_of(batch, a, routes)), old_scores=a.scores)
    gradients = [p.gradient(part, PARTS) for p in (hf, ours)]
    facts["gradient"] = far(*gradients) / gradients[0].abs().max().item()
    u, v = (p.update(part, PARTS) for p in (hf, ours))
    facts["updated"] = max(far(u.logprobs, v.logprobs), abs(u.loss / v.loss - 1), abs(u.grad_norm / v.grad_norm - 1))
    real, positions = int(part.attention_mask.sum()), sum(ranks.gather(ours.positions))
    facts["padding"] = [ranks.gather(ours.padding), 1 - real / positions]
    facts["metrics"] = {key: [value, v.metrics[key]] for key, value in u.metrics.items()}
    facts["updated routes"] = (
        u.routes == v.routes
        and u.preferred == v.preferred
        and torch.equal(u.clipped_by, v.clipped_by)
        and u.grad_clipped
        and v.grad_clipped
    )
    e, f = (p.score(batch) for p in (hf, ours))
    facts["stepped"], facts["moved"] = far(e.logprobs, f.logprobs), far(e.logprobs, a.logprobs)
    biases = [dict(model.named_buffers()) for model in (hf.model, ours.model)]
    facts["buffers"] = all(torch.equal(x, biases[1][key]) for key, x in biases[0].items())
    return facts


def noises() -> dict:
    """How far the log-probs of the policies are under a dose, and the dose moves them; weights are put back."""
    hf, ours = pair(QWEN, SETTINGS, {})
    batch = example()
    part = part_of(batch, hf.score(batch))
    for policy in (hf, ours):
        policy.update(part, GRPO)
    take_over(ours.model, weights_and_buffers(hf.model) if ranks.rank() == 0 else None)
    facts, unconstrained = {}, hf.score(batch)
    for form, way in (("weights", "random"), ("choice", "random"), ("beside", "random"), ("weights", "last_step")):
        a, b = (p.score(batch, noise=Noise(form, 0.5, 3, way)) for p in (hf, ours))
        facts[f"{form}, {way}"] = [
            far(a.logprobs, b.logprobs),
            far(a.logprobs, unconstrained.logprobs),
            a.routes == b.routes,
        ]
    return {"doses": facts, "put back": equal_weights(ours, hf)}


def in_pieces() -> dict:
    """A vocabulary that is too large to be held at once; and one row for all ranks."""
    from moe_rl.models import vocabulary

    hf, ours = pair(QWEN, SETTINGS, {})
    batch = example()
    one = hf.score(batch)
    part = part_of(batch, one)
    gradient = hf.gradient(part, GRPO)
    kept = hf_module.LOGITS
    hf_module.LOGITS = vocabulary.LOGITS = 2000
    found = ours.score(batch)
    apart = [
        far(x, y)
        for x, y in (
            (found.logprobs, one.logprobs),
            (found.entropy, one.entropy),
            (ours.gradient(part, GRPO), gradient),
        )
    ]
    hf_module.LOGITS = vocabulary.LOGITS = kept
    alone = ours.score(batch.rows(slice(2, 3)))
    return {"pieces": max(apart), "one row": far(alone.logprobs, one.logprobs[2:3, : alone.logprobs.shape[1]])}


def reduced() -> dict:
    """Gradients of a mini-batch in two forwards per rank, and how often ranks add theirs up for it."""
    hf, _ = pair(QWEN, SETTINGS, {})
    batch, facts = example(), {}
    part = part_of(batch, hf.score(batch))
    whole = hf.gradient(part, GRPO)
    for reduce in REDUCE:
        policy = FSDPPolicy(QWEN, load(QWEN, 0).weights(), SETTINGS, **ROWS, reduce=reduce)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            found = policy.gradient(part, GRPO)
            policy.update(part, GRPO)
        count = sum(event.count for event in seen.key_averages() if event.key.startswith("c10d::_reduce_scatter"))
        facts[reduce] = [count, far(found, whole) / whole.abs().max().item()]
        after = policy.gradient(part, GRPO)
    hf.update(part, GRPO)
    facts["moved"] = far(hf.gradient(part, GRPO), whole) / whole.abs().max().item()
    facts["after"] = far(hf.gradient(part, GRPO), after) / whole.abs().max().item()
    return facts


def mixed() -> dict:
    """Forwards in bfloat16 over float32 weights, routers in float32."""
    config = QWEN.replace(router_dtype="float32")
    hf = HFPolicy(load(config, 0).model, SETTINGS, **ROWS)
    ours = FSDPPolicy(config, load(config, 0).weights(), SETTINGS, **ROWS, compute_dtype="bfloat16")
    batch = example()
    a = hf.score(batch, scores=True)
    b = ours.score(batch, a.routes, scores=True)
    gradients = [p.gradient(part_of(batch, a, a.routes), GRPO) for p in (hf, ours)]
    rows = batch.response_mask[:, 1:]
    coarse = b.scores.all_log_probs[0][:, :-1][rows]
    return {
        "log-probs": far(a.logprobs, b.logprobs),
        "gradient": ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item(),
        "kept in": sorted({str(w.dtype) for _, w in ours.weights()} | {str(gradients[1].dtype)}),
        "routers computed finely": not torch.equal(coarse, coarse.bfloat16().float()),
    }


# ---------------------------------------------------------------------- checkpoints and runs
def written(folder: Path) -> dict:
    """A checkpoint after a step; where one more leads from there, with and without having been interrupted."""
    _, policy = pair(*CASES["bias"])
    batch = example()
    policy.update(part_of(batch, policy.score(batch)), GRPO)
    for name in ("checkpoint", "again"):
        ranks.from_rank_0((folder / name).mkdir)
        policy.save(folder / name)
    one, other = ({f.name: f.read_bytes() for f in (folder / n).iterdir()} for n in ("checkpoint", "again"))
    policy.update(part_of(batch, policy.score(batch)), GRPO)
    if ranks.rank() == 0:
        torch.save(weights := weights_of(policy), folder / "weights.pt")
    else:
        weights = weights_of(policy)
    _, reader = pair(*CASES["bias"])
    reader.update(part_of(batch, reader.score(batch)), GRPO)  # elsewhere
    reader.load(folder / "checkpoint")
    reader.update(part_of(batch, reader.score(batch)), GRPO)
    return {
        "same bytes": one == other,
        "files": sorted(one),
        "updates": reader.updates,
        "goes on": all(torch.equal(w, weights[name]) for name, w in reader.weights()),
    }


def read(folder: Path) -> dict:
    """The checkpoint of another number of ranks, and the next step from there."""
    _, reader = pair(*CASES["bias"])
    reader.load(folder / "checkpoint")
    batch, weights = example(), torch.load(folder / "weights.pt")
    reader.update(part_of(batch, reader.score(batch)), GRPO)
    return {"apart": max(far(w, weights[name]) for name, w in reader.weights()), "updates": reader.updates}


def carry_out(run: RunConfig, path: Path, cache: Path) -> None:
    """Begin a run, or go on with it, all ranks together."""
    real = RunFolder.open(path, run.to_dict(), run.hash) if ranks.rank() == 0 else nullcontext()
    with real as opened:
        execute(run, SharedFolder(opened), cache=cache)


def killed(
    world: int, folder: Path, name: str, verb: str, call: int, victims: Collection[int], run: RunConfig = LAST
) -> list[int]:
    """Exit codes of ranks that begin a run, and of which some are killed as they are about to call a verb of
    their policy for the `call`-th time."""

    def begin(folder: Path) -> dict:
        real, calls = getattr(FSDPPolicy, verb), itertools.count(1)

        def deadly(*given, **named):
            if next(calls) == call and ranks.rank() in victims:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        setattr(FSDPPolicy, verb, deadly)
        carry_out(run, folder / name, folder)
        return {}

    return exit_codes(world, folder, begin)


def runs(folder: Path) -> dict:
    """Every arm; and those that were killed, gone on with: two ranks' and one's."""
    from moe_rl.storage.frames import diff

    for arm in ARMS:
        carry_out(RUN.replace(arm=arm, policy="fsdp"), folder / arm.name, folder)
    facts = {}
    for name in ("one-killed", "all-killed"):
        carry_out(LAST, folder / name, folder)
        manifests = (folder / LAST.arm.name / "manifest.json", folder / name / "manifest.json")
        digests = ranks.from_rank_0(lambda files=manifests: [read_json(f, ())["checkpoint"] for f in files])
        same = ranks.from_rank_0(lambda path=folder / name: diff(folder / LAST.arm.name, path) is None)
        facts[name] = {"tables": same, "weights": digests[0] == digests[1]}
    carry_out(LAST, folder / "1-to-2", folder)
    return facts


def served(folder: Path) -> dict:
    """Two steps on the rollouts of a server, replayed, whose weights come in files, and an export of them."""
    loaded = LoadedModel(build("qwen3_moe", **SIZES), byte_tokenizer())
    if ranks.rank() == 0:
        save_checkpoint(loaded.model, loaded.tokenizer, folder / "start")
    server = Server(folder / "served", loaded) if ranks.rank() == 0 else None
    url = ranks.from_rank_0(lambda: server and server.url)
    run = RUN.replace(
        policy="fsdp",
        steps=1,
        model=ModelConfig(name=str(folder / "start")),
        hf_checkpoints=(1,),
        arm=Arm(name="r3", routes="rollout"),
        engine=Component("server", url=url),
    )
    kept = []
    execute_module.load = lambda *given: kept.append(load(*given)) or kept[-1]
    carry_out(run, folder / "with-server", folder)
    execute_module.load = load
    facts: dict = {"pushes": None}
    if server:
        exported = load(ModelConfig(name=str(folder / "with-server/checkpoints/step=000001")), 0).model.state_dict()
        held = server.fake.engine.model.state_dict()
        facts = {
            "pushes": server.fake.pushes,
            "exported": all(torch.equal(w, held[name]) for name, w in exported.items()),
            "moved": max(far(w, loaded.model.state_dict()[name]) for name, w in exported.items()),
            "whole models": len(kept),
        }
        server.stop()
    return facts


# ---------------------------------------------------------------------- in anyone's loop
def hooks() -> dict:
    """Routes recorded and replayed under DDP and FSDP2, checkpointed, in a plain loop: rows and gradients of a rank."""
    tokens = torch.randint(3, 48, (4, 9), generator=torch.Generator().manual_seed(7))
    mine = slice(ranks.rank() * 4 // ranks.world(), (ranks.rank() + 1) * 4 // ranks.world())
    with torch.no_grad(), record_routing(whole := build("qwen3_moe")) as recording:
        whole(tokens)
    routes = recording.trace(tokens)
    perturb(whole, 0.3)

    def trained(model, rows) -> list:
        with replay_routing(model, routes.rows(rows)) as replay, record_routing(model) as used:
            model(tokens[rows]).logits.log_softmax(-1)[:, :-1].gather(2, tokens[rows, 1:, None]).sum().backward()
        return [replay.preferred, used.trace(tokens[rows])]

    preferred, _ = trained(whole, slice(None))
    sharded, facts = build("qwen3_moe"), {}
    sharded.load_state_dict(whole.state_dict())
    replicated = build("qwen3_moe")
    replicated.load_state_dict(whole.state_dict())
    checkpoint_activations(sharded, reentrant=False)
    for layer in sharded.model.layers:
        fully_shard(layer)
    for name, model in (("FSDP2", fully_shard(sharded)), ("DDP", DistributedDataParallel(replicated))):
        live, used = trained(model, mine)
        gradients = [
            (ranks.join_shards(p.grad) * ranks.world(), q.grad)
            for p, q in zip(model.parameters(), whole.parameters(), strict=True)
        ]
        right = live == preferred.rows(mine) and used == routes.rows(mine)
        facts[name] = [all(ranks.gather(right)), max(far(g, h) / h.abs().max().item() for g, h in gradients)]
    return facts


def memory() -> dict:
    """What a rank holds of a recording of 64 rows of 2,048 tokens in 48 layers, half of which it made."""
    batch, layout = wide()
    code = torch.arange(64)[:, None] * 3 + torch.arange(2047) % 3  # tells row and position
    rows = [*torch.arange(64)[ranks.rank() :: ranks.world()].split(16)]
    traces = [
        RoutingTrace.from_ids(code[r].to(torch.uint8)[..., None, None].expand(-1, -1, 48, 8), layout, check=False)
        for r in rows
    ]
    parts = [(torch.zeros(len(r), 2048), trace, None) for r, trace in zip(rows, traces, strict=True)]
    gathered = partial(FSDPPolicy._join, None, parts, batch, rows)
    held, trace = growth(lambda: gathered()[1])
    right = bool((trace.experts[:, :-1, 7, 3] == code).all() & ~trace.known[:, -1].any())
    everything = code.to(torch.uint8)[..., None, None].expand(-1, -1, 48, 8)
    sent, engines = growth(
        lambda: (
            from_rank_0(
                lambda: replace(
                    batch, rollout_routes=RoutingTrace.from_ids(everything.contiguous(), layout, check=False)
                )
            ).rollout_routes
        )
    )
    right &= bool((engines.experts[:, :2047] == everything).all())
    share = trace.experts.nbytes / ranks.world()
    return {
        "right": all(ranks.gather(right)),
        "shards held": max(ranks.gather(held / share)),
        "shards held of the engine's": max(ranks.gather(sent / share)),
    }


class Watched(Mapping):
    """Weights, and how large this process was at most when one of them had come."""

    def __init__(self, weights: Mapping):
        self.weights, self.largest, self.most = weights, 0, 0

    def __getitem__(self, name):
        tensor = self.weights[name]
        self.largest, self.most = max(self.largest, tensor.nbytes), max(self.most, resident())
        return tensor

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


def start_of_a_checkpoint(folder: Path) -> dict:
    """By how many bytes rank 0 grows at most while a policy takes over a checkpoint of 103 MB. The second time counts:
    the first one also imports, and makes buffers that stay."""
    shape = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 8}
    config = ModelConfig(name=str(folder / "large"))
    if ranks.rank() == 0:
        made = load(ModelConfig(overrides=shape), 0)
        save_checkpoint(made.model, made.tokenizer, folder / "large")
        whole = sum(p.nbytes for p in made.model.parameters())
        del made
    for _ in range(2):
        torch.distributed.barrier()
        policy, watched = None, Watched(outline(config).weights() if ranks.rank() == 0 else {})
        before = resident()
        policy = FSDPPolicy(config, watched if ranks.rank() == 0 else None, SETTINGS, **ROWS)
    if ranks.rank() == 0:
        theirs = dict(load(config, 0).model.state_dict())
    right = [torch.equal(w, theirs[name]) for name, w in policy.weights() if ranks.rank() == 0]
    if ranks.rank():
        return {}
    return {
        "right": all(right) and len(right) == len(theirs),
        "grown": watched.most - before,
        "whole": whole,
        "largest": watched.largest,
    }


def equal_everywhere() -> bool:
    """Whether every rank has what rank 0 alone had, of routes with combine weights."""
    batch, layout = make_batch(2, 2), Layout((MoeLayer("a", 0, 300, 2), MoeLayer("b", 1, 300, 2)), "sent")
    count, time = batch.tokens.shape
    ids = torch.rand(count, time, 2, 300, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :2]
    trace = RoutingTrace.from_ids(ids, layout, tokens=batch.tokens, attention_mask=batch.attention_mask)
    trace = RoutingTrace.cat(
        [replace(trace.rows(slice(a, b)), weight_version=v) for a, b, v in ((0, 1, "step 1"), (1, count, "step 2"))],
        batch.tokens,
        batch.attention_mask,
        mixed=True,
    )
    trace = replace(trace, gates=torch.rand(trace.shape, generator=torch.Generator().manual_seed(2)).half())
    got = from_rank_0(lambda: replace(batch, rollout_routes=trace) if ranks.rank() == 0 else None)
    same = got.rollout_routes == trace and torch.equal(got.rollout_routes.gates, trace.gates)
    return all(ranks.gather(same))


def verbs(folder: Path) -> dict:
    """All that needs no run."""
    found = {name: case(name) for name in CASES}
    return found | {
        "dial": noises(),
        "large": in_pieces(),
        "mixed": mixed(),
        "reduced": reduced(),
        "hooks": hooks(),
        "memory": memory(),
        "sent": equal_everywhere(),
        "nothing": from_rank_0(lambda: None) is None,
    }


def two(folder: Path) -> dict:
    return verbs(folder) | {
        "checkpoint": written(folder),
        "resumed": runs(folder),
        "served": served(folder),
        "start": start_of_a_checkpoint(folder),
    }


def four(folder: Path) -> dict:
    """With what two have written."""
    carry_out(LAST, folder / "2-to-4", folder)
    return {"budget": case("budget"), "checkpoint": read(folder)}


def one(folder: Path) -> dict:
    """Likewise."""
    carry_out(LAST, folder / "2-to-1", folder)
    return {"checkpoint": read(folder)}
