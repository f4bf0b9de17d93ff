"""Multi-head attention as a module: four scores, any normaliser, every statistic of `regard.attention`."""

from regard.nn.multihead import Cache, MultiheadAttention
from regard.nn.validation import SCORES

__all__ = ["SCORES", "Cache", "MultiheadAttention"]
