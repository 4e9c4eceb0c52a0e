"""Numbers of other frameworks' own code on shared float64 batches: `peers.npz`, read here and made nowhere in this
repository.

Losses and gradients are what TRL, OpenRLHF, open-instruct, prime-rl, verl, AReaL, UniRL, Megatron-LM, transformers
and the authors' GMPO and RSPO code return at the versions in `PROVENANCE[key]`: peer, repo, commit, path, function,
options, a note on the aggregation, the first digits of the source's SHA-256, and what the gradient is with respect to.
Keys are "peer/method".

Every case is 8 rows of 24 columns, all of them the response's but for `mask`; padding holds finite garbage, so that a
leak shows. `main-narrow-0` is for ranges of sequences, the `wide` ones for ranges of tokens, of which `empty-wide-0`
has an empty row and `holes-wide-0` holes in the mask; `main-extreme-0` has log-ratios beyond 20. Scores of routers,
[batch, time, layer, expert], are there for `ROUTED` cases alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.objectives import LossInputs
from tests.objectives.examples import inputs

with np.load(Path(__file__).with_name("peers.npz")) as _file:
    _ARRAYS = dict(_file)
PROVENANCE: dict[str, dict[str, Any]] = json.loads(str(_ARRAYS.pop("provenance")))
CASES = tuple(str(name) for name in _ARRAYS.pop("cases"))
ROUTED = ("main-wide-0", "empty-wide-0")


def case(name: str) -> dict[str, np.ndarray]:
    """The inputs of a case by name: logprobs, old_logprobs, rollout_logprobs, ref_logprobs, entropy, token_advantages,
    mask [batch, time]; advantages, rewards, groups [batch]; router_old and router_new where they are there."""
    return {
        key.removeprefix("inputs/"): value
        for key in _ARRAYS
        if key.startswith("inputs/")
        if (value := _of(key, name)) is not None
    }


def loss_inputs(name: str, logprobs: Any = None, **changes: Any) -> LossInputs:
    """A case as `LossInputs`; `logprobs` in place of the case's own, e.g. with gradient."""
    x = case(name)
    given: dict[str, Any] = {k: x[k] for k in ("rollout_logprobs", "ref_logprobs", "entropy")} | changes
    advantages = given.pop("advantages", x["advantages"])
    return inputs(x["logprobs"] if logprobs is None else logprobs, x["old_logprobs"], advantages, x["mask"], **given)


def expected(name: str, key: str) -> tuple[float, np.ndarray]:
    """(loss, gradient) of a peer's function on a case."""
    return float(_of(f"{key}/loss", name)), _of(f"{key}/grad", name)


def output(name: str, key: str, which: str = "out") -> np.ndarray:
    """What a peer's function returned on a case, where that is no loss: weights, advantages; `out2` is the second."""
    return _of(f"{key}/{which}", name)


def _of(key: str, name: str) -> Any:
    stacked, cases = _ARRAYS[key], ROUTED if len(_ARRAYS[key]) == len(ROUTED) else CASES
    return stacked[cases.index(name)] if name in cases else None
