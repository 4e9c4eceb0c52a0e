"""A Hugging Face model as a policy: it scores and updates on one device, live or under replayed routes.

Below it are its forwards, a batch in micro-batches, and its optimizer, up to `optimizer.step()`. The policy `fsdp`
spreads the same over ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.config import SCORED, Optimizer, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.models.adapters import ATTENTION, add_adapters, merged
from moe_rl.models.compilation import check_backend, compile_parts, try_parts
from moe_rl.models.load import LoadedModel, load, skeleton
from moe_rl.models.master_weights import TrainedWeights
from moe_rl.models.memory import fit_tokens
from moe_rl.models.vocabulary import LOGITS, entropy_of, head_is_apart, head_of, log_probs_in_pieces
from moe_rl.objectives import Objective
from moe_rl.policies.optimizer import (
    adamw_8bit,
    compute_cosine_with,
    last_step,
    make_optimizer,
    narrow_sample,
    read_state,
    share_changed,
    take_step,
    write_state,
)
from moe_rl.registry import Component, Positive, checked
from moe_rl.routing.hooks import RouterScores, record_routing, replay_routing
from moe_rl.routing.inputs import Routed, RouterInputs, load_of, token_weights
from moe_rl.routing.moe_layers import find_moe_layers
from moe_rl.routing.router_noise import Noise, disturbed
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import KeptTokens, MiniBatch, Rollouts, Scored, Stage, Updated

PerToken = Float[Tensor, "batch time"]
Rows = slice | Tensor

WEIGHTS, MOMENTS, GRADIENT = "model.safetensors", "optimizer.pt", "gradient.pt"
BIAS = "e_score_correction_bias"


def check_adapters(
    run: RunConfig, *, lora: int | None = None, lora_targets: Sequence[str] = ATTENTION, **options: Any
) -> None:
    """Raise ConfigError for options of adapters that the model or other settings of the run contradict."""
    policy = Component.of(run.policy).name
    if lora:
        add_adapters(skeleton(run.model), lora, 1.0, lora_targets, 0)
    if lora is None and (lora_targets != ATTENTION or "lora_alpha" in options):
        raise ConfigError(f"policy={policy!r}: lora_alpha and lora_targets need a rank, e.g. lora=16")
    noise, changed = run.router_noise, run.optimizer.router_lr_scale != 1 or run.optimizer.loss_free_bias
    if lora and (changed or noise.scale and noise.direction == "last_step"):
        raise ConfigError(
            f"policy='{policy}(lora=…)' trains adapters alone, so routers stay as they are. Leave "
            "optimizer.router_lr_scale, optimizer.loss_free_bias and router_noise.direction='last_step' out."
        )


def _check(run: RunConfig, *, compile: str | None = None, **options: Any) -> None:
    check_backend(compile)
    if run.optimizer.name == "adamw_8bit":
        adamw_8bit()
    check_adapters(run, **options)
    if ranks.planned() > 1:
        raise ConfigError(
            f"policy='hf' runs in one process, but this run has {ranks.planned()}. Leave torchrun or "
            "launcher.ranks out, or use --policy fsdp or --policy megatron."
        )


@checked(_check)
def hf(
    run: RunConfig,
    start: LoadedModel,
    frozen: bool,
    *,
    master_weights: bool = True,
    compile: str | None = None,
    lora: PositiveInt | None = None,
    lora_alpha: Positive = 32.0,
    lora_targets: Sequence[str] = ATTENTION,
) -> HFPolicy:
    """The policy `hf`, which trains `start` itself; `frozen`: a copy of it, which only scores. `master_weights`: the
    optimizer trains float32 copies of weights that are narrower (`model.dtype=bfloat16`), 18 bytes a parameter. False
    trains the narrow ones, 8 bytes a parameter, and loses most small steps, unless `optimizer.name=adamw_8bit` (6
    bytes) rounds them stochastically. `compile`: a backend of torch.compile,
    such as `inductor`, for what lies between the routers (`models.compilation`). Engines decode eagerly. `lora`: the
    rank of adapters of scale lora_alpha / lora at the linear maps `lora_targets`; all else is frozen. Checkpoints to
    resume from hold the adapters. Exported ones, and engines with weights of their own, have them merged."""
    model = copy_of(run, start) if frozen else start.model
    if lora and not frozen:
        add_adapters(model, lora, lora_alpha, lora_targets, run.cold_start.seed)
    settings = settings_of(run, frozen)
    if start.model.device.type == "cuda" and run.micro_batch_tokens is None:
        free = torch.cuda.mem_get_info(start.model.device)[0] + torch.cuda.memory_reserved(start.model.device)
        settings["micro_batch_tokens"] = tokens = fit_tokens(run, start.model, free)
        print(f"micro_batch_tokens={tokens:,}, which fits {free / 1e9:.3g} GB")
    return HFPolicy(
        model,
        run.optimizer,
        master_weights=master_weights and not frozen,
        compile=compile,
        gradient_cosine=run.measure.gradient_cosine and not frozen,
        **settings,
    )


def settings_of(run: RunConfig, frozen: bool = False) -> dict[str, Any]:
    """The settings of a run that an `HFPolicy` takes."""
    return {
        "temperature": run.temperature,
        "micro_batch": run.micro_batch,
        "micro_batch_tokens": run.micro_batch_tokens,
        "activation_checkpointing": run.activation_checkpointing and not frozen,
    }


def copy_of(run: RunConfig, start: LoadedModel) -> Any:
    """Another model of the same weights."""
    model = load(run.model, run.cold_start.seed).model
    model.load_state_dict(dict(merged(start.model)))
    return model


class HFPolicy:
    """Owns the module and its optimizer. The module stays in eval mode (no dropout, no router jitter), gradients on.

    `temperature` divides the logits, as the rollout engine's does. `micro_batch` bounds the rows of one forward
    with gradient, `score_batch` (SCORED times as many) those of one without, `micro_batch_tokens` the tokens of any
    forward, for which rows are sorted by length; a sequence is never split. `activation_checkpointing` recomputes
    layers in the backward, with "reentrant" in torch's older way. `master_weights`: see `TrainedWeights`.
    `compile`: the backend for `compile_parts`. With `gradient_cosine` every update says how its gradient lies to
    the one before (`compute_cosine_with`), which is kept for it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        temperature: float = 1.0,
        micro_batch: int = 64,
        micro_batch_tokens: int | None = None,
        score_batch: int | None = None,
        activation_checkpointing: bool | str = False,
        master_weights: bool = True,
        compile: str | None = None,
        gradient_cosine: bool = False,
    ):
        self.model = model.eval()
        self.settings = optimizer
        self.temperature = temperature
        self.micro_batch, self.micro_batch_tokens = micro_batch, micro_batch_tokens
        self.score_batch = score_batch or SCORED * micro_batch
        self.device = next(model.parameters()).device
        self.biases = correction_biases(model) if optimizer.loss_free_bias else []
        self.updates = 0
        self.padding: float | None = None
        """The share of positions of the last update's forwards that hold no token."""
        self.last_gradient: list[Tensor] | None = [] if gradient_cosine else None
        if activation_checkpointing:
            checkpoint_activations(model, reentrant=activation_checkpointing == "reentrant")
        if compile is not None:
            try_parts(model, compile_parts(model, compile), compile)  # before masters take its gradients
        self.trained = TrainedWeights(model, master_weights)
        self.optimizer = make_optimizer(self.trained, optimizer)

    # ------------------------------------------------------------------ the verbs
    @torch.no_grad()
    def score(
        self, batch: Rollouts, routes: RoutingTrace | None = None, scores: bool = False, noise: Noise | None = None
    ) -> Scored:
        """Log-probs, entropy and routing of rollouts; unconstrained when `routes` is None. See `Policy.score`."""
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

    def update(self, batch: MiniBatch, objective: Objective, noise: Noise | None = None) -> Updated:
        """One optimizer step on a mini-batch. Micro-batches only add: the weights of the loss span all of it."""
        (logprobs, entropy, routes, preferred, clipped_by), loss, metrics = self._backward(batch, objective, noise)
        if self.last_gradient is not None:
            cosine = compute_cosine_with(self.last_gradient, self.trained.parameters())
            metrics = metrics if cosine is None else {**metrics, "grad_cosine": cosine}
        before = narrow_sample(self.trained)
        norm, clipped = take_step(
            self.trained,
            self.optimizer,
            self.settings,
            self.updates + 1,
            locate=lambda: objective.locate_divergence(batch, logprobs, entropy),
        )
        self.updates += 1
        if before:
            changed = share_changed(before, narrow_sample(self.trained))
            metrics = {**metrics, "weights_changed": changed}
            if self.updates == 1 and not self.trained.masters and self.settings.name != "adamw_8bit":
                warnings.warn(
                    f"master_weights=False: the first step changed {changed:.1%} of the weights that are narrower than "
                    "float32. Leave master_weights out to train float32 masters.",
                    stacklevel=2,
                )
        if self.biases:
            balance(self.biases, preferred or routes, self.settings.loss_free_bias)
        outputs = (logprobs, entropy, routes, preferred, clipped_by)
        return Updated(*outputs, loss=loss, grad_norm=norm, grad_clipped=clipped, metrics=metrics)

    def gradient(self, batch: MiniBatch, objective: Objective) -> Float[Tensor, " parameters"]:
        """What `update` would clip and hand to its optimizer, of all trainable parameters in one vector. No step."""
        self._backward(batch, objective)
        trained = self.trained.parameters()
        parts = [ranks.join_shards(torch.zeros_like(p) if p.grad is None else p.grad) for p in trained]
        gradient = torch.cat([part.flatten() for part in parts])
        self.optimizer.zero_grad(set_to_none=True)
        return gradient

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the state dict, as transformers names them in memory, with adapters merged."""
        for name, tensor in merged(self.model):
            yield name, ranks.join_shards(tensor)

    def save(self, folder: Path) -> None:
        """Write weights (safetensors) and optimizer moments; bit-exact."""
        write_state(folder / WEIGHTS, folder / MOMENTS, self.trained, self.optimizer, self.updates)
        if self.last_gradient:
            torch.save(self.last_gradient, folder / GRADIENT)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into this policy."""
        self.updates = read_state(folder / WEIGHTS, folder / MOMENTS, self.trained, self.optimizer, self.device)
        if self.last_gradient is not None and self.updates:
            self.last_gradient = torch.load(folder / GRADIENT, map_location=self.device, weights_only=True)

    def _cut(self, batch: Rollouts, most: int) -> list[Rows]:
        """The rows of every forward of this process."""
        return cut(batch, most, self.micro_batch_tokens)

    def _join(self, parts: list[tuple], batch: Rollouts, cuts: list[Rows]) -> list:
        """What all forwards over a batch gave, each kind as one."""
        return join(parts, batch, cuts)

    def _apply_noise(self, noise: Noise | None) -> AbstractContextManager[None]:
        find_step = partial(last_step, self.trained, self.optimizer)
        return nullcontext() if noise is None else disturbed(self.model, noise, find_step)

    def _backward(
        self, batch: MiniBatch, objective: Objective, noise: Noise | None = None
    ) -> tuple[list, float, Mapping[str, float]]:
        """Fresh gradients of a mini-batch's loss; returns the outputs of its rows, the loss and its metrics."""
        if batch.routes is not None:
            batch.routes.require_known()
        self.optimizer.zero_grad(set_to_none=True)
        metrics: Counter[str] = Counter()
        parts, loss = [], 0.0
        self.positions = 0
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
            self.positions += part.tokens.numel()
            metrics.update(out.metrics)
            parts.append(move_beside(batch, logprobs.detach(), entropy.detach(), *routed.traces, out.clipped_by))
        self.padding = 1 - int(batch.attention_mask.sum()) / self.positions
        return self._join(parts, batch, cuts), loss, dict(metrics)

    def _prepare_backward(self, last: bool) -> None:
        """Called before the backward of every micro-batch; `last`: of the mini-batch's last one."""

    def _router_inputs(
        self, batch: MiniBatch, objective: Objective, noise: Noise | None
    ) -> Callable[..., dict[str, Any]]:
        """A function that gives `RouterInputs` of some rows of a mini-batch, once their forward has run."""
        weights, load = token_weights(batch.attention_mask, batch.response_mask), None
        if "load" in objective.needs and len(batch.tokens[self._cut(batch, self.micro_batch)[0]]) < len(batch):
            scored = self.score(batch, batch.routes, noise=noise)
            load = load_of(weights, scored.routes, scored.preferred)
            load = {kind: tuple(share.to(self.device) for share in moe_layers) for kind, moe_layers in load.items()}

        def inputs_of(rows: Rows, part: MiniBatch, routed: Routed) -> dict[str, Any]:
            here = weights[rows][:, : part.tokens.shape[1]].to(self.device)
            return {"router": RouterInputs.of(part.old_scores, routed, here, load)}

        return inputs_of

    @contextmanager
    def _record_and_replay(
        self, part: Rollouts, routes: RoutingTrace | None, scores: bool = False, logits: bool = False
    ) -> Iterator[Routed]:
        """Scope of one forward (and its backward), with what the routers did once the forward has run."""
        inputs = part.tokens[:, :-1].to(self.device)
        followed = part.attention_mask[:, 1:].to(self.device)  # inputs whose output is a real token
        forced = None
        if routes is not None:
            forced = replace(routes.rows(slice(None), inputs.shape[1]).to(self.device), attention_mask=followed)
        # A part may know no route by chance: those who cut it have looked at the whole.
        recorder = record_routing(self.model, scores, logits)
        with replay_routing(self.model, forced, part=True) as replay, recorder as recording:
            yield Routed(inputs, followed, recording, replay)

    def _in_pieces(self, part: Rollouts) -> bool:
        """Whether the logits of its responses are too many to be held at once, and can be made piece by piece."""
        head = head_of(self.model)
        count = part.response_mask[:, first_response(part) :].numel()
        return head is not None and count * head.weight.shape[0] > LOGITS and self._head_is_apart

    @cached_property
    def _head_is_apart(self) -> bool:
        return head_is_apart(self.model)

    def _forward(self, part: Rollouts, in_pieces: bool, entropy_gradient: bool = False) -> tuple[PerToken, PerToken]:
        """Log-probs and entropy of the response tokens, 0 elsewhere."""
        first = first_response(part)
        tokens, mask = part.tokens.to(self.device), part.response_mask.to(self.device)[:, first:]
        sets = None if part.kept_tokens is None else part.kept_tokens.to(self.device).since(first)
        if in_pieces:
            outputs = log_probs_in_pieces(
                self.model, tokens[:, :-1], tokens[:, first:], mask, self.temperature, entropy_gradient, sets
            )
        else:
            log_p = self._log_probs(tokens, first, sets)
            chosen = log_p.gather(-1, tokens[:, first:, None])[..., 0]
            with nullcontext() if entropy_gradient else torch.no_grad():
                entropy = entropy_of(log_p, sets is not None)
            outputs = chosen.where(mask, 0.0), entropy.where(mask, 0.0)
        chosen, entropy = (nn.functional.pad(x, (first, 0)) for x in outputs)
        return chosen, entropy

    def _log_probs(self, tokens: Tensor, first: int, sets: KeptTokens | None) -> Float[Tensor, "batch kept vocabulary"]:
        """log π over the vocabulary from the token `first` on, -inf at what truncated sampling did not keep.

        The last token is never an input: nothing depends on it. Right padding under a causal mask reaches no real
        token, so no attention mask is needed. Logits are made only where the next token belongs to a response.
        """
        keep = tokens.shape[1] - first
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=keep).logits
        logits = logits.float() / self.temperature
        if sets is not None:
            logits = sets.only(logits)
        return logits.log_softmax(-1)


