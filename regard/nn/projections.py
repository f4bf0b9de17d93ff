"""`projections`: the weights of an attention module that make its queries and keys, and its output weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard._core.dtensor import is_dtensor

SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("to_q", "to_k"), ("Wq", "Wk"),
            ("wq", "wk"))  # fmt: skip
STACKED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj")  # q, k, v one after another
OUTPUTS = ("out_proj", "o_proj", "output_proj", "c_proj", "o", "out_lin", "linear_out", "to_out", "Wo", "wo", "proj",
           "dense", "projection_layer", "projection", "out", "output")  # fmt: skip
LATENT_QUERIES = ("q_b_proj", "wq_b", "q_proj", "wq")  # MLA: the query's up-projection, or its only one
LATENT_KEYS = ("kv_b_proj", "wkv_b")  # MLA: the up-projection of keys without position and of values
NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm", "qk_norm")


class NotFound(LookupError):
    """The weights of queries and keys were not found, or cannot be scaled head by head."""


@dataclass(frozen=True)
class Projection:
    """Where a weight and bias hold `heads` heads: `width` rows or columns along `dim`, from `start`."""

    weight: Tensor
    bias: Tensor | None
    heads: int
    width: int  # of all heads together
    start: int = 0
    dim: int = 0
    makes_all: bool = True  # False for torch's keys with add_bias_kv, where one key is learned
    fixed: int = 0  # last rows of each head that no factor changes (MLA: values), or whose partner is fixed (rotary)
    powers: tuple[tuple[int, float], ...] = ()  # rows of a head and the power of the factor that they take; () = 1

    @torch.no_grad()
    def shrink(self, factors: Tensor) -> None:
        """Multiply each head's weights and bias by its factor, to the powers; a factor of 1 changes no bit."""
        factors = factors.to(self.weight.device, torch.float32)
        powers = {power for count, power in self.powers if count} or {1.0}
        if len(powers) == 1 and not is_dtensor(self.weight):  # each head's rows have one factor
            (power,) = powers
            own = factors if power == 1.0 else factors.sqrt() if power == 0.5 else factors**power
            rows = self.weight.narrow(self.dim, self.start, self.width).unflatten(self.dim, (self.heads, -1))
            rows.mul_(own[:, None, None] if self.dim == 0 else own[:, None])
            if self.bias is not None:
                self.bias.narrow(0, self.start, self.width).unflatten(0, (self.heads, -1)).mul_(own[:, None])
            return
        each = self._row_factors(factors)
        if is_dtensor(self.weight):  # a slice would be a copy: multiply the whole, other rows by 1
            self._shrink_shards(each)
            return
        rows = self.weight.narrow(self.dim, self.start, self.width)
        rows.copy_(rows * (each[:, None] if self.dim == 0 else each))
        if self.bias is not None:
            part = self.bias.narrow(0, self.start, self.width)
            part.copy_(part * each)

    def _row_factors(self, factors: Tensor) -> Tensor:
        """Return the factor of each row of all heads, [width]."""
        rows = self.powers or ((self.width // self.heads, 1.0),)
        parts = [(factors if power == 1.0 else factors**power)[:, None].expand(-1, count) for count, power in rows]
        return torch.cat(parts, 1).flatten()

    def _shrink_shards(self, each: Tensor) -> None:
        """Multiply weights that are sharded over ranks (`fully_shard`), each rank its own rows."""
        from torch.distributed.tensor import DTensor, Replicate

        all_factors = each.new_ones(self.weight.shape[self.dim])
        all_factors[self.start : self.start + self.width] = each
        for tensor, dim in ((self.weight, self.dim), (self.bias, 1)):
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                whole = DTensor.from_local(all_factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
                tensor.mul_(whole[:, None] if dim == 0 else whole)


def projections(
    module: nn.Module, heads: int, head_dim: int, names: tuple[str, str] | None = None
) -> tuple[Projection, Projection]:
    """Return the projections of the queries and of the keys of an attention module; raise `NotFound` if unknown.

    names: the attributes that hold its query and key layers, where they are not named as usual.
    """
    reason = bounded_scores_reason(module)
    if reason is not None:
        raise NotFound(reason)
    if isinstance(module, nn.MultiheadAttention):
        _check_stored(module, "in_proj_weight", "q_proj_weight", "k_proj_weight", "in_proj_bias")
        return _from_torch(module)
    if is_latent(module):
        return _from_latent(module, heads, head_dim)
    pairs = (names, *SEPARATE) if names else SEPARATE
    for pair in pairs:
        query, key = (getattr(module, name, None) for name in pair)
        if all(isinstance(layer, nn.Module) and hasattr(layer, "weight") for layer in (query, key)):
            return _from_layers(query, key, heads, head_dim)
    for name in STACKED:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Module) and hasattr(layer, "weight"):
            return _from_stack(layer, name, heads, head_dim)
    known = ", ".join((*map("/".join, pairs), *STACKED))
    raise NotFound(f"{type(module).__name__} has no linear layers named {known}; pass names=(query, key)")


def output_weight(module: nn.Module, parent: nn.Module | None = None) -> Tensor | None:
    """Return the matrix [outputs, H·E] that multiplies the output of an attention module's heads, or None.

    It is the module's own or, as in BERT, `output.dense` of its parent.
    """
    sibling = getattr(getattr(parent, "output", None), "dense", None)
    for layer in (*(getattr(module, name, None) for name in OUTPUTS), sibling):
        if isinstance(layer, (nn.Sequential, nn.ModuleList)) and len(layer):
            layer = layer[0]  # dropout follows
        if isinstance(layer, nn.Module) and hasattr(layer, "weight"):
            try:
                weight = _checked_weight(layer)
            except NotFound:
                return None
            return None if is_dtensor(weight) else weight.mT if _output_dim(layer) else weight
    return None


def bounded_scores_reason(module: nn.Module) -> str | None:
    """Return why a module's scores do not grow with its weights (cosine, additive, QK-norm), or None if they do."""
    if getattr(module, "score", None) in ("cosine", "additive"):
        return f"its {module.score} scores do not grow with the weights"
    norm = next((name for name in NORMS if getattr(module, name, None) is not None), None)
    return norm and f"its queries and keys are normalised ({norm}): they do not grow with the weights"


def is_latent(module: nn.Module) -> bool:
    """True for multi-head latent attention (MLA: DeepSeek V2 and V3, Kimi K2)."""
    sizes = (getattr(module, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return all(isinstance(size, int) for size in sizes) and _first_layer(module, LATENT_KEYS) is not None


def _first_layer(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    layers = (getattr(module, name, None) for name in names)
    return next((layer for layer in layers if isinstance(layer, nn.Module) and hasattr(layer, "weight")), None)


def _from_latent(module: nn.Module, heads: int, head_dim: int) -> tuple[Projection, Projection]:
    """Return MLA's up-projections: rows of a query head are (no position, rotary), of a key head (no position, value).

    The rotary key is one for all heads, so it stays as it is and the rotary query takes its share.
    """
    plain, rotary, values = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    query, key = _first_layer(module, LATENT_QUERIES), _first_layer(module, LATENT_KEYS)
    if query is None or key is None:
        raise NotFound(f"{type(module).__name__} has no query layer named {', '.join(LATENT_QUERIES)}")
    widths = [_checked_weight(layer).shape[_output_dim(layer)] for layer in (query, key)]
    if head_dim != plain + rotary or widths != [heads * head_dim, heads * (plain + values)]:
        raise NotFound(
            f"its query and key layers make {widths[0]} and {widths[1]} numbers for {heads} heads of {plain} + {rotary}"
        )
    return (
        Projection(query.weight, _bias(query), heads, widths[0], dim=_output_dim(query), fixed=rotary),
        Projection(key.weight, _bias(key), heads, widths[1], dim=_output_dim(key), fixed=values),
    )


def _from_torch(module: nn.MultiheadAttention) -> tuple[Projection, Projection]:
    heads, width, bias = module.num_heads, module.embed_dim, module.in_proj_bias
    makes_all = module.bias_k is None
    if module.in_proj_weight is not None:
        whole = module.in_proj_weight
        key = Projection(whole, bias, heads, width, start=width, makes_all=makes_all)
        return Projection(whole, bias, heads, width), key
    if is_dtensor(bias):
        raise NotFound("its query and key biases are one tensor that ranks share, and its weights are not")
    biases = (None, None) if bias is None else (bias[:width], bias[width : 2 * width])
    return (
        Projection(module.q_proj_weight, biases[0], heads, width),
        Projection(module.k_proj_weight, biases[1], heads, width, makes_all=makes_all),
    )


def _from_layers(query: nn.Module, key: nn.Module, heads: int, head_dim: int) -> tuple[Projection, Projection]:
    width, keys = (_checked_weight(layer).shape[_output_dim(layer)] for layer in (query, key))
    shared = keys // head_dim
    if width != heads * head_dim or keys != shared * head_dim or heads % max(shared, 1):
        raise NotFound(f"its query and key layers make {width} and {keys} numbers for {heads} heads of {head_dim}")
    return (
        Projection(query.weight, _bias(query), heads, width, dim=_output_dim(query)),
        Projection(key.weight, _bias(key), shared, keys, dim=_output_dim(key)),
    )


def _from_stack(layer: nn.Module, name: str, heads: int, head_dim: int) -> tuple[Projection, Projection]:
    total, width = _checked_weight(layer).shape[_output_dim(layer)], heads * head_dim
    shared = (total - width) // (2 * head_dim)
    if shared < 1 or heads % shared or total != width + 2 * shared * head_dim:
        raise NotFound(f"its {name} makes {total} numbers, which are not q, k, v of {heads} heads of {head_dim}")
    weight, bias, dim = layer.weight, _bias(layer), _output_dim(layer)
    return (
        Projection(weight, bias, heads, width, dim=dim),
        Projection(weight, bias, shared, shared * head_dim, start=width, dim=dim),
    )


def _check_stored(layer: nn.Module, *names: str) -> None:
    """Refuse weights that are computed from others (parametrizations, weight_norm, pruning, adapters)."""
    for name in names:
        if getattr(layer, name, None) is not None and name not in layer._parameters and name not in layer._buffers:
            raise NotFound(f"the {name} of its {type(layer).__name__} is computed from other parameters")


def _checked_weight(layer: nn.Module) -> Tensor:
    _check_stored(layer, "weight", "bias")
    others = [name for name, _ in layer.named_parameters() if name not in ("weight", "bias")]
    if others:
        raise NotFound(f"its {type(layer).__name__} adds to its weight: it has {', '.join(others)} too")
    weight = layer.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        raise NotFound(f"the weights of its {type(layer).__name__} are not a floating-point matrix")
    return weight


def _output_dim(layer: nn.Module) -> int:
    """Return the weight's dimension of outputs: 0 for nn.Linear, 1 for GPT-2's Conv1D."""
    return 1 if type(layer).__name__ == "Conv1D" else 0


def _bias(layer: nn.Module) -> Tensor | None:
    return getattr(layer, "bias", None)
