"""What the declared rule of gradient_clipping says, from its tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
from per_seed import differences, own_table

from moe_rl.results.stats import Interval, geometric, interval, paired

CONFIDENCE = 0.975
QUESTIONS = {
    "clipping": ("grpo", "token-none", "it amplifies the noise, reproduced", "it damps the noise, reversed"),
    "length normalisation": ("product-none", "sequence-none", "needed, reproduced", "reversed"),
}
"""(numerator, denominator, what a ratio of variances above 1 says, and one below)."""


def main() -> None:
    """What the rule says, and every arm beside it."""
    gradients = own_table("gradient_clipping", "gradients")
    table = sound(gradients)
    print("First update, largest distance from GRPO's gradient, in its norm: "
          + ", ".join(f"{arm} {apart:.1e}" for arm, apart in machinery(gradients).items())
          + f"; attenuation by noise in the reference: at least {table['attenuation'].min():.2f}")
    for arm in table["compared"].unique():
        rows = table[table["compared"] == arm].sort_values("seed")
        cosine = interval(rows["cosine"].dropna())
        print(f"  {arm}: cosine {cosine} (n = {cosine.n}); variance {geometric(rows['variance'])}, by seed "
              f"{', '.join(f'{x:.0f}' for x in rows['variance'])}")
    cosines = table.pivot(index="seed", columns="compared", values="cosine")
    for a, b, *_ in QUESTIONS.values():
        logs = logs_of(table, a, b)
        print(f"  {a} / {b}: variance larger on {(logs > 0).sum()} of {len(logs)} seeds, exploratory: p of sign flips "
              f"{paired(logs.to_dict(), dict.fromkeys(logs.index, 0.0)).p:.2g}; {a} − {b}, cosine "
              f"{differences(cosines, a, b, CONFIDENCE)}, {100 * CONFIDENCE:g} %")
    for a, b in (("gspo", "sequence-none"), ("gspo", "grpo"), ("sequence-none", "token-none")):
        print(f"  exploratory, {a} / {b}: variance {ratio(table, a, b, 0.95)}; {a} − {b}, cosine "
              f"{differences(cosines, a, b)}")
    print("\n".join(f"Verdict: {line}" for line in verdict(gradients)))


def verdict(gradients: pd.DataFrame) -> list[str]:
    """Void or not, and both questions."""
    lines = [f"void: {name} is {apart:.1e} of a norm apart from GRPO where every ratio is 1"
             for name, apart in machinery(gradients).items() if not apart <= 1e-3]
    for question, (a, b, above, below) in QUESTIONS.items():
        times = ratio(sound(gradients), a, b)
        said = above if times.low > 1 else below if times.high < 1 else f"undetermined at n = {times.n}"
        lines.append(f"{question}: {said} (variance, {a} / {b} {times})")
    return lines


def machinery(gradients: pd.DataFrame) -> pd.Series:
    """By arm, how far its first gradient was from GRPO's: the largest over seeds."""
    return gradients[gradients["update"] == 1].groupby("compared")["apart"].max()


def sound(gradients: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last update, of seeds whose reference is not mostly noise."""
    last = gradients[gradients["update"] == gradients["update"].max()]
    void = last.loc[~(last["attenuation"] >= 0.7), "seed"]
    return last[~last["seed"].isin(void)]


def logs_of(table: pd.DataFrame, a: str, b: str) -> pd.Series:
    """By seed, the log of the ratio of two arms' variances."""
    logs = np.log(table.pivot(index="seed", columns="compared", values="variance").astype(float))
    return (logs[a] - logs[b]).dropna()


def ratio(table: pd.DataFrame, a: str, b: str, confidence: float = CONFIDENCE) -> Interval:
    """The same as a geometric mean over seeds."""
    return geometric(np.exp(logs_of(table, a, b)), confidence)
