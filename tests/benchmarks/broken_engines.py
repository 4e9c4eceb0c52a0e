"""Engines that are broken in one known way each, and honest ones, for `moe-rl diagnose`.

    python tests/benchmarks/broken_engines.py faults --seeds 7000:7002      # every kind, four pairs of number formats
    python tests/benchmarks/broken_engines.py honest --seeds 7000:7300      # a third with a near-tie
    python tests/benchmarks/broken_engines.py faults --kinds old_head,reversed_layers --pairs 0,1

Tiny random models, real forwards. A fault is made by hand in a copy of the model, or in what an honest engine reports;
nothing here is shared with what finds it. A line per file, then tables.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_rl.analysis.diagnose import Diagnosis, diagnose
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import record_routing
from moe_rl.types import Prompt, Sampling
from tests.conftest import build, perturb

VOCABULARY, BOS = 48, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 5, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "glm4_moe": {"num_hidden_layers": 5, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    "mixtral": {"num_hidden_layers": 4},
    "olmoe": {"num_hidden_layers": 4},
}
ALL = tuple(FAMILIES)
BIASED = ("deepseek_v3", "glm4_moe")
PAIRS = ("float32/float32", "float32/bfloat16", "float32/float16", "bfloat16/bfloat16")
"""Number formats of trainer and engine."""
UNKNOWN = "unexplained"
VAGUE = {UNKNOWN, "routing", "combine_weights", "rounding", "dtype"}
Entry = dict[str, Any]


class Engine:
    """A model and what an engine of it reports, in a number format of its own; responses of one turn or of two."""

    def __init__(self, family: str, count: int = 16, seed: int = 0, dtype=None, turns: int = 1, **changes: Any):
        self.family, self.count, self.seed, self.dtype, self.turns = family, count, seed, dtype, turns
        self.model = build(family, seed, **{**FAMILIES[family], "initializer_range": 0.15, **changes})
        self.tokenizer = byte_tokenizer(VOCABULARY)
        self.model.generation_config.eos_token_id = end = self.tokenizer.eos_token_id
        self.draw = random.Random(seed)
        self.moe = [i for i, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "gate")]
        lengths = [self.draw.randint(4, 13) for _ in range(count)]
        inside = [[self.draw.randint(3, 39) for _ in range(n)] for n in lengths]  # an end token, as between turns
        self.asked = [Prompt("", tokens=(*ids[: len(ids) // 2], end, *ids[len(ids) // 2 + 1 :])) for ids in inside]

    def train_in(self, dtype: torch.dtype | None) -> Engine:
        """The trainer's weights are numbers of this dtype before they are changed and pushed."""
        with torch.no_grad():
            for p in self.model.parameters() if dtype else ():
                p.copy_(p.to(dtype))
        return self

    def twin(self, change: Callable[[Any], Any] = lambda m: None) -> Any:
        twin = copy.deepcopy(self.model)
        with torch.no_grad():
            change(twin)
        return cast(twin, self.dtype)

    def routers(self, model: Any) -> list[Any]:
        return [model.model.layers[i].mlp.gate for i in self.moe]

    def older(self) -> Any:
        """The checkpoint before: every weight elsewhere."""
        twin = copy.deepcopy(self.model)
        perturb(twin, 0.2, self.seed + 1)
        return twin

    def sample(self, model: Any, asked, seed: int, **sampling: Any) -> list[Entry]:
        of = replace(Sampling(1.0, 14 if self.turns == 1 else 9), **sampling)
        entries = []
        for r in HFEngine(model, self.tokenizer).generate(asked, 1, key=(seed,), sampling=of):
            ids = np.zeros((r.routes.shape[1], model.config.num_hidden_layers, r.routes.shape[3]), dtype=np.int64)
            ids[:, self.moe] = r.routes.ids()[0].numpy()
            stated = {"temperature": of.temperature, "top_p": of.top_p}
            entry = {"tokens": [*r.prompt.tokens, *r.tokens], "prompt_length": len(r.prompt.tokens), "routes": ids}
            entries.append(entry | stated | {"logprobs": r.logprobs.tolist()})
        return entries

    def honest(self, change: Callable[[Any], Any] = lambda m: None, asked=None, **sampling: Any) -> list[Entry]:
        model = self.twin(change)
        drawn = self.sample(model, asked or self.asked, self.seed, **sampling)
        if self.turns == 1:
            return drawn
        said = [[3 + (7 * i + j) % 37 for j in range(2 + i % 4)] for i in range(len(drawn))]
        again = [Prompt("", tokens=(*e["tokens"], *words)) for e, words in zip(drawn, said, strict=True)]
        second = self.sample(model, again, self.seed + 1, **sampling)
        return [
            e
            | {"prompt_length": first["prompt_length"]}
            | {"logprobs": [*first["logprobs"], *[None] * len(words), *e["logprobs"]]}
            for first, words, e in zip(drawn, said, second, strict=True)
        ]

    def score(self, entries: list[Entry], model: Any = None, gates: bool = False) -> list[Entry]:
        """The same tokens with the log-probs and routes of a forward, on request with combine weights."""
        model, scored = self.twin() if model is None else model, []
        for e in entries:
            tokens = torch.tensor([e["tokens"]])
            with torch.no_grad(), record_routing(model, scores=True) as recording:
                logits = model(tokens[:, :-1]).logits[0, e["prompt_length"] - 1 :].float() / e.get("temperature", 1)
            ids = np.zeros((tokens.shape[1] - 1, len(model.model.layers), recording.layout.top_k), dtype=np.int64)
            weights = np.zeros(ids.shape)
            ids[:, self.moe] = recording.trace(tokens[:, :-1]).ids()[0].numpy()
            weights[:, self.moe] = recording.scores(1).gates[0].float().numpy()
            more = {"gates": weights.tolist()} if gates else {}
            scored.append(e | {"logprobs": like(e, pick(logits, e)), "routes": ids} | more)
        return scored


