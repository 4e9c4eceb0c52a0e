"""A Hugging Face model as a policy: score and update on one device, live or under replayed routes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.config.run import OPTIMIZERS, Optimizer
from moe_rl.errors import ConfigError, Diverged
from moe_rl.objectives import Objective
from moe_rl.routing.balance import balance, correction_biases
from moe_rl.routing.dial import Dose, disturbed
from moe_rl.routing.file_mode import usual_mode
from moe_rl.routing.hooks import RouterScores, record_routing, replay_routing
from moe_rl.routing.inputs import Routed, RouterInputs, load_of, token_weights
from moe_rl.routing.sites import router_parameters
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, Scored, Updated

PerToken = Float[Tensor, "batch time"]

WEIGHTS, MOMENTS = "model.safetensors", "optimizer.pt"


class HFPolicy:
    """Owns the module and its optimizer. The module stays in eval mode (no dropout, no router jitter), gradients on.

    `temperature` divides the logits, as the rollout engine's does. `micro_batch` bounds the rows of one forward with
    gradient; a sequence is never split. `activation_checkpointing` is False, "reentrant" or "non-reentrant".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        temperature: float = 1.0,
        micro_batch: int = 64,
        score_batch: int = 256,
        activation_checkpointing: bool | str = False,
    ):
        self.model = model.eval()
        self.settings = optimizer
        self.temperature = temperature
        self.micro_batch, self.score_batch = micro_batch, score_batch
        self.device = next(model.parameters()).device
        self.optimizer = optimizer_of(model, optimizer)
        self.biases = correction_biases(model) if optimizer.loss_free_bias else []
        self.updates = 0
        if activation_checkpointing:
            checkpoint_activations(model, reentrant=activation_checkpointing == "reentrant")

    # ------------------------------------------------------------------ the verbs
    @torch.no_grad()
    def score(
        self, batch: Batch, routes: RoutingTrace | None = None, scores: bool = False, dose: Dose | None = None
    ) -> Scored:
        """Log-probs, entropy and routes of a batch; natural routing when `routes` is None. See `Policy.score`."""
        if routes is not None:
            routes.require_known()
        parts = []
        for rows in slices(len(batch), self.score_batch):
            part = batch.rows(rows)
            forced = None if routes is None else routes.rows(rows)
            with disturbed(self.model, dose), self._routed(part, forced, scores) as routed:
                outputs = self._forward(part)
            parts.append((*outputs, *routed.traces, routed.recording.scores(len(part)) if scores else None))
        return Scored(*join(parts, batch))

    def update(self, batch: Batch, objective: Objective, dose: Dose | None = None) -> Updated:
        """One optimizer step on a mini-batch. Micro-batches only add: the weights of the loss span all of it."""
        (logprobs, entropy, routes, preferred, clipped_by), loss, metrics = self._backward(batch, objective, dose)
        norm, clipped = stepped(self.model, self.optimizer, self.settings, self.updates + 1)
        self.updates += 1
        if self.biases:
            balance(self.biases, preferred or routes, self.settings.loss_free_bias)
        found = (logprobs, entropy, routes, preferred, clipped_by)
        return Updated(*found, loss=loss, grad_norm=norm, grad_clipped=clipped, metrics=metrics)

    def gradient(self, batch: Batch, objective: Objective) -> Float[Tensor, " parameters"]:
        """What `update` would clip and hand to its optimizer, of all trainable parameters in one vector. No step."""
        self._backward(batch, objective)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trainable])
        self.optimizer.zero_grad(set_to_none=True)
        return gradient

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the state dict, as transformers names them in memory.

        A PEFT model gives base weights and adapters as they are, unmerged and under its own names: nothing for an
        engine on the same module, and any other engine must have the same adapters, or refuses. For one that has none,
        give it `merge_and_unload()` of a copy.
        """
        yield from self.model.state_dict().items()

    def save(self, folder: Path) -> None:
        """Write weights (safetensors) and optimizer moments; bit-exact."""
        write_state(folder / WEIGHTS, folder / MOMENTS, self.model, self.optimizer, self.updates)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into this policy."""
        self.updates = read_state(folder / WEIGHTS, folder / MOMENTS, self.model, self.optimizer, self.device)

    @torch.no_grad()
    def distributions(
        self, batch: Batch, routes: RoutingTrace | None = None
    ) -> Float[Tensor, "batch time vocabulary"]:
        """log π(· | prefix) at every response token, 0 elsewhere; all rows at once, so for small vocabularies."""
        part = batch.to(self.device)
        if routes is not None:
            routes.require_known()
        with self._routed(part, routes):
            first, log_p = self._log_probs(part)
        return nn.functional.pad(log_p.where(part.response_mask[:, first:, None], 0.0), (0, 0, first, 0))

    # ------------------------------------------------------------------ how
    def _backward(
        self, batch: Batch, objective: Objective, dose: Dose | None = None
    ) -> tuple[list, float, Mapping[str, float]]:
        """Fresh gradients of a mini-batch's loss; returns the outputs of its rows, the loss and its metrics."""
        if batch.routes is not None:
            batch.routes.require_known()
        self.optimizer.zero_grad(set_to_none=True)
        metrics: Counter[str] = Counter()
        parts, loss = [], 0.0
        looks = "router" in objective.needs
        inputs_of = self._router_inputs(batch, objective, dose) if looks else lambda rows, part, routed: {}
        for rows in slices(len(batch), self.micro_batch):
            part = batch.rows(rows).to(self.device)
            with disturbed(self.model, dose), self._routed(part, part.routes, logits=looks) as routed:
                logprobs, entropy = self._forward(part, entropy_gradient="entropy" in objective.needs)
                out = objective(part, logprobs, entropy, **inputs_of(rows, part, routed))
                out.loss.backward()
            loss += out.loss.item()
            metrics.update(out.metrics)
            parts.append((logprobs.detach(), entropy.detach(), *routed.traces, out.clipped_by))
        return join(parts, batch), loss, dict(metrics)

    def _router_inputs(self, batch: Batch, objective: Objective, dose: Dose | None) -> Callable[..., dict[str, Any]]:
        """What parts that look at routers are given about some rows of a mini-batch, once their forward has run."""
        weights, load = token_weights(batch), None
        if "load" in objective.needs and len(batch) > self.micro_batch:
            whole = self.score(batch, batch.routes, dose=dose)
            load = load_of(batch, whole.routes, whole.preferred)
            load = {kind: tuple(share.to(self.device) for share in sites) for kind, sites in load.items()}

        def inputs_of(rows: slice, part: Batch, routed: Routed) -> dict[str, Any]:
            here = weights[rows][:, : part.tokens.shape[1]].to(self.device)
            return {"router": RouterInputs.of(part, routed, here, load)}

        return inputs_of

    @contextmanager
    def _routed(
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

    def _forward(self, part: Batch, entropy_gradient: bool = False) -> tuple[PerToken, PerToken]:
        """Log-probs and entropy of the response tokens, 0 elsewhere."""
        first, log_p = self._log_probs(part)
        tokens, mask = part.tokens.to(self.device), part.response_mask.to(self.device)[:, first:]
        chosen = log_p.gather(-1, tokens[:, first:, None])[..., 0]
        with nullcontext() if entropy_gradient else torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        chosen, entropy = (nn.functional.pad(x.where(mask, 0.0), (first, 0)) for x in (chosen, entropy))
        return chosen, entropy

    def _log_probs(self, part: Batch) -> tuple[int, Float[Tensor, "batch kept vocabulary"]]:
        """The first position at which a row has a response token, and log π over the vocabulary from there on.

        The last token is never an input: nothing depends on it. Right padding under a causal mask reaches no real
        token, so no attention mask is needed. Logits are made only where the next token belongs to a response.
        """
        tokens = part.tokens.to(self.device)
        first = max(1, int(part.response_mask.any(0).long().argmax()))
        keep = tokens.shape[1] - first
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=keep).logits
        return first, (logits.float() / self.temperature).log_softmax(-1)


