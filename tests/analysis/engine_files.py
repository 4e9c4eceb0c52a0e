"""Files of honest and faulty engines by kind and seed, for `moe-rl diagnose`: tiny models, real forwards.

The seed draws family, number of responses, turns and the place of the fault. A faulty engine writes one file of 8 to 40
responses; an honest one writes 40 responses, cut into four files of 1 to 31. Faults are made by hand in the engine's
model or in what it reports. Nothing here is shared with what finds them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_rl.types import Prompt
from tests.analysis import broken_engines
from tests.analysis.broken_engines import Bench, logits_of, picked, sampled, with_gates

broken_engines.FAMILIES.setdefault("gpt_oss", {"num_hidden_layers": 4, "sliding_window": 6})
broken_engines.FAMILIES.setdefault("gemma4_text", {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 48, "global_head_dim": 8,
    "tie_word_embeddings": False, "final_logit_softcapping": 30.0})
FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "gpt_oss")
UNKNOWN = "unexplained"


class Engine(Bench):
    """A bench whose responses may have two turns, and further faults."""

    def __init__(self, family: str, count: int, seed: int, dtype: torch.dtype | None, turns: int):
        self.turns, self.place = turns, seed
        super().__init__(family, count, seed, dtype)

    def honest(self, temperature=1.0, change=lambda m: None, asked=None):
        engine, tokens = self.engine(change), 14 if self.turns == 1 else 9
        drawn = sampled(engine, self.tokenizer, asked or self.asked, self.seed, tokens, temperature)
        if self.turns == 1:
            return drawn
        said = [[3 + (7 * i + j) % 37 for j in range(2 + i % 4)] for i in range(len(drawn))]
        again = [Prompt("", tokens=(*e["tokens"], *words)) for e, words in zip(drawn, said, strict=True)]
        second = sampled(engine, self.tokenizer, again, self.seed + 1, tokens, temperature)
        return [e | {"prompt_length": first["prompt_length"], "said": (len(first["logprobs"]), len(words)),
                     "logprobs": [*first["logprobs"], *[None] * len(words), *e["logprobs"]]}
                for first, words, e in zip(drawn, said, second, strict=True)]

    def combine_weights(self):
        return with_gates(self.engine(), self.honest())

    # -------------------------------------------------------------- its weights
    def _layer(self):
        return self.place % len(self.model.model.layers)

    def stale_layer(self):
        older, at = self.older(), self._layer()
        return self.honest(change=lambda m: m.model.layers[at].load_state_dict(older.model.layers[at].state_dict()))

    def swapped_layers(self):
        def change(model):
            at = self.moe[0] + self.place % (len(self.moe) - 1)
            one, two = (model.model.layers[i] for i in (at, at + 1))
            kept = {n: x.clone() for n, x in one.state_dict().items()}
            one.load_state_dict(two.state_dict())
            two.load_state_dict(kept)

        return self.honest(change=change)

    def _mlp(self, model):
        return next(model.model.layers[i] for i in self.moe[self.place % len(self.moe) :]).mlp

    def permuted_expert(self):
        """The columns of one expert's last matrix, in another order."""
        def change(model):
            weight = self._mlp(model).experts.down_proj
            weight[0] = weight[0].flip(-1)

        return self.honest(change=change)

    def shared_expert(self):
        return self.honest(change=lambda m: [
            x.zero_() for n, x in m.named_parameters() if "shared_experts.down_proj" in n])

    def sigmoid(self):
        def weighted(module, inputs, output):
            logits, weights, ids = output
            raw = (inputs[0].reshape(-1, module.weight.shape[1]).float() @ module.weight.float().T).sigmoid()
            raw = raw.gather(1, ids)
            if getattr(module, "norm_topk_prob", True):
                raw = raw / raw.sum(-1, keepdim=True)
            return logits, raw.to(weights.dtype), ids

        return self.honest(change=lambda m: [r.register_forward_hook(weighted) for r in self.routers(m)])

    def lost_expert(self):
        """One expert without its last matrix."""
        return self.honest(change=lambda m: self._mlp(m).experts.down_proj[0].zero_())

    def router_int4(self):
        return self.router_int8(largest=7)

    # -------------------------------------------------------------- its attention
    def rope_base(self):
        """A base of 1e6; of 1e4 where the trainer's is 1e6."""
        def change(model):
            for module in model.modules():
                if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
                    x = torch.arange(len(module.inv_freq)) / len(module.inv_freq)
                    module.inv_freq.copy_(1e4**-x if torch.allclose(module.inv_freq, 1e6**-x) else 1e6**-x)

        return self.honest(change=change)

    def _attention(self, **settings):
        def change(model):
            for module in model.modules():
                if hasattr(module, "scaling") and hasattr(module, "o_proj"):
                    for name, value in settings.items():
                        setattr(module, name, value(module))

        return self.honest(change=change)

    def attention_scale(self):
        return self._attention(scaling=lambda m: 1.0)

    def attention_warmer(self):
        """A scale that nobody would write."""
        return self._attention(scaling=lambda m: 1.3 * m.scaling)

    def qk_norm(self):
        return self._attention(q_norm=lambda m: nn.Identity(), k_norm=lambda m: nn.Identity())

    def sinks(self):
        return self._attention(sinks=lambda m: nn.Parameter(torch.full_like(m.sinks, -1e4)))

    def window_lost(self):
        return self.honest(change=lambda m: setattr(m.config, "sliding_window", 10**6))

    def rope_scaling(self):
        """Positions as multiples of ½, ¼ or ⅛."""
        def change(model):
            for module in model.modules():
                if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
                    module.inv_freq.div_((2, 4, 8)[self.place % 3])

        return self.honest(change=change)

    def window_size(self):
        """A window, as transformers makes it, of another size than the trainer's or where the trainer has none."""
        size = (3, 5, 7, 12) if self.family == "gpt_oss" else (4, 8)
        return self.honest(change=lambda m: setattr(m.config, "sliding_window", size[self.place % len(size)]))

    # -------------------------------------------------------------- its head
    def _enlarge(self):
        """Logits about 15, some tokens likelier than others."""
        draw = torch.Generator().manual_seed(self.place)
        self.model.lm_head.bias = nn.Parameter(15 + 4 * torch.randn(broken_engines.VOCABULARY, generator=draw))

    def softcap(self):
        self._enlarge()
        return self.honest(change=lambda m: m.lm_head.register_forward_hook(
            lambda module, inputs, logits: 30 * torch.tanh(logits / 30)))

    def softcap_lost(self):
        self._enlarge()
        return self.honest(change=lambda m: setattr(m.config, "final_logit_softcapping", None))

    # -------------------------------------------------------------- what it reads
    def visible_padding(self):
        """Prompts are padded on the left to the longest, and attention reads the padding."""
        entries = self.honest()
        longest = max(e["prompt_length"] for e in entries)
        found = []
        for e in entries:
            pads = longest - e["prompt_length"]
            padded = e | {"tokens": [0] * pads + e["tokens"], "prompt_length": longest}
            found.append({k: v for k, v in e.items() if k != "routes"} | {
                "logprobs": picked(logits_of(self.engine(), padded), padded)})
        return found

    def positions_per_turn(self):
        """The second turn of each response counts its positions from 0."""
        def moved(e):
            first, words = e["said"]
            t = torch.arange(len(e["tokens"]))
            start = e["prompt_length"] + first + words
            return picked(logits_of(self.engine(), e, torch.where(t >= start, t - start, t)[None]), e)

        return [{k: v for k, v in e.items() if k != "routes"} for e in self._each(logprobs=moved)]

    def positions_of_padding(self):
        """The prompts are padded on the right to the longest, and the response counts on from there."""
        longest = max(len(p.tokens) for p in self.asked)

        def moved(e):
            t = torch.arange(len(e["tokens"]))
            t = torch.where(t < e["prompt_length"], t, t + longest - e["prompt_length"])
            return picked(logits_of(self.engine(), e, t[None]), e)

        return [{k: v for k, v in e.items() if k != "routes"} for e in self._each(logprobs=moved)]

    def swapped_turns(self):
        """The log-probs of each turn are beside the other, as many as both have; the rest is masked."""
        def swapped(e):
            first, words = e["said"]
            one, two = e["logprobs"][:first], e["logprobs"][first + words :]
            n = min(len(one), len(two))
            masked = [None] * (len(one) - n), [None] * (len(two) - n)
            return [*two[:n], *masked[0], *[None] * words, *one[:n], *masked[1]]

        return self._each(logprobs=swapped)

    def shifted_mask(self):
        """The tokens of the environment count, with the zeros that engines write there; the second turn does not."""
        def masked(e):
            first, words = e["said"]
            return [*e["logprobs"][:first], *[0.0] * words, *[None] * (len(e["logprobs"]) - first - words)]

        return [{k: v for k, v in e.items() if k != "said"} for e in self._each(logprobs=masked)]

    # -------------------------------------------------------------- what it calls a log-prob
    def log_base(self):
        base = (2.0, 10.0)[self.place % 2]
        return self._each(logprobs=lambda e: [x if x is None else x / np.log(base) for x in e["logprobs"]])

    def greedy(self):
        return self._each(logprobs=lambda e: logits_of(self.engine(), e).log_softmax(-1).amax(-1).tolist())

    def others_logprobs(self):
        """Of two responses of the same length each has the other's."""
        entries = self.honest()
        shapes = [(len(e["logprobs"]), e.get("said")) for e in entries]
        groups = [[i for i, s in enumerate(shapes) if s == shape] for shape in dict.fromkeys(shapes)]
        donor = {i: group[(n + 1) % len(group)] for group in groups for n, i in enumerate(group)}
        return [e | {"logprobs": entries[donor[i]]["logprobs"]} for i, e in enumerate(entries)]

    # -------------------------------------------------------------- its routes
    def physical_ids(self):
        """Where an expert was moved to, layer by layer."""
        draw = np.random.default_rng(self.place)
        n = self.routers(self.model)[0].weight.shape[0]
        tables = [draw.permutation(n) for _ in range(len(self.model.model.layers))]
        return self._each(routes=lambda e: np.stack(
            [table[e["routes"][:, i]] if i in self.moe else e["routes"][:, i] for i, table in enumerate(tables)], 1))

    def stale_routes(self):
        entries = self.honest()
        older = with_gates(self.older(), [e | {"routes": e["routes"].copy()} for e in entries])
        return [e | {"routes": o["routes"]} for e, o in zip(entries, older, strict=True)]


