"""Weights that a conversion reads another way: each mistake in a trained model is named, and none without one."""

import pytest
import torch
from contract_data import codes, run_check

from regard.health.checks.weight_repairs import regroup
from regard.health.models.inputs import sample_text
from regard.health.models.tiny import checkpoint, encode


def text():
    return encode(sample_text()[: 8 * 96]).view(8, 96)


def transpose_output(model):
    for block in model.blocks:
        block.attention.out.weight.data = block.attention.out.weight.data.T.contiguous()


def exchange_thirds(model):
    for block in model.blocks:
        q, k, v = block.attention.qkv.weight.data.chunk(3)
        block.attention.qkv.weight.data = torch.cat([k, v, q])


def stack_by_head(model):
    for block in model.blocks:
        w = block.attention.qkv.weight.data
        block.attention.qkv.weight.data = w.unflatten(0, (3, 4, -1)).transpose(0, 1).flatten(0, 2)


CASES = [
    (transpose_output, "attention.out.weight is transposed"),
    (exchange_thirds, "holds q, k and v as k, v, q"),
]


@pytest.mark.parametrize(("breaks", "says"), CASES)
def test_the_mistake_is_named(breaks, says):
    model, _ = checkpoint("tiny-scaled")
    assert codes(run_check("weight_repairs", model, text())) == []
    breaks(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    (found,) = run_check("weight_repairs", model, text())
    assert says in found.evidence and found.code == "RG621"
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())


def test_a_bad_loss_alone_names_no_wiring():
    model, _ = checkpoint("tiny-scaled")
    torch.nn.init.normal_(model.head.weight)
    assert codes(run_check("repairs", model, text())) == []
    assert codes(run_check("weight_repairs", model, text())) == []


def test_thirds_are_read_back_from_heads():
    model, _ = checkpoint("tiny-scaled")
    before = model.blocks[0].attention.qkv.weight.clone()
    stack_by_head(model)
    x = model.blocks[0].attention.qkv.weight.detach()
    assert regroup(0, (4, 3, x.shape[0] // 12), x).equal(before) and not x.equal(before)
