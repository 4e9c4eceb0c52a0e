"""A Hugging Face model as a policy: it scores and updates on one device, live or under replayed routes.

Below it are its forwards, a batch in micro-batches, and its optimizer, up to `optimizer.step()`. The policy `fsdp`
spreads the same over ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.config import Optimizer, RunConfig
from moe_rl.errors import ConfigError, Diverged, raise_os_errors
from moe_rl.models.load import LoadedModel, load
from moe_rl.models.vocabulary import LOGITS, entropy_of, head_is_apart, head_of, log_probs_in_pieces
from moe_rl.objectives import Objective
from moe_rl.registry import checked
from moe_rl.routing.hooks import RouterScores, record_routing, replay_routing
from moe_rl.routing.inputs import Routed, RouterInputs, load_of, token_weights
from moe_rl.routing.router_noise import Noise, disturbed
from moe_rl.routing.sites import find_sites, router_parameters
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, Scored, Updated

PerToken = Float[Tensor, "batch time"]
Rows = slice | Tensor

WEIGHTS, MOMENTS, GRADIENT = "model.safetensors", "optimizer.pt", "gradient.pt"
BIAS = "e_score_correction_bias"


def _check(run: RunConfig) -> None:
    if ranks.planned() > 1:
        raise ConfigError(f"policy='hf' runs in one process, but this run has {ranks.planned()}. Leave torchrun or "
                          "launcher.ranks out, or use --policy fsdp or --policy megatron.")


@checked(_check)
def hf(run: RunConfig, start: LoadedModel, frozen: bool) -> HFPolicy:
    """The policy `hf`, which trains `start` itself; `frozen`: a copy of it, which only scores."""
    model = copy_of(run, start) if frozen else start.model
    return HFPolicy(model, run.optimizer, gradient_cosine=run.measure.gradient_cosine and not frozen,
                    **settings_of(run, frozen))


def settings_of(run: RunConfig, frozen: bool = False) -> dict[str, Any]:
    """The settings of a run that an `HFPolicy` takes."""
    return {"temperature": run.temperature, "micro_batch": run.micro_batch,
            "micro_batch_tokens": run.micro_batch_tokens,
            "activation_checkpointing": run.activation_checkpointing and not frozen}


def copy_of(run: RunConfig, start: LoadedModel) -> Any:
    """Another model of the same weights."""
    model = load(run.model, run.cold_start.seed).model
    model.load_state_dict(start.model.state_dict())
    return model


class HFPolicy:
    """Owns the module and its optimizer. The module stays in eval mode (no dropout, no router jitter), gradients on.

    `temperature` divides the logits, as the rollout engine's does. `micro_batch` bounds the rows of one forward with
    gradient, `micro_batch_tokens` the tokens of any forward, for which rows are sorted by length; a sequence is never
    split. `activation_checkpointing` is False, "reentrant" or "non-reentrant". With `gradient_cosine` every update says
    how its gradient lies to the one before (`compute_cosine_with`), which is kept for it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        temperature: float = 1.0,
        micro_batch: int = 64,
        micro_batch_tokens: int | None = None,
        score_batch: int = 256,
        activation_checkpointing: bool | str = False,
        gradient_cosine: bool = False,
    ):
        self.model = model.eval()
        self.settings = optimizer
        self.temperature = temperature
        self.micro_batch, self.micro_batch_tokens, self.score_batch = micro_batch, micro_batch_tokens, score_batch
        self.device = next(model.parameters()).device
        self.optimizer = optimizer_of(model, optimizer)
        self.biases = correction_biases(model) if optimizer.loss_free_bias else []
        self.updates = 0
        self.last_gradient: list[Tensor] | None = [] if gradient_cosine else None
        if activation_checkpointing:
            checkpoint_activations(model, reentrant=activation_checkpointing == "reentrant")

    # ------------------------------------------------------------------ the verbs
    @torch.no_grad()
    def score(
        self, batch: Batch, routes: RoutingTrace | None = None, scores: bool = False, noise: Noise | None = None
    ) -> Scored:
        """Log-probs, entropy and routes of a batch; natural routing when `routes` is None. See `Policy.score`."""
        if routes is not None:
            routes.require_known()
        parts = []
        cuts = self._cut(batch, self.score_batch)
        for rows in cuts:
            part = batch.rows(rows)
            forced, in_pieces = None if routes is None else routes.rows(rows), self._in_pieces(part)
            with self._apply_noise(noise), self._record_and_replay(part, forced, scores) as routed:
                outputs = self._forward(part, in_pieces)
            seen = routed.recording.scores(len(part)) if scores else None
            parts.append(move_beside(batch, *outputs, *routed.traces, seen))
        return Scored(*self._join(parts, batch, cuts))

    def update(self, batch: Batch, objective: Objective, noise: Noise | None = None) -> Updated:
        """One optimizer step on a mini-batch. Micro-batches only add: the weights of the loss span all of it."""
        (logprobs, entropy, routes, preferred, clipped_by), loss, metrics = self._backward(batch, objective, noise)
        if self.last_gradient is not None:
            cosine = compute_cosine_with(self.last_gradient, self._trainable())
            metrics = metrics if cosine is None else {**metrics, "grad_cosine": cosine}
        norm, clipped = take_step(self.model, self.optimizer, self.settings, self.updates + 1)
        self.updates += 1
        if self.biases:
            balance(self.biases, preferred or routes, self.settings.loss_free_bias)
        found = (logprobs, entropy, routes, preferred, clipped_by)
        return Updated(*found, loss=loss, grad_norm=norm, grad_clipped=clipped, metrics=metrics)

    def gradient(self, batch: Batch, objective: Objective) -> Float[Tensor, " parameters"]:
        """What `update` would clip and hand to its optimizer, of all trainable parameters in one vector. No step."""
        self._backward(batch, objective)
        found = [ranks.join_shards(torch.zeros_like(p) if p.grad is None else p.grad) for p in self._trainable()]
        gradient = torch.cat([gradient.flatten() for gradient in found])
        self.optimizer.zero_grad(set_to_none=True)
        return gradient

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the state dict, as transformers names them in memory.

        A PEFT model gives base weights and adapters as they are, unmerged and under its own names: nothing for an
        engine on the same module, and any other engine must have the same adapters, or refuses. For one that has none,
        give it `merge_and_unload()` of a copy.
        """
        for name, tensor in self.model.state_dict().items():
            yield name, ranks.join_shards(tensor)

    def save(self, folder: Path) -> None:
        """Write weights (safetensors) and optimizer moments; bit-exact."""
        write_state(folder / WEIGHTS, folder / MOMENTS, self.model, self.optimizer, self.updates)
        if self.last_gradient:
            torch.save(self.last_gradient, folder / GRADIENT)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into this policy."""
        self.updates = read_state(folder / WEIGHTS, folder / MOMENTS, self.model, self.optimizer, self.device)
        if self.last_gradient is not None and self.updates:
            self.last_gradient = torch.load(folder / GRADIENT, map_location=self.device, weights_only=True)

    @torch.no_grad()
    def distributions(
        self, batch: Batch, routes: RoutingTrace | None = None
    ) -> Float[Tensor, "batch time vocabulary"]:
        """log π(· | prefix) at every response token, 0 elsewhere; all rows at once, so for small vocabularies."""
        part = batch.to(self.device)
        if routes is not None:
            routes.require_known()
        with self._record_and_replay(part, routes):
            log_p = self._log_probs(part, first := first_response(part))
        found = nn.functional.pad(log_p.where(part.response_mask[:, first:, None], 0.0), (0, 0, first, 0))
        return found.to(batch.tokens.device)

    # ------------------------------------------------------------------ how
    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _cut(self, batch: Batch, most: int) -> list[Rows]:
        """The rows of every forward of this process."""
        return cut(batch, most, self.micro_batch_tokens)

    def _join(self, parts: list[tuple], batch: Batch, cuts: list[Rows]) -> list:
        """What all forwards over a batch gave, each kind as one."""
        return join(parts, batch, cuts)

    def _apply_noise(self, noise: Noise | None) -> AbstractContextManager[None]:
        return disturbed(self.model, noise, partial(last_step, self.optimizer))

    def _backward(
        self, batch: Batch, objective: Objective, noise: Noise | None = None
    ) -> tuple[list, float, Mapping[str, float]]:
        """Fresh gradients of a mini-batch's loss; returns the outputs of its rows, the loss and its metrics."""
        if batch.routes is not None:
            batch.routes.require_known()
        self.optimizer.zero_grad(set_to_none=True)
        metrics: Counter[str] = Counter()
        parts, loss = [], 0.0
        looks = "router" in objective.needs
        inputs_of = self._router_inputs(batch, objective, noise) if looks else lambda rows, part, routed: {}
        cuts = self._cut(batch, self.micro_batch)
        for number, rows in enumerate(cuts, 1):
            part = batch.rows(rows).to(self.device)
            in_pieces = self._in_pieces(part)
            with self._apply_noise(noise), self._record_and_replay(part, part.routes, logits=looks) as routed:
                logprobs, entropy = self._forward(part, in_pieces, entropy_gradient="entropy" in objective.needs)
                out = objective(part, logprobs, entropy, **inputs_of(rows, part, routed))
                self._prepare_backward(last=number == len(cuts))
                out.loss.backward()
            loss += out.loss.item()
            metrics.update(out.metrics)
            parts.append(move_beside(batch, logprobs.detach(), entropy.detach(), *routed.traces, out.clipped_by))
        return self._join(parts, batch, cuts), loss, dict(metrics)

    def _prepare_backward(self, last: bool) -> None:
        """Called before the backward of every micro-batch; `last`: of the mini-batch's last one."""

    def _router_inputs(self, batch: Batch, objective: Objective, noise: Noise | None) -> Callable[..., dict[str, Any]]:
        """What parts that look at routers are given about some rows of a mini-batch, once their forward has run."""
        weights, load = token_weights(batch.attention_mask, batch.response_mask), None
        if "load" in objective.needs and len(batch.tokens[self._cut(batch, self.micro_batch)[0]]) < len(batch):
            whole = self.score(batch, batch.routes, noise=noise)
            load = load_of(weights, whole.routes, whole.preferred)
            load = {kind: tuple(share.to(self.device) for share in sites) for kind, sites in load.items()}

        def inputs_of(rows: Rows, part: Batch, routed: Routed) -> dict[str, Any]:
            here = weights[rows][:, : part.tokens.shape[1]].to(self.device)
            return {"router": RouterInputs.of(part.old_scores, routed, here, load)}

        return inputs_of

    @contextmanager
    def _record_and_replay(
        self, part: Batch, routes: RoutingTrace | None, scores: bool = False, logits: bool = False
    ) -> Iterator[Routed]:
        """Scope of one forward (and its backward), which says what the routers did as soon as the forward has run."""
        inputs = part.tokens[:, :-1].to(self.device)
        followed = part.attention_mask[:, 1:].to(self.device)  # inputs whose output is a real token
        forced = None
        if routes is not None:
            forced = replace(routes.rows(slice(None), inputs.shape[1]).to(self.device), attention_mask=followed)
        # A part may know no route by chance: those who cut it have looked at the whole.
        recorder = record_routing(self.model, scores, logits)
        with replay_routing(self.model, forced, part=True) as replay, recorder as recording:
            yield Routed(inputs, followed, recording, replay)

    def _in_pieces(self, part: Batch) -> bool:
        """Whether the logits of its responses are too many to be held at once, and can be made piece by piece."""
        head = head_of(self.model)
        count = part.response_mask[:, first_response(part) :].numel()
        return head is not None and count * head.weight.shape[0] > LOGITS and self._head_is_apart

    @cached_property
    def _head_is_apart(self) -> bool:
        return head_is_apart(self.model)

    def _forward(
        self, part: Batch, in_pieces: bool, entropy_gradient: bool = False
    ) -> tuple[PerToken, PerToken]:
        """Log-probs and entropy of the response tokens, 0 elsewhere."""
        first = first_response(part)
        tokens, mask = part.tokens.to(self.device), part.response_mask.to(self.device)[:, first:]
        kept = None if part.kept is None else part.kept.to(self.device).since(first)
        if in_pieces:
            found = log_probs_in_pieces(self.model, tokens[:, :-1], tokens[:, first:], mask, self.temperature,
                                        entropy_gradient, kept)
        else:
            log_p = self._log_probs(part, first)
            chosen = log_p.gather(-1, tokens[:, first:, None])[..., 0]
            with nullcontext() if entropy_gradient else torch.no_grad():
                entropy = entropy_of(log_p, kept is not None)
            found = chosen.where(mask, 0.0), entropy.where(mask, 0.0)
        chosen, entropy = (nn.functional.pad(x, (first, 0)) for x in found)
        return chosen, entropy

    def _log_probs(self, part: Batch, first: int) -> Float[Tensor, "batch kept vocabulary"]:
        """log π over the vocabulary from the token `first` on, -inf at what truncated sampling did not keep.

        The last token is never an input: nothing depends on it. Right padding under a causal mask reaches no real
        token, so no attention mask is needed. Logits are made only where the next token belongs to a response.
        """
        tokens = part.tokens.to(self.device)
        keep = tokens.shape[1] - first
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=keep).logits
        logits = logits.float() / self.temperature
        return (logits if part.kept is None else part.kept.to(self.device).since(first).only(logits)).log_softmax(-1)