def cast(model: Any, dtype: torch.dtype | None) -> Any:
    """Its parameters in another dtype (None: as they are); buffers stay."""
    for p in model.parameters() if dtype else ():
        p.data = p.data.to(dtype)
    return model


@torch.no_grad()
def compute_logits(model: Any, entry: Entry, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Of a response's tokens, from a forward of its own."""
    tokens = torch.tensor([entry["tokens"]])
    moved = {} if positions is None else {"position_ids": positions[None], "attention_mask": torch.ones_like(tokens)}
    return model(tokens, **moved).logits[0, entry["prompt_length"] - 1 : -1].float()


def pick(logits: torch.Tensor, entry: Entry) -> list[float]:
    chosen = torch.tensor(entry["tokens"][entry["prompt_length"] :])
    return logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()


def like(entry: Entry, values: list[float]) -> list[float | None]:
    """Null where the environment wrote."""
    return [None if own is None else x for own, x in zip(entry["logprobs"], values, strict=True)]


def without(entries: list[Entry], *keys: str) -> list[Entry]:
    return [{k: v for k, v in e.items() if k not in (keys or ("routes", "gates"))} for e in entries]


# ---------------------------------------------------------------------- an engine's model
def round_to_int(w: torch.Tensor, largest: int = 127, axis: int | None = 1) -> torch.Tensor:
    scale = (w.abs().max() if axis is None else w.abs().amax(-1, keepdim=True)) / largest
    return (w / scale).round() * scale


def round_to_fp8(w: torch.Tensor, axis: int | None = None, scaled: bool = True) -> torch.Tensor:
    scale = 448 / (w.abs().max() if axis is None else w.abs().amax(-1, keepdim=True)) if scaled else torch.tensor(1.0)
    return (w * scale).to(torch.float8_e4m3fn).float() / scale


def rounded_routers(engine: Engine, rounded: Callable[..., torch.Tensor]) -> list[Entry]:
    return engine.honest(lambda m: [r.weight.copy_(rounded(r.weight)) for r in engine.routers(m)])


def rounded_matrices(engine: Engine, rounded: Callable[..., torch.Tensor]) -> list[Entry]:
    def change(model: Any) -> None:
        routers = {id(r.weight) for r in engine.routers(model)}
        for n, p in model.named_parameters():
            if p.dim() > 1 and id(p) not in routers and "embed" not in n and "lm_head" not in n:
                p.copy_(rounded(p))

    return engine.honest(change)


def other_gates(engine: Engine, model: Any) -> None:
    """Raw where the family renormalises, and the other way round."""
    for r in engine.routers(model):
        if hasattr(r, "norm_topk_prob"):
            r.norm_topk_prob = not r.norm_topk_prob
        else:
            r.forward = partial(raw, r.forward)


def raw(forward: Callable[..., Any], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a router returns, with raw combine weights. A recording does not see what a forward hook changes."""
    logits, _, ids = forward(hidden)
    return logits, logits.softmax(-1).gather(1, ids), ids


def name_of_gates(engine: Engine) -> str:
    return "gates_raw" if getattr(engine.routers(engine.model)[0], "norm_topk_prob", True) else "gates_renormalised"


def set_routers(engine: Engine, **values: Any) -> list[Entry]:
    def change(model: Any) -> None:
        for r in engine.routers(model):
            for name, value in values.items():
                setattr(r, name, value(r))

    return engine.honest(change)


def older_weights(engine: Engine, picks: Callable[[str], bool]) -> list[Entry]:
    def change(model: Any) -> None:
        theirs = dict(engine.older().named_parameters(remove_duplicate=False))
        if picks("lm_head.weight") != picks("model.embed_tokens.weight"):  # a tied head comes apart
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        for n, p in model.named_parameters(remove_duplicate=False):
            if picks(n):
                p.copy_(theirs[n])

    return engine.honest(change)


def of_some(engine: Engine, broken: list[Entry], **marks: tuple[Any, Any]) -> list[Entry]:
    """Every second response is of the broken engine; `marks` has what the file says of both."""
    both = enumerate(zip(broken, engine.honest(), strict=True))
    entries = [(a if i % 2 else b) | {k: v[i % 2] for k, v in marks.items()} for i, (a, b) in both]
    return without(entries)


def at_layer(engine: Engine, which: int) -> Callable[[str], bool]:
    return lambda name: f"layers.{engine.moe[which]}." in name


# ---------------------------------------------------------------------- what it reads, and calls a log-prob
def read_otherwise(engine: Engine, prompt_of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> list[Entry]:
    entries = engine.honest(asked=[Prompt("", tokens=prompt_of(p.tokens)) for p in engine.asked])
    found = []
    for p, e in zip(engine.asked, entries, strict=True):
        tokens = [*p.tokens, *e["tokens"][e["prompt_length"] :]]
        found.append({"tokens": tokens, "prompt_length": len(p.tokens), "logprobs": e["logprobs"]})
    return found


def with_bos(engine: Engine, dropped: bool) -> list[Entry]:
    engine.tokenizer.bos_token = engine.tokenizer.convert_ids_to_tokens(BOS)
    if not dropped:
        return read_otherwise(engine, lambda ids: (BOS, *ids))
    engine.asked = [Prompt("", tokens=(BOS, *p.tokens)) for p in engine.asked]
    return read_otherwise(engine, lambda ids: ids[1:])


def visible_padding(engine: Engine, pad: int) -> list[Entry]:
    entries, model = engine.honest(), engine.twin()
    longest = max(e["prompt_length"] for e in entries)

    def padded(e: Entry) -> Entry:
        return e | {"tokens": [pad] * (longest - e["prompt_length"]) + e["tokens"], "prompt_length": longest}

    return without([e | {"logprobs": like(e, pick(compute_logits(model, padded(e)), padded(e)))} for e in entries])


def moved(engine: Engine, move: Callable[[Entry, torch.Tensor, int], torch.Tensor]) -> list[Entry]:
    """Other positions, of the tokens `t` of an entry, where the longest prompt has `longest`."""
    entries, model = engine.honest(), engine.twin()
    longest = max(e["prompt_length"] for e in entries)

    def logprobs(e: Entry) -> list[float]:
        return pick(compute_logits(model, e, move(e, torch.arange(len(e["tokens"])), longest)), e)

    return without([e | {"logprobs": like(e, logprobs(e))} for e in entries])


def from_zero(e: Entry, t: torch.Tensor, longest: int) -> torch.Tensor:
    start = e["prompt_length"] + len(e["logprobs"]) - e["logprobs"][::-1].index(None)
    return torch.where(t >= start, t - start, t)


def at_temperature(engine: Engine, sampled: float, reported: float, stated: float) -> list[Entry]:
    entries, model = engine.honest(temperature=sampled), engine.twin()
    return [
        e | {"temperature": stated, "logprobs": like(e, pick(compute_logits(model, e) / reported, e))} for e in entries
    ]


def kept_set(engine: Engine, **of: float) -> list[Entry]:
    """Log-probs over what top-p, top-k or min-p keep; a response ends before the first token that is not kept."""
    entries, model, found = engine.honest(), engine.twin(), []
    for e in entries:
        p, order = compute_logits(model, e).softmax(-1).sort(-1, descending=True)
        rank = torch.arange(p.shape[-1])
        keep = (
            (p.cumsum(-1) - p < of.get("top_p", 1))
            & (rank < of.get("top_k", 1000))
            & (p >= of.get("min_p", 0) * p[:, :1])
        )
        logits = compute_logits(model, e).masked_fill(~torch.zeros_like(keep).scatter(1, order, keep), -torch.inf)
        values = pick(logits, e)
        n = next((i for i, x in enumerate(values) if x == -np.inf), len(values))
        if n:
            end = e["prompt_length"] + n
            short = {"tokens": e["tokens"][:end], "routes": e["routes"][: end - 1], "logprobs": values[:n]}
            found.append(e | short | of)
    return found


def zeros_of_environment(engine: Engine) -> list[Entry]:
    """Tokens of the environment count, with log-probs of 0; the second turn does not count."""
    entries = engine.honest()
    for e in entries:
        first, last = e["logprobs"].index(None), len(e["logprobs"]) - e["logprobs"][::-1].index(None)
        e["logprobs"] = [*e["logprobs"][:first], *[0.0] * (last - first), *[None] * (len(e["logprobs"]) - last)]
    return entries


def shifted(values: list[Any], by: int) -> list[Any]:
    own = [x for x in values if x is not None]
    turned = iter([own[0], *own[:-1]] if by > 0 else [*own[1:], own[-1]])
    return [x if x is None else next(turned) for x in values]


# ---------------------------------------------------------------------- its routes
def routes(engine: Engine, change: Callable[[np.ndarray, Entry, int], Any], gates: bool = False) -> list[Entry]:
    entries = engine.score(engine.honest(), gates=gates) if gates else engine.honest()
    return [e | {"routes": change(e["routes"].copy(), e, i)} for i, e in enumerate(entries)]


def garbage(engine: Engine, where: Callable[[np.ndarray, Entry, Any], Any], gates: bool = False) -> list[Entry]:
    """Random experts at the (row, layer) places that `where` picks."""
    draw = np.random.default_rng(engine.seed)
    experts = engine.routers(engine.model)[0].weight.shape[0]

    def change(ids: np.ndarray, e: Entry, i: int) -> np.ndarray:
        places = np.zeros(ids.shape[:2], dtype=bool)
        where(places, e, draw)
        places[:, [n for n in range(places.shape[1]) if n not in engine.moe]] = False
        ids[places] = draw.random((places.sum(), experts)).argsort(-1)[:, : ids.shape[2]]
        return ids

    return routes(engine, change)


def everywhere(share: float) -> Callable[..., None]:
    return lambda places, e, draw: places.__setitem__(slice(None), draw.random(places.shape) < share)


def layer_shift(engine: Engine) -> list[Entry]:
    """Layers that route counted from 0; one too late where all do."""
    first = engine.moe[0]
    return routes(engine, lambda ids, e, i: np.roll(ids, -first if first else 1, axis=1))


def row_shift(engine: Engine, by: int, response: bool = False) -> list[Entry]:
    def change(ids: np.ndarray, e: Entry, i: int) -> np.ndarray:
        start = e["prompt_length"] - 1 if response else 0
        ids[start:] = np.roll(ids[start:], by, axis=0)
        return ids

    return routes(engine, change)


def copied_layer(engine: Engine, ids: np.ndarray) -> np.ndarray:
    ids[:, engine.moe[-1]] = ids[:, engine.moe[0]]
    return ids


def of_another(engine: Engine, every: int = 1, prompt: bool = False) -> list[Entry]:
    """Rows of another response, gone on with others of its rows where it is shorter; of the prompt alone two later."""
    entries, draw = engine.honest(), np.random.default_rng(0)
    found = []
    for i, e in enumerate(entries):
        other, ids = entries[(i + (5 if prompt else 1)) % len(entries)]["routes"], e["routes"].copy()
        n = min(len(other) - 2, e["prompt_length"] - 1) if prompt else min(len(other), len(ids))
        ids[:n] = other[2 : n + 2] if prompt else other[:n]
        if not prompt:
            ids[n:] = other[draw.integers(0, len(other), len(ids) - n)]
        found.append(e if i % every else e | {"routes": ids})
    return found


def emptied(ids: np.ndarray, e: Entry, layer: int | None = None) -> np.ndarray:
    ids[(slice(e["prompt_length"] - 1), slice(None)) if layer is None else (slice(None), layer)] = 0
    return ids


def renumbered(engine: Engine) -> list[Entry]:
    draw, n = np.random.default_rng(engine.seed), engine.routers(engine.model)[0].weight.shape[0]
    tables = [draw.permutation(n) if i in engine.moe else np.arange(n) for i in range(len(engine.model.model.layers))]
    return routes(engine, lambda ids, e, i: np.stack([x[ids[:, n]] for n, x in enumerate(tables)], 1))


def twice(ids: np.ndarray, e: Entry, i: int) -> np.ndarray:
    ids[..., 1] = np.where(ids[..., 0] > 0, ids[..., 0], ids[..., 1])
    return ids


def reported_gates(engine: Engine, factor: float | None) -> list[Entry]:
    """Combine weights times a factor; of the other convention where it is None."""
    entries = engine.score(engine.honest(), gates=True)
    if factor is not None:
        return [e | {"gates": (factor * np.array(e["gates"])).tolist()} for e in entries]
    others = engine.score(entries, engine.twin(partial(other_gates, engine)), gates=True)
    return [e | {"gates": other["gates"]} for e, other in zip(entries, others, strict=True)]


def next_number(engine: Engine, ids: np.ndarray) -> np.ndarray:
    n = engine.routers(engine.model)[0].weight.shape[0]
    ids[:, engine.moe] = (ids[:, engine.moe] + 1) % n
    return ids


def shuffled(engine: Engine, ids: np.ndarray, i: int) -> np.ndarray:
    return ids[np.random.default_rng(engine.seed + i).permutation(len(ids))]


def reversed_layers(engine: Engine, ids: np.ndarray) -> np.ndarray:
    ids[:, engine.moe] = ids[:, engine.moe[::-1]]
    return ids


def one_slot(engine: Engine, ids: np.ndarray, i: int) -> np.ndarray:
    """The last expert of every fourth row is another one."""
    n = engine.routers(engine.model)[0].weight.shape[0]
    ids[i % 4 :: 4, engine.moe, -1] = (ids[i % 4 :: 4, engine.moe].max(-1) + 1) % n
    for _ in range(ids.shape[-1]):  # until it is none of the others
        same = ids[..., -1:] == ids[..., :-1]
        ids[..., -1] = np.where(same.any(-1), (ids[..., -1] + 1) % n, ids[..., -1])
    return ids


# ---------------------------------------------------------------------- every kind
@dataclass(frozen=True)
class Kind:
    make: Callable[[Engine], list[Entry]]
    cause: str = ""
    """To be named; the kind's own name where it is empty."""
    families: tuple[str, ...] = ALL
    also: bool = False
    turns: int = 1


def zero(select: str) -> Callable[[Engine], list[Entry]]:
    return lambda engine: engine.honest(lambda m: [x.zero_() for n, x in m.named_buffers() if n.endswith(select)])


def shared_off(engine: Engine) -> list[Entry]:
    return engine.honest(lambda m: [x.zero_() for n, x in m.named_parameters() if "shared_experts.down_proj" in n])


def lost_expert(engine: Engine) -> list[Entry]:
    return engine.honest(lambda m: m.model.layers[engine.moe[0]].mlp.experts.down_proj[:2].zero_())


def warmer(engine: Engine) -> list[Entry]:
    def change(model: Any) -> None:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), float) and hasattr(module, "o_proj"):
                module.scaling *= 1.6

    return engine.honest(change)


