"""Token mixers that are not softmax attention: delta nets, state spaces, linear recurrences, short convolutions.

`Mixers` reads every module of a known kind (`KINDS`) in the forwards of an examination: the size of what it adds, how
long it remembers, how often its gates are shut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

SHUT = 0.01  # a decay below this forgets what came before at once; a write gate below it writes nothing
OPEN = 1.0 - 1e-4  # a decay above this keeps all: e-folding after 10,000 tokens


class MixerReading:
    """Sums over the forwards of an examination.

    Attributes:
        layer: the module's name in the model.
        kind: "GatedDeltaNet", "Mamba2", "RG-LRU", …; the class's name where nothing more is known of it.
        failure: why it was not read, None if it was.
    """

    def __init__(self, layer: str, kind: str) -> None:
        self.layer, self.kind = layer, kind
        self.failure: str | None = None
        self._sizes: Tensor | None = None  # Σ x², Σ y², number of entries of x, of y
        self._decays: Tensor | None = None  # per channel: Σ log a, of a: shut, kept open, number
        self._writes: Tensor | None = None  # Σ b, shut, number

    def add_sizes(self, x: Tensor, y: Tensor) -> None:
        """Adds an input and an output of the mixer."""
        sums = torch.stack([x.double().square().sum(), y.double().square().sum()])
        counts = torch.tensor([x.numel(), y.numel()], dtype=torch.float64, device=x.device)
        self._sizes = _plus(self._sizes, torch.cat([sums, counts]))

    def add_gates(self, log_decay: Tensor | None, write: Tensor | None = None) -> None:
        """Adds log decays [tokens, channels], at most 0, and write gates in [0, 1] of any shape."""
        if log_decay is not None:
            d = log_decay.double().flatten(0, -2)
            parts = d.sum(0), (d < math.log(SHUT)).double().sum(0), (d > math.log(OPEN)).double().sum(0)
            self._decays = _plus(self._decays, torch.stack([*parts, torch.full_like(d[0], len(d))]))
        if write is not None:
            w = write.double()
            self._writes = _plus(
                self._writes, torch.stack([w.sum(), (w < SHUT).double().sum(), w.new_tensor(w.numel())])
            )

    @property
    def is_read(self) -> bool:
        """True if a forward reached it and nothing of ours failed."""
        return self.failure is None and self._sizes is not None

    @property
    def numbers(self) -> dict[str, float]:
        """Root mean squares of input and output, and what is known of decays and write gates."""
        if self._sizes is None:
            return {}
        x, y, entries_x, entries_y = self._sizes.tolist()
        numbers = dict(input_rms=math.sqrt(x / max(entries_x, 1)), output_rms=math.sqrt(y / max(entries_y, 1)))
        if self._decays is not None:
            logs, shut, kept, count = self._decays
            memory = -1.0 / (logs / count).clamp_max(-1e-12)  # tokens after which e⁻¹ is left, per channel
            numbers |= dict(
                memory_median=float(memory.median()), memory_min=float(memory.min()), memory_max=float(memory.max()),
                decay_shut=float(shut.sum() / count.sum()), decay_open=float(kept.sum() / count.sum()),
            )  # fmt: skip
        if self._writes is not None:
            total, shut, count = self._writes.tolist()
            numbers |= dict(write_mean=total / count, write_shut=shut / count)
        return numbers

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; those that are not finite are None."""
        numbers = {name: x if math.isfinite(x) else None for name, x in self.numbers.items()}
        return dict(layer=self.layer, kind=self.kind, failure=self.failure, numbers=numbers)


def _plus(sums: Tensor | None, more: Tensor) -> Tensor:
    return more if sums is None else sums + more.to(sums.device)


Taps = dict[str, Tensor]
Read = tuple[Tensor | None, Tensor | None]


class Kind(NamedTuple):
    """One kind: its name, the modules that are of it, the submodules ("name" or "name:input") that `read` looks at."""

    name: str
    matches: Callable[[nn.Module], bool]
    taps: tuple[str, ...] = ()
    read: Callable[[Any, Taps], Read] | None = None


DELTA_TAPS = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj")


def is_gated_delta(module: nn.Module) -> bool:
    return hasattr(module, "A_log") and hasattr(module, "dt_bias") and any(hasattr(module, tap) for tap in DELTA_TAPS)


def read_gated_delta(module: Any, taps: Taps) -> Read:
    """S ← a·S(1 − b·k kᵀ) + b·v kᵀ, with a = exp(−exp(A)·softplus(α + bias)) and b = σ(β), per head."""
    heads = module.A_log.shape[-1]
    if (both := taps.get("in_proj_ba")) is not None:  # heads that share a key stand together: their b, then their a
        groups = getattr(module, "num_k_heads", 1)
        b, a = both.unflatten(-1, (groups, -1)).chunk(2, -1)
        b, a = b.flatten(-2), a.flatten(-2)
    else:
        a, b = (taps.get(f"in_proj_{name}", taps.get(f"{name}_proj")) for name in "ab")
    if a is None or a.shape[-1] != heads:
        return None, None if b is None else b.float().sigmoid()
    decay = -module.A_log.float().exp() * softplus(a.float() + module.dt_bias.float())
    return decay, None if b is None else b.float().sigmoid()


def is_mamba(module: nn.Module) -> bool:
    a = getattr(module, "A_log", None)
    return isinstance(a, Tensor) and a.ndim >= 2 and hasattr(module, "conv1d")


