"""Routing change and expert usage: sums per MoE layer, so that pooling over batches is exact.

S and S' are the expert sets of one (token, MoE layer) before and after. Ids are integers (batch, time, MoE layer, k) as
in `RoutingTrace.experts`: a slot without an expert is 255 in uint8, -1 in a signed dtype. A row unknown in either trace
is excluded and counted. Tokens are read in blocks, so that temporaries stay small. GSPO (arXiv 2507.18071, section 5.3)
reports that "roughly 10% of the experts" change, without a formula: `expert_change_rate` is its nearest reading."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Integer, Shaped
from torch import Tensor

from moe_rl.metrics.pooled import Pooled
from moe_rl.routing.ids import BLOCK, block_tokens, signed, slots_first, unknown_id, used
from moe_rl.routing.moe_layers import Layout
from moe_rl.types import require_mask

Ids = Integer[Tensor, "batch time moe_layer k"]
AnyK = Integer[Tensor, "batch time moe_layer _"]
Mask = Bool[Tensor, "batch time"]
PerSlot = Float[Tensor, "batch time moe_layer k"]
PerResponse = Shaped[Tensor, "batch moe_layer"]
SUMMED = 4096
"""Tokens whose float64 values are summed at once, or more where there are few MoE layers. PyTorch sums columns in such
blocks, so sums of blocks have the bits of one sum."""


def route_change(
    before: Ids, after: AnyK, mask: Mask, gates: Float[Tensor, "batch time moe_layer k"] | None = None
) -> Pooled:
    """Compare two routings of the same tokens where `mask` is true.

    Sums over tokens: `expert_change_rate` 1 - |S ∩ S'| / k; `any_change_rate` S ≠ S' (R3, arXiv 2510.11370);
    `jaccard_distance` 1 - |S ∩ S'| / |S ∪ S'|; `gate_mass_moved` the share of the gates, before, that was on S \\ S';
    and over tokens known at every MoE layer `any_layer_change` (S ≠ S' at any) and `layers_changed` (at how many; both
    R3). `gates` are the combine weights of `before`, of any sum."""
    before, after = _alike(before, after)
    traces = [x.flatten(0, 1) for x in (before, after, gates) if x is not None]
    moe_layers = before.shape[2]
    changes = []
    block = block_tokens(moe_layers, before.device)
    for tokens in _tokens(mask, before, after).split(
        max(block, SUMMED if moe_layers >= 16 else 64 * SUMMED // moe_layers)
    ):
        compared = [_compare(*(x.index_select(0, some) for x in traces)) for some in tokens.split(block)]
        changes.append(_route_change(*(torch.cat(x) for x in zip(*compared, strict=True))))
    return sum(changes, Pooled())


def _compare(
    before: Integer[Tensor, "token moe_layer k"],
    after: Integer[Tensor, "token moe_layer _"],
    gates: Float[Tensor, "token moe_layer k"] | None = None,
) -> tuple[Shaped[Tensor, "token moe_layer"], ...]:
    """1 where both are known, and |S ∩ S'|, |S| and |S'|, which are 1 elsewhere; with gates, their share on S \\ S'."""
    old, new = slots_first(before), slots_first(after)
    stays, same = torch.empty_like(old), torch.empty_like(new)  # 0 and 1
    for slot, stay in zip(old, stays, strict=True):
        torch.amax(torch.eq(new, slot, out=same), 0, out=stay)
    in_use, in_use_after = used(old, out=old), used(new, out=new)
    stays &= in_use
    count = torch.uint8 if max(len(old), len(new)) <= 255 else torch.int16
    known = (in_use[0] & in_use_after[0]).to(count)
    unknown = 1 - known
    sums = known, *(x.sum(0, dtype=count).mul_(known).add_(unknown) for x in (stays, in_use, in_use_after))
    if gates is None:
        return sums
    lost, all_slots = (x.bool().movedim(0, -1).contiguous() for x in (in_use - stays, in_use))
    return *sums, _share(gates, lost, all_slots)


def _route_change(
    known: Integer[Tensor, "token moe_layer"],
    overlap: Integer[Tensor, "token moe_layer"],
    size: Integer[Tensor, "token moe_layer"],
    size_after: Integer[Tensor, "token moe_layer"],
    moved: Float[Tensor, "token moe_layer"] | None = None,
) -> Pooled:
    largest, union = torch.maximum(size, size_after), size.short() + size_after - overlap
    changed = torch.ne(overlap, largest, out=torch.empty_like(overlap))
    n, changes = known.sum(0, dtype=torch.int64).double(), changed.sum(-1, dtype=torch.int64)
    everywhere = known.sum(-1, dtype=torch.int64) == known.shape[1]
    return Pooled(
        expert_change_rate=_missing(overlap, largest).sum(0),
        any_change_rate=changed.sum(0, dtype=torch.int64).double(),
        jaccard_distance=_missing(overlap, union).sum(0),
        gate_mass_moved=torch.zeros_like(n) if moved is None else torch.where(known > 0, moved, 0).sum(0),
        any_layer_change=((changes > 0) & everywhere).double().sum(),
        layers_changed=(changes * everywhere).sum().double(),
        volatility_tokens=n,
        volatility_unknown=len(known) - n,
        gated_tokens=torch.zeros_like(n) if moved is None else n.clone(),
        tokens=everywhere.double().sum(),
    )