def routers_of(rounded: Callable[..., torch.Tensor], **how: Any) -> Callable[[Engine], list[Entry]]:
    return lambda engine: rounded_routers(engine, partial(rounded, **how))


def stale(picks: Callable[[str], bool]) -> Callable[[Engine], list[Entry]]:
    return lambda engine: older_weights(engine, picks)


def rows(change: Callable[..., np.ndarray]) -> Callable[[Engine], list[Entry]]:
    return lambda engine: routes(engine, change)


def more_experts(by: Callable[[int], int]) -> Callable[[Engine], list[Entry]]:
    return lambda engine: without(set_routers(engine, top_k=lambda r: by(r.top_k)))


def factor(power: int) -> Callable[[Engine], list[Entry]]:
    return lambda engine: set_routers(engine, routed_scaling_factor=lambda r: r.routed_scaling_factor**power)


def of_half(change: Callable[[Engine], list[Entry]], **marks: tuple[Any, Any]) -> Callable[[Engine], list[Entry]]:
    return lambda engine: of_some(engine, change(engine), **marks)


def gates_changed(engine: Engine) -> list[Entry]:
    return engine.honest(partial(other_gates, engine))


LISTED: dict[str, Kind] = {
    # routers, experts, weights
    "router_int8_row": Kind(routers_of(round_to_int), "router_int8"),
    "router_int8_tensor": Kind(routers_of(round_to_int, axis=None), "router_int8"),
    "router_fp8_tensor": Kind(routers_of(round_to_fp8), "router_fp8"),
    "router_fp8_row": Kind(routers_of(round_to_fp8, axis=-1), "router_fp8"),
    "router_fp8_unscaled": Kind(routers_of(round_to_fp8, scaled=False), "router_fp8"),
    "router_bf16": Kind(routers_of(lambda w: w.bfloat16().float())),
    "int8": Kind(lambda x: rounded_matrices(x, round_to_int)),
    "fp8": Kind(lambda x: rounded_matrices(x, round_to_fp8)),
    "lost_bias": Kind(zero("e_score_correction_bias"), families=BIASED),
    "gates": Kind(gates_changed),
    "gates_of_half": Kind(of_half(gates_changed), "gates"),
    "lost_scaling": Kind(factor(0), families=("deepseek_v3",)),
    "scaled_twice": Kind(factor(2), families=("deepseek_v3",)),
    "one_expert_more": Kind(more_experts(lambda k: k + 1), "top_k"),
    "one_expert_less": Kind(more_experts(lambda k: k - 1), "top_k"),
    "twice_the_experts": Kind(more_experts(lambda k: 2 * k), "top_k"),
    "shared_expert": Kind(shared_off, families=BIASED),
    "older_weights": Kind(stale(lambda n: True), "weight_version", also=True),
    "old_head": Kind(stale(lambda n: n.startswith("lm_head.")), "head_not_pushed", also=True),
    "old_embedding": Kind(stale(lambda n: "embed_tokens" in n), "embedding_not_pushed", also=True),
    "old_routers": Kind(stale(lambda n: n.endswith("mlp.gate.weight")), "routers_not_pushed", also=True),
    "old_experts": Kind(stale(lambda n: "experts" in n.split(".")), "experts_not_pushed", also=True),
    "old_layer": Kind(lambda x: older_weights(x, at_layer(x, 1)), "layer_not_pushed", also=True),
    "old_last_layer": Kind(lambda x: older_weights(x, at_layer(x, -1)), "layer_not_pushed", also=True),
    "some_versions": Kind(of_half(stale(lambda n: True), weight_version=("7", "6")), "weight_version"),
    "stale_cache": Kind(of_half(stale(lambda n: True), cached_tokens=(0, 3))),
    # what it reads
    "bos_added": Kind(lambda x: with_bos(x, False), "bos"),
    "bos_dropped": Kind(lambda x: with_bos(x, True), "bos"),
    "special_tokens": Kind(
        lambda x: read_otherwise(x, lambda ids: tuple(t for t in ids if t != x.tokenizer.eos_token_id))
    ),
    "prompt_cut": Kind(lambda x: read_otherwise(x, lambda ids: ids[1:])),
    "prompt_cut_by_2": Kind(lambda x: read_otherwise(x, lambda ids: ids[2:]), "prompt_cut"),
    "visible_zeros": Kind(lambda x: visible_padding(x, 0), "visible_padding"),
    "visible_ends": Kind(lambda x: visible_padding(x, x.tokenizer.eos_token_id), "visible_padding"),
    "positions_high": Kind(lambda x: moved(x, lambda e, t, n: t + (t >= e["prompt_length"]).long()), "positions"),
    "positions_low": Kind(lambda x: moved(x, lambda e, t, n: t - (t >= e["prompt_length"]).long()), "positions"),
    "positions_of_padding": Kind(
        lambda x: moved(x, lambda e, t, n: t + (n - e["prompt_length"]) * (t >= e["prompt_length"]))
    ),
    "positions_per_turn": Kind(lambda x: moved(x, from_zero), turns=2),
    # what it calls a log-prob
    "before_temperature": Kind(lambda x: at_temperature(x, 0.7, 1.0, 0.7), "temperature"),
    "unstated_temperature": Kind(lambda x: at_temperature(x, 0.7, 0.7, 1.0), "temperature"),
    "warm_temperature": Kind(lambda x: at_temperature(x, 1.4, 1.4, 1.0), "temperature", turns=2),
    "temperature_between": Kind(lambda x: at_temperature(x, 0.83, 0.83, 1.0), "temperature"),
    "temperature_twice": Kind(lambda x: at_temperature(x, 0.7, 0.49, 0.7), "temperature"),
    "temperature_inverted": Kind(lambda x: at_temperature(x, 0.7, 1 / 0.7, 0.7), "temperature"),
    "top_p_kept": Kind(lambda x: kept_set(x, top_p=0.8), "kept_set"),
    "top_k_kept": Kind(lambda x: kept_set(x, top_k=12), "kept_set"),
    "min_p_kept": Kind(lambda x: kept_set(x, min_p=0.1), "kept_set"),
    "one_late": Kind(lambda x: [e | {"logprobs": shifted(e["logprobs"], 1)} for e in x.honest()], "logprob_shift"),
    "one_early": Kind(lambda x: [e | {"logprobs": shifted(e["logprobs"], -1)} for e in x.honest()], "logprob_shift"),
    "zeros_of_environment": Kind(zeros_of_environment, "response_mask", turns=2),
    # its routes
    "layer_shift": Kind(layer_shift),
    "row_late": Kind(lambda x: row_shift(x, 1), "row_shift"),
    "row_early": Kind(lambda x: row_shift(x, -1), "row_shift"),
    "row_late_in_response": Kind(lambda x: row_shift(x, 1, response=True), "row_shift"),
    "overwritten_layer": Kind(lambda x: garbage(x, lambda at, e, draw: at.__setitem__((slice(None), x.moe[0]), True))),
    "copied_layer": Kind(lambda x: routes(x, lambda ids, e, i: copied_layer(x, ids)), "overwritten_layer"),
    "stale_prefix": Kind(lambda x: of_another(x, prompt=True)),
    "stale_prefix_of_some": Kind(lambda x: of_another(x, 3, prompt=True), "stale_prefix"),
    "zero_rows": Kind(rows(lambda ids, e, i: emptied(ids, e))),
    "zero_layer": Kind(lambda x: routes(x, lambda ids, e, i: emptied(ids, e, x.moe[-1])), "zero_rows"),
    "swapped_responses": Kind(of_another),
    "sorted_ids": Kind(lambda x: routes(x, lambda ids, e, i: np.sort(ids, -1), gates=True)),
    "physical_ids": Kind(renumbered),
    "stale_routes": Kind(
        lambda x: [
            e | {"routes": o["routes"]}
            for h in [x.honest()]
            for e, o in zip(h, x.score(h, cast(x.older(), x.dtype)), strict=True)
        ],
        also=True,
    ),
    "repeated_ids": Kind(rows(twice)),
    "other_width": Kind(rows(lambda ids, e, i: np.concatenate([ids, (ids[..., -1:] + 3) % 8], -1)), "top_k"),
    "reported_gates_scaled": Kind(lambda x: reported_gates(x, 0.4), "gates_scaled"),
    "reported_gates": Kind(lambda x: reported_gates(x, None), "gates"),
}
"""Kinds that are to be named."""
ROUTES = (*list(LISTED)[list(LISTED).index("layer_shift") : list(LISTED).index("reported_gates_scaled")],)
STRANGE: dict[str, Kind] = {
    "router_int4": Kind(routers_of(round_to_int, largest=7), UNKNOWN),
    "lost_expert": Kind(lost_expert, UNKNOWN),
    "attention_warmer": Kind(warmer, UNKNOWN),
    "unknown_weights": Kind(stale(lambda n: True), UNKNOWN),
    "unknown_layer": Kind(lambda x: older_weights(x, at_layer(x, 1)), UNKNOWN),
    "reversed_layers": Kind(lambda x: routes(x, lambda ids, e, i: reversed_layers(x, ids)), UNKNOWN),
    "garbage": Kind(lambda x: garbage(x, everywhere(1.0)), UNKNOWN),
    "half_garbage": Kind(lambda x: garbage(x, everywhere(0.5)), UNKNOWN),
    "a_tenth_garbage": Kind(lambda x: garbage(x, everywhere(0.1)), UNKNOWN),
    "shuffled_rows": Kind(lambda x: routes(x, lambda ids, e, i: shuffled(x, ids, i)), UNKNOWN),
    "next_number": Kind(lambda x: routes(x, lambda ids, e, i: next_number(x, ids)), "physical_ids"),
    "one_slot": Kind(lambda x: routes(x, lambda ids, e, i: one_slot(x, ids, i)), UNKNOWN),
}
"""Faults without a name: a fault, and no wrong name; and further routes that a permutation of experts makes right."""
WRONG_ROUTES = {*ROUTES, *list(STRANGE)[5:]}