def read_mamba(module: Any, taps: Taps) -> Read:
    """h ← exp(−exp(A)·Δ)·h + Δ·B x, with Δ = softplus(W δ + bias) per channel; of its row of A the slowest."""
    projected, step = taps.get("x_proj"), taps.get("dt_layernorm")
    if projected is None or not isinstance(getattr(module, "dt_proj", None), nn.Linear):
        return None, None
    if step is None:
        if hasattr(module, "rms_eps"):  # Falcon Mamba norms δ without a module
            return None, None
        step = projected[..., : module.dt_proj.in_features]
    delta = softplus(linear(step, module.dt_proj.weight, module.dt_proj.bias).float())
    return -module.A_log.float().exp().amin(-1) * delta, None


def is_mamba2(module: nn.Module) -> bool:
    a = getattr(module, "A_log", None)
    return isinstance(a, Tensor) and a.ndim == 1 and hasattr(module, "in_proj") and hasattr(module, "dt_bias")


def read_mamba2(module: Any, taps: Taps) -> Read:
    """h ← exp(−exp(A)·Δ)·h + Δ·B x, with Δ = softplus(δ + bias) per head, the last columns of the projection."""
    projected = taps.get("in_proj")
    if projected is None:
        return None, None
    if isinstance(factor := getattr(module, "mup_vector", None), Tensor):
        projected = projected * factor
    step = softplus(projected[..., -module.A_log.shape[0] :].float() + module.dt_bias.float())
    low, high = getattr(module, "time_step_limit", (0.0, float("inf")))
    return -module.A_log.float().exp() * step.clamp(low, high), None


def is_rg_lru(module: nn.Module) -> bool:
    return hasattr(module, "rg_lru")


def read_rg_lru(module: Any, taps: Taps) -> Read:
    """Griffin's h ← a·h + √(1 − a²)·(i·x), with a = exp(−8·softplus(Λ)·σ(r)) and i = σ(g), per channel."""
    lru, x = module.rg_lru, taps.get("rg_lru")
    if x is None:
        return None, None
    blocks = x.flatten(0, -2).unflatten(-1, (lru.recurrent_gate_weight.shape[0], -1))

    def gate(name: str) -> Tensor:
        made = torch.einsum("thi,hij->thj", blocks, getattr(lru, f"{name}_weight")) + getattr(lru, f"{name}_bias")
        return made.flatten(1).float().sigmoid()

    return -8.0 * gate("recurrent_gate") * softplus(lru.recurrent_param.float()), gate("input_gate")


def is_short_conv(module: nn.Module) -> bool:
    """out(C ∘ conv(B ∘ x)) of LFM2, which remembers as many tokens as the kernel has taps."""
    return type(module).__name__.endswith("ShortConv") and isinstance(getattr(module, "conv", None), nn.Conv1d)


KINDS = (
    Kind("GatedDeltaNet", is_gated_delta, DELTA_TAPS, read_gated_delta),
    Kind("Mamba", is_mamba, ("x_proj", "dt_layernorm"), read_mamba),
    Kind("Mamba2", is_mamba2, ("in_proj",), read_mamba2),
    Kind("RG-LRU", is_rg_lru, ("rg_lru:input",), read_rg_lru),
    Kind("ShortConv", is_short_conv),
)


OTHER = re.compile(
    r"(LightningAttention|LinearAttention|RetNet\w*|Retention|RwkvSelfAttention|RWKV\w*|mLSTM\w*|Hyena\w*)$"
)


def find_mixers(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, Kind | None]]:
    """(name, module, its kind) of each mixer; None for one that is known by its class alone."""
    found: list[tuple[str, nn.Module, Kind | None]] = []
    for name, module in modules:
        if any(name.startswith(f"{outer}.") for outer, _, _ in found):
            continue
        kind = next((kind for kind in KINDS if kind.matches(module)), None)
        if kind is not None or OTHER.search(type(module).__name__):
            found.append((name, module, kind))
    return found


class Mixers:
    """The mixers of a model, read inside `with mixers.reading():`."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._found = find_mixers(modules)
        self.readings = [
            MixerReading(name, type(module).__name__ if kind is None else kind.name)
            for name, module, kind in self._found
        ]

    @contextmanager
    def reading(self) -> Iterator[None]:
        with ExitStack() as stack:
            for (_, module, kind), reading in zip(self._found, self.readings, strict=True):
                _observe(stack, module, kind, reading)
            yield


def _observe(stack: ExitStack, module: nn.Module, kind: Kind | None, reading: MixerReading) -> None:
    """Hooks a mixer and the submodules that its kind taps; a failure of ours ends its reading, never the forward."""
    taps: dict[str, Tensor] = {}

    def keep(name: str, is_input: bool) -> Any:
        def hook(_: nn.Module, args: tuple, output: Any) -> None:
            seen = args[0] if is_input and args else output
            if isinstance(seen, Tensor):
                taps[name] = seen.detach()

        return hook

    def add(_: nn.Module, args: tuple, named: dict, output: Any) -> None:
        if reading.failure is not None:
            return
        try:
            x = args[0] if args else next(value for value in named.values() if isinstance(value, Tensor))
            y = output if isinstance(output, Tensor) else output[0]
            reading.add_sizes(x.detach(), y.detach())
            if kind is not None and kind.read is not None:
                reading.add_gates(*kind.read(module, taps))
        except Exception as error:
            reading.failure = f"{type(error).__name__}: {error}".split("\n")[0]
        finally:
            taps.clear()

    for path in () if kind is None else kind.taps:
        name, _, side = path.partition(":")
        if (part := getattr(module, name, None)) is not None:
            stack.callback(part.register_forward_hook(keep(name, side == "input")).remove)
    stack.callback(module.register_forward_hook(add, with_kwargs=True).remove)
