"""Converts weights of torch's `nn.MultiheadAttention`, whose in_proj_weight stacks q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from regard.nn.multihead import MultiheadAttention


def rename_keys(state: dict[str, Any], prefix: str = "", assign: bool = False) -> None:
    """Rename torch's keys of a state dict to ours, in place; other keys stay.

    With `assign` the tensors become the parameters themselves, so parts of a stacked tensor get memory of their own,
    which every file format accepts.
    """
    for kind in ("weight", "bias"):
        stacked = state.pop(f"{prefix}in_proj_{kind}", None)
        if stacked is not None:
            for name, part in zip("qkv", stacked.chunk(3), strict=True):
                state[f"{prefix}{name}_proj.{kind}"] = part.clone() if assign else part
    for name in "qkv":
        separate = state.pop(f"{prefix}{name}_proj_weight", None)
        if separate is not None:
            state[f"{prefix}{name}_proj.weight"] = separate


def check_module(module: nn.MultiheadAttention) -> None:
    """Raise TypeError or ValueError if a module has no counterpart here."""
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}")
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn have no counterpart here; use a module without them")
    if not module.batch_first:
        raise ValueError(
            "module has batch_first=False: it takes (L, B, embed_dim), and inputs are (B, L, embed_dim) here; set "
            "module.batch_first = True, and transpose where it is called"
        )


def copy_weights(ours: MultiheadAttention, module: nn.MultiheadAttention) -> None:
    """Copy a torch module's weights, and which of them are frozen."""
    loaded = ours.load_state_dict(module.state_dict(), strict=False)
    missing = [name for name in loaded.missing_keys if "_proj" in name]
    if missing or loaded.unexpected_keys:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {loaded.unexpected_keys}")
    for name, parameter in ours.named_parameters():
        if "_proj." in name:
            parameter.requires_grad_(_source(module, name).requires_grad)


def _source(module: nn.MultiheadAttention, name: str) -> Tensor:
    """Return torch's parameter that holds one of ours, such as "q_proj.weight"."""
    layer, _, kind = name.partition(".")
    if layer == "out_proj":
        return getattr(module.out_proj, kind)
    separate = getattr(module, f"{layer}_weight") if kind == "weight" else None
    return getattr(module, f"in_proj_{kind}") if separate is None else separate
