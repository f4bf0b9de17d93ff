"""triton.language for tile functions, with the GPU's own logarithm of float32.

Triton's log and log2 are polynomials of some 25 instructions. `lg2.approx` is one, with an error of at most 2⁻²² (of
log2 x itself outside [½, 2]), which is that of Triton's exp2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import *  # noqa: F403

LN2 = tl.constexpr(0.6931471805599453)
NVIDIA = tl.constexpr(torch.version.hip is None)


@triton.jit
def log2(x):
    """Return log2 x; of float32 by one instruction, which takes denormal numbers for 0."""
    if not isinstance(x, tl.tensor) or not NVIDIA or x.dtype != tl.float32:  # a constant
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def log(x):
    """Return log x, likewise."""
    if not isinstance(x, tl.tensor) or not NVIDIA or x.dtype != tl.float32:
        y = tl.log(x)
    else:
        y = log2(x) * LN2
    return y
