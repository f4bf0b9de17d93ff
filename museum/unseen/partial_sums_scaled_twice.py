"""Keys are taken in splits; each split's log-sum-exp multiplies the row maximum by the scale once more."""

import torch

from museum.unseen.parts import RopeAttention, lm_batches, rope_lm

LINK = "HKUSTDial/flash-sparse-attention#106"
SYMPTOM = "Split-KV forward: the softmax LSE is scaled twice, so that splits are merged with wrong weights."
NEEDS = ("sum to", "normalis", "log-sum-exp", "lse", "split", "merge", "kernel", "chunk")


class Split(RopeAttention):
    splits, twice = 4, False

    def attend(self, q, k, v, mask):
        scale, n = q.shape[-1] ** -0.5, q.shape[2]
        causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        if mask is not None:
            causal = causal & mask[:, None, None, :].bool() | torch.eye(n, dtype=torch.bool)
        outputs, sums = [], []
        for at in torch.arange(n).chunk(self.splits):
            scores = (q @ k[:, :, at].transpose(2, 3) * scale).masked_fill(~causal[..., at], -1e30)
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp() * causal[..., at]
            total = weights.sum(-1, keepdim=True)
            outputs.append(weights @ v[:, :, at] / total.clamp(min=1e-20))
            sums.append(
                torch.where(total > 0, (top * scale if self.twice else top) + total.clamp(min=1e-20).log(), -1e30)
            )
        sums = torch.stack(sums)
        shares = (sums - sums.amax(0)).exp()
        return (torch.stack(outputs) * shares / shares.sum(0)).sum(0)


class Twice(Split):
    twice = True


def make():
    return rope_lm(Twice), lm_batches(), {}


def sound():
    return rope_lm(Split), lm_batches(), {}
