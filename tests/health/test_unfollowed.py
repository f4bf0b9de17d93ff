"""Forwards whose calls all come from transformers' registry are not followed function by function again."""

import pytest
import torch

pytest.importorskip("transformers")
from hf_models import make_model, tokens

import regard
from regard.health.capture import interception


def test_later_forwards_are_swapped_as_the_first_was(monkeypatch):
    model, ids = make_model("llama"), tokens(1, 9)
    layers, modes = model.config.num_hidden_layers, []
    depth = torch._C._len_torch_function_stack
    own = model.norm.forward
    model.norm.forward = lambda x: modes.append(depth()) or own(x)
    monkeypatch.setattr(interception, "RECHECKED", 2)
    with torch.no_grad(), regard.using(model, temperature=2.0) as swap:
        outputs = [model(ids).last_hidden_state for _ in range(5)]
        assert swap.calls == 5 * layers and all(torch.equal(one, outputs[0]) for one in outputs)
        assert [depth > 0 for depth in modes] == [True, False, False, True, False]

        def stop(*_):
            raise KeyboardInterrupt

        model.norm.forward = stop
        with pytest.raises(KeyboardInterrupt):
            model(ids)
        model.norm.forward = own
        assert torch.equal(model(ids).last_hidden_state, outputs[0])
        model.set_attn_implementation("eager")
        assert torch.allclose(model(ids, output_attentions=True).last_hidden_state, outputs[0], atol=1e-5)
    assert interception.STATE.light == interception.STATE.stack == interception.STATE.scopes == []
