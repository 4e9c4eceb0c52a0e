"""An independent oracle for the losses: plain NumPy, loops over sequences and tokens, gradients by hand.

It shares no code with `moe_rl.objectives` and is written from the equations, of GSPO (arXiv 2507.18071) where nothing
else is said. Each function returns (loss, gradient with respect to logprobs, clipped_by); the last is +1 / -1 where the
upper / lower bound took a token's gradient. On the bound the gradient is kept.
"""

import numpy as np


def reach(level, t, tokens):
    """Which tokens of the response a token's log-ratio is made of, and with which factor, at a level of ratios."""
    if level in ("sequence", "sequence_token"):
        return {u: 1 / len(tokens) for u in tokens}
    if level == "product":
        return {u: 1.0 for u in tokens}
    run = [t]
    while level == "segment" and run[-1] + 1 in tokens:
        run.append(run[-1] + 1)
    while level == "segment" and run[0] - 1 in tokens:
        run.insert(0, run[0] - 1)
    return {u: 1 / len(run) for u in run}


def trust_region(logprobs, old, advantages, mask, level, rule):
    """-1/N sum_i 1/|y_i| sum_t value, with (value, slope, side) = rule(log-ratio at the level, A, log p, log p_old).

    The slope is d value / d log-ratio; for a rule of log p itself its third argument's, then `rule.local` is True.
    """
    loss, gradient, clipped_by = 0.0, np.zeros(logprobs.shape), np.zeros(logprobs.shape, dtype=int)
    rows = [i for i in range(len(mask)) if any(mask[i])]
    for i in rows:
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        for t in tokens:
            a = advantages[i] if advantages.ndim == 1 else advantages[i, t]
            parts = reach(level, t, tokens)
            log_ratio = sum(factor * (logprobs[i, u] - old[i, u]) for u, factor in parts.items())
            value, slope, clipped_by[i, t] = rule(log_ratio, a, logprobs[i, t], old[i, t])
            loss -= value / (len(rows) * len(tokens))
            own = level == "sequence_token" or getattr(rule, "local", False)
            for u, factor in {t: 1.0}.items() if own else parts.items():
                gradient[i, u] -= slope * factor / (len(rows) * len(tokens))
    return loss, gradient, clipped_by


def central_differences(value, x, h=1e-6):
    """Gradient of value(x) at x, one coordinate at a time."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[index] = h
        gradient[index] = (value(x + step) - value(x - step)) / (2 * h)
    return gradient
