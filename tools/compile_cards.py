"""Compiles a sample of the plain kernels for other cards, and prints what each takes of a block's resources.

    python3 tools/compile_cards.py [sm_80 sm_120 …] [--most-spilled 1024] [-k WORDS]

Compiled only, never run: there is no such card here. Shared memory, registers and bytes spilled per thread come from
the machine code. Exits with 1 if a kernel does not compile, needs more shared memory than the card's blocks may have,
or spills more than the limit. `gfx942` tries Triton's target for AMD, up to assembly.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import compile_kernels
import torch
import triton
from kernel_calls import make_calls
from triton.backends.compiler import GPUTarget

CARDS = {  # name: architecture, bytes of shared memory that a block may have, SMs
    "sm_80": (80, 166912, 108),  # A100
    "sm_89": (89, 101376, 128),  # RTX 4090, L40
    "sm_90": (90, 232448, 132),  # H100, H200
    "sm_100": (100, 232448, 148),  # B200
    "sm_120": (120, 101376, 170),  # RTX 5090
    "gfx942": ("gfx942", 65536, 304),  # MI300X
}
SAMPLE = (
    "softmax causal bfloat16 d64 n197 statistics forward",
    "softmax causal bfloat16 d64 n197 no-statistics backward",
    "softmax causal bfloat16 d128 n1024 statistics forward",
    "entmax15 causal bfloat16 d64 n1024 no-statistics forward",
    "entmax15 causal bfloat16 d64 n1024 no-statistics backward",
    "softmax plain bfloat16 d64 decode statistics forward",
    "softmax grouped bfloat16 d64 few statistics forward",
    "entmax15 plain bfloat16 d128 few no-statistics forward",
    "softmax causal bfloat16 d64 n1024 no-statistics keys",
    "entmax15 causal bfloat16 d128 n1024 no-statistics keys",
    "softmax mask bfloat16 d256 n1024 no-statistics keys",
    "entmax15 causal float16 d80 n1024 no-statistics backward",
    "softmax causal float16 d256 n1024 no-statistics backward",
    "entmax15 causal float16 d256 n1024 no-statistics backward",
    "softmax causal float16 d256 n1024 statistics forward",
    "softmax causal float32 d64 n1024 no-statistics backward",
    "softmax causal bfloat16 d80 n1024 no-statistics logits",
    "softmax causal bfloat16 d128 n1024 no-statistics logits",
    "softmax causal float16 d256 n1024 no-statistics logits",
    "softmax causal float32 d128 n1024 no-statistics logits",
    "softmax causal float32 d256 n1024 no-statistics logits",
)
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def pretend(card: str) -> None:
    """Make this process believe in a card; kernels of Hopper's own are left out, so that the plain ones are seen."""
    from regard import _facts
    from regard._backends.gpu.attention import config

    arch, memory, processors = CARDS[card]
    cuda = isinstance(arch, int)
    _facts.supports_gluon = lambda x: False
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("regard.") and hasattr(module, "supports_gluon"):
            module.supports_gluon = _facts.supports_gluon
    compile_kernels.pretend_card(GPUTarget("cuda" if cuda else "hip", arch, 32 if cuda else 64), memory, processors)
    if not cuda:
        torch.version.hip, config.SPLIT = "6.4", "bf16x6"
        stop_at_assembly()


def stop_at_assembly() -> None:
    """Leave out the linker of AMD's toolchain, which Triton does not carry."""
    from triton.backends.amd.compiler import HIPBackend

    add_stages = HIPBackend.add_stages

    def stages_without_linking(self: Any, stages: dict, *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        stages["hsaco"] = lambda source, metadata: b""

    HIPBackend.add_stages = stages_without_linking


def compile_one(call: Any) -> list[tuple[str, str]]:
    """(kernel, its resources or its error) of one call."""
    _, errors = compile_kernels.compile_call(call)
    found = [(kernel.name, measure(kernel)) for kernel in compile_kernels.compiled.values()]
    return found + [(error.partition(":")[0], f"ERROR {error}") for error in errors]


def measure(kernel: Any) -> str:
    """Registers, spilled bytes and shared memory of a compiled kernel, as text."""
    binary = kernel.asm.get("cubin")
    if not binary:
        return f"0 0 {kernel.metadata.shared}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack, _, local = RESOURCES.findall(told)[-1]
    return f"{registers} {int(stack) + int(local)} {kernel.metadata.shared}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", nargs="*", help=f"of {', '.join(CARDS)}; those of NVIDIA without")
    parser.add_argument("-k", default="", metavar="WORDS", help="only calls of the sample that contain all WORDS")
    parser.add_argument("--most-spilled", type=int, default=1024, help="bytes per thread")
    given = parser.parse_args()
    calls = [x for x in make_calls() if str(x) in SAMPLE and all(word in str(x) for word in given.k.split())]
    failed, start = 0, time.monotonic()
    print(
        f"Triton {triton.__version__}; compiled, never run\n\n| card | kernel | registers | spilled | shared memory |"
    )
    print("| --- | --- | --- | --- | --- |")
    for card in given.cards or [x for x in CARDS if x.startswith("sm_")]:
        with ProcessPoolExecutor(1, get_context("spawn"), pretend, (card,)) as pool:
            for call, found in zip(calls, pool.map(compile_one, calls), strict=True):
                for name, told in found:
                    if told.startswith("ERROR"):
                        failed += 1
                        print(f"| {card} | {name} ({call}) | {told} | | |", flush=True)
                        continue
                    registers, spilled, shared = map(int, told.split())
                    over = spilled > given.most_spilled or shared > CARDS[card][1]
                    failed += over
                    mark = " TOO MUCH" if over else ""
                    row = f"{name} ({call}) | {registers} | {spilled} | {shared} of {CARDS[card][1]}{mark}"
                    print(f"| {card} | {row} |", flush=True)
    print(f"\n{failed} over a limit or not compiled, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
