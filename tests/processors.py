"""The environment in which PyTorch, oneDNN, MKL, NumPy and OpenBLAS leave the processor's wider vectors alone.

env $(python tests/processors.py avx2) python -m pytest
"""

from __future__ import annotations

import sys

from numpy._core._multiarray_umath import __cpu_dispatch__

VARIABLES = {
    "native": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
}
"""By instruction set; `native` is the processor as it is. MKL_ENABLE_INSTRUCTIONS acts on Intel's processors alone; MKL
uses AVX2 at most on others, and MKL_CBWR=COMPATIBLE acts on all."""


def environment(isa: str) -> dict[str, str]:
    """The variables of an instruction set. NumPy dispatches other features in each release, and refuses to disable
    those of its baseline, so it is asked for their names."""
    off = {
        "native": [],
        "avx2": [name for name in __cpu_dispatch__ if "512" in name or name == "X86_V4"],
        "default": __cpu_dispatch__,
    }[isa]
    return VARIABLES[isa] | ({"NPY_DISABLE_CPU_FEATURES": ",".join(off)} if off else {})


if __name__ == "__main__":
    if sys.argv[1] not in VARIABLES:
        sys.exit(f"{sys.argv[1]!r} is not an instruction set of these passes. Give one of {', '.join(VARIABLES)}.")
    print(*(f"{name}={value}" for name, value in environment(sys.argv[1]).items()))