def _missing(
    part: Integer[Tensor, "token moe_layer"], total: Integer[Tensor, "token moe_layer"]
) -> Float[Tensor, "token moe_layer"]:
    """1 - part / total."""
    share = part.double().div_(total)
    return torch.sub(1, share, out=share)


def response_change(before: Ids, after: AnyK, mask: Mask, num_experts: int) -> Pooled:
    """Compare the experts that each response uses, over its rows known in both, summed over responses.

    `response_set_change` is 1 - |U ∩ U'| / |U|, U the union of S over the response; `response_usage_change` is the
    total variation ½ Σ_e |f_e - f'_e|, f_e the share of the response's slots with expert e. `num_experts`: the most at
    any MoE layer. The number of slots may differ.
    """
    before, after = _alike(before, after)
    batch, time, moe_layers, _ = before.shape
    rows = max(1, min(block_tokens(moe_layers, before.device) // max(1, time), BLOCK // num_experts))
    parts = [slice(row, row + rows) for row in range(0, max(1, batch), rows)]
    compared = [_response_change(before[part], after[part], mask[part], num_experts) for part in parts]
    present, set_change, usage_change = (torch.cat(x) for x in zip(*compared, strict=True))
    return Pooled(
        response_set_change=set_change.sum(0),
        response_usage_change=usage_change.sum(0),
        responses=present.double().sum(0),
    )


def _response_change(before: Ids, after: AnyK, mask: Mask, num_experts: int) -> tuple[PerResponse, ...]:
    """Per response and MoE layer: whether it has a known token, and its two changes."""
    old, new = (counts.double() for counts in _usage([before, after], mask, num_experts))
    union = (old > 0).sum(-1)
    common = ((old > 0) & (new > 0)).sum(-1)
    shares = [usage / usage.sum(-1, keepdim=True).clamp(min=1) for usage in (old, new)]
    return union > 0, (union - common).double() / union.clamp(min=1), (shares[0] - shares[1]).abs().sum(-1) / 2


def router_shift(
    old_logprobs_at_old_ids: Float[Tensor, "batch time moe_layer k"],
    new_logprobs_at_old_ids: Float[Tensor, "batch time moe_layer k"],
    mask: Mask,
) -> Pooled:
    """Router shift of RSPO (arXiv 2510.23027), from the router's log-probs (full softmax) at the *old* ids.

    Sums over tokens: `router_shift`, the mean over the token's experts of |log p' - log p|, in nats; and over tokens
    known at every MoE layer `router_shift_ratio`, γ = Π_layer mean_e exp(-|log p'(e) - log p(e)|) in (0, 1], and
    `router_shift_ratio_low`, γ < 0.7, below which RSPO's code drops a token. NaN marks an unused slot; a row of NaN is
    unknown.
    """
    shift = (new_logprobs_at_old_ids[require_mask(mask)].double() - old_logprobs_at_old_ids[mask].double()).abs()
    known = ~shift.isnan().all(-1)
    everywhere = known.all(-1)
    gamma = (-shift).exp().nanmean(-1)[everywhere].prod(-1)
    return Pooled(
        router_shift=shift.nanmean(-1).nansum(0),
        router_shift_ratio=gamma.sum(),
        router_shift_ratio_low=(gamma < 0.7).double().sum(),
        shift_n=known.double().sum(0),
        shift_tokens=everywhere.double().sum(),
    )


def load_statistics(ids: Ids, num_experts: int | Sequence[int], mask: Mask) -> Pooled:
    """The slots that each expert fills where `mask` is true: `load` [MoE layer, expert], NaN beyond an MoE layer's own
    experts. `num_experts`: of all MoE layers, or of each."""
    moe_layers = ids.shape[2]
    per_moe_layer = (num_experts,) * moe_layers if isinstance(num_experts, int) else tuple(num_experts)
    counts = _usage([ids.flatten(0, 1)[None]], require_mask(mask).reshape(1, -1), max(per_moe_layer))[0][0].double()
    for moe_layer, experts in zip(counts, per_moe_layer, strict=True):
        moe_layer[experts:] = math.nan
    return Pooled(load=counts)


def margin_summary(margins: Float[Tensor, "batch time moe_layer"], mask: Mask) -> list[dict[str, float]]:
    """Per MoE layer, statistics of the gap between the k-th and the (k+1)-th router score, in the unit of the scores:
    `margin_n`, quantiles `margin_q01`, `_q10`, `_q50`, `_q90`, and `margin_below_<threshold>`, the share below it.

    NaN marks an unknown margin. Quantiles cannot be pooled.
    """
    rows = []
    for values in margins[require_mask(mask)].double().cpu().numpy().T:
        values = values[~np.isnan(values)]
        row = {"margin_n": float(len(values))}
        for name, q in (("01", 0.01), ("10", 0.1), ("50", 0.5), ("90", 0.9)):
            row[f"margin_q{name}"] = float(np.quantile(values, q)) if len(values) else math.nan
        for limit in (0.01, 0.1):
            row[f"margin_below_{limit:g}"] = float((values < limit).mean()) if len(values) else math.nan
        rows.append(row)
    return rows


def _share(
    gates: Float[Tensor, "token moe_layer k"],
    of: Bool[Tensor, "token moe_layer k"],
    in_use: Bool[Tensor, "token moe_layer k"],
) -> Float[Tensor, "token moe_layer"]:
    """The share of the gates in use that is on some of the slots; 0 where all gates are 0."""
    part, total = (torch.where(where, gates, 0).sum(-1, dtype=torch.float64) for where in (of, in_use))
    return torch.where(total > 0, part / total, 0)


def _alike(before: Ids, after: AnyK) -> tuple[Ids, AnyK]:
    """Both in one dtype, so that they mark an empty slot alike."""
    return (before, after) if before.dtype == after.dtype else (signed(before), signed(after))


def _tokens(mask: Mask, *traces: AnyK) -> Int64[Tensor, " token"]:
    """Which of batch × time tokens are True in the mask."""
    for ids in traces:
        if ids.shape[:2] != mask.shape:
            raise ValueError(f"the mask has shape {list(mask.shape)}, the ids have shape {list(ids.shape)}")
    return require_mask(mask).flatten().nonzero()[:, 0].to(traces[0].device)


def _usage(traces: Sequence[AnyK], mask: Mask, num_experts: int) -> list[Int64[Tensor, "batch moe_layer expert"]]:
    """Slots that each expert fills in each row of the batch, where the mask is true and all of the traces know it."""
    batch, time, moe_layers, _ = traces[0].shape
    device, width = traces[0].device, num_experts + 1
    if traces[0].dtype == torch.uint8 and num_experts > 255:
        raise ValueError(f"ids of {num_experts} experts are uint8, where 255 marks no expert; give them as int16")
    at_moe_layer = [
        (torch.arange(moe_layers, device=device) * width).int().repeat_interleave(ids.shape[3]) for ids in traces
    ]
    usage = [torch.zeros(batch, moe_layers, num_experts, dtype=torch.int64, device=device) for _ in traces]
    for tokens in _tokens(mask, *traces).split(block_tokens(moe_layers, device)):
        parts = [ids.flatten(0, 1).index_select(0, tokens) for ids in traces]
        unknown = (~(used(parts[0][..., 0]) & used(parts[-1][..., 0]))).nonzero(as_tuple=True)
        at_row = (tokens // max(1, time) * (moe_layers * width)).int()[:, None]
        for counts, at, ids in zip(usage, at_moe_layer, parts, strict=True):
            ids[unknown] = unknown_id(ids.dtype)
            ids = ids.short() if ids.dtype == torch.int8 else ids  # 127 + 1 would wrap
            experts = (ids + 1).clamp_(min=0)  # 0 where there is none: 255 + 1 wraps
            if experts.numel() and int(experts.max()) > num_experts:
                raise ValueError(f"an id is {int(experts.max()) - 1}, but there are {num_experts} experts")
            bins = experts.flatten(1).int().add_(at)
            bins = (bins if batch == 1 else bins.add_(at_row)).flatten()
            counts += torch.bincount(bins, minlength=batch * moe_layers * width).view(batch, moe_layers, width)[..., 1:]
    return usage


# ---------------------------------------------------------------------- routers and replay
def router_confidence(log_probs: PerSlot, ids: Ids, mask: Mask) -> Pooled:
    """Probability of the chosen experts where `mask` is true. `log_probs` are the router's log softmax at `ids`
    (prime-rl, pull request 2545)."""
    in_use = used(ids[require_mask(mask)])  # token, MoE layer, k
    known = in_use[..., 0]
    chosen = torch.where(in_use, log_probs[mask].double().exp(), 0)
    return Pooled(router_confidence=chosen.sum(-1).sum(0), confidence_n=known.double().sum(0))


def coverage(known: Bool[Tensor, "batch time moe_layer"], mask: Mask) -> Pooled:
    """The number of (token, MoE layer) pairs that a trace knows where `mask` is true."""
    forced = known[require_mask(mask)].double()
    return Pooled(coverage=forced.sum(), coverage_n=torch.ones_like(forced).sum())


def changes(
    before: Ids,
    after: Ids,
    mask: Mask,
    layout: Layout,
    gates: PerSlot | None = None,
    log_probs: tuple[PerSlot, PerSlot] | None = None,
) -> Pooled:
    """Volatility of the tokens of `mask`: of routes, of whole responses, and of the routers. `gates` are the combine
    weights of `before`, `log_probs` the log softmax at its ids, before and after, each where it is known."""
    experts = max(moe_layer.num_experts for moe_layer in layout.moe_layers)
    change = route_change(before, after, mask, gates) + response_change(before, after, mask, experts)
    if log_probs is None:
        return change
    unused = ~(used(before) & used(after[..., :1]))
    first, then = (x.masked_fill(unused, math.nan) for x in log_probs)
    return change + router_shift(first, then, mask)
