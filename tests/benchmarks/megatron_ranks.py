"""What a rank of Megatron-core holds and what reaches it, beside the formulas of docs/distributed.md.

    python -m tests.benchmarks.megatron_ranks --ranks 2             # every layout of two CPU ranks, fp32, gloo
    python -m tests.benchmarks.megatron_ranks --ranks 4 --family deepseek_v3

Held: bytes of weights, gradients and moments, and the peak of the process over what it had after the imports, which
adds activations, the Hugging Face model that rank 0 reads from, and what malloc keeps. Received: bytes of tensors that
collectives brought to a rank from others, the largest of all ranks, by the verb that asked for them. The ranks are
forks of one process and print one table. No time is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from moe_rl import ranks
from moe_rl.config import Arm, ModelConfig, Optimizer
from moe_rl.integrations.megatron.layout import Parallel, expert_tensor
from moe_rl.models.load import load
from moe_rl.objectives import objective_of
from moe_rl.rollouts.batches import collate
from moe_rl.types import Batch, Prompt, Rollout
from tests.integrations.megatron_layouts import of_ranks

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "kv_lora_rank": 64,
    "num_key_value_heads": 8,
    "n_group": 1,
    "topk_group": 1,
}
ROWS, TOKENS, MICRO_BATCH = 32, 65, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--family", default="qwen3_moe", choices=("qwen3_moe", "deepseek_v3"))
    args = parser.parse_args()
    import moe_rl.integrations.megatron.policy  # noqa: F401 - once for all forks

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    print(
        f"{args.family}, {ROWS} rows of {TOKENS} tokens, micro-batches of {MICRO_BATCH}; MB = 10^6 bytes; "
        "measured / formula"
    )
    print(f"{'layout':10} {'state':>17} {'peak':>6} {'routes':>13} {'dispatch':>15} {'gradients':>15} {'weights':>13}")
    for name in of_ranks(args.ranks):  # a process has one peak in its life: each layout gets processes of its own
        start_processes(one, (name, args.family), args.ranks, start_method="fork")


def one(rank: int, name: str, family: str) -> None:
    """One rank of one layout."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from moe_rl.integrations.megatron.policy import MegatronPolicy

    torch.set_num_threads(1)
    ranks.join("cpu")
    parallel: Parallel = of_ranks(ranks.world())[name]
    reset_peak()
    before = resident("VmRSS")
    received: Counter[str] = Counter()
    listen(received)
    model = load(
        ModelConfig(name=f"{family}-tiny", overrides=SHAPE | (DEEPSEEK if family == "deepseek_v3" else {})), seed=0
    ).model
    numbers = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    experts = sum(n for name, n in numbers.items() if ".mlp.experts." in name)
    config = model.config
    policy = MegatronPolicy(model, Optimizer(), parallel, micro_batch=MICRO_BATCH, score_batch=MICRO_BATCH)
    del model
    gc.collect()
    batch = rollouts(config.vocab_size)

    def during(verb: Callable[[], Any]) -> tuple[Any, Counter[str]]:
        received.clear()
        return verb(), Counter(received)

    scored, score = during(lambda: policy.score(batch))
    objective = objective_of(Arm(name="grpo"))
    part = objective.attach_weights(replace(batch, old_logprobs=scored.logprobs))
    _, update = during(lambda: policy.update(part, objective))
    _, pushed = during(lambda: [None for _ in policy.weights()])

    p, tokens, moe_layers = parallel, ROWS * (TOKENS - 1), len(policy.layout.moe_layers)
    k, etp = config.num_experts_per_tok, expert_tensor(p)
    rest = sum(numbers.values()) - experts
    held = held_parameters(experts, rest, p, etp)
    here = tokens / (p.dp * p.tp) * moe_layers / p.pp  # routed on this rank
    half = 4 * k * config.hidden_size * here * (p.ep - 1) / p.ep  # of which others hold the experts, there or back
    columns = [
        (state_bytes(policy), 16 * held),
        (resident("VmHWM") - before, None),
        (score["routes"], tokens * moe_layers * k * (1 - 1 / ranks.world())),
        (score["dispatch"], 2 * half),
        (
            update["gradients"],
            4 * (rest / (p.tp * p.pp) if p.dp > 1 else 0)
            + 4 * (experts / (p.pp * p.ep * etp) if p.dp * p.tp > p.ep * etp else 0),
        ),
        (sum(pushed.values()), 4 * (sum(numbers.values()) - held)),
    ]
    largest = ranks.gather([measured for measured, _ in columns])
    if rank == 0:
        cells = [(max(found), formula) for found, (_, formula) in zip(zip(*largest, strict=True), columns, strict=True)]
        words = [f"{m / 1e6:.2f}" + ("" if f is None else f" / {f / 1e6:.2f}") for m, f in cells]
        widths = (17, 6, 13, 15, 15, 13)
        print(f"{name:10}", *(f"{word:>{width}}" for word, width in zip(words, widths, strict=True)), flush=True)
    ranks.leave()


