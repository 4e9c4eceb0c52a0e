"""The passes of `make test-processors`: each uses the instructions that it is named for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from numpy._core._multiarray_umath import __cpu_features__

from tests.processors import VARIABLES, environment

ASKED = os.environ.get("MOE_RL_ISA", "native")


def test_this_pass_uses_the_instructions_that_it_is_named_for():
    assert environment(ASKED).items() <= os.environ.items(), f"run it by: make test-processors ISA={ASKED}"
    used = torch.backends.cpu.get_cpu_capability()
    if ASKED != "native":
        assert used == ASKED.upper(), f"PyTorch cannot do {ASKED} here: leave it out, as in ISA='native default'"
    off = os.environ.get("NPY_DISABLE_CPU_FEATURES", "").replace(",", " ").split()
    assert not [name for name in off if __cpu_features__[name]]


@pytest.mark.parametrize("isa", VARIABLES)
def test_numpy_takes_every_name_without_a_word_and_leaves_out_what_is_wider(isa):
    code = (
        "from numpy._core._multiarray_umath import __cpu_dispatch__ as d, __cpu_features__ as f;"
        "print(any(f[n] and ('512' in n or n == 'X86_V4') for n in d), f.get('X86_V3', f.get('AVX2')))"
    )
    clean = {name: value for name, value in os.environ.items() if name != "NPY_DISABLE_CPU_FEATURES"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=clean | environment(isa),
        text=True,
        capture_output=True,
        check=True,
    )
    wider, avx2 = done.stdout.split()
    assert done.stderr == ""
    assert isa == "native" or wider == "False"
    assert isa != "default" or avx2 in ("False", "None")
