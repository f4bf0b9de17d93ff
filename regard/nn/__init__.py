"""Multi-head attention as a module: four ways to score, any normaliser, all that `regard.attention` can measure."""

from regard.nn.multihead import SCORES, Cache, MultiheadAttention

__all__ = ["SCORES", "Cache", "MultiheadAttention"]
