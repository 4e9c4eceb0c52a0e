"""Every method by name: `arm("sapo(tau_neg=1.05)+old_policy")`, and the defaults of other frameworks."""

from moe_rl.methods.roll import from_roll
from moe_rl.methods.table import arm, differences, entry, methods, presets, spelled

__all__ = ["arm", "differences", "entry", "from_roll", "methods", "presets", "spelled"]
