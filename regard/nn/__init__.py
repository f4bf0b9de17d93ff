"""Multi-head attention as a module: four scores, any normaliser, every statistic of `regard.attention`."""

from regard._core.formulas import qk_norm
from regard.nn.differential import DifferentialAttention
from regard.nn.multihead import Cache, MultiheadAttention

__all__ = ["Cache", "DifferentialAttention", "MultiheadAttention", "qk_norm"]
