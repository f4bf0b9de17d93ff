"""Models whose heads have left, a step of them, and their logits, for the tests of `regard.qk_clip`."""

import torch
from torch import nn

import regard
from regard.health.qk_clip.max_logits import observe


def logits(model, batch, layer="") -> torch.Tensor:
    """[H]: the largest logit of each head of a layer, by examining the model."""
    heads = regard.examine(model, [batch]).heads
    return torch.tensor([head.statistics["max_logit"].max for head in heads if head.layer == layer])


def step(model, batch, lr=1e-12) -> None:
    """One training step of a model that `qk_clip` observes."""
    observe(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    (getattr(out, "last_hidden_state", out)).float().square().mean().backward()
    optimizer.step()


class Self(nn.Module):
    """torch's module as self-attention."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True, **options)

    def forward(self, x):
        return self.inner(x, x[..., : self.inner.kdim], x, need_weights=False)[0]


def exploded(attention, **options):
    """A model whose first head has left, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), attention(**options))
    with torch.no_grad():
        layer = model[1].q_proj if hasattr(model[1], "q_proj") else model[1].inner
        (layer.weight if isinstance(layer, nn.Linear) else layer.in_proj_weight)[:4] *= 300
    return model, torch.optim.SGD(model.parameters(), lr=1e-9)


def ours(**options):
    return regard.nn.MultiheadAttention(16, 4, **options)
