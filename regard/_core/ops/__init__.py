"""The torch.library ops: schema, fake, autograd, vmap. The normaliser travels as a string, the backend too.

Forward and backward are ops of their own, so that torch.compile, checkpointing and opcheck see two opaque steps with
known shapes. `rows` maps a matrix of scores to weights; `attention` is the fused step on [B, H, M, D].
"""

from regard._core.ops.attention import attention, attention_backward
from regard._core.ops.backends import accumulator
from regard._core.ops.rows import rows, rows_backward, rows_weights

__all__ = ["accumulator", "attention", "attention_backward", "rows", "rows_backward", "rows_weights"]