def first_response(part: Rollouts) -> int:
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
def fill_rows(batch: Stage, order: Tensor) -> Stage:
    """The rows `order` of the batch; those beyond its end are copies of the last one without a response, so that they
    weigh nothing, for ranks that must do as much as others."""
    real = (order < len(batch))[:, None]
    rows = batch.rows(order.clamp(max=len(batch) - 1))
    if isinstance(rows, MiniBatch):
        rows = replace(rows, mask=rows.mask & real, weights=rows.weights * real)
    return replace(rows, response_mask=rows.response_mask & real)


def cut(batch: Rollouts, rows: int, tokens: int | None = None) -> list[Rows]:
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


def move_beside(batch: Rollouts, *outputs: Tensor | RoutingTrace | RouterScores | None) -> tuple:
    """What a forward gave, where the batch is, so that it takes no memory of a device until all forwards have run."""
    return tuple(None if x is None else x.to(batch.tokens.device) for x in outputs)


def join(parts: Sequence[tuple], batch: Rollouts, cuts: Sequence[Rows]) -> list:
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
            tensor = torch.cat([widen(x) for x in kind])
            return tensor if back is None else tensor[back]
        scores = isinstance(kind[0], RouterScores)
        joined = RouterScores.cat(kind, width) if scores else RoutingTrace.cat(kind, tokens, mask)
        return joined if back is None else joined.rows(back, width)

    return [put_back(kind) for kind in zip(*parts, strict=True)]


