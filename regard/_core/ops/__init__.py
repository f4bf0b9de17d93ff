"""The custom ops of torch.library: schema, fake, autograd, vmap. Normaliser and backend travel as strings.

Forward and backward are ops of their own, so that torch.compile, checkpointing and opcheck see two opaque steps with
known shapes. `rows` maps a matrix of scores to weights, `row_loss` to losses; `attention` is the fused step on
[B, H, M, D].
"""

from regard._core.ops.attention import attention, attention_backward
from regard._core.ops.losses import row_loss, row_loss_backward
from regard._core.ops.rows import rows, rows_backward, rows_weights

__all__ = ["attention", "attention_backward", "row_loss", "row_loss_backward", "rows", "rows_backward", "rows_weights"]
