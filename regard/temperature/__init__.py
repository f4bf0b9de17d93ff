"""Temperature policies for `regard.attention(temperature=…)`, `regard.using` and `regard.nn`.

A policy is called with the number of visible keys per query, [B, H, M], and the call's `Rows`, and returns a positive
tensor that broadcasts to [B, H, M]. `rows(names)` measures statistics of the rows at temperature 1; `rows.q` are the
queries as given, [B, H, M, D]. A policy that needs neither has `.value`, and no keys are counted for it. Any function
of these two arguments is a policy.

>>> import regard, torch
>>> q = k = v = torch.randn(1, 2, 5, 4)
>>> policy = regard.temperature.SSMax(s=0.5)
>>> policy(torch.tensor([[[100.0]]]), None)
tensor([[[0.4343]]])
>>> regard.attention(q, k, v, temperature=policy).shape
torch.Size([1, 2, 5, 4])
"""

from regard.temperature.policies import Adaptive, ASEntmax, Fixed, Learned, QueryDependent, SSMax

__all__ = ["ASEntmax", "Adaptive", "Fixed", "Learned", "QueryDependent", "SSMax"]
