"""Compiles the attention kernels of a table of calls for an H100 or H200, on a machine without a GPU.

    python3 tools/compile_kernels.py [-k WORDS] [--quick] [--list] [--processes 1]

Triton's interpreter, which runs the tests where there is no GPU, compiles nothing: an error of Triton's compiler or of
ptxas, or a block that needs more shared memory than there is, shows here or on a GPU. Each call of `kernel_calls.py`
goes through `regard.attention` with tensors that have shapes but no values, so that its kernels are those of a user's
call. Triton keeps what it has compiled: the table takes an hour on one core, and 2 minutes again. It is compiled by the
Triton that is installed; `make compile` takes that of torch 2.11. Exits with 1 if a kernel failed.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import argparse
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from kernel_calls import OPTIONS, SIZES, Call, draw, is_quick, make_calls
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import regard
from regard._backends.gpu import max_logits
from regard._backends.gpu.attention import launch
from regard._call.problem import Along, Problem
from regard._core import execute
from regard._core.derivatives.autograd import LEARNED, compute_gradients

SHARED_MEMORY = 232448  # bytes that a block of an H100 or H200 may have
META, CUDA = torch.device("meta"), torch.device("cuda", 0)
ERROR = re.compile(r"(?:error|fatal)\s*: .*")
compiled: dict[str, Any] = {}  # the kernels of the latest call by their hashes
errors: list[str] = []  # of those that did not compile


class OnGpu(torch.Tensor):
    """A tensor of torch's "meta" device that says that it is on a GPU."""

    inside = False  # a function of torch, which has to see the device that it is
    device = property(lambda self: META if OnGpu.inside else CUDA)
    is_cuda = property(lambda self: not OnGpu.inside)


class PretendGpu(TorchFunctionMode):
    """Within it, what is made on or moved to a GPU is an `OnGpu`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def place(x: Any) -> Any:
            return META if isinstance(x, (str, torch.device)) and str(x).startswith("cuda") else x

        def wrap(x: Any) -> Any:
            return x.as_subclass(OnGpu) if isinstance(x, Tensor) and x.is_meta else x

        OnGpu.inside = True
        try:
            with torch._C.DisableTorchFunction():
                found = func(*map(place, args), **{name: place(x) for name, x in (kwargs or {}).items()})
                return type(found)(map(wrap, found)) if type(found) in (tuple, list) else wrap(found)
        finally:
            OnGpu.inside = False


class Launcher:
    """Takes the place of Triton's launcher: a launch does nothing."""

    def __init__(self, source: Any = None, metadata: Any = None) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass

    def __getitem__(self, grid: tuple) -> Callable:
        return self


def pretend_hopper() -> None:
    """Make Triton, torch and regard believe in a Hopper GPU on which every launch does nothing."""
    pretend_card(GPUTarget("cuda", 90, 32), SHARED_MEMORY, 132)