# ---------------------------------------------------------------------- loss-free balancing
def correction_biases(model: nn.Module) -> list[Tensor]:
    """The bias with which every MoE layer's router chooses, and does not weigh. Raises ConfigError for a family whose
    routers have none of their own, and for one in a dtype that rounds small steps away."""
    biases = []
    for moe_layer in find_moe_layers(model):
        bias = getattr(moe_layer.module, BIAS, None)
        if not isinstance(bias, Tensor):
            raise ConfigError(
                f"optimizer.loss_free_bias: {moe_layer.moe_layer.name} ({type(moe_layer.module).__name__}) has no "
                f"{BIAS}. Use a family that has one, such as deepseek_v3 or glm4_moe."
            )
        if bias.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"optimizer.loss_free_bias: the bias of {moe_layer.moe_layer.name} is {bias.dtype}, which is too "
                "coarse for steps of 0.001. Set model.router_dtype='float32'."
            )
        biases.append(bias)
    return biases


@torch.no_grad()
def balance(biases: list[Tensor], live: RoutingTrace, step: float, first: int = 0) -> None:
    """b_e += step · sign(mean count − count_e), counts of the `live` choices of real tokens: loss-free balancing, arXiv
    2408.15664, algorithm 1. Replayed choices would count what no bias can change. A count at the mean moves nothing.
    The biases are those of the MoE layers from `first` on.
    """
    ids = live.ids()
    for moe_layer, bias in enumerate(biases, first):
        chosen = ids[:, :, moe_layer]
        count = torch.bincount(chosen[chosen >= 0], minlength=len(bias)).to(bias.device, bias.dtype)
        bias += step * (count.mean() - count).sign()