def write_state(
    weights: Path, moments: Path, model: nn.Module, optimizer: torch.optim.Optimizer, updates: int
) -> None:
    """A module into a safetensors file, its optimizer and the number of its updates into another; bit-exact."""
    from safetensors.torch import save_model

    weights.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, str(weights))
    usual_mode(weights)
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


def slices(rows: int, size: int) -> list[slice]:
    """The rows of every forward."""
    return [slice(start, start + size) for start in range(0, rows, size)]


def join(parts: list[tuple], batch: Batch) -> list:
    """Concatenate each kind of part over rows, widened to the batch's time axis, on the batch's device."""

    def widen(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, batch.tokens.shape[1] - x.shape[1])).to(batch.tokens.device)

    def join(kind: tuple) -> Tensor | RoutingTrace | RouterScores | None:
        if isinstance(kind[0], Tensor):
            return torch.cat([widen(x) for x in kind])
        if isinstance(kind[0], RouterScores):
            return RouterScores.cat(kind, batch.tokens.shape[1])
        return None if kind[0] is None else RoutingTrace.cat(kind, batch.tokens, batch.attention_mask)

    return [join(kind) for kind in zip(*parts, strict=True)]


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
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, **common)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.betas[0], **common)
    raise ConfigError(f"there is no optimizer {settings.name!r}: choose {' or '.join(OPTIMIZERS)}.")


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Optimizer, update: int, whose: str = ""
) -> tuple[float, bool]:
    """One step along the clipped gradients, which are gone then; their norm before, and whether they were clipped.
    Updates are counted from 1. Raises Diverged where a gradient is not finite."""
    limit = settings.grad_clip or float("inf")
    total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = total.item()
    if not math.isfinite(norm):
        raise Diverged(f"the{whose} gradient norm is {norm}: a step would destroy the weights. Lower the{whose} "
                       "learning rate.")
    if norm + 1e-6 > limit:  # else torch would multiply every gradient by 1; the constant is its own
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, total)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr_at(update) * group["scale"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, norm > limit


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