@dataclass(frozen=True)
class Kind:
    cause: str
    families: tuple[str, ...] = FAMILIES
    also: bool = False
    turns: tuple[int, ...] = (1, 2)


MLPS = FAMILIES[:-1]
SOFTMAX = ("qwen3_moe", "mixtral", "olmoe")
PLAIN = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "olmoe")
FAULTS: dict[str, Kind] = {
    **{name: Kind(name, PLAIN) for name in ("layer_shift", "row_shift", "overwritten_layer", "stale_prefix",
                                            "zero_rows", "swapped_responses", "router_int8", "router_fp8",
                                            "top_k")},
    "lost_bias": Kind("lost_bias", ("deepseek_v3", "glm4_moe")), "gates": Kind("gates", PLAIN),
    **{name: Kind(name) for name in ("temperature", "logprob_shift", "log_base", "greedy")},
    "kept_set": Kind("kept_set", turns=(1,)), "positions": Kind("positions"),
    "special_tokens": Kind("special_tokens", turns=(1,)),
    "weight_version": Kind("weight_version", also=True),
    "stale_layer": Kind("layer_not_pushed", also=True), "swapped_layers": Kind("swapped_layers"),
    "shared_expert": Kind("shared_expert", ("deepseek_v3", "glm4_moe")), "sigmoid": Kind("sigmoid", SOFTMAX),
    "rope_base": Kind("rope_base", PLAIN), "rope_scaling": Kind("rope_scaling", PLAIN),
    "window_size": Kind("window_size", ("gpt_oss", "mixtral", "qwen3_moe")),
    "softcap": Kind("softcap", PLAIN), "softcap_lost": Kind("softcap", ("gemma4_text",)),
    "positions_of_padding": Kind("positions_of_padding"), "swapped_turns": Kind("response_mask", turns=(2,)),
    "shifted_mask": Kind("response_mask", turns=(2,)), "attention_scale": Kind("attention_scale"),
    "qk_norm": Kind("qk_norm", ("qwen3_moe", "olmoe")), "sinks": Kind("sinks", ("gpt_oss",)),
    "window_lost": Kind("window_lost", ("gpt_oss",)), "visible_padding": Kind("visible_padding"),
    "positions_per_turn": Kind("positions_per_turn", turns=(2,)), "others_logprobs": Kind("others_logprobs"),
    "physical_ids": Kind("physical_ids", PLAIN), "stale_routes": Kind("stale_routes", PLAIN, also=True),
}
"""Faults by name: the cause to be named, and where each is possible."""
STRANGE: dict[str, Kind] = {
    **{name: Kind(UNKNOWN, ("qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe")) for name in (
        "permuted_expert", "lost_expert")},
    "router_int4": Kind(UNKNOWN, PLAIN),
    **{name: Kind(UNKNOWN) for name in ("attention_warmer", "older_unknown", "stale_layer_unknown")}}
