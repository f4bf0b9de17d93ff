"""Multi-head attention as a module: four scores, any normaliser, every statistic of `regard.attention`."""

from regard.nn.differential import DifferentialAttention
from regard.nn.multihead import Cache, MultiheadAttention
from regard.nn.validation import GATES, SCORES

__all__ = ["GATES", "SCORES", "Cache", "DifferentialAttention", "MultiheadAttention"]
