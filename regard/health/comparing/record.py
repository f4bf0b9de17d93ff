"""Runs a model once and keeps what enters and leaves every module and every attention call, in order of execution."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.health.capture.call import Call
from regard.health.capture.forwards import as_written
from regard.health.capture.interception import Interception
from regard.health.comparing.scores import Kept, perturb_scores
from regard.health.measure.batches import evaluation_mode, is_function
from regard.health.probe.modes import preserved, training_without_dropout
from regard.health.tokens.text import TokenBatch, as_batch

CALL_PARTS = ("q", "k", "v", "mask", "scores", "attention")  # of an attention call, in the order of computation
Mode = Literal["evaluation", "training", "given"]
MORE = 3  # tensors of one module's output that are kept; of the model's own all
LOSS = "out loss"  # the part of a model's output that is its loss


class Key(NamedTuple):
    """A place in a run: what ("in", "out", "out 1", "q", …, "attention"), the module's name, and which use of it.

    What the model returns beside its main output is "out loss", "out pooler_output", or "out 1" in a tuple.
    """

    part: str
    module: str
    use: int = 0


@dataclass
class Run:
    """What one run of a model computed.

    Attributes:
        points: tensors by place, in order of execution.
        calls: attention calls by place (part "attention").
        real: True at tokens that are not padding, [B, N]; None where the batch does not tell.
        forwards: the number of the model's forward that each call was made in.
    """

    points: dict[Key, Tensor] = field(default_factory=dict)
    calls: dict[Key, Kept] = field(default_factory=dict)
    real: Tensor | None = None
    forwards: dict[Key, int] = field(default_factory=dict)

    def forward_of(self, key: Key) -> int:
        """The number of the model's forward that a place is in; a module may be used several times in one forward."""
        return self.forwards.get(
            key._replace(part="attention"), key.use if Key("in", "", key.use) in self.points else 0
        )

    def earlier(self, key: Key) -> list[Key]:
        """The same call in every forward up to this one, the first first; empty in the first forward."""
        last = self.forward_of(key)
        each = sum(1 for one, forward in self.forwards.items() if one.module == key.module and forward == 0)
        return [key._replace(use=key.use - each * (last - at)) for at in range(last + 1)] if last else []

    @property
    def outputs(self) -> list[Tensor]:
        """What the model itself returned, once per forward."""
        return [x for key, x in self.points.items() if key[:2] == ("out", "")]


