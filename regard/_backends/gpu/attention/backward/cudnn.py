"""Backward of plain softmax attention by cuDNN, from the row state that any of our forwards leaves.

cuDNN recomputes the weights from q, k and the logsumexp of each row, which is shift + log z. So a call with statistics,
or one whose forward is ours because it is faster, has cuDNN's backward all the same.
`why_not` decides it, for the registry and for plans (`launch.backward`).
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._call.problem import MARKS, Forward, Gradients, Problem, Upstream
from regard._facts import has_bulk_copies

WIDEST = 256  # head width
# every option with words in refusals, so that a new one is refused until somebody allows it here
unknown_options = attrgetter(*(x for x, mark in MARKS.items() if mark.words and x not in ("stats", "dropout_p")))


def why_not(p: Problem, has_statistics: bool) -> str | None:
    """None, or why cuDNN cannot compute the backward of this problem."""
    if not p.q.is_cuda or not has_bulk_copies(p.q.device):
        return "no Hopper or later GPU"
    if p.q.element_size() != 2:
        return f"{p.q.dtype}"
    if p.choice.name != "softmax":
        return f"normalizer {p.choice.spec}"
    if has_statistics:
        return "gradients of statistics"
    if any(option is not None for option in unknown_options(p)) or p.dropout_p or p.first_query or p.scale <= 0:
        return "options other than causal order and scale"
    if p.causal and p.q.shape[2] != p.k.shape[2]:
        return "causal order over another number of keys"
    if p.q.shape[-1] % 8 or p.v.shape[-1] % 8 or max(p.q.shape[-1], p.v.shape[-1]) > WIDEST:
        return f"head width {max(p.q.shape[-1], p.v.shape[-1])} (multiples of 8 up to {WIDEST})"
    return (
        None if _is_allowed_by_torch(p) else "torch's rules for cuDNN (a setting, a layout, deterministic algorithms)"
    )


def _is_allowed_by_torch(p: Problem) -> bool:
    """True if torch's own sdpa would let cuDNN compute this call."""
    return can_use_cudnn_attention(SDPAParams(p.q, p.k, p.v, None, 0.0, p.causal, p.q.shape[1] != p.k.shape[1]))


def supports(call: BackwardCall) -> str | None:
    """None, or why cuDNN cannot compute this backward call."""
    return why_not(call.problem, call.flags["STATS_GRAD"])


def run(call: BackwardCall) -> None:
    """Replace the gradients to fill by those that cuDNN computes."""
    found = backward(call.problem, call.forward, Upstream(call.do))
    call.grads.q, call.grads.k, call.grads.v = found.q, found.k, found.v


def backward(p: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    """Compute dq, dk and dv by cuDNN."""
    if "logsumexp" in p.stats:
        lse = forward.stats[p.stats.index("logsumexp")]
    else:
        lse = torch.log(forward.z).add_(forward.shift)
    lse = lse.unsqueeze(-1)  # [B, H, M, 1]
    seed = _unused_seed(p.q.device)
    do = upstream.o if upstream.o.stride(-1) == 1 else upstream.o.contiguous()
    m, n = p.q.shape[2], p.k.shape[2]
    options = seed, seed, None, None, None, m, n, 0.0, p.causal
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        do, p.q, p.k, p.v, forward.o, lse, *options, scale=p.scale
    )
    return Gradients(*found)


@cache
def _unused_seed(device: torch.device) -> Tensor:
    """A philox state for calls without dropout, which nobody reads."""
    return torch.zeros((), dtype=torch.int64, device=device)