def pretend_card(of: GPUTarget, shared_memory: int, processors: int) -> None:
    """Make Triton, torch and regard believe in a GPU on which every launch does nothing."""
    memory = dict(max_shared_mem=shared_memory)
    load = dict(load_binary=lambda *arguments: (0, 0, 0, 0, 1024), unload_module=lambda module: None)
    utils = SimpleNamespace(get_device_properties=lambda device: memory, **load)
    target = dict(get_current_target=lambda: of, get_current_device=lambda: 0)
    place = dict(get_current_stream=lambda device=None: 0, is_active=lambda: True)
    driver.set_active(SimpleNamespace(launcher_cls=Launcher, utils=utils, **target, **place))
    chip = SimpleNamespace(multi_processor_count=processors, shared_memory_per_block_optin=shared_memory)
    torch.cuda.get_device_properties = lambda device=None: chip
    torch.cuda.get_device_capability = lambda device=None: divmod(of.arch, 10) if of.backend == "cuda" else (8, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: nullcontext()
    launch._has_tape = lambda problem: False
    compile_and_launch = JITFunction.run

    def run(self, *arguments, **options):
        with read_errors() as told:
            try:
                kernel = compile_and_launch(self, *arguments, **options)
                compiled[kernel.hash] = kernel
                return kernel
            except Exception as error:
                said = ERROR.findall(told()) or [describe(error)]
                errors.append(f"{self.fn.__name__}: {said[0]}")
                return Launcher()

    JITFunction.run = run


def describe(error: Exception) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def read_errors() -> Iterator[Callable[[], str]]:
    """Keep what Triton's compiler writes to standard error; yields a function that returns it."""
    with tempfile.TemporaryFile() as kept:
        own = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield lambda: os.pread(kept.fileno(), 2**20, 0).decode(errors="replace")
        finally:
            os.dup2(own, 2)
            os.close(own)


def run_kernels(direction: str, p: Problem, inputs: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor, Tensor]:
    """Launch the kernels of a call forward and in `direction`, in the place of `regard._core.execute.run_kernels`."""
    result = launch.forward(p)
    if direction == "backward":
        wants = [name for name, place in LEARNED.items() if inputs[place] is not None]
        d_stats = result.stats if p.stats and p.choice.softmax_family else None
        compute_gradients(launch, p, result, result.o, d_stats, inputs, wants)
    elif direction == "tangent":
        launch.tangent(p, result, Along(p.q, p.k, p.v))
    return result.o, result.stats


def compile_call(call: Call) -> tuple[set[str], list[str]]:
    """Return the hashes of a call's kernels, and the errors of those that do not compile."""
    compiled.clear()
    errors.clear()
    execute.run_kernels = partial(run_kernels, call.direction)
    b, h, m, n = SIZES[call.size]
    groups = h // 4 if call.option == "grouped" else h
    with PretendGpu():
        q, k, v = (draw(b, y, x, call.width, dtype=call.dtype) for x, y in ((m, h), (n, groups), (n, groups)))
        if call.option == "unaligned":
            q, k, v = (x[..., 1:] for x in (q, k, v))
        read = ("received", "top_keys(8)") if call.direction == "keys" else call.stats
        options = {"normalizer": call.normalizer, "return_stats": read}
        try:
            if call.direction == "logits":
                max_logits.note_largest(q, k, v, call.option == "causal", 0.125, 0, draw(3 + h))
                return set(compiled), list(errors)
            options |= OPTIONS[call.option](b, h, m, n)
            regard.attention(q, k, v, **options, backend="triton")
        except Exception as error:
            errors.append(describe(error))
    return set(compiled), list(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="WORDS", help="only calls whose --list line contains all WORDS")
    parser.add_argument("--quick", action="store_true", help="entmax15 and softmax only, forward, in bfloat16")
    parser.add_argument("--list", action="store_true", help="print the calls and compile none")
    parser.add_argument("--processes", type=int, default=1, help="that compile at once")
    given = parser.parse_args()
    calls = [call for call in make_calls() if all(word in str(call) for word in given.k.split())]
    calls = [call for call in calls if is_quick(call)] if given.quick else calls
    if given.list:
        print(*calls, sep="\n")
        return 0
    if not calls:
        parser.error(f"no call has the words {given.k!r}; --list prints all")
    start, kernels, failed = time.monotonic(), set(), 0
    spawn = multiprocessing.get_context("spawn")  # a fork has none of the threads of Triton's compiler
    with ProcessPoolExecutor(given.processes, spawn, pretend_hopper) as pool:
        for at, (call, result) in enumerate([(call, pool.submit(compile_call, call)) for call in calls], 1):
            try:
                found, wrong = result.result()
            except BrokenProcessPool:
                print(f"FAILED {call}: a worker crashed on this or a later call; the rest is not compiled")
                return 1
            kernels |= found
            failed += bool(wrong)
            for error in wrong:
                print(f"FAILED {call}: {error}", flush=True)
            if at % 20 == 0:
                print(f"{at} of {len(calls)} calls, {time.monotonic() - start:.0f} s", flush=True)
    print(f"Triton {triton.__version__}: {len(kernels)} kernels of {len(calls)} calls compiled,", end=" ")
    print(f"{failed} calls failed, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