def held_parameters(experts: float, rest: float, p: Parallel, etp: int) -> float:
    """Parameters of a rank, as docs/distributed.md has them."""
    return experts / (p.pp * p.ep * etp) + rest / (p.tp * p.pp)


def state_bytes(policy: Any) -> int:
    """Weights, gradients and moments on this rank."""
    weights = sum(p.nbytes for p in policy.gpt.parameters())
    buffers = [*policy.module.buffers, *policy.module.expert_parallel_buffers]
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    moments = sum(x.nbytes for part in parts for state in part.optimizer.state.values() for x in state.values())
    return weights + sum(buffer.grad_data.nbytes for buffer in buffers) + moments


def rollouts(vocabulary: int):
    """A batch of equal rows, half of each a response."""
    generator = torch.Generator().manual_seed(0)
    half = TOKENS // 2
    made = []
    for _ in range(ROWS):
        drawn = torch.randint(3, vocabulary, (TOKENS,), generator=generator).tolist()
        made.append(
            Rollout(Prompt("", tokens=tuple(drawn[:half])), tuple(drawn[half:]), torch.zeros(TOKENS - half), "", True)
        )
    batch = collate(made, list(range(ROWS)), [0.0] * ROWS, 0)
    advantages = torch.randn(ROWS, 1, generator=generator) * batch.response_mask
    return Batch(**vars(batch), old_logprobs=torch.zeros_like(advantages), advantages=advantages)


def listen(received: Counter[str]) -> None:
    """Count what every collective of a process group brings to this rank, under what it is for."""
    group = dist.ProcessGroup

    def count(method: str, incoming: Callable[[Any, tuple], int], kind: Callable[[tuple], str]) -> None:
        original = getattr(group, method)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.size() > 1:
                received[kind(args)] += incoming(self, args)
            return original(self, *args, **kwargs)

        setattr(group, method, counted)

    def gathered(self: Any, args: tuple) -> int:
        return args[1][0].nbytes * (self.size() - 1)

    def from_others(self: Any, args: tuple) -> int:
        output, _, sizes = args[:3]
        mine = int(sizes[self.rank()]) if len(sizes) else len(output) // self.size()
        return output[: len(output) - mine].nbytes

    def named(name: str) -> Callable[[tuple], str]:
        return lambda args: name

    count("allgather", gathered, lambda args: "routes" if args[1][0].dtype == torch.uint8 else "gathered")
    exchange = "all_to_all_single" if hasattr(group, "all_to_all_single") else "alltoall_base"  # older than torch 2.13
    count(exchange, from_others, lambda args: "dispatch" if args[0].dim() > 1 else "dispatch's sizes and gates")
    for sums in ("allreduce", "allreduce_coalesced"):
        count(
            sums,
            lambda self, args: sum(x.nbytes for x in args[0]),
            lambda args: "gradients" if args[0][0].dim() == 1 and args[0][0].nbytes > 1e5 else "sums",
        )
    count("broadcast", lambda self, args: 0 if args[1].rootRank == self.rank() else args[0][0].nbytes, named("sent"))


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