@dataclass(frozen=True)
class File:
    entries: list[Entry]
    model: Any
    tokenizer: Any
    also: dict[str, Any]
    cause: str
    """"" for an honest engine."""


def formats(pair: str) -> list[torch.dtype | None]:
    """Of trainer and engine; None for float32."""
    return [None if name == "float32" else getattr(torch, name) for name in pair.split("/")]


def make_file(kind: str, seed: int, pair: str) -> File:
    """The file of this fault and seed."""
    of, (trainer, dtype), draw = LISTED.get(kind) or STRANGE[kind], formats(pair), random.Random(f"{kind} {seed}")
    engine = Engine(draw.choice(of.families), draw.randint(8, 32), seed, dtype, of.turns).train_in(trainer)
    entries = of.make(engine)
    cause = name_of_gates(engine) if of.cause == "gates" or kind == "gates" else of.cause or kind
    also = {"older": engine.older()} if of.also else {}
    return File(entries, cast(engine.model, trainer), engine.tokenizer, also, cause)


VARIANTS = ("plain", "without routes", "combine weights", "top-p", "two turns", "versions and caches")


def make_honest_file(seed: int, pair: str) -> File:
    draw, (trainer, dtype), variant = random.Random(f"honest {seed}"), formats(pair), VARIANTS[seed % 6]
    turns = 2 if variant == "two turns" else 1
    engine = Engine(draw.choice(ALL), draw.choice((1, 4, 8, 16, 32)), seed, dtype, turns).train_in(trainer)
    entries = engine.honest(temperature=draw.choice((1.0, 0.7, 1.3)), top_p=0.8 if variant == "top-p" else 1.0)
    if variant == "top-p":
        entries = engine.score(entries)
    if variant == "without routes":
        entries = without(entries)
    if variant == "combine weights":
        entries = engine.score(entries, gates=True)
    if variant == "versions and caches":
        entries = [e | {"weight_version": i % 3, "cached_tokens": i % 2 * 3} for i, e in enumerate(entries)]
    return File(entries, cast(engine.model, trainer), engine.tokenizer, {}, "")