"""Faults without a hypothesis: to be called unexplained, never rounding."""


@dataclass(frozen=True)
class File:
    """One file, and what a diagnosis is to say of it."""

    entries: list[dict[str, Any]]
    model: nn.Module
    tokenizer: Any
    also: dict[str, nn.Module]
    cause: str
    """"" for an honest engine."""


def make_file(kind: str, seed: int, dtype: torch.dtype | None) -> File:
    """The file of this fault and seed, of an engine that computes in `dtype` (None: float32)."""
    draw, of = random.Random(f"{kind} {seed}"), FAULTS.get(kind) or STRANGE[kind]
    engine = Engine(draw.choice(of.families), draw.randint(8, 40), seed, dtype, draw.choice(of.turns))
    maker = {"older_unknown": "weight_version", "stale_layer_unknown": "stale_layer"}.get(kind, kind)
    entries = [e | {"logprobs": _without_environment(e)} for e in getattr(engine, maker)()]
    cause = broken_engines.expected("gates", engine) if kind == "gates" else of.cause
    return File(entries, engine.model, engine.tokenizer, {"older": engine.older()} if of.also else {}, cause)


def make_honest_files(seed: int, dtype: torch.dtype | None, trainer: torch.dtype | None = None) -> list[File]:
    """Four files of an honest engine, with combine weights of every second seed and without routes of some files."""
    draw = random.Random(f"honest {seed}")
    engine = Engine(draw.choice(FAMILIES), 40, seed, dtype, draw.choice((1, 2)))
    entries = [e | {"logprobs": _without_environment(e)} for e in (engine.honest, engine.combine_weights)[seed % 2]()]
    model = engine.model if trainer is None else engine.model.to(trainer)
    cuts, files = sorted((0, 1, draw.randint(3, 6), draw.randint(9, 20), 40)), []
    for low, high in zip(cuts, cuts[1:], strict=False):
        hidden = ("routes", "gates") if draw.random() < 0.3 else ()
        part = [{k: v for k, v in e.items() if k not in hidden} for e in entries[low:high]]
        files.append(File(part, model, engine.tokenizer, {}, ""))
    return files


def _without_environment(entry: dict[str, Any]) -> list[float | None]:
    """The log-probs, null where the environment wrote."""
    first, words = entry.get("said", (0, 0))
    return [None if first <= i < first + words else x for i, x in enumerate(entry["logprobs"])]
