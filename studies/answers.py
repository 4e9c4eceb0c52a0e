"""What the declared rules ask beyond the tables of `moe-rl plot`: numbers for the studies' pages, and five figures.

    python studies/answers.py [study …]

reads `results/` and prints; without names, every study that is there. Intervals are over seeds unless a line says so.
`pages.py` keeps what is printed in the page of each study.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import dense_verdicts
import dial_elsewhere_verdicts
import early_warning
import exploratory
import flip_effects_verdicts
import gradient_clipping_verdicts
import in_two_trainers_updates
import irreversible_verdicts
import lag_natural_verdicts
import lengths_verdicts
import open_side_verdicts
import ratio_gradient_verdicts
import regime_gate_verdicts
import router_noise_low_verdicts
import stabilisers_verdicts
import volatility_controls_verdicts
import volatility_dial_verdicts
from answers_of_arms import (
    clip_fraction,
    controls,
    engine_mismatch,
    engine_vllm,
    lag,
    learning_rates,
    many_turns,
    placebos,
    staleness,
    why_gspo,
)
from answers_of_measures import expert_volatility, gradient_quality, ratio_variance
from per_seed import RESULTS, stored

from moe_rl.results.summary import verdict_of
from moe_rl.study.declaration import read_declaration

ANSWERS: dict[str, Sequence[Callable[[], None]]] = {
    "volatility_dial": (volatility_dial_verdicts.main, exploratory.volatility_dial),
    "volatility_controls": (volatility_controls_verdicts.main, exploratory.volatility_controls),
    "dial_elsewhere": (dial_elsewhere_verdicts.main, exploratory.dial_elsewhere),
    "stabilisers": (stabilisers_verdicts.main, exploratory.stabilisers),
    "open_side": (open_side_verdicts.main, exploratory.open_side),
    "many_turns": (many_turns,),
    "in_two_trainers": (in_two_trainers_updates.main,),
    "lag": (lag, exploratory.lag),
    "lag_natural": (lag_natural_verdicts.main, exploratory.lag_natural),
    "router_noise_low": (router_noise_low_verdicts.main,),
    "ratio_gradient": (ratio_gradient_verdicts.main,),
    "clip_fraction": (clip_fraction,),
    "engine_mismatch": (engine_mismatch, exploratory.engine_mismatch),
    "engine_vllm": (engine_vllm,),
    "learning_rates": (learning_rates,),
    "early_warning": (early_warning.main,),
    "expert_volatility": (expert_volatility,),
    "ratio_variance": (ratio_variance,),
    "staleness": (staleness,),
    "why_gspo": (why_gspo,),
    "placebos": (placebos,),
    "controls": (controls,),
    "gradient_quality": (gradient_quality,),
    "gradient_clipping": (gradient_clipping_verdicts.main,),
    "lengths": (lengths_verdicts.main,),
    "flip_effects": (flip_effects_verdicts.main,),
    "irreversible": (irreversible_verdicts.main,),
    "regime_gate": (regime_gate_verdicts.main,),
    "dense": (dense_verdicts.main,),
}
"""What is made from the tables of each study."""
READS = {"early_warning": "learning_rates"}
"""Whose tables an analysis without runs of its own reads."""


def print_verdict(name: str) -> None:
    """What the rule of a study says, by the function that its declaration names."""
    frames, declared = stored(name), read_declaration(RESULTS / name, trust=True)
    for sentence in verdict_of(frames, declared):
        print(f"Verdict: {sentence}")


def main(names: Sequence[str]) -> None:
    for name, answers in ANSWERS.items():
        if (name in names or not names) and (RESULTS / READS.get(name, name)).exists():
            print(f"\n# {name}")
            for answer in answers:
                answer()
            print_verdict(name)


if __name__ == "__main__":
    main(sys.argv[1:])
