"""What a layer of attention costs on many GPUs: the ring simulated step by step, from kernel and link speeds.

    python benchmarks/parallel_model.py [--figure docs/figures/scale.png]

prints the tables of docs/records/scale.md. Kernel speeds are those of a pair of chunks, measured on one H200
(benchmarks/results/parallel.md); link speeds are the vendor's, one direction, as this project has no second GPU: give
others with --link.

    rank r, step t   computes on the keys of rank r − t as soon as they are there and step t − 1 is done
    their transfer   begins when they are there and the link is free, and takes latency + bytes / speed
    a step is one call: it takes its operations / speed, but no less than the smallest call was measured to take
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

LATENCY = 20e-6  # seconds per message
STEPS = 5  # all-reduces until τ is found: the ranks' own solutions, and four of Newton's steps


@dataclass(frozen=True)
class Layer:
    """One layer's attention over a whole sequence: H query heads, G key heads of width d, bf16, causal."""

    tokens: int
    heads: int = 32
    groups: int = 8
    width: int = 128
    item: int = 2  # bytes
    wide: int = 4  # bytes of an accumulator


@dataclass(frozen=True)
class Machine:
    forward: float = 618e12  # FLOP/s of a pair of chunks, d 128, no statistics
    backward: float = 367e12
    least: tuple[float, float] = (0.24e-3, 0.46e-3)  # seconds that a pair takes however small: forward, backward
    link: float = 50e9  # bytes/s
    name: str = "InfiniBand 400G, 50 GB/s"


NVLINK = Machine(link=450e9, name="NVLink 4, 450 GB/s")
NETWORK = Machine()


def pairs(world: int, rank: int, step: int, layout: str) -> float:
    """Scores that a rank computes in a step, as a share of n² for its n queries and the visitor's n keys."""
    owner = (rank - step) % world
    if layout == "contiguous":
        return 0.5 if owner == rank else float(owner < rank)
    return 0.5  # balanced: all queries see one chunk, half of them see two, or causal order halves a rank's own


def simulate(
    layer: Layer, world: int, machine: Machine, layout: str = "balanced", backward: bool = False, share: float = 1.0
) -> dict:
    """{"seconds", "compute", "bytes"} of one pass: the last rank's end, a rank's own work, what a rank sends.

    share = 0.5: k alone travels, and q·k alone is computed.
    """
    n = layer.tokens / world
    flops = 4.0 * n * n * layer.heads * layer.width * (2.5 if backward else share)  # of all n × n scores
    speed = machine.backward if backward else machine.forward
    keys = share * n * 2 * layer.width * layer.groups
    message = keys * layer.item + (keys * layer.wide if backward else 0.0)
    ready = [0.0] * world  # when the visitor's keys are there
    sent = [0.0] * world  # when the link to the next rank is free
    done = [0.0] * world  # when the last step's work is finished
    own = 0.0
    for step in range(world):
        arrives = [0.0] * world
        for rank in range(world):
            begin = max(ready[rank], sent[rank])
            if backward and step:  # dk and dv leave with the keys, once this rank has added its own
                begin = max(begin, done[rank])
            sent[rank] = begin + LATENCY + message / machine.link if step + 1 < world else begin
            arrives[(rank + 1) % world] = sent[rank]
        for rank in range(world):
            seen = pairs(world, rank, step, layout)
            work = max(seen * flops / speed, float(seen > 0) * machine.least[backward] * (world > 1))
            done[rank] = max(done[rank], ready[rank]) + work
            own += seen * flops / speed / world
        ready = arrives
    return {"seconds": max(done), "compute": own, "bytes": (world - 1) * message}


def memory(layer: Layer, world: int, training: bool) -> float:
    """Bytes of one rank for one layer's attention: q, o, k, v, two visitors in flight; gradients in training."""
    n = layer.tokens / world
    queries, keys = n * layer.heads * layer.width, n * layer.groups * layer.width * 2
    bytes_ = 2 * queries * layer.item + 3 * keys * layer.item + queries * layer.wide + 2 * n * layer.heads * layer.wide
    if training:
        bytes_ += queries * (layer.item + layer.wide) + 4 * keys * layer.wide
    return bytes_


def gathered(layer: Layer, world: int, machine: Machine) -> dict:
    """The alternative that needs no ring: gather all keys first, then compute; memory grows with the whole sequence."""
    n = layer.tokens / world
    keys = n * 2 * layer.width * layer.groups * layer.item
    compute = 0.5 * 4.0 * n * layer.tokens * layer.heads * layer.width / machine.forward
    return {"seconds": (world - 1) * (LATENCY + keys / machine.link) + compute, "bytes": (world - 1) * keys,
            "memory": world * keys}  # fmt: skip


