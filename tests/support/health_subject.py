"""What is examined: a module that calls torch's attention itself; and what a report should say of it."""

import torch
import torch.nn.functional as F
from torch import nn

import regard


class Own(nn.Module):
    """A module that calls torch's function itself, sharply."""

    def __init__(self, heads=3, kv_heads=3, **options):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, heads * 4), nn.Linear(12, kv_heads * 4), nn.Linear(12, kv_heads * 4)
        self.options = options

    def project(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return 6.0 * q, k, v

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.project(x), **self.options)


def dense(q, k, v, mask=None, scale=None, causal=False):
    """The float64 statistics of the reference for one call."""
    return regard.reference.attention(q, k, v, mask, 0.0, causal, scale, enable_gqa=True, return_stats=True)[2]


def means(report, name):
    return torch.tensor([head.statistics[name].mean for head in report.heads], dtype=torch.float64)
