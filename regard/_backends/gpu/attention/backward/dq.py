"""Host side of the backward kernels that find ds twice: dq over the keys, then dk and dv over the queries."""

from __future__ import annotations

from regard._backends.gpu.attention.backward import dkv
from regard._backends.gpu.attention.backward.bias import compute_relative_gradient
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.backward.two_sweeps import backward_dq
from regard._backends.gpu.attention.config import config_of, count_blocks, describe_keys, options, view
from regard._backends.gpu.attention.masks.dense import add_tile_map, pack_mask
from regard._backends.gpu.attention.masks.tables import add_key_index
from regard._backends.gpu.attention.sparse import launch as sparse
from regard._backends.gpu.launcher import launch


def supports_sparse(call: BackwardCall) -> str | None:
    """Say why lists of candidates cannot give these gradients."""
    if call.grads.temperature is not None:
        return "a gradient of the temperature"
    if call.flags["STATS_GRAD"]:
        return "gradients of statistics"
    return sparse.supports(call.problem, "backward")


def run_two_sweeps(call: BackwardCall, with_lists: bool = False) -> None:
    """Fill dq, finding δ on the way, then dk and dv; with lists of candidates only the blocks whose lists failed."""
    p, forward, do, rows, grads, flags, packed, wants_relative = call
    if p.mask is not None and packed is None:
        packed = pack_mask(p)
    inputs = view(p.q), view(p.k), view(p.v), view(do)
    config, how = config_of(p, "backward_dq", **flags)
    opt, key = add_tile_map(p, config, add_key_index(p, options(p)), packed=packed), call.key
    failed = iter((None, None))  # blocks of queries, then of keys, that are left to the sweeps; None: all
    if with_lists:
        outputs = view(grads.q), view(grads.k), view(grads.v)
        failed = sparse.backward(
            p, key, inputs, forward.shift, forward.z, outputs, grads.theta, rows.delta, opt, config
        )
    results = view(grads.q), grads.temperature, grads.row_bias, grads.theta
    queries = view(forward.o), inputs[3], *results, forward.shift, forward.z, rows
    arguments = *inputs[:3], *describe_keys(p, config), *queries, next(failed), opt
    launch(key, backward_dq, count_blocks(p, config), arguments, (config,), **how)
    d_key_bias = grads.bias if flags["KEY_BIAS_GRAD"] else None
    dkv.run(p, do, rows, None, grads.k, grads.v, next(failed), flags, d_key_bias, packed=packed)
    if wants_relative:
        grads.relative = compute_relative_gradient(call)
