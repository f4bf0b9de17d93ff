"""`jacobian` inside a compiled graph: one step of it, to the bits of the plain call."""

import math

import pytest
import torch

import regard


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", regard.normalizers.names())
def test_it_compiles_whole(name):
    torch._dynamo.reset()
    z = 4.0 * torch.randn(3, 7)
    z[0, 2] = -math.inf
    compiled = torch.compile(lambda z: 2.0 * regard.jacobian(z, name, 0.7), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(z), 2.0 * regard.jacobian(z, name, 0.7), rtol=0.0, atol=0.0)
    assert not compiled(z.requires_grad_()).requires_grad


def test_it_maps_inside_a_graph():
    torch._dynamo.reset()
    z = torch.randn(5, 3)
    mapped = torch.compile(torch.vmap(regard.jacobian, in_dims=1), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(mapped(z), regard.jacobian(z.T))


def test_the_step_is_a_sound_op():
    torch.library.opcheck(torch.ops.regard.jacobian, (torch.randn(2, 4), "entmax15", 0.5))
