"""Every broken engine in every family, two faults at once, and honest files by the hundred, for `moe-rl diagnose`.

    python tests/benchmarks/broken_engines.py                  # all of it, a table each
    python tests/benchmarks/broken_engines.py faults           # 26 faults × 5 families: named, not named, wrongly
    python tests/benchmarks/broken_engines.py bfloat16         # faults of routers and routes, engine in bfloat16
    python tests/benchmarks/broken_engines.py pairs            # two at once: both named, one, neither, wrongly
    python tests/benchmarks/broken_engines.py honest --files 200

Prints a line each as it goes, then tables.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter

import torch

from moe_rl.analysis.diagnose import diagnose
from moe_rl.analysis.diagnose.diagnosis import Diagnosis
from moe_rl.analysis.diagnose.responses import Rollouts
from moe_rl.analysis.diagnose.scoring import Scorer
from moe_rl.routing import layout_of
from moe_rl.types import Prompt
from tests.analysis.broken_engines import (
    ALSO,
    FAULTS,
    VOCABULARY,
    Bench,
    expected,
    logits_of,
    picked,
    possible,
    sampled,
    with_gates,
)

FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "olmoe")
ROUTES = FAULTS[: FAULTS.index("sorted_ids") + 1]
ROUTERS = ("router_int8", "router_fp8", "lost_bias", "gates", "top_k")
PAIRS = (("lost_bias", "layer_shift"), ("router_int8", "row_shift"), ("gates", "zero_rows"),
         ("weight_version", "stale_prefix"), ("zero_rows", "overwritten_layer"), ("lost_bias", "temperature"),
         ("gates", "temperature"), ("router_int8", "temperature"), ("gates", "logprob_shift"),
         ("head_not_pushed", "gates"), ("top_k", "kept_set"), ("top_k", "positions"))  # fmt: skip
SILENT = ((), ("rounding",), ("dtype",), ("unexplained",), ("routing",))
"""Answers that name no fault of those that can be told by name."""


# ---------------------------------------------------------------------- more engines
def versions(bench: Bench) -> list[dict]:
    """Every second response is of the checkpoint before, and the file says so."""
    both = zip(bench.honest(), bench.weight_version(), strict=True)
    return [older | {"weight_version": "6"} if i % 2 else entry | {"weight_version": "7"}
            for i, (entry, older) in enumerate(both)]


def cache(bench: Bench) -> list[dict]:
    """Every second response goes on from a cached prefix of other weights."""
    return [{k: v for k, v in e.items() if k != "weight_version"} | {"cached_tokens": 3 * (e["weight_version"] == "6")}
            for e in versions(bench)]


def lost_scaling(bench: Bench) -> list[dict]:
    def change(model: torch.nn.Module) -> None:
        for router in bench.routers(model):
            router.routed_scaling_factor = 1.0

    return bench.honest(change=change)


def attention_scaled(bench: Bench) -> list[dict]:
    def change(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), float):
                module.scaling *= 1.3

    return bench.honest(change=change)


def router_int4(bench: Bench) -> list[dict]:
    def rounded(w: torch.Tensor) -> torch.Tensor:
        scale = w.abs().amax(1, keepdim=True) / 7
        return (w / scale).round() * scale

    return bench._rounded(rounded)


UNKNOWN = "unexplained"
MORE = {"some_versions": (versions, "weight_version"), "stale_cache": (cache, "stale_cache"),
        "lost_scaling": (lost_scaling, "lost_scaling"), "unknown_weights": (Bench.weight_version, UNKNOWN),
        "attention_scaled": (attention_scaled, UNKNOWN), "router_int4": (router_int4, UNKNOWN)}
"""Engines that are broken in still other ways, the last three in ways that it does not know: whatever it names of these
is wrong."""


def fits(fault: str, bench: Bench) -> bool:
    if fault == "lost_scaling":
        return getattr(bench.model.config, "routed_scaling_factor", 1.0) != 1.0
    return possible(fault, bench)


def made(fault: str, bench: Bench) -> tuple[list[dict], str]:
    """What the broken engine reports, and the cause to be named."""
    if fault in MORE:
        engine, cause = MORE[fault]
        return engine(bench), cause
    return getattr(bench, fault)(), expected(fault, bench)


def both(bench: Bench, first: str, second: str) -> list[dict]:
    """What an engine with two faults reports: of a model changed for the first, the second made as ever; where the
    first is one of routes, of these."""
    changes: list = []
    probe, pair = copy.copy(bench), copy.copy(bench)
    probe.honest = lambda change=None, **_: changes.append(change) or []  # type: ignore[method-assign]
    getattr(probe, first)()
    if changes[0] is None:
        pair.honest = lambda *_, **__: getattr(bench, first)()  # type: ignore[method-assign]
    else:
        pair.engine = lambda change=lambda m: None: bench.engine(  # type: ignore[method-assign]
            lambda m: (changes[0](m), change(m)))
    return getattr(pair, second)()


# ---------------------------------------------------------------------- named or not
def faults(which: tuple[str, ...], families: tuple[str, ...], seed: int, engine: torch.dtype | None = None,
           trainer: torch.dtype = torch.float32) -> None:
    table: dict[str, dict[str, str]] = {fault: {} for fault in which}
    counts: Counter[str] = Counter()
    for family in families:
        bench = Bench(family, seed=seed, dtype=engine)
        model = bench.model if trainer == torch.float32 else bench.engine()
        for fault in which:
            if not fits(fault, bench):
                continue
            entries, wanted = made(fault, bench)
            also = {"older": bench.older().to(trainer)} if fault in ALSO else None
            found = diagnose(entries, model, tokenizer=bench.tokenizer, also=also)
            right = found.causes[:1] == (wanted,) or wanted == UNKNOWN and found.causes == ("routing",)
            what = "named" if right else "not named" if found.causes in SILENT else "WRONG"
            counts[what] += 1
            answer = "+".join(found.causes) + "".join(f" or {x}" for x in found.equally)
            table[fault][family] = {"named": "✓", "not named": answer or "no gap"}.get(what, f"WRONG: {answer}")
            if answer != wanted and what == "named":
                table[fault][family] += f" {answer.removeprefix(wanted)}"
            print(family, fault, what, answer, f"KL {found.fits[0].mean:.2g}", f"rounding {found.fits[2].mean:.2g}",
                  nearest(found), sep="\t", flush=True)
    print(f"\nengine in {engine or torch.float32}, trainer in {trainer}: {dict(counts)}\n")
    print("| fault |", " | ".join(families), "|\n|" + "---|" * (1 + len(families)))
    for fault, row in table.items():
        print(f"| {fault} |", " | ".join(row.get(family, "–") for family in families), "|")
    print(flush=True)


def nearest(found: Diagnosis) -> str:
    """The three hypotheses that leave least of the gap, and how much, with the upper end of its interval."""
    left = sorted((x, name) for name, x in found.left.items() if "forced" not in name)[:3]
    return "; ".join(f"{name} {100 * x[0]:.2g} % [{100 * x[2]:.2g}]" for x, name in left)


def pairs(families: tuple[str, ...], seed: int) -> None:
    counts: Counter[str] = Counter()
    for family in families:
        bench = Bench(family, seed=seed)
        for two in PAIRS:
            if not all(fits(fault, bench) for fault in two):
                continue
            entries = both(bench, *two)
            also = {"older": bench.older()} if set(two) & ALSO else None
            found = diagnose(entries, bench.model, tokenizer=bench.tokenizer, also=also)
            wanted = [expected(fault, bench) for fault in two]
            named = [cause for cause in wanted if cause in found.causes]
            what = "both" if len(named) == 2 else "one" if named else "neither"
            if set(found.causes) - set(wanted) - {"unexplained", "routing", "rounding"}:
                what = "WRONG"
            elif what == "one":  # of faults of log-probs it has to be the larger
                sizes = [gap(bench, made(fault, bench)[0]) for fault in two]
                larger = sizes[wanted.index(named[0])] >= 0.5 * max(sizes)
                what = "one, the larger" if larger else "one, the smaller"
            counts[what] += 1
            print(family, " and ".join(two), what, *found.causes, *(f"or {x}" for x in found.equally), sep="\t",
                  flush=True)
    print(f"\ntwo faults at once: {dict(counts)}\n", flush=True)


def gap(bench: Bench, entries: list[dict]) -> float:
    """The natural KL, nats per token."""
    read = Rollouts(entries, layout_of(bench.model), vocabulary=VOCABULARY)
    return Scorer(bench.model, read.responses).base.mean


# ---------------------------------------------------------------------- nothing to name
VARIANTS = ("plain", "without routes", "top-p", "two turns", "versions and caches", "combine weights")


def honest_file(bench: Bench, variant: str, temperature: float) -> list[dict]:
    """What an honest engine reports."""
    engine = bench.engine()
    if variant == "top-p":  # log-probs over the whole vocabulary
        drawn = sampled(engine, bench.tokenizer, bench.asked, bench.seed, temperature=temperature, top_p=0.8)
        return [e | {"logprobs": picked(logits_of(engine, e) / temperature, e)} for e in drawn]
    entries = bench.honest(temperature)
    if variant == "without routes":
        return [{k: v for k, v in e.items() if k != "routes"} for e in entries]
    if variant == "two turns":  # what an environment says is between them
        said = [[3 + (7 * i + j) % 37 for j in range(2 + i % 4)] for i in range(len(entries))]
        asked = [Prompt("", tokens=(*e["tokens"], *words)) for e, words in zip(entries, said, strict=True)]
        more = sampled(engine, bench.tokenizer, asked, bench.seed + 1, temperature=temperature)
        return [e | {"prompt_length": first["prompt_length"],
                     "logprobs": [*first["logprobs"], *[None] * len(words), *e["logprobs"]]}
                for first, words, e in zip(entries, said, more, strict=True)]
    if variant == "versions and caches":  # a push that changed nothing, a cache that is right
        return [e | {"weight_version": str(6 + i % 3), "cached_tokens": i % 2 * 3} for i, e in enumerate(entries)]
    return with_gates(engine, entries) if variant == "combine weights" else entries


def honest(files: int, start: int) -> None:
    """Families, dtypes of engine and trainer, variants, temperatures and numbers of responses in turn."""
    alarms: Counter[tuple[str, str]] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    for n in range(start, start + files):
        family, half = FAMILIES[n % 5], (None, torch.bfloat16)[n // 5 % 2]
        variant, temperature = VARIANTS[n % 6], (1.0, 0.7, 1.3)[n // 7 % 3]
        bench = Bench(family, count=8 + n % 9, seed=n, dtype=half)
        trainer = bench.engine() if half and n // 10 % 2 else bench.model  # bfloat16 against bfloat16, and float32
        found = diagnose(honest_file(bench, variant, temperature), trainer, tokenizer=bench.tokenizer)
        numerics = "bfloat16" if half else "float32"
        numerics += " against bfloat16" if next(trainer.parameters()).dtype == torch.bfloat16 else " against float32"
        for key in ((family, numerics), (variant, numerics)):
            seen[key] += 1
            alarms[key] += found.fault
        print(n, family, numerics, variant, temperature, found.responses, "+".join(found.causes),
              f"{found.fits[0].mean:.2g}", found.verdict if found.fault else nearest(found), sep="\t", flush=True)
    columns = list(dict.fromkeys(numerics for _, numerics in sorted(seen)))
    print("\nfalse alarms / honest files\n")
    print("| |", " | ".join(columns), "|\n|" + "---|" * (1 + len(columns)))
    for row in (*FAMILIES, *VARIANTS):
        print(f"| {row} |", " | ".join(f"{alarms[row, c]} / {seen[row, c]}" for c in columns), "|")
    total = sum(alarms[family, c] for family in FAMILIES for c in columns)
    print(f"\n{total} false alarms on {files} honest files\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all",
                        choices=("all", "faults", "bfloat16", "pairs", "honest"))
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="first honest file, or the seed of the faults' models")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--faults", default=",".join((*FAULTS, *MORE)))
    options = parser.parse_args()
    torch.set_num_threads(1)
    what, families = options.what, tuple(options.families.split(","))
    if what in ("all", "faults"):
        faults(tuple(options.faults.split(",")), families, options.start)
    if what in ("all", "bfloat16"):
        faults((*ROUTERS, *ROUTES), families, options.start, torch.bfloat16, torch.bfloat16)
        faults(ROUTERS, families, options.start, torch.bfloat16, torch.float32)
    if what in ("all", "pairs"):
        pairs(families, options.start)
    if what in ("all", "honest"):
        honest(options.files, options.start)


if __name__ == "__main__":
    main()