def first_response(part: Batch) -> int:
    """The first position at which a row has a response token; the first token of all is nobody's."""
    return max(1, int(part.response_mask.any(0).long().argmax()))


def checkpoint_activations(model: Any, reentrant: bool) -> None:
    """Turn on transformers' activation checkpointing, which it only does in train mode.

    The flag is set on the checkpointed layers alone, not on what is inside them: dropout and jitter stay off.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
    if reentrant:
        model.enable_input_require_grads()


# ---------------------------------------------------------------------- a batch in forwards that fit
def fill_rows(batch: Batch, order: Tensor) -> Batch:
    """The rows `order` of the batch; those beyond its end are copies of the last one without a response, so that they
    weigh nothing, for ranks that must do as much as others."""
    real = (order < len(batch))[:, None]
    rows = batch.rows(order.clamp(max=len(batch) - 1))
    return replace(
        rows,
        response_mask=rows.response_mask & real,
        loss_mask=None if rows.loss_mask is None else rows.loss_mask & real,
        weights=None if rows.weights is None else rows.weights * real,
    )


def cut(batch: Batch, rows: int, tokens: int | None = None) -> list[Rows]:
    """The rows of every forward, at most `rows`, in their order. Under a budget of `tokens`, padding included, they are
    sorted by length, the longest first, and as many as fit go together, so that little is padding. A row is never
    split: one that is longer than the budget goes alone."""
    if tokens is None:
        return [slice(start, start + rows) for start in range(0, len(batch), rows)]
    lengths = batch.attention_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    cuts: list[Rows] = []
    while len(order):
        size = max(1, min(rows, tokens // max(1, int(lengths[order[0]]))))
        cuts.append(order[:size])
        order = order[size:]
    return cuts


def move_beside(batch: Batch, *outputs: Tensor | RoutingTrace | RouterScores | None) -> tuple:
    """What a forward gave, where the batch is, so that it takes no memory of a device until all forwards have run."""
    return tuple(None if x is None else x.to(batch.tokens.device) for x in outputs)


def join(parts: Sequence[tuple], batch: Batch, cuts: Sequence[Rows]) -> list:
    """Each kind of part as one over the batch's rows, in their order, widened to its time axis, on its device."""
    order = None if isinstance(cuts[0], slice) else torch.cat([c for c in cuts if isinstance(c, Tensor)])
    tokens, mask = (x if order is None else x[order] for x in (batch.tokens, batch.attention_mask))
    back, width = None if order is None else order.argsort(), batch.tokens.shape[1]

    def widen(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, width - x.shape[1]))

    def put_back(kind: tuple) -> Tensor | RoutingTrace | RouterScores | None:
        if kind[0] is None:
            return None
        if isinstance(kind[0], Tensor):
            found = torch.cat([widen(x) for x in kind])
            return found if back is None else found[back]
        scores = isinstance(kind[0], RouterScores)
        whole = RouterScores.cat(kind, width) if scores else RoutingTrace.cat(kind, tokens, mask)
        return whole if back is None else whole.rows(back, width)

    return [put_back(kind) for kind in zip(*parts, strict=True)]


