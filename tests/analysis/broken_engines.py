"""Honest rollouts of tiny models of several families, and engines that are broken in one known way each.

Faults of an engine's numbers are made in a copy of the model, by hand, and sampled from; faults of its routes are made
in the arrays that an honest engine reports. Nothing here is shared with what finds them.
"""

from __future__ import annotations

import copy
import re

import numpy as np
import torch

from moe_rl.models.tokens import byte_tokenizer
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import record_routing
from moe_rl.types import Prompt, Sampling
from tests.conftest import build, perturb

VOCABULARY = 48
FAMILIES = {
    "qwen3_moe": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 5, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "glm4_moe": {"num_hidden_layers": 5, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    "mixtral": {"num_hidden_layers": 4},
    "olmoe": {"num_hidden_layers": 4},
}


def trained_by(family, seed=0, **changes):
    """The trainer's model, sharp enough that samples say something, and its tokenizer."""
    model = build(family, seed, **{**FAMILIES[family], "initializer_range": 0.15, **changes})
    tokenizer = byte_tokenizer(VOCABULARY)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def prompts(tokenizer, count, seed=0):
    """Unequal lengths; an end token, as between turns, inside each."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 14, (1,), generator=draw))
        ids = torch.randint(3, 40, (length,), generator=draw).tolist()
        ids[length // 2] = tokenizer.eos_token_id
        found.append(Prompt("", tokens=tuple(ids)))
    return found


def sampled(engine, tokenizer, asked, seed=0, tokens=14, temperature=1.0, top_p=1.0):
    """What an engine on this model reports, a dictionary per response: ids of all layers, dense ones zero."""
    sampling = Sampling(temperature, tokens, top_p=top_p)
    drawn = HFEngine(engine, tokenizer).generate(asked, 1, key=(seed,), sampling=sampling)
    layers = engine.config.num_hidden_layers
    found = []
    for r in drawn:
        ids = np.zeros((r.routes.shape[1], layers, r.routes.shape[3]), dtype=np.int64)
        ids[:, [site.decoder_layer for site in r.routes.layout.sites]] = r.routes.ids()[0].numpy()
        found.append({"tokens": [*r.prompt.tokens, *r.tokens], "prompt_length": len(r.prompt.tokens),
                      "logprobs": r.logprobs.tolist(), "temperature": temperature, "top_p": top_p, "routes": ids})
    return found


@torch.no_grad()
def logits_of(model, entry, positions=None):
    """Of a response's tokens, from a forward of its own."""
    tokens = torch.tensor([entry["tokens"]])
    settings = {} if positions is None else {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}
    return model(tokens, **settings).logits[0, entry["prompt_length"] - 1 : -1].float()


def picked(logits, entry):
    chosen = torch.tensor(entry["tokens"][entry["prompt_length"] :])
    return logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()


def with_gates(model, entries):
    """The same, with the combine weights that the model used."""
    found = []
    for entry in entries:
        tokens = torch.tensor([entry["tokens"][:-1]])
        with torch.no_grad(), record_routing(model, scores=True) as recording:
            model(tokens)
        gates = np.zeros(entry["routes"].shape)
        layers = [site.decoder_layer for site in recording.layout.sites]
        gates[:, layers] = recording.scores(1).gates[0].numpy()
        ids = np.zeros(entry["routes"].shape, dtype=np.int64)
        ids[:, layers] = recording.trace(tokens).ids()[0].numpy()
        found.append(entry | {"routes": ids, "gates": gates.tolist()})
    return found


# ---------------------------------------------------------------------- broken engines
class Bench:
    """One family, its honest rollouts, and every broken engine by name."""

    def __init__(self, family, count=16, seed=0, dtype=None, **changes):
        self.family, self.count, self.seed, self.dtype = family, count, seed, dtype
        self.model, self.tokenizer = trained_by(family, seed, **changes)
        self.asked = prompts(self.tokenizer, count, seed)
        self.moe = [i for i, layer in enumerate(self.model.model.layers) if any(
            re.search(r"gate$|router$", n) for n, _ in layer.named_modules() if "proj" not in n)]

    def engine(self, change=lambda m: None):
        twin = copy.deepcopy(self.model)
        with torch.no_grad():
            change(twin)
        if self.dtype is not None:
            for p in twin.parameters():
                p.data = p.data.to(self.dtype)
        return twin

    def honest(self, temperature=1.0, change=lambda m: None, asked=None):
        return sampled(self.engine(change), self.tokenizer, asked or self.asked, self.seed, temperature=temperature)

    def routers(self, model):
        return [m for n, m in model.named_modules() if re.search(r"(gate|router)$", n) and hasattr(m, "top_k")]

    def _each(self, **of):
        """Honest rollouts with something of every entry replaced by a function of it."""
        return [entry | {key: change(entry) for key, change in of.items()} for entry in self.honest()]

    # -------------------------------------------------------------- its routes
    def layer_shift(self):
        def moved(entry):
            """Layers that route counted from 0; where all do, one too late."""
            ids, first = entry["routes"], self.moe[0]
            return np.roll(ids, -first if first else 1, axis=1)

        return self._each(routes=moved)

    def row_shift(self):
        return self._each(routes=lambda e: np.roll(e["routes"], 1, axis=0))

    def overwritten_layer(self):
        draw = np.random.default_rng(1)

        def changed(entry):
            ids = entry["routes"].copy()
            experts = self.routers(self.model)[0].num_experts
            for row in ids[:, self.moe[0]]:
                row[:] = draw.permutation(experts)[: len(row)]
            return ids

        return self._each(routes=changed)

    def stale_prefix(self):
        entries = self.honest()
        stale = []
        for i, entry in enumerate(entries):
            other, n = entries[(i + 5) % len(entries)]["routes"], entry["prompt_length"] - 1
            ids = entry["routes"].copy()
            n = min(n, len(other) - 2)
            ids[:n] = other[2 : n + 2]
            stale.append(entry | {"routes": ids})
        return stale

    def zero_rows(self):
        def emptied(entry):
            ids = entry["routes"].copy()
            ids[: entry["prompt_length"] - 1] = 0
            return ids

        return self._each(routes=emptied)

    def swapped_responses(self):
        entries, draw = self.honest(), np.random.default_rng(0)
        found = []
        for i, entry in enumerate(entries):  # another's rows, gone on with random sets where it is shorter
            other = entries[(i + 1) % len(entries)]["routes"]
            n = min(len(other), len(entry["routes"]))
            ids = entry["routes"].copy()
            ids[:n] = other[:n]
            ids[n:] = other[draw.integers(0, len(other), len(ids) - n)]
            found.append(entry | {"routes": ids})
        return found

    def sorted_ids(self):
        entries = with_gates(self.engine(), self.honest())
        return [e | {"routes": np.sort(e["routes"], -1)} for e in entries]

    # -------------------------------------------------------------- its routers
    def _rounded(self, rounded):
        def change(model):
            for router in self.routers(model):
                router.weight.copy_(rounded(router.weight))

        return self.honest(change=change)

    def router_int8(self, largest=127):
        def rounded(w):
            scale = w.abs().amax(1, keepdim=True) / largest
            return (w / scale).round() * scale

        return self._rounded(rounded)

    def router_fp8(self):
        def rounded(w):
            scale = 448 / w.abs().max()
            return (w * scale).to(torch.float8_e4m3fn).float() / scale

        return self._rounded(rounded)

    def router_bf16(self):
        return self._rounded(lambda w: w.to(torch.bfloat16).float())

    def lost_bias(self):
        return self.honest(change=lambda m: [r.e_score_correction_bias.zero_() for r in self.routers(m)])

    def gates(self):
        """The other convention: raw where the family renormalises, and the other way round."""
        def change(model):
            for r in self.routers(model):
                if hasattr(r, "norm_topk_prob"):
                    r.norm_topk_prob = not r.norm_topk_prob
                else:
                    r.register_forward_hook(lambda m, i, o: (o[0], o[0].softmax(-1).gather(1, o[2]), o[2]))

        return self.honest(change=change)

    def top_k(self):
        def change(model):
            for r in self.routers(model):
                r.top_k += 1

        return [{k: v for k, v in e.items() if k != "routes"} for e in self.honest(change=change)]

    # -------------------------------------------------------------- its log-probs, tokens and weights
    def temperature(self):
        return [e | {"logprobs": picked(logits_of(self.engine(), e), e)} for e in self.honest(temperature=0.7)]

    def kept_set(self):
        """Top-p 0.9, log-probs renormalised; a response ends before the first token that would not have been drawn."""
        found = []
        for entry in self.honest():
            logits = logits_of(self.engine(), entry)
            order = logits.softmax(-1).sort(-1, descending=True)
            cut = (order.values.cumsum(-1) - order.values) >= 0.9
            cut = torch.zeros_like(cut).scatter(1, order.indices, cut)
            logprobs = picked(logits.masked_fill(cut, -torch.inf), entry)
            n = next((i for i, x in enumerate(logprobs) if x == -np.inf), len(logprobs))
            if n:
                time = entry["prompt_length"] + n
                found.append(entry | {"tokens": entry["tokens"][:time], "routes": entry["routes"][: time - 1],
                                      "logprobs": logprobs[:n], "top_p": 0.9})
        return found

    def logprob_shift(self):
        return self._each(logprobs=lambda e: [e["logprobs"][0], *e["logprobs"][:-1]])

    def positions(self):
        def moved(entry):
            n, t = entry["prompt_length"], torch.arange(len(entry["tokens"]))
            return picked(logits_of(self.engine(), entry, (t + (t >= n).long())[None]), entry)

        return [{k: v for k, v in e.items() if k != "routes"} for e in self._each(logprobs=moved)]

    def special_tokens(self):
        end = self.tokenizer.eos_token_id
        asked = [Prompt("", tokens=tuple(t for t in p.tokens if t != end)) for p in self.asked]
        found = self.honest(asked=asked)
        return [{"tokens": [*p.tokens, *e["tokens"][e["prompt_length"] :]], "prompt_length": len(p.tokens),
                 "logprobs": e["logprobs"]} for p, e in zip(self.asked, found, strict=True)]

    def older(self):
        """The checkpoint before: every weight elsewhere."""
        twin = copy.deepcopy(self.model)
        perturb(twin, 0.2, self.seed + 1)
        return twin

    def weight_version(self):
        return self.honest(change=lambda m: m.load_state_dict(self.older().state_dict()))

    def head_not_pushed(self):
        """A tied head that is a weight of its own in the engine, and was left behind."""
        def change(model):
            model.lm_head.weight = torch.nn.Parameter(self.older().lm_head.weight.detach().clone())

        return self.honest(change=change)


FAULTS = ("layer_shift", "row_shift", "overwritten_layer", "stale_prefix", "zero_rows", "swapped_responses",
          "sorted_ids",
          "router_int8", "router_fp8", "router_bf16", "lost_bias", "gates", "top_k", "temperature", "kept_set",
          "logprob_shift", "positions", "special_tokens", "weight_version", "head_not_pushed")
ALSO = {"weight_version", "head_not_pushed"}


def expected(fault, bench):
    """The cause that a diagnosis must name."""
    if fault != "gates":
        return fault
    raw = getattr(bench.routers(bench.model)[0], "norm_topk_prob", True)
    return "gates_raw" if raw else "gates_renormalised"


def possible(fault, bench):
    return fault != "lost_bias" or hasattr(bench.routers(bench.model)[0], "e_score_correction_bias")
