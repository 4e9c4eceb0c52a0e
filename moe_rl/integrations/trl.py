"""Routing replay of the old policy or of the engine, with routing and ratio metrics, in TRL's GRPOTrainer.

The routes are recorded in TRL's own forward for the old log-probs, or come from the engine with the completions. They
travel as one more tensor of TRL's inputs through its shuffle and its split into mini-batches. A training step is one
replay scope, forward and backward. With `routes="live"` losses and weights are TRL's, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.integrations.monitor import Monitor
from moe_rl.integrations.vllm.payloads import decode_routes
from moe_rl.metrics.ratios import ratio_statistics
from moe_rl.metrics.volatility import route_change
from moe_rl.routing import RoutingTrace, layout_of, record_routing, replay_routing

try:
    from transformers import TrainerCallback
    from trl import GRPOTrainer, __version__
except ImportError as error:
    raise ImportError("moe_rl.integrations.trl needs TRL: pip install 'moe_rl[trl]'") from error

OLD_ROUTES = "old_routes"
"""Key in TRL's inputs: the experts to replay, [batch, prompt + completion, MoE layer, k]."""
ENGINE_ROUTES = "routed_experts"
"""Key in what a `rollout_func` returns: one payload of an engine per completion, as `decode_routes` reads it."""
ROUTES = ("old_policy", "rollout", "live")
VOLATILITY = ("expert_change_rate", "any_change_rate", "any_layer_change")
MONITORED = (
    "pull",
    "coverage",
    "load_entropy",
    "load_max_violation",
    "load_dead_experts",
    "router_confidence",
    "margin_q50",
)
RATIOS = tuple(
    f"{unit}_{statistic}"
    for unit in ("token", "sequence")
    for statistic in ("log_ratio_mean", "log_ratio_var", "log_ratio_max", "ess", "kl_k3", "beyond_2")
)


class ReplayGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer for a Mixture-of-Experts model, with replay and with measurements in its logs.

    `routes="old_policy"`: every update replays the experts of the old policy, recorded in the forward of the old
    log-probs (Routing Replay, GSPO, arXiv 2507.18071, section 5.3). `routes="rollout"`: old log-probs, reference and
    updates replay the experts of the engine (R3, arXiv 2510.11370), which a `rollout_func` returns as `routed_experts`
    beside TRL's keys: TRL 1.16.0 drops those of its own vLLM. `routes="live"`: no replay, and no forward beyond TRL's.
    All other arguments are GRPOTrainer's. Evaluation is TRL's own.

    It logs, for completion tokens over all processes, means over the micro-steps since the last log. Each micro-step is
    measured *before* its update, so right after generation all values are 0, or 1 for `ess`:

    - `routing/expert_change_rate`, `any_change_rate`, `any_layer_change`: unconstrained routing, old policy against
      current policy; with `routes="rollout"` as `engine_…`, engine against current policy. Under replay they take a
      forward of their own, without gradient, in the last of every `measure_every` micro-steps.
    - `routing/load_entropy`, `load_max_violation`, `load_dead_experts`, `router_confidence` and `margin_q50` of the
      current unconstrained routing, and under replay `routing/pull` and `routing/coverage`: a `Monitor`'s, as often.
    - `ratios/…`: `moe_rl.metrics.ratios.ratio_statistics` of log π_θ / π_old as the loss used it.

    Raises RoutingError for a dense model and for a TRL whose log-probs bypass these forwards, ConfigError for settings
    under which replay would do nothing.
    """

    def __init__(self, *args: Any, routes: str = "old_policy", measure_every: int = 1, **kwargs: Any):
        if routes not in ROUTES or measure_every < 1:
            raise ConfigError(
                f"routes={routes!r}, measure_every={measure_every}: use {', '.join(ROUTES)}, and at least 1."
            )
        if routes == "rollout" and kwargs.get("rollout_func") is None:
            raise ConfigError(
                f"routes='rollout' needs a rollout_func that returns {ENGINE_ROUTES!r} beside the completions. "
                "Give one, or use routes='old_policy'."
            )
        if not __version__.startswith("1.16."):
            raise ConfigError(f"trl {__version__}: private methods of trl 1.16 are extended here. Use trl 1.16.0.")
        super().__init__(*args, **kwargs)
        self.routes = routes
        self.layout = layout_of(self.model)
        coefficient = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        self.monitor = Monitor(self.model, every=measure_every, router_aux_loss_coef=coefficient)
        self._scored: list[tuple[Tensor, Tensor]] | None = None
        """While a generation batch is scored: log-probs and routes of each scoring forward of the policy."""
        self._engine_routes: list[Tensor] = []
        """Of the last generation batch: the engine's experts, [input, MoE layer, k] per completion."""
        self._inputs: dict[str, Any] | None = None
        """While a loss is computed: its inputs, until its forward begins."""
        self._step_scope: ExitStack | None = None
        """While a training step runs: scopes that end after its backward."""
        self._require_usable()

    # ------------------------------------------------------------------ TRL's methods, in the order it calls them
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with ExitStack() as scope:
            self._step_scope = scope
            try:
                return super().training_step(*args, **kwargs)
            finally:
                self._step_scope = None

    def _generate(self, prompts: list) -> Any:
        generated = super()._generate(prompts)
        if len(generated) != 8:
            raise RoutingError(f"TRL's _generate returned {len(generated)} values, not 8. Use trl 1.16.0.")
        prompt_ids, completion_ids, fields = generated[0], generated[1], generated[5]
        payloads = fields.pop(ENGINE_ROUTES, None)  # else TRL would hand them to the rewards
        if self.routes == "rollout" and self.model.training:
            if payloads is None:
                raise RoutingError(f"rollout_func returned no {ENGINE_ROUTES!r}. Return the engine's routing, too.")
            layers = self.model.config.get_text_config().num_hidden_layers
            self._engine_routes = [
                decode_routes(payload, layout=self.layout, tokens=[*prompt, *completion], num_layers=layers).experts[0]
                for payload, prompt, completion in zip(payloads, prompt_ids, completion_ids, strict=True)
            ]
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._scored = []
        try:
            outputs = super()._generate_and_score_completions(inputs)
            old = outputs.get("old_per_token_logps")
            if self.routes == "rollout":
                mask = torch.cat([outputs["prompt_mask"], outputs["completion_mask"]], 1)
                return {**outputs, OLD_ROUTES: self._place_engine_routes(mask.bool())}
            if old is None and self.routes == "live":
                return outputs
            # By identity: the policy may be scored twice, the second time as reference, with its adapters off.
            routes = [routes for logps, routes in self._scored if logps is old]
        finally:
            self._scored = None
        if not routes:
            raise RoutingError("the old log-probs are from no forward that was recorded. Use trl 1.16.0.")
        return {**outputs, OLD_ROUTES: routes[0]}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self._inputs = inputs if OLD_ROUTES in inputs else None
        try:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self._inputs is not None:
                raise RoutingError(
                    "the loss bypassed the forward that replays. Use trl 1.16.0, without a fused loss (Liger)."
                )
        finally:
            self._inputs = None
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        def score(model: Any, **changed: Any) -> Any:
            method = super(ReplayGRPOTrainer, self)._get_per_token_logps_and_entropies
            return method(model, input_ids, attention_mask, *args, **{**kwargs, **changed})

        if self._scored is not None and self.routes == "rollout":
            return self._score_under_engine_routes(model, input_ids, attention_mask, *args, **kwargs)
        if self._scored is not None and model is self.model:
            scored, routes = self._record(lambda: score(model), input_ids, attention_mask)
            self._scored.append((scored[0], routes.experts))
            return scored
        if self._inputs is None:
            return score(model)

        inputs, self._inputs = self._inputs, None
        routed = attention_mask
        if self.routes == "rollout":  # an engine never reads the last token, and nothing depends on its experts
            routed = routed * torch.nn.functional.pad(routed[:, 1:], (0, 1))
        old = self._trace(inputs[OLD_ROUTES], input_ids, routed)
        decides, unconstrained = _decides(inputs, old.attention_mask), None
        with self.monitor:
            if self.routes == "live":
                self.monitor.decides(decides)
                scored, unconstrained = self._record(lambda: score(model), input_ids, attention_mask)
            else:
                if self.monitor.measures:
                    plain = {"compute_entropy": False, "compute_aux_loss": False}
                    self.monitor.decides(decides)
                    with torch.no_grad(), self._random_state_kept():
                        _, unconstrained = self._record(lambda: score(self.model, **plain), input_ids, attention_mask)
                self._replay_until_backward(old)
                self.monitor.decides(decides)
                scored = score(model)
        self._log("routing", MONITORED, self.monitor.row())
        if unconstrained is not None:
            self._log_change(old, unconstrained, decides)
        if "old_per_token_logps" in inputs:
            self._log_ratios(scored[0].detach() - inputs["old_per_token_logps"], inputs)
        return scored

    # ------------------------------------------------------------------ routes
    def _record(self, score: Callable[[], Any], input_ids: Tensor, attention_mask: Tensor) -> tuple[Any, RoutingTrace]:
        """The result of `score`, and the routes of its forwards, which read the rows in order, some at a time."""
        with record_routing(self.model) as recording:
            rows: list[Tensor] = []
            hook = self.model.register_forward_hook(lambda *_: rows.append(recording.take()))
            try:
                scored = score()
            finally:
                hook.remove()
        if sum(len(part) for part in rows) != input_ids.numel():
            raise RoutingError(
                f"the forwards had {[len(part) for part in rows]} tokens, but TRL scored {tuple(input_ids.shape)}. Do "
                "not pack sequences or split them over devices."
            )
        ids = torch.cat(rows).unflatten(0, tuple(input_ids.shape))
        return scored, self._trace(ids, input_ids, attention_mask)

    def _place_engine_routes(self, mask: Bool[Tensor, "batch time"]) -> Integer[Tensor, "batch time moe_layer k"]:
        """The engine's experts at the tokens of a generation batch that `mask` lets in. A last token has none."""
        shape = (*mask.shape, len(self.layout.moe_layers), self.layout.top_k)
        ids = torch.full(shape, self.layout.unknown, dtype=self.layout.dtype)
        for row, real, routes in zip(ids, mask.cpu(), self._engine_routes, strict=True):
            where = real.nonzero()[: len(routes), 0]
            row[where] = routes[: len(where)]
        return ids.to(mask.device)

    def _score_under_engine_routes(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        """Log-probs of a generation batch under the engine's experts, in forwards of `batch_size` rows."""
        ids = self._place_engine_routes(attention_mask.bool())
        routes, parts = self._trace(ids, input_ids, attention_mask), []
        score = super()._get_per_token_logps_and_entropies
        for rows in torch.arange(len(input_ids)).split(kwargs.get("batch_size") or len(input_ids)):
            with replay_routing(model, routes.rows(rows)):
                parts.append(score(model, input_ids[rows], attention_mask[rows], *args, **kwargs)[0])
        return torch.cat(parts), None, None

    def _random_state_kept(self) -> AbstractContextManager[None]:
        """Restore the random state of the training after the dropout of a forward that only measures."""
        device = self.accelerator.device
        return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

    def _replay_until_backward(self, old: RoutingTrace) -> None:
        """Open a replay scope that ends with the training step."""
        if self._step_scope is None:
            raise RoutingError("compute_loss was called outside training_step, so replay would end before backward.")
        self._step_scope.enter_context(replay_routing(self.model, old))

    def _trace(
        self, ids: Integer[Tensor, "batch time moe_layer k"], input_ids: Tensor, attention_mask: Tensor
    ) -> RoutingTrace:
        """Padding on either side, and completions that TRL masks as truncated, are unknown and route freely."""
        mask = attention_mask.bool()
        ids = ids.masked_fill(~mask[..., None, None], self.layout.unknown)
        return RoutingTrace.from_ids(ids, self.layout, tokens=input_ids, attention_mask=mask, check=False)

    def _require_usable(self) -> None:
        """The routers are visible; and TRL scores the old policy, only if a generation batch has several updates."""
        args = self.args
        if args.torch_compile:
            raise ConfigError("torch_compile=True hides the routers from recording and replay. Set it to False.")
        single = args.gradient_accumulation_steps % (args.steps_per_generation * self.num_iterations) == 0
        if self.routes == "rollout" or not single:
            return
        text = "each generation batch has one update, so every ratio is 1"
        if self.routes == "old_policy":
            raise ConfigError(f"{text}, and replay would do nothing. Raise steps_per_generation or num_iterations.")
        warnings.warn(f"{text}, and neither volatility nor ratios are logged.", stacklevel=3)

    # ------------------------------------------------------------------ logs
    def _log(self, group: str, names: tuple[str, ...], row: dict[str, float]) -> None:
        """Append to TRL's metrics those of the names that were measured."""
        for name in names:
            if name in row:
                self._metrics["train"][f"{group}/{name}"].append(row[name])

    def _log_change(self, before: RoutingTrace, after: RoutingTrace, decides: Bool[Tensor, "batch time"]) -> None:
        row = route_change(before.experts, after.experts, decides).over_ranks().row()
        if bool((~after.known & decides[..., None]).any()):  # routers without finite scores: the monitor warns
            row = dict.fromkeys(row, float("nan"))
        of = "engine_" if self.routes == "rollout" else ""
        names = tuple(f"{of}{name}" for name in VOLATILITY)
        self._log("routing", names, {f"{of}{name}": value for name, value in row.items()})

    def _log_ratios(self, log_ratio: Float[Tensor, "batch time"], inputs: dict[str, Any]) -> None:
        mask = _loss_mask(inputs)
        if self.accelerator.num_processes > 1:
            log_ratio, mask = self.accelerator.gather(self.accelerator.pad_across_processes((log_ratio, mask), dim=1))
        self._log("ratios", RATIOS, ratio_statistics(log_ratio, mask.bool()))


class MonitorCallback(TrainerCallback):
    """A `Monitor`'s row of every step in the logs of a trainer of TRL or transformers, as `routing/…`.

    The block of the monitor is one optimizer step. TRL logs the mean since its last log; a plain `Trainer`, which has
    no metrics of its own, logs every row by itself.
    """

    def __init__(self, trainer: Any, monitor: Monitor):
        self.trainer, self.monitor = trainer, monitor

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        self.monitor.__enter__()

    def on_step_end(self, *given: Any, **named: Any) -> None:
        """After the optimizer's step."""
        self.monitor.__exit__(None, None, None)
        row = {f"routing/{name}": value for name, value in self.monitor.row().items()}
        if row and not hasattr(self.trainer, "_metrics"):
            self.trainer.log(row)
            return
        for name, value in row.items():
            self.trainer._metrics["train"][name].append(value)


def _loss_mask(inputs: dict[str, Any]) -> Bool[Tensor, "batch time"]:
    """Completion tokens that TRL's loss counts: those that tools wrote do not."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def _decides(inputs: dict[str, Any], mask: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """Tokens whose output is a completion token of the loss."""
    decides = torch.zeros_like(mask)
    decides[:, inputs["prompt_ids"].shape[1] - 1 : -1] = _loss_mask(inputs)
    return decides
