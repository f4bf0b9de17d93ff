"""regard: turn query-key scores into weights with any normaliser, measure that step, explain it, repair it.

>>> import regard, torch
>>> q = k = v = torch.randn(1, 2, 16, 8)
>>> out, stats = regard.attention(q, k, v, is_causal=True, normalizer="entmax15", return_stats=True)
>>> stats.entropy.shape
torch.Size([1, 2, 16])
"""

from regard import bias, masks, nn, normalizers, reference, statistics, temperature  # noqa: F401
from regard._call.mask.mask import Mask
from regard._core.attention import attention, attention_path
from regard._core.rows.functions import (
    entmax,
    entmax15,
    gumbel_softmax,
    log_softmax,
    logsumexp,
    normalize,
    relu_norm,
    sigmoid_norm,
    softmax,
    softmax1,
    softmax_backward,
    softpick,
    sparsemax,
)
from regard._core.rows.jacobian import jacobian, vjp
from regard._core.rows.online_softmax import OnlineSoftmax
from regard._core.varlen import attention_varlen

__version__ = "0.1.0"


def __getattr__(name: str):
    """The names of health and what stands on it, imported when first asked for."""
    if name in ("Fingerprint", "Monitor", "check", "compare", "examine", "fingerprint", "look", "using"):
        from regard import health

        return getattr(health, name)
    if name in ("health", "losses", "parallel", "testing"):
        import importlib

        return importlib.import_module(f"regard.{name}")
    if name in ("QKClip", "qk_clip"):
        from regard.health import qk_clip

        return getattr(qk_clip, name)
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = [
    "Fingerprint", "Mask", "Monitor", "OnlineSoftmax", "QKClip", "attention", "attention_path", "attention_varlen",
    "bias", "check", "compare", "entmax", "entmax15", "examine", "fingerprint", "gumbel_softmax", "jacobian",
    "log_softmax", "logsumexp", "look", "masks", "nn", "normalize", "normalizers", "parallel", "reference", "relu_norm",
    "sigmoid_norm", "softmax", "softmax1", "softmax_backward", "softpick", "sparsemax", "temperature", "testing",
    "using", "vjp",
]  # fmt: skip