# ---------------------------------------------------------------------- the optimizer
def optimizer_of(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """With the routers in a group of their own, at `router_lr_scale` times the learning rate (0 = frozen)."""
    routers = {id(p) for p in router_parameters(model)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter.")
    groups = [
        {"params": [p for p in trainable if id(p) not in routers], "scale": 1.0},
        {"params": [p for p in trainable if id(p) in routers], "scale": settings.router_lr_scale},
    ]
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.betas[0], **common)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, **common)


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Optimizer, update: int, whose: str = ""
) -> tuple[float, bool]:
    """One step along the clipped gradients, which are gone then; their norm before, and whether they were clipped.
    Updates are counted from 1. Raises Diverged where a gradient is not finite."""
    limit = settings.grad_clip or float("inf")
    total = ranks.join_shards(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    norm = total.item()
    if not math.isfinite(norm):
        raise Diverged(f"the{whose} gradient norm is {norm}, so a step would destroy the weights. Lower the{whose} "
                       "learning rate.")
    if norm + 1e-6 > limit:  # else torch would multiply every gradient by 1; the constant is its own
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, total)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr_at(update) * group["scale"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, norm > limit


@torch.no_grad()
def compute_cosine_with(last: list[Tensor], parameters: Iterable[nn.Parameter]) -> float | None:
    """cos(g_t, g_{t−1}) over all of them (arXiv 2603.01501), from sums in float64, before anything is clipped; None
    where one of them is 0 or there is no `last` yet, which becomes g_t."""
    now = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if not last:
        last += [g.clone() for g in now]
        return None
    sums = torch.zeros(3, dtype=torch.float64)
    for g, before in zip(now, last, strict=True):
        a, b = g.flatten().double(), before.flatten().double()
        sums += torch.stack([a @ b, a @ a, b @ b]).cpu()
        before.copy_(g)
    return (sums[0] / (sums[1] * sums[2]).sqrt()).item() if sums[1] and sums[2] else None


def last_step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor | None:
    """Where the optimizer last moved a parameter, up to a factor and without weight decay; None before its first step.
    Read off the moments, so that a resumed run knows it."""
    settings = optimizer.param_groups[0]
    state = {name: ranks.join_shards(x) for name, x in optimizer.state.get(parameter, {}).items()}
    if "exp_avg_sq" in state:  # AdamW
        variance = state["exp_avg_sq"] / (1 - settings["betas"][1] ** state["step"])
        return -state["exp_avg"] / (variance.sqrt() + settings["eps"])
    momentum = state.get("momentum_buffer")
    return None if momentum is None else -momentum


def write_state(
    weights: Path, moments: Path, model: nn.Module, optimizer: torch.optim.Optimizer, updates: int
) -> None:
    """A module into a safetensors file, its optimizer and the number of its updates into another; bit-exact."""
    from safetensors.torch import save_model

    weights.parent.mkdir(parents=True, exist_ok=True)
    with raise_os_errors(weights):
        save_model(model, str(weights))
    with raise_os_errors(moments):
        torch.save({"optimizer": optimizer.state_dict(), "updates": updates}, moments)


def read_state(
    weights: Path, moments: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Put back what `write_state` wrote; returns the number of updates."""
    from safetensors.torch import load_model

    load_model(model, str(weights), device=str(device))
    state = torch.load(moments, map_location=device, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return state["updates"]


def correction_biases(model: nn.Module) -> list[Tensor]:
    """The bias with which every site's router chooses, and does not weigh. Raises ConfigError for a family whose
    routers have none of their own, and for one in a dtype that rounds small steps away."""
    found = []
    for site in find_sites(model):
        bias = getattr(site.module, BIAS, None)
        if not isinstance(bias, Tensor):
            raise ConfigError(f"optimizer.loss_free_bias: {site.site.name} ({type(site.module).__name__}) has no "
                              f"{BIAS}. Use a family that has one, such as deepseek_v3 or glm4_moe.")
        if bias.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"optimizer.loss_free_bias: the bias of {site.site.name} is {bias.dtype}, which is too "
                              "coarse for steps of 0.001. Set model.router_dtype='float32'.")
        found.append(bias)
    return found


@torch.no_grad()
def balance(biases: list[Tensor], live: RoutingTrace, step: float, first: int = 0) -> None:
    """b_e += step · sign(mean count − count_e), counts of the `live` choices of real tokens: loss-free balancing, arXiv
    2408.15664, algorithm 1. Replayed choices would count what no bias can change. A count at the mean moves nothing.
    The biases are those of the sites from `first` on.
    """
    ids = live.ids()
    for site, bias in enumerate(biases, first):
        chosen = ids[:, :, site]
        count = torch.bincount(chosen[chosen >= 0], minlength=len(bias)).to(bias.device, bias.dtype)
        bias += step * (count.mean() - count).sign()
