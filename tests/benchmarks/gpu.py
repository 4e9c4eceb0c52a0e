"""What a card does: updates of an OLMoE-1B-7B, its hooks, sampling, memory, volatility at 48 layers, and metrics.

    make bench-gpu                                              # three minutes on an H100
    python -m tests.benchmarks.gpu --device cpu --small         # the dry run: the same code, sizes of no meaning

Random weights in bfloat16: speed and memory do not depend on their values, but for how evenly experts are used.
Everything is timed by CUDA events after a warm-up; numbers are medians, overheads medians of ratios of neighbours.
Where the card is too small for all layers with gradients and moments, fewer are built, and the table says how many.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from moe_rl.config import Optimizer
from moe_rl.metrics.volatility import load_statistics, route_change
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import record_routing, replay_routing
from moe_rl.types import Prompt, Sampling, Scored, response_rows
from tests.benchmarks.card import card, free, matmul_rate, median, overhead
from tests.benchmarks.gpu_models import (
    GRPO,
    Sizes,
    products,
    random_batch,
    random_model,
    weighed,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:<index> or cpu (default: cuda)")
    parser.add_argument("--small", action="store_true", help="tiny models: to see that all of it runs")
    parser.add_argument("--layers", type=int, help="of the OLMoE (default: all)")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device here; the dry run is --device cpu --small")
    if device.type == "cpu" and not args.small:
        parser.error("on a CPU these sizes would take days; the dry run is --device cpu --small")
    torch.manual_seed(0)
    print(f"{card(device)}\n\n| what | measured |\n|---|---|", flush=True)
    sizes, started = Sizes.of(args.small), time.monotonic()
    for name, value in measured(sizes, device, args.layers):
        print(f"| {name} | {value} |", flush=True)
    print(f"| the whole benchmark | {time.monotonic() - started:.0f} s |")


def measured(sizes: Sizes, device: torch.device, layers: int | None) -> Iterator[tuple[str, str]]:
    """The rows of the table, as they are known."""
    peak = matmul_rate(sizes.matmul, device)
    yield f"bfloat16 product of two {sizes.matmul}² matrices", f"{peak / 1e12:.3g} TFLOP/s: the peak below"
    yield from olmoe(sizes, device, layers, peak)
    free(device)
    yield from deep(sizes, device)
    free(device)
    yield from metrics(sizes, device)


# ---------------------------------------------------------------------- OLMoE-1B-7B
def olmoe(sizes: Sizes, device: torch.device, layers: int | None, peak: float) -> Iterator[tuple[str, str]]:
    settings = sizes.olmoe | {"num_hidden_layers": layers or sizes.olmoe["num_hidden_layers"]}
    model = random_model("olmoe", settings, device)
    count, built, whole = sum(p.numel() for p in model.parameters()), settings["num_hidden_layers"], sizes.olmoe
    name = f"OLMoE-1B-7B, {built} of {whole['num_hidden_layers']} layers"
    yield (
        name,
        f"{count / 1e6:,.4g} M parameters, bfloat16, {sizes.rows} rows of {sizes.tokens} tokens, "
        f"{sizes.micro_batch_tokens} in a forward, activation checkpointing",
    )
    batch = random_batch(sizes.rows, sizes.tokens, settings["vocab_size"])
    policy = HFPolicy(
        model, Optimizer(lr=1e-6), micro_batch_tokens=sizes.micro_batch_tokens, activation_checkpointing="non-reentrant"
    )
    old = policy.score(batch)
    for title, replayed in (("live", False), ("under replay", True)):
        part = weighed(batch, old, replayed)
        spent = median(lambda: policy.update(part, GRPO), device, sizes.repeats)  # noqa: B023
        share, rate = products(settings, batch) / spent / peak, batch.tokens.numel() / spent
        yield f"update, {title}", f"{spent:.3g} s, {share:.0%} of the peak, {rate:,.0f} tokens/s"
    if device.type == "cuda":
        yield "peak memory of the updates", f"{torch.cuda.max_memory_allocated(device) / 1e9:.3g} GB"
    spent = median(lambda: policy.score(batch), device, sizes.repeats)
    yield "score", f"{spent:.3g} s, {batch.tokens.numel() / spent:,.0f} tokens/s"
    policy.optimizer.state.clear()
    policy.optimizer.zero_grad(set_to_none=True)
    del policy
    model.eval()  # no layer is checkpointed any more
    free(device)
    yield from hooks(model, sizes, device)
    yield from sampling(model, sizes, device)


def hooks(model: torch.nn.Module, sizes: Sizes, device: torch.device) -> Iterator[tuple[str, str]]:
    """What recording and replay add to a forward, and to one with its backward."""
    rows = max(1, sizes.micro_batch_tokens // sizes.tokens)
    tokens = torch.randint(3, model.config.vocab_size, (rows, sizes.tokens), device=device)
    with torch.no_grad(), record_routing(model) as recording:
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    trace = recording.trace(tokens)

    def run(gradient: bool, recorded: bool, replayed: bool) -> None:
        with ExitStack() as scope:
            scope.enter_context(torch.set_grad_enabled(gradient))
            replay = scope.enter_context(replay_routing(model, trace if replayed else None))
            recording = scope.enter_context(record_routing(model)) if recorded else None
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
            if gradient:
                logits.float().sum().backward()
            if recording:
                recording.trace(tokens)
            if replay:
                replay.preferred  # noqa: B018
        model.zero_grad(set_to_none=True)

    for title, gradient in (("forward", False), ("forward and backward", True)):
        plain = lambda: run(gradient, False, False)  # noqa: E731, B023
        for what, flags in (("recording", (True, False)), ("replay", (False, True))):
            cell = overhead(plain, lambda: run(gradient, *flags), device, sizes.pairs)  # noqa: B023
            yield f"{what}: {title} of {tokens.numel()} tokens", cell


class Tokenizer:
    """As much of one as sampling asks for: no token ends a completion, text is not looked at."""

    eos_token_id = None

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return [""] * len(rows)


def sampling(model: torch.nn.Module, sizes: Sizes, device: torch.device) -> Iterator[tuple[str, str]]:
    """Tokens per second of the engines, every completion of full length."""
    model.generation_config.eos_token_id = None
    drawn = torch.randint(3, model.config.vocab_size, (sizes.prompts, sizes.tokens // 2)).tolist()
    prompts, asked = [Prompt("", tokens=tuple(row)) for row in drawn], Sampling(max_new_tokens=sizes.new_tokens)
    count = sizes.prompts * 8 * sizes.new_tokens
    what = f"{sizes.prompts * 8} completions of {sizes.new_tokens} tokens after {sizes.tokens // 2}"

    def rate(recorded: bool) -> float:
        engine = HFEngine(model, Tokenizer(), record_routes=recorded)  # type: ignore[arg-type]
        return count / median(lambda: engine.generate(prompts, 8, key=(0,), sampling=asked), device, 2)

    free(device)
    with_routes, without = rate(True), rate(False)
    yield f"sampling, Hugging Face engine: {what}", f"{with_routes:,.0f} tokens/s, without routes {without:,.0f}"
    yield "sampled with a cache, scored again", gap(model, prompts, asked, sizes)
    yield "sampling, vLLM", vllm_rate(model, prompts, asked, count, device)


def gap(model: torch.nn.Module, prompts: list[Prompt], asked: Sampling, sizes: Sizes) -> str:
    """How far the engine and the trainer are apart, at equal weights."""
    drawn = HFEngine(model, Tokenizer()).generate(prompts, 8, key=(0,), sampling=asked)  # type: ignore[arg-type]
    batch = collate(drawn, [i // 8 for i in range(len(drawn))], [0.0] * len(drawn), 0)
    scored = HFPolicy(model, Optimizer(), micro_batch_tokens=sizes.micro_batch_tokens).score(batch)
    assert batch.rollout_routes is not None and batch.rollout_logprobs is not None
    change = route_change(batch.rollout_routes.ids(), scored.routes.ids(), response_rows(batch)).row()
    log_ratio = (scored.logprobs - batch.rollout_logprobs)[batch.response_mask].double()
    kl = (log_ratio.exp() - 1 - log_ratio).mean().item()
    return (
        f"k3 KL {kl:.2g} nats per token, largest gap of a log-prob {log_ratio.abs().max().item():.2g} nats, "
        f"expert change rate {change['expert_change_rate']:.2%}, any change rate {change['any_change_rate']:.2%}"
    )


def vllm_rate(model: torch.nn.Module, prompts: list[Prompt], asked: Sampling, count: int, device: torch.device) -> str:
    """Beside the model, on the same card, with the same weights."""
    if device.type != "cuda":
        return "not run: it needs a card"
    try:
        import vllm  # noqa: F401
    except ImportError:
        return "not run: vLLM is not installed here"
    from moe_rl.integrations.shards import checkpoint_weights, describe
    from moe_rl.integrations.vllm.engine import VLLMEngine
    from moe_rl.models.tokens import byte_tokenizer

    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        describe(model, tokenizer, Path(folder))
        engine = VLLMEngine(
            Path(folder),
            tokenizer,
            dtype="bfloat16",
            memory=0.4,
            max_tokens=len(prompts[0].tokens) + asked.max_new_tokens,
        )
        try:
            engine.push(checkpoint_weights(engine.model, model.state_dict().items()))
            lengths: list[int] = []

            def draw() -> None:
                found = engine.generate(prompts, 8, key=(0,), sampling=asked)
                lengths.append(sum(len(rollout.tokens) for rollout in found))

            spent = median(draw, device, 2)
        finally:
            engine.close()
    return f"{lengths[-1] / spent:,.0f} tokens/s, with routes ({lengths[-1] / count:.0%} of the full lengths)"


# ---------------------------------------------------------------------- 48 layers
def deep(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, str]]:
    """Expert change per update at lr 1e-6, beside that of scoring again at equal weights."""
    model = random_model("qwen3_moe", sizes.deep, device)
    count = sum(p.numel() for p in model.parameters())
    batch = random_batch(sizes.rows, sizes.tokens, sizes.deep["vocab_size"])
    policy = HFPolicy(
        model, Optimizer(lr=1e-6), micro_batch_tokens=sizes.micro_batch_tokens, activation_checkpointing="non-reentrant"
    )
    other = HFPolicy(model, Optimizer(lr=1e-6), micro_batch_tokens=sizes.micro_batch_tokens // 2)
    yield f"{sizes.deep['num_hidden_layers']} layers, random", f"{count / 1e6:,.4g} M parameters, bfloat16, lr 1e-6"
    rows, unconstrained = response_rows(batch), policy.score(batch)

    def change(before: Scored, after: Scored) -> dict[str, float]:
        return route_change(before.routes.ids(), after.routes.ids(), rows).row()

    def told(found: list[dict[str, float]]) -> str:
        cells = [
            f"{name.replace('_', ' ')} {statistics.median(f[name] for f in found):.2%}"
            for name in ("expert_change_rate", "any_change_rate", "any_layer_change")
        ]
        return ", ".join(cells)

    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    permuted = policy.score(batch.rows(order)).rows(order.argsort(), batch.tokens.shape[1])
    for title, again in (
        ("again", policy.score(batch)),
        ("rows permuted", permuted),
        ("half the tokens in a forward", other.score(batch)),
    ):
        yield f"noise floor: {title}", told([change(unconstrained, again)])
    found, moved = [], []
    for _ in range(sizes.updates):
        before = [p.detach().clone() for p in model.parameters()]
        policy.update(weighed(batch, unconstrained, False), GRPO)
        changed = sum(int((p != b).sum()) for p, b in zip(model.parameters(), before, strict=True))
        moved.append(changed / count)
        after = policy.score(batch)
        found.append(change(unconstrained, after))
        unconstrained = after
    yield f"volatility per update, median of {sizes.updates}", told(found)
    yield "weights that an update moves", f"{statistics.median(moved):.2%}: smaller steps are rounded away in bfloat16"


# ---------------------------------------------------------------------- metrics
def metrics(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, str]]:
    """Routing metrics of many tokens at the shape of Qwen3-30B-A3B: a tenth of the (token, layer) pairs changed."""
    layers, experts, k, rows = 48, 128, 8, sizes.compared // 1024
    some = torch.rand(4096, layers, experts, device=device).argsort(-1)[..., :k].to(torch.uint8)
    before = some.repeat(sizes.compared // 4096, 1, 1).view(rows, 1024, layers, k)
    changed = torch.rand(before.shape[:3], device=device) < 0.1
    after = before.where(~changed[..., None], before.roll(7, 1))
    mask = torch.ones(rows, 1024, dtype=torch.bool, device=device)
    for name, call in (
        ("route_change", lambda: route_change(before, after, mask)),
        ("load_statistics", lambda: load_statistics(before, experts, mask)),
    ):
        free(device)
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        spent = median(call, device, sizes.repeats)
        grown = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
        yield (
            f"{name}: {sizes.compared / 1e6:.2g} M tokens, {layers} layers, {k} of {experts} experts",
            (f"{spent * 1e3:.3g} ms, {grown / 1e9:.3g} GB beside the traces"),
        )


if __name__ == "__main__":
    main()
