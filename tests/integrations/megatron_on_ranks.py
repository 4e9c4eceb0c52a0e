"""What ranks of Megatron-core do, against a Hugging Face policy on rank 0: facts as JSON, for `test_megatron.py`.

    torchrun --nproc-per-node 2 tests/integrations/megatron_on_ranks.py FOLDER
    python tests/integrations/megatron_on_ranks.py FOLDER 4

Megatron's process groups belong to a process, so one launch does everything for one number of ranks, layout after
layout. At the end of the one of two, rank 1 fails in the middle of an update, on purpose: the job must end, and say
why. That is for torchrun to notice; without it so many ranks are forks of one process, which imports for all of them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from moe_rl import ranks
from moe_rl.config import ModelConfig, RunConfig
from moe_rl.errors import RunError
from moe_rl.integrations.shards import outline
from moe_rl.integrations.vllm.push import CheckedEngine, Tolerance, probe_prompts
from moe_rl.integrations.vllm.server import ServerEngine
from moe_rl.models.load import save_checkpoint, skeleton
from moe_rl.policies.hf import HFPolicy
from moe_rl.registry import Component
from moe_rl.storage.folder import RunFolder, SharedFolder
from tests.conftest import build
from tests.integrations.megatron_layouts import (
    LAYOUTS,
    OBJECTIVE,
    ON_RANKS,
    ROWS,
    SETTINGS,
    compared,
    example,
    failing,
    far,
    growth,
    layout,
    megatron,
    of_family,
    of_ranks,
    weights_of,
    wide,
)
from tests.integrations.megatron_study import short, study
from tests.integrations.test_server import Server
from tests.policies.test_hf import part_of
from tests.rollouts.fake_engine import small

torch.set_num_threads(1)


def main(folder: Path) -> None:
    ranks.join("cpu")
    ranks.from_rank_0(folder.mkdir)
    facts, here = {}, of_ranks(ranks.world())
    for name, parallel in here.items():
        for recompute in (False, True):  # and with tied embeddings
            facts[name + "+recompute" * recompute] = layout(parallel, recompute, tied=recompute)
    for name, other in zip(here, [*here][1:] + [*here][:1], strict=True):
        facts[f"{name} checkpoint"] = checkpoint(folder, name, other)
    if ranks.world() == 2:
        for name, where in ON_RANKS.items():
            family = name.split()[0]
            facts[name] = compared(partial(of_family, family), LAYOUTS[where], recompute=where == "pp2")
        make = partial(build, "qwen3_moe", norm_topk_prob=False, num_experts_per_tok=3)
        facts["unnormalised"] = compared(make, LAYOUTS["ep2"], recompute=False)
        facts["resumed"] = resumed(folder)
        facts["server"] = server(folder)
        facts["memory"] = memory()
    else:
        for name in here:
            run = short.replace(policy=Component("megatron", **vars(here[name])))
            carry_out(run, folder / "runs" / name, folder)
    if ranks.rank() == 0:
        (folder / "facts.json").write_text(json.dumps(facts))
    if ranks.world() == 2:
        die_on_rank_1()
    ranks.leave()


def nothing(rows: dict) -> None:
    """Does so, between two steps."""


def carry_out(run: RunConfig, path: Path, cache: Path, listen: Callable[[dict], None] = nothing) -> None:
    """Begin a run, or go on with it, all ranks together."""
    from moe_rl.build import execute

    real = RunFolder.open(path, run.to_dict(), run.hash) if ranks.rank() == 0 else nullcontext()
    with real as opened:
        execute(run, SharedFolder(opened), cache=cache, listen=listen)


def checkpoint(folder: Path, name: str, other: str) -> dict:
    """Written in one layout after a step, read, and trained on. One of them holds a model whose layers differ."""
    make = partial(build, "qwen3_moe", num_hidden_layers=2)
    if name == "pp2":
        make = partial(of_family, "deepseek_v3")
    hf = HFPolicy(make(), SETTINGS, **ROWS)
    batch, facts = example(), {}
    writer = megatron(make(), LAYOUTS[name])
    for policy in (hf, writer):
        policy.update(part_of(batch, policy.score(batch)), OBJECTIVE)
    target = folder / f"checkpoint-{name}"
    ranks.from_rank_0(target.mkdir)
    writer.save(target)
    written = weights_of(writer)
    writer.update(part_of(batch, writer.score(batch)), OBJECTIVE)
    hf.update(part_of(batch, hf.score(batch)), OBJECTIVE)
    second = weights_of(writer)
    reader = megatron(make(seed=5), LAYOUTS[name])
    reader.load(target)
    facts["weights"] = all(torch.equal(w, written[n]) for n, w in reader.weights())
    reader.update(part_of(batch, reader.score(batch)), OBJECTIVE)
    facts["next step"] = far(hf.score(batch).logprobs, reader.score(batch).logprobs)
    facts["next step, bits"] = all(torch.equal(w, second[n]) for n, w in reader.weights())
    try:
        megatron(make(), LAYOUTS[other]).load(target)
    except RunError as error:
        facts["refused"] = str(error)
    facts["moved"] = max(far(w, second[n]) for n, w in written.items())
    return facts


def server(folder: Path) -> dict:
    """Pushes to a server on rank 0, of weights that every rank holds parts of; the second one follows a step."""
    loaded, facts = small(), {}
    ranks.from_rank_0(lambda: save_checkpoint(loaded.model, loaded.tokenizer, folder / "start"))
    config = ModelConfig(name=str(folder / "start"))
    weights = outline(config).weights() if ranks.rank() == 0 else None
    policy = megatron(skeleton(config), LAYOUTS["ep2"], weights=weights)
    served = Server(folder / "served", loaded) if ranks.rank() == 0 else None
    engine = served and ServerEngine(served.url, served.fake.folder, loaded.tokenizer)
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


def resumed(folder: Path) -> dict:
    """A run interrupted after its first step and gone on with, against one that was not."""
    from moe_rl.storage.frames import diff

    less = {"prompts_per_step": 2, "eval_prompts": 2, "mini_batches": 2, "measure.detail_every": 10}
    run = study.base.replace(policy=Component("megatron", **vars(LAYOUTS["ep2"])), steps=2, save_every=1, **less)

    def interrupt(rows: dict) -> None:
        if rows["steps"][0]["step"] == 1:
            raise KeyboardInterrupt

    whole, cut = folder / "whole", folder / "cut"
    for path, listen in ((whole, nothing), (cut, interrupt), (cut, nothing)):
        with suppress(KeyboardInterrupt):
            carry_out(run, path, folder / "cache", listen)
    manifests = (whole / "manifest.json", cut / "manifest.json")
    digests = ranks.from_rank_0(lambda: [json.loads(file.read_text())["checkpoint"] for file in manifests])
    return {"tables": ranks.from_rank_0(lambda: diff(whole, cut) is None), "weights": digests[0] == digests[1]}


def memory() -> dict:
    """What a rank holds of a recording of 64 rows of 2,048 tokens in 48 layers, half of which are its own."""
    from moe_rl.integrations.megatron.replay import own_targets, shared_trace

    megatron(build("qwen3_moe"), LAYOUTS["dp2"])  # the groups of this layout
    batch, layout = wide()
    mask = batch.attention_mask
    code = torch.arange(64)[:, None] * 3 + torch.arange(2047) % 3  # tells row and position
    mine = code[32 * ranks.rank() :][:32].to(torch.uint8).T[None, :, :, None].expand(48, -1, -1, 8)
    parts = [part.contiguous() for part in mine.split(16, 2)]
    grown, trace = growth(lambda: shared_trace(parts, batch, layout))
    known = trace.experts[:, :-1, 7, 3].long() == code
    right = known[mask[:, 1:]].all() & ~trace.known[5, 999:].any() & ~trace.known[:, -1].any()
    facts = {"right": bool(right)}
    targets = own_targets(batch, trace, layout, torch.arange(32) + 32 * ranks.rank(), slice(None), 2047)
    held = torch.tensor([grown, targets.nbytes]).double() / (trace.experts.nbytes / 2)
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX)
    facts["aimed"] = torch.equal(targets, trace.experts[32 * ranks.rank() :][:32, :-1])
    return facts | {"shards held": held[0].item(), "shards aimed": held[1].item()}


def die_on_rank_1() -> None:
    """In the forward of an update, while rank 0 waits for the other half of the experts."""
    policy = megatron(build("qwen3_moe"), LAYOUTS["ep2"])
    batch = example()
    old = policy.score(batch)
    policy.update(part_of(batch, old), replace(OBJECTIVE, loss=failing if ranks.rank() else OBJECTIVE.loss))
    raise AssertionError("rank 0 went on without rank 1")


def forked(folder: Path, world: int) -> int:
    """Ranks in the environment that torchrun gives them; the exit code. The first that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    left = set()
    for rank in map(str, range(world)):
        if not (child := os.fork()):
            os.environ.update(RANK=rank, LOCAL_RANK=rank)
            try:
                main(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        left.add(child)
    code = 0
    while left:
        ended, status = os.wait()
        left.discard(ended)
        if status and not code:
            code = 1
            for child in left:
                os.kill(child, signal.SIGKILL)
    return code


if __name__ == "__main__":
    if ranks.launched():
        main(Path(sys.argv[1]))
    else:
        for late in ("moe_rl.build", "moe_rl.integrations.megatron.policy"):
            importlib.import_module(late)
        build("qwen3_moe")  # transformers imports a family when its first model is built
        sys.exit(forked(Path(sys.argv[1]), int(sys.argv[2])))