def make_near_tie(seed: int, pair: str) -> File:
    """An honest engine that breaks a tie between two experts otherwise: of the place with the smallest margin, the
    weights of the two routers are moved so that their scores differ by 5e-6, in favour of one here, of the other
    there."""
    draw, (trainer, dtype) = random.Random(f"tie {seed}"), formats(pair)
    engine = Engine(draw.choice(("qwen3_moe", "mixtral", "olmoe")), draw.choice((4, 8, 16, 24)), seed, dtype).train_in(
        trainer
    )
    entries, places = engine.honest(), []
    moe_layer = draw.randrange(len(engine.moe))
    router, inputs = engine.routers(engine.model)[moe_layer], []
    handle = router.register_forward_hook(lambda m, args, out: inputs.append(args[0].reshape(-1, args[0].shape[-1])))
    for n, e in enumerate(entries):
        with torch.no_grad():
            engine.model(torch.tensor([e["tokens"][:-1]]))
        scores = (inputs[-1] @ router.weight.detach().T).sort(-1, descending=True)
        margins = scores.values[:, router.top_k - 1] - scores.values[:, router.top_k]
        t = int(margins[e["prompt_length"] - 1 :].argmin()) + e["prompt_length"] - 1
        places.append((float(margins[t]), n, t, scores.indices[t, router.top_k - 1 : router.top_k + 1].tolist()))
    handle.remove()
    margin, n, t, (first, second) = min(places)
    hidden = inputs[n][t]
    up = hidden / (hidden @ hidden)
    with torch.no_grad():
        router.weight[second] += (margin - 5e-6) * up
    twin = engine.twin(lambda m: engine.routers(m)[moe_layer].weight[second].add_(1e-5 * up))
    entries = engine.score(entries, twin)
    return File(entries, cast(engine.model, trainer), engine.tokenizer, {}, "")