class Recorder:
    """Hooks that keep every point of a run; that put those of `force` in the place of inputs; that add rounding noise.

    `force` is a run of the same modules: each module is then given the input which that run gave it, so that what
    differs in one place is not carried on to the next. `noise` is a relative size: outputs are moved by so much of
    their size at random, as rounding would.
    """

    def __init__(self, model: nn.Module, force: Run | None = None, noise: float = 0.0, seed: int = 0) -> None:
        self.model, self.force, self.noise = as_written(model), force, noise
        self.run = Run()
        self._uses: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._stack: list[tuple[str, int]] = []
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._generator = torch.Generator().manual_seed(seed)

    @contextlib.contextmanager
    def active(self) -> Iterator[Run]:
        interception = Interception(self.model, observe=self._observe)
        hooks: list[Any] = []
        with interception, interception.torch_calls():
            try:
                for name, module in self.model.named_modules():
                    if isinstance(module, torch.jit.ScriptModule):
                        continue
                    hooks.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                    hooks.append(module.register_forward_hook(self._after(name)))
                yield self.run
            finally:
                for hook in hooks:
                    hook.remove()

    def _before(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
            key = Key("in", name, self._uses[name])
            self._uses[name] += 1
            self._stack.append((name, key.use))
            place, given = _first_tensor(args, kwargs)
            if given is None:
                return None
            self._keep(key, given)
            forced = None if self.force is None else self.force.points.get(key)
            if forced is None or forced.shape != given.shape or not name:
                return None
            forced = forced.to(given)
            if isinstance(place, int):
                return (*args[:place], forced, *args[place + 1 :]), kwargs
            return args, {**kwargs, place: forced}

        return hook

    def _after(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> Any:
            while self._stack and self._stack.pop()[0] != name:
                pass  # modules that raised
            use = self._uses[name] - 1
            noisy = self._with_noise(output) if self.noise and name else None
            output = output if noisy is None else noisy
            found = dict(enumerate(_tensors_of(output)[:MORE])) if name else name_outputs(output)
            for part, x in found.items():
                self._keep(Key(f"out {part}" if part else "out", name, use), x)
            return noisy

        return hook

    def _with_noise(self, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            return self._moved(output)
        if type(output) is tuple and output and isinstance(output[0], Tensor) and output[0].is_floating_point():
            return (*(self._moved(x) if _is_real(x) else x for x in output[:2]), *output[2:])
        return None

    def _moved(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        wide = x.detach().double()
        size = wide.abs() + wide.square().mean(-1, keepdim=True).sqrt()
        random = torch.randn(x.shape, generator=self._generator, dtype=torch.float64).to(x.device)
        # of a wider type than the rounding that is played, the noise would be lost in the model's own
        return (wide + self.noise * size.nan_to_num(0.0, 0.0, 0.0) * random).to(x.dtype)

    def _observe(self, call: Call, name: str, run: Callable[[], Tensor]) -> Tensor:
        output = run()
        use = self._calls[name]
        self._calls[name] += 1
        kept = Kept.of(call, output)
        self.run.calls[Key("attention", name, use)] = kept
        self.run.forwards[Key("attention", name, use)] = max(self._uses[""] - 1, 0)
        for part in ("q", "k", "v") if call.obstacle is None else ():
            self.run.points[Key(part, name, use)] = getattr(kept, part)
        if self.noise and call.obstacle is None:
            output = self._moved(output + perturb_scores(kept, self.noise, self._generator).to(output))
        self.run.points[Key("attention", name, use)] = output.detach().clone().cpu().reshape(kept.output.shape)
        return output

    def _keep(self, key: Key, x: Tensor) -> None:
        known = self._copies.get(id(x))
        if known is None or known[0] is not x or known[1] != _version(x):
            known = self._copies[id(x)] = x, _version(x), x.detach().clone().cpu()
        self.run.points[key] = known[2]


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _first_tensor(args: tuple, kwargs: dict) -> tuple[int | str, Tensor | None]:
    """The first tensor that a module is given, and its place; masks of truth values do not count."""
    for place, x in (*enumerate(args), *kwargs.items()):
        if isinstance(x, Tensor) and x.dtype != torch.bool:
            return place, x
    return 0, None


def _tensors_of(output: Any) -> list[Tensor]:
    """The real tensors of an output, in order; logits before others."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        named = {name: x for name, x in output.items() if _is_real(x) and name != "loss"}
        first = [named[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in named]
        return first[:1] or list(named.values())
    if isinstance(output, (tuple, list)):
        return [x for x in output if _is_real(x)]
    found = (getattr(output, name, None) for name in ("logits", "last_hidden_state", "sample"))
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()][:1]


def name_outputs(output: Any) -> dict[int | str, Tensor]:
    """All that a model returned, its main output under 0; a loss under its own name."""
    main = _tensors_of(output)
    if isinstance(output, (tuple, list)):  # of transformers or nanoGPT: a loss may come first or last
        ordered = sorted(main, key=lambda x: x.ndim == 0)
        return {"loss" if number and x.ndim == 0 else number: x for number, x in enumerate(ordered)}
    named: Mapping[str, Any] = output if isinstance(output, Mapping) else {"loss": getattr(output, "loss", None)}
    found: dict[int | str, Tensor] = dict(enumerate(main[:1]))
    return found | {name: x for name, x in named.items() if _is_real(x) and not any(x is one for one in main[:1])}


def record(
    model: nn.Module, batch: Any, force: Run | None = None, noise: float = 0.0, seed: int = 0,
    mode: Mode = "evaluation",
) -> Run:  # fmt: skip
    """Run the model on one batch, or call a function with it, without gradients, and return what it computed.

    It runs in evaluation mode, in training mode without dropout, or as it was given; but for evaluation with gradients,
    as in training. Its random numbers are those of `seed`; the caller's are left alone.
    """
    model = as_written(model)
    with Recorder(model, force, noise, seed).active() as run, torch.set_grad_enabled(mode != "evaluation"):
        result, run.real = run_batch(model, batch, mode, seed)
        if ("out", "", 0) not in run.points:
            for x in _tensors_of(result)[:1]:
                run.points[Key("out", "", 0)] = x.detach().clone().cpu()
    return run


def run_batch(model: nn.Module, batch: Any, mode: Mode, seed: int = 0) -> tuple[Any, Tensor | None]:
    """(what the model returns for a batch or a function, the tokens that are no padding) in a mode, with a seed."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    modes = {
        "evaluation": lambda: evaluation_mode(list(model.named_modules())),
        "training": lambda: training_without_dropout(model), "given": lambda: preserved(model),
    }  # fmt: skip
    with torch.random.fork_rng(devices), modes[mode]():
        torch.manual_seed(seed)
        if is_function(batch):
            return batch(model), None
        given = batch if isinstance(batch, TokenBatch) else as_batch(batch, device, model)
        given = given.map(partial(_as_precise, dtype=find_dtype(model)))
        return model(*given.args, **given.named), find_real(given)


def find_dtype(model: nn.Module) -> torch.dtype:
    """The most frequent dtype of a model's weights."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return max(set(dtypes), key=dtypes.count) if dtypes else torch.float32


def _as_precise(x: Any, dtype: torch.dtype) -> Any:
    """Images and sounds in the 16 bits that a model computes with, so that one batch serves models of two dtypes."""
    if dtype.itemsize != 2 or not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    most = torch.finfo(dtype).max  # beyond which the numbers of a mask would become −∞
    return torch.where(x.isinf(), x, x.clamp(-most, most)).to(dtype)


def read_field(config: Any, name: str) -> Any:
    """A field of a configuration; None without it, or where it has another value in each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises its own kind for fields of layers
        return None


def find_real(given: TokenBatch) -> Tensor | None:
    """True at the tokens [B, N] that a batch's mask of two dims shows; None without one."""
    mask = given.named.get("attention_mask")
    return mask.bool().cpu() if isinstance(mask, Tensor) and mask.ndim == 2 else None
