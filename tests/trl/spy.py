"""An independent witness of a TRL run, and the statistics of what it saw, by loops over tokens."""

from __future__ import annotations

import numpy as np
import torch


class Spy:
    """What a trainer's policy reads and uses, seen at the experts' own inputs and by none of the hooks under test.

    `phase` is "score" while TRL scores a generation batch, then "unconstrained" in forwards without gradient, "train"
    in those with. `steps` holds, per micro-step, these forwards and, as "old", those of the scoring. A forward is a
    dictionary of what it read, the log-probs, and per MoE layer the ids used then ("ids"), in recomputation ("again"),
    and those of the largest router logits ("preferred")."""

    def __init__(self, trainer):
        self.trainer, self.scored, self.steps = trainer, [], []
        self.scoring = False
        model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
        self.layers = [m for m in model.modules() if type(m).__name__.endswith("MoeExperts")]
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda _, args, index=index: self.experts(index, args[1]))
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        for index, router in enumerate(routers):
            router.register_forward_hook(lambda router, _, out, index=index: self.prefers(index, router.top_k, out[0]))
        model.register_forward_pre_hook(self.reads, with_kwargs=True)
        model.register_forward_hook(lambda _, args, out: self.returns(out))
        generate, step = trainer._generate_and_score_completions, trainer.training_step

        def generate_and_score(inputs):
            self.scoring, self.scored = True, []
            try:
                return generate(inputs)
            finally:
                self.scoring = False

        def training_step(*args, **kwargs):
            self.steps.append({})
            loss = step(*args, **kwargs)
            self.steps[-1]["old"] = self.scored
            return loss

        trainer._generate_and_score_completions, trainer.training_step = generate_and_score, training_step

    def reads(self, _, args, kwargs):
        self.forward = None
        if "labels" in kwargs:  # TRL scores; else it generates
            mask = kwargs["attention_mask"].bool()
            self.forward = {"tokens": kwargs["input_ids"], "mask": mask, "labels": kwargs["labels"]}
            self.forward |= {"ids": {}, "again": {}, "preferred": {}}
            phase = "train" if torch.is_grad_enabled() else "unconstrained"
            if self.scoring:
                self.scored.append(self.forward)
            else:
                self.steps[-1][phase] = self.forward

    def experts(self, index, ids):
        if self.forward is not None:
            again = torch._C._current_graph_task_id() != -1
            kept = self.forward["again" if again else "ids"]
            assert index not in kept
            kept[index] = ids.detach().clone().view(*self.forward["tokens"].shape, -1)

    def prefers(self, index, k, logits):
        if self.forward is not None:
            ids = logits.detach().topk(k, dim=-1).indices
            self.forward["preferred"].setdefault(index, ids.view(*self.forward["tokens"].shape, -1))

    def returns(self, out):
        if self.forward is not None:
            self.forward["logps"] = out.log_probs.detach()


def row_of(forward, b):
    return tuple(forward["tokens"][b].tolist()), tuple(forward["mask"][b].tolist())


def pairs(forward, old):
    """Each row of a forward with the old policy's forward, and its row there, of the same tokens."""
    known = {row_of(f, b): (f, b) for f in old for b in range(len(f["tokens"]))}
    for b in range(len(forward["tokens"])):
        yield b, *known[row_of(forward, b)]


# ---------------------------------------------------------------------- what the logs should say
def tokens_of(step, unconstrained):
    """What the statistics of a micro-step are made of: changes per token and MoE layer, and log-ratios per response."""
    slots, sets, anywhere, pulled, log_ratios = [], [], [], [], []
    for row, old, old_row in pairs(step["train"], step["old"]):
        length = old["tokens"].shape[1]
        positions = [t for t in range(length - 1) if old["labels"][old_row, t + 1] != -100]
        for t in positions:
            changes = []
            for moe_layer, ids in old["ids"].items():
                before, after = set(ids[old_row, t].tolist()), set(unconstrained["ids"][moe_layer][row, t].tolist())
                slots.append(len(before - after) / len(before))
                pulled.append(len(before - set(step["train"]["preferred"][moe_layer][row, t].tolist())) / len(before))
                changes.append(before != after)
            sets += changes
            anywhere.append(any(changes))
        at = [t + 1 - length for t in positions]  # log-probs are aligned at the end
        log_ratios.append((step["train"]["logps"][row] - old["logps"][old_row])[at].double().tolist())
    return slots, sets, anywhere, pulled, [response for response in log_ratios if response]


def statistics(slots, sets, anywhere, pulled, log_ratios):
    """NaN where no token is left."""
    flat = np.array([x for response in log_ratios for x in response] or [np.nan])
    sequences = np.array([np.mean(response) for response in log_ratios] or [np.nan])
    return {
        "routing/expert_change_rate": np.mean(slots or [np.nan]),
        "routing/any_change_rate": np.mean(sets or [np.nan]),
        "routing/any_layer_change": np.mean(anywhere or [np.nan]),
        "routing/pull": np.mean(pulled or [np.nan]),
        "ratios/token_log_ratio_mean": flat.mean(),
        "ratios/token_log_ratio_var": flat.var(),
        "ratios/token_log_ratio_max": abs(flat).max(),
        "ratios/token_kl_k3": (np.exp(flat) - 1 - flat).mean(),
        "ratios/token_ess": np.exp(flat).sum() ** 2 / (np.exp(2 * flat).sum() * len(flat)),
        "ratios/sequence_log_ratio_var": sequences.var(),
    }


def expected_logs(seen, micro_batches=2):
    """Per log entry, of what each micro-step saw: like TRL, the mean over micro-batches that have a number."""
    steps = [statistics(*tokens) for tokens in seen]
    values = {name: np.array([step[name] for step in steps]).reshape(-1, micro_batches) for name in steps[0]}
    return {name: np.nanmean(x, 1).tolist() for name, x in values.items()}