def visits(layer: Layer, world: int, machine: Machine) -> dict:
    """Threshold maps, queries travel: q·k for each rank's own solution, q·k and p·v at τ; o goes home in float32."""
    n = layer.tokens / world
    compute = 1.5 * 0.5 * 4.0 * n * layer.tokens * layer.heads * layer.width / machine.forward
    home = (world - 1) / world * layer.tokens * layer.heads * (layer.width + 3) * layer.wide
    newton = layer.tokens * layer.heads * 2 * 8 * STEPS  # (F, F′) of every row and step
    sent = n * layer.heads * layer.width * layer.item + home + newton
    return {"seconds": compute + sent / machine.link + world * STEPS * LATENCY, "bytes": sent}


def show(number: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"0 {unit}"


def table(tokens: int, worlds: list[int]) -> list[str]:
    lines = [
        f"### {tokens // 1_000_000} million tokens",
        "",
        "| GPUs | tokens each | memory each, training | sent each, forward | forward, NVLink | forward, network | "
        "of it not computing | forward + backward, network | contiguous layout, network |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for world in worlds:
        layer = Layer(tokens)
        near, far = simulate(layer, world, NVLINK), simulate(layer, world, NETWORK)
        back = simulate(layer, world, NETWORK, backward=True)
        plain = simulate(layer, world, NETWORK, "contiguous")
        waiting = max(0.0, 1.0 - far["compute"] / far["seconds"])
        lines.append(
            f"| {world} | {tokens // world} | {show(memory(layer, world, True), 'B')} | {show(far['bytes'], 'B')} | "
            f"{show(near['seconds'], 's')} | {show(far['seconds'], 's')} | {100 * waiting:.0f} % | "
            f"{show(far['seconds'] + back['seconds'], 's')} | {show(plain['seconds'], 's')} |"
        )
    return lines


def schemes(tokens: int, worlds: list[int]) -> list[str]:
    lines = [
        f"### Schemes at {tokens // 1_000_000} million tokens, forward, network",
        "",
        "| GPUs | ring | gather all keys first | its keys, each | threshold, queries visit | sent each | "
        "threshold, two rounds of a ring | sent each |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for world in worlds:
        layer = Layer(tokens)
        ring, whole = simulate(layer, world, NETWORK), gathered(layer, world, NETWORK)
        visit, keys = visits(layer, world, NETWORK), simulate(layer, world, NETWORK, share=0.5)
        again, sent = keys["seconds"] + ring["seconds"], keys["bytes"] + ring["bytes"]
        lines.append(
            f"| {world} | {show(ring['seconds'], 's')} | "
            f"{show(whole['seconds'], 's')} | {show(whole['memory'], 'B')} | "
            f"{show(visit['seconds'], 's')} | {show(visit['bytes'], 'B')} | {show(again, 's')} | {show(sent, 'B')} |"
        )
    return lines


def figure(path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    worlds = [2**i for i in range(11)]
    plot, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for at, tokens in zip(axes, (1_000_000, 10_000_000), strict=True):
        layer = Layer(tokens)
        for machine, style in ((NVLINK, "-"), (NETWORK, "--")):
            for layout, colour in (("balanced", "#1a66b3"), ("contiguous", "#c2571a")):
                times = [simulate(layer, world, machine, layout)["seconds"] for world in worlds]
                at.loglog(worlds, times, style, color=colour, label=f"{layout}, {machine.name.split(',')[0]}", base=2)
        ideal = simulate(layer, 1, NVLINK)["seconds"]
        at.loglog(worlds, [ideal / world for world in worlds], ":", color="#777777", label="compute / GPUs", base=2)
        at.set_yscale("log", base=10)
        at.set_title(f"{tokens // 1_000_000} M tokens", fontsize=10)
        at.set_xlabel("GPUs")
        at.grid(True, alpha=0.25)
    axes[0].set_ylabel("seconds per layer, forward")
    axes[0].legend(fontsize=7, frameon=False)
    plot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", help="draw the strong scaling here")
    parser.add_argument("--link", type=float, help="bytes/s of the network in place of 50e9")
    arguments = parser.parse_args()
    if arguments.link:
        global NETWORK
        NETWORK = replace(NETWORK, link=arguments.link, name=f"{arguments.link:g} B/s")
    for tokens, worlds in ((1_000_000, [1, 8, 64, 256, 1024]), (10_000_000, [8, 64, 256, 1024])):
        print("\n".join(table(tokens, worlds)) + "\n")
    print("\n".join(schemes(1_000_000, [8, 64, 256, 1024])))
    if arguments.figure:
        figure(arguments.figure)


if __name__ == "__main__":
    main()