# ---------------------------------------------------------------------- the table
def judge(found: Diagnosis, cause: str) -> str:
    """ok or false alarm of an honest file; else named, near (among others, or as good as one), wrong, unexplained;
    hidden, where it is called rounding or a dtype and its KL is at most twice the rounding's; else passed."""
    if not cause:
        return "false alarm" if found.fault else "ok"
    if not found.fault:
        return "hidden" if found.fits[0].mean <= 2 * found.fits[2].mean else "passed"
    if found.causes[:1] == (cause,) and not found.equally:
        return "named"
    if cause != UNKNOWN and (cause in found.causes or cause in found.equally):
        return "near"
    return UNKNOWN if set(found.causes) <= VAGUE else "wrong"


def report(kind: str, seed: int, pair: str, file: File, tables: dict[str, Counter[str]], group: str) -> None:
    found = diagnose(file.entries, file.model, tokenizer=file.tokenizer, also=file.also)
    verdict = judge(found, file.cause)
    for name in (f"{group}, {pair}", group, *([f"{kind}: {pair}"] if verdict not in ("ok", "named", UNKNOWN) else ())):
        tables[name][verdict] += 1
    base, _, rounding = found.fits[:3]
    best = sorted((x[0], n) for n, x in found.left.items() if "forced" not in n)[:3]
    times = base.mean / max(rounding.mean, 1e-12), base.distance / rounding.distance
    ratio = f"KL {base.mean:.2g} = {times[0]:.2g} x, |log r| {times[1]:.2g} x"
    nearest = "; ".join(f"{n} {100 * x:.2g} %" for x, n in best)
    answer = "+".join(found.causes) + "".join(f" or {x}" for x in found.equally)
    family = type(file.model).__name__[:8]
    print(
        kind,
        seed,
        pair,
        family,
        f"{found.responses}/{found.tokens}",
        verdict,
        answer,
        ratio,
        nearest,
        sep="\t",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "honest"))
    parser.add_argument("--seeds", default="7000:7001", help="from:to; of honest files one per seed")
    parser.add_argument("--kinds", default=",".join((*LISTED, *STRANGE)))
    parser.add_argument("--pairs", default="0,1,2,3", help=f"places in {PAIRS}")
    parser.add_argument("--one", action="store_true", help="one pair of number formats per kind and seed, in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables: dict[str, Counter[str]] = defaultdict(Counter)
    pairs = [PAIRS[int(i)] for i in options.pairs.split(",")]
    for seed in range(*map(int, options.seeds.split(":"))):
        if options.what == "honest":
            tie, n = seed % 3 == 0, seed // 3
            pair = pairs[n // 2 % len(pairs) if tie and n % 2 else 0 if tie else n % len(pairs)]
            file = (make_near_tie if tie else make_honest_file)(seed, pair)
            report("near-tie" if tie else "honest", seed, pair, file, tables, "near-tie" if tie else "honest")
            continue
        for n, kind in enumerate(options.kinds.split(",")):
            for pair in [pairs[(n + seed) % len(pairs)]] if options.one else pairs:
                if kind == "router_bf16" and "bfloat16" in pair:
                    continue  # no fault where the engine, or the trainer, has them so anyway
                group = "listed" if kind in LISTED else "strange"
                report(kind, seed, pair, make_file(kind, seed, pair), tables, group)
    columns = ("ok", "false alarm", "named", "near", UNKNOWN, "hidden", "wrong", "passed")
    print("\n| files |", " | ".join(columns), "|\n|" + "---|" * (1 + len(columns)))
    for name, row in sorted(tables.items(), key=lambda item: (":" in item[0], item[0])):
        print(f"| {name} |", " | ".join(str(row[c]) for c in columns), "|")


if __name__ == "__main__":
    main()
