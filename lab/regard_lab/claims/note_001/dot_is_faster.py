"""One matrix product against N² tanh's of length d: the arithmetic and the memory traffic, counted."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard_lab.claim import Figure, above, claim, conclude, near

QUERIES, DIMS = 64, [16, 64, 256]


class Count(TorchDispatchMode):
    """Arithmetic operations (a multiply-add is two, a tanh only one) and bytes moved, of every op that runs."""

    operations = 0
    bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if not op.is_view:
            tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
            inner = args[0].shape[-1] if op.name().startswith(("aten::mm", "aten::mv", "aten::bmm")) else 0
            self.operations += result.numel() * (2 * inner if inner else 1)
        return result


def dot(q, k, v):
    return q @ k.T / q.shape[-1] ** 0.5


def additive(q, k, v):
    return torch.tanh(q[:, None, :] + k) @ v


def ratios(sampler, d):
    arguments = sampler.normal(QUERIES, d), sampler.normal(QUERIES, d), sampler.normal(d)
    counts = []
    for score in (additive, dot):
        with Count() as count:
            score(*arguments)
        counts.append(count)
    return counts[0].operations / counts[1].operations, counts[0].bytes / counts[1].bytes


@claim(
    statement="Scaled dot product is cheaper than additive attention.",
    derivation=[
        r"\text{dot: } N^2 d \text{ multiply-adds, one matrix product, } N^2 \text{ numbers written}",
        r"\text{additive: } N^2 d \text{ additions, } N^2 d \text{ tanh, } N^2 d \text{ multiply-adds, } N^2 d "
        r"\text{ numbers in memory}",
    ],
    rule="Holds if additive scores take more operations and more memory traffic at every d.",
)
def measure(sampler):
    operations, traffic = zip(*(ratios(sampler, d) for d in DIMS), strict=True)
    series = {"operations": (DIMS, operations), "memory traffic": (DIMS, traffic)}
    return conclude(
        *(above(f"operations, additive over dot, d = {d}", 1.0, o) for d, o in zip(DIMS, operations, strict=True)),
        *(above(f"memory traffic, additive over dot, d = {d}", 1.0, t) for d, t in zip(DIMS, traffic, strict=True)),
        near("operations, additive over dot, d = 256: 4N²d / 2N²d", 2.0, operations[-1], 0.05).ours(),
        remark="Counted, not timed, so that the verdict does not depend on the machine. A tanh counts as one "
        "operation here and costs many; the matrix product runs at full speed.",
        alt=f"At d = {DIMS[-1]} additive scores do {operations[-1]:.1f} times the arithmetic of dot products "
        f"and move {traffic[-1]:.0f} times as many bytes; at d = {DIMS[0]}, {operations[0]:.1f} and "
        f"{traffic[0]:.0f} times.",
        figure=Figure("lines", "d", "additive over dot", series, log="xy"),
    )
