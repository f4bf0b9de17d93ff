"""`QKClip`: QK-clip for a whole training, as optimizer hook, trainer callback or a call per step."""

from __future__ import annotations

import math
import numbers
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.forwards import find_caller
from regard.health.measure.side_stream import HostCopies
from regard.health.qk_clip.clipping import Clipped, Masters, check_arguments, clip_observed
from regard.health.qk_clip.max_logits import observe, stop
from regard.health.watching import callbacks
from regard.health.watching.groups import find_groups
from regard.health.watching.telling import make_writer
from regard.nn.projections import NotFound
from regard.parallel.group import is_first_rank

LOW_PRECISION = (torch.bfloat16, torch.float16)
UNDONE, GROWN, HELD = 0.5, 0.7, 0.8  # τ/m of clips undone, undone or outgrown by one step, and held
MOST_FAILED = 10  # consecutive steps that clipped nothing where they should have, before an error
MEMORY, MOST_GROWTH = 0.99, 4.0  # margin="auto": what a calm step leaves of the expected growth; its limit


class QKClip:
    """W_q, W_k ← √(τ/m)·W_q, √(τ/m)·W_k after each optimizer step, for every head whose largest logit m passed τ.

    >>> import regard, torch
    >>> model = regard.nn.MultiheadAttention(8, num_heads=2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> clip = regard.QKClip(model, threshold=100.0)
    >>> for _ in range(2):
    ...     model(torch.randn(2, 6, 8)).square().mean().backward()
    ...     optimizer.step()
    ...     clipped = clip.step()
    >>> clipped.heads, clip.steps
    ([], 2)
    >>> clip.close()

    MuonClip's order: forward, backward, optimizer step (weight decay and all), then the clip, by the logits of the
    forwards of that step. They are measured while the model runs, in one fused pass over q and k per attention call;
    no forward is added. `regard.qk_clip` says which weights take which part of the factor. Inside torch.compile the
    same pass is an op of the graph: make QKClip before the first compiled forward.

    The logits are those from before the optimizer's step, which may raise them: between steps they pass τ by what one
    step adds, by 5 % and at most 42 % at a learning rate of 3e-3 in a small model. `margin` clips by what they will be.

    A step that saw no logits, could not clip a layer whose logits passed τ, or found the clip before it undone warns
    with the reason; ten such steps, with no two others in a row between them, raise an error unless `strict` is False.

    Args:
        model: the model in training; what `qk_clip` takes.
        threshold: τ, the largest logit that a head may have.
        log_only: True to measure and report, and leave the weights alone.
        log: where `attention/max_logit`, the same per layer, and `attention/clipped_heads` go after each step: all that
            `regard.Monitor(log=…)` takes. None saves the wait for the GPU that reading them costs.
        group: the process group whose ranks hold the same heads of the same layers (data-parallel ranks), or a
            DeviceMesh with named dimensions, of which "tp" and "pp" are read as the next two. None reads it from
            DTensors or DistributedDataParallel, or takes all ranks if their weights are equal.
        tensor_group: the ranks that hold other heads of the same layers (tensor parallel).
        pipeline_group: the ranks that hold other layers.
        names: the attributes of an attention module that hold its query and key layers, where their names are unusual.
        masters: a function from a parameter to the float32 copy that the optimizer keeps of it, or None where it keeps
            none. Copies in the state of a hooked optimizer (a key with "master" in it) and in `parameter.main_param`
            (Megatron) are found without it. Sharded parameters (FSDP2) are clipped as they are.
        strict: False to go on after such ten steps.
        margin: by which share a step is expected to raise the largest logits: heads are clipped from τ/(1 + margin) on,
            to that. "auto" measures it for each layer from step to step, and remembers the largest for 70 steps or so.

    Attributes:
        steps: how many steps it has ended.
        last: what the last step did, a `Clipped`.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: `threshold` is not a positive, finite number, `margin` not a number ≥ 0 or "auto", the model is
            `nn.DataParallel`, or the ranks' weights differ and no group is given.
        RuntimeError: Ranks without one of these, after a minute; or ten steps that clipped nothing, see above.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        log_only: bool = False,
        *,
        log: Any = None,
        group: Any = None,
        tensor_group: Any = None,
        pipeline_group: Any = None,
        names: tuple[str, str] | None = None,
        masters: Masters | None = None,
        strict: bool = True,
        margin: float | str = 0.0,
    ) -> None:
        check_arguments(model, threshold)
        is_number = isinstance(margin, numbers.Real) and not isinstance(margin, bool)
        if margin != "auto" and not (is_number and 0 <= margin < math.inf):  # type: ignore[operator]
            raise ValueError(f'margin must be a number ≥ 0, or "auto", got {margin!r}')
        self.model, self.threshold, self.log_only = model, float(threshold), log_only
        self.names, self.masters, self.strict, self.margin = names, masters, strict, margin
        self.groups = find_groups(model, group, tensor_group, pipeline_group)
        self.steps = 0
        self.last: Clipped | None = None  # of the last step
        self.failed = 0  # steps that clipped nothing where they should have, since two in a row were fine
        self._failing_since, self._was_fine = 0, True
        self._writer = None if log is None else make_writer(log)
        self._is_logged = self.groups.agree(log is not None)  # by any rank: all take part in the numbers then
        self._warned: set[str] = set()
        self._optimizers: list[weakref.ref] = []
        self._handles: list = []
        self._grown: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> expected logits, expected growth
        self._before: deque[dict[str, tuple[Tensor, Tensor | None]]] = deque(maxlen=2)  # what the last steps found
        self._copies = HostCopies()
        observe(model).start()

    def step(self) -> Clipped:
        """Clips by the logits of the forwards since the last call; call it after `optimizer.step()`."""
        self._copies.finish()  # what the step before has left on a GPU
        observer = observe(self.model)
        observer.read_modules()
        observer.read_taps(self.model)
        complaint = observer.complain(self.model, has_stepped=True)
        masters = self._find_master if self.masters is not None or self._optimizers else _main_param
        self.last = clip_observed(
            self.model, observer, self.threshold, self.groups, names=self.names, masters=masters,
            log_only=self.log_only, growth=self._expect if self.margin else None,
        )  # fmt: skip
        self.steps += 1
        self._judge(complaint)
        if self._is_logged:
            scalars = self.last.scalars(self.groups)
            if self._writer is not None and is_first_rank():
                self._writer.write(self.steps, scalars, [])
        return self.last

    def _judge(self, complaint: str | None) -> None:
        """Warns of a step that clipped nothing where it should have; on a GPU one step later, when flags are read."""
        last = self.last
        assert last is not None
        if not last._found:
            if complaint is not None:
                self._fail(f"QKClip clips nothing: {complaint}")
            else:
                self._note_fine()
            return
        skipped = {name: largest for name, (largest, _) in last._found.items() if name in last.unclipped}
        flags = [self._find_undone(last)]
        flags += [(largest.nan_to_num(posinf=0.0) > self.threshold).any().float() for largest in skipped.values()]
        self._copies.add(torch.stack([flag.to(flags[0].device) for flag in flags]), self._reader(last, list(skipped)))
        self._copies.start()
        if flags[0].device.type == "cpu":
            self._copies.finish()

    def _find_undone(self, last: Clipped) -> Tensor:
        """Returns the smallest τ/m, as a tensor, of heads that were clipped and are as large as before; 1 if none is.

        Clipped in the last step, or in the one before it where the clip held since: an optimizer writes its copies back
        after the forward that has shown it to hold.
        """
        device = next(iter(last._found.values()))[0].device
        found = [torch.ones(1, device=device)]

        def join(parts: Iterable[Tensor]) -> Tensor:  # of all layers, for few operations each step
            return torch.cat([part.to(device) for part in parts])

        for at, before in enumerate(reversed(self._before)):
            names = [name for name in last._found if before.get(name, (None, None))[1] is not None]
            if names:
                largest, was = join(last._found[name][0] for name in names), join(before[name][0] for name in names)
                is_back = (largest > 0.9 * was) & (join(before[name][1] for name in names) < 1.0)  # type: ignore[misc]
                if at:
                    between = join(self._before[-1].get(name, last._found[name])[0] for name in names)
                    is_back &= between < self.threshold / HELD
                found.append(torch.where(is_back, self.threshold / was, 1.0).amin()[None])
        self._before.append(last._found)
        return torch.cat(found).amin()

    def _reader(self, clipped: Clipped, skipped: list[str]) -> Callable[[Tensor], None]:
        def read(flags: Tensor) -> None:
            undone, *over = flags.tolist()
            reasons = {name: clipped.skipped[name] for name, passed in zip(skipped, over, strict=True) if passed}
            if reasons and not self.log_only:
                self._fail(self._describe_skipped(reasons))
            elif undone < UNDONE and not self.log_only:
                self._fail(
                    "QKClip has no effect: weights that it shrank a step or two before are as large as they were. The "
                    "optimizer keeps copies and writes them back: pass it to hook() or follow(), or pass masters="
                )
            elif undone < GROWN and not self.log_only:
                self._warn(
                    "Heads that QKClip shrank are as large again one step later: the learning rate lets logits grow by "
                    'half in a step (margin="auto" clips by what they will be), or the optimizer keeps copies of the '
                    "weights and writes them back (pass it to hook() or follow(), or pass masters=)"
                )
            else:
                self._note_fine()

        return read

    def _note_fine(self) -> None:
        """Notes a step that did what it should; an optimizer that undoes each clip shows it at every second step."""
        self.failed = 0 if self._was_fine else self.failed
        self._was_fine = True

    def _describe_skipped(self, reasons: Mapping[str, str]) -> str:
        (layer, reason), *others = reasons.items()
        more = f" (and {len(others)} more)" if others else ""
        knows_a_layer = self.last is not None and self.last.knows_a_layer
        none = f"can clip no attention layer of {type(self.model).__name__}"
        what = "cannot clip a layer whose logits passed the threshold" if knows_a_layer else none
        return f"QKClip {what}: {layer or 'the model itself'}: {reason}{more}; see `.last.skipped`"

    def _fail(self, text: str) -> None:
        """Warns once of each reason; raises after ten such steps."""
        self._failing_since = self._failing_since if self.failed else self.steps
        self.failed, self._was_fine = self.failed + 1, False
        if self.strict and not self.log_only and self.failed >= MOST_FAILED:
            raise RuntimeError(
                f"{text}. It was so at {self.failed} of the last {self.steps - self._failing_since + 1} steps; pass "
                "strict=False to train on without a clip"
            )
        self._warn(text)

    def _warn(self, text: str) -> None:
        """Warns once of each reason."""
        if text not in self._warned and is_first_rank():
            self._warned.add(text)
            warnings.warn(text, stacklevel=find_caller()[1] + 1)

    def _expect(self, name: str, largest: Tensor) -> Tensor:
        """Returns the largest logits that a layer is expected to have after the step: m·(1 + margin)."""
        if self.margin != "auto":
            return largest * (1.0 + float(self.margin))
        expected, growth = self._grown.get(name, (largest, torch.zeros_like(largest)))
        measured = torch.where(
            expected > 0.25 * self.threshold, largest / expected - 1.0, 0.0
        )  # the rest is far from τ
        measured = measured.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, MOST_GROWTH)
        growth = torch.maximum(MEMORY * growth, measured.amax())  # heads of a layer grow in turns
        after = largest * (1.0 + growth)
        # what the next forward shows if no step adds anything: the logit, or what the clip made of it
        self._grown[name] = torch.where(after > self.threshold, self.threshold / (1.0 + growth), largest), growth
        return after

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps and the growth that margin="auto" has measured, for `load_state_dict`."""
        grown = {name: [x.tolist() for x in pair] for name, pair in self._grown.items()}
        return {"steps": self.steps, "failed": self.failed, "growth": grown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self.steps, self.failed = int(state["steps"]), int(state["failed"])
        self._grown = {name: (torch.tensor(a), torch.tensor(b)) for name, (a, b) in state["growth"].items()}

    def hook(self, optimizer: Any) -> Any:
        """Makes each `optimizer.step()` end with `self.step()`; returns the handle, whose `remove()` undoes it.

        An optimizer that accelerate prepared steps once per accumulation, and so does this.
        """
        inner = _inner_optimizer(optimizer)
        if not callable(getattr(inner, "register_step_post_hook", None)):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.follow(inner)
        self._handles.append(inner.register_step_post_hook(self._after_step))
        return self._handles[-1]

    def _after_step(self, *_: Any) -> None:
        self.step()

    def follow(self, optimizer: Any) -> None:
        """Keeps the float32 master copies that `optimizer` holds in step with the clipped weights."""
        inner = _inner_optimizer(optimizer)
        if isinstance(inner, torch.optim.Optimizer) and all(known() is not inner for known in self._optimizers):
            self._optimizers.append(weakref.ref(inner))

    def close(self) -> None:
        """Stops observing and removes the hooks; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        stop(self.model)

    def __enter__(self) -> QKClip:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def trainer_callback(self) -> Any:
        """Returns a callback for `transformers.Trainer(callbacks=[…])` that clips after each optimizer step."""
        return callbacks.clip_trainer_callback(self)

    def lightning_callback(self) -> Any:
        """Returns a callback for `lightning.Trainer(callbacks=[…])` that clips after each optimizer step."""
        return callbacks.clip_lightning_callback(self)

    def _find_master(self, parameter: Tensor) -> Tensor | None:
        if self.masters is not None:
            return self.masters(parameter)
        if (found := _main_param(parameter)) is not None:
            return found
        optimizers = [one for known in self._optimizers if (one := known()) is not None]
        for optimizer in optimizers:
            for name, value in optimizer.state.get(parameter, {}).items():
                if "master" in str(name) and isinstance(value, Tensor):
                    return value
        held = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        if optimizers and parameter.dtype in LOW_PRECISION and id(parameter) not in held:
            raise NotFound(
                f"its {str(parameter.dtype).removeprefix('torch.')} weights are not the tensors that the optimizer "
                "steps, which would overwrite them; pass masters= a function from a parameter to its float32 copy"
            )
        return None


def _inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that accelerate, or another wrapper with `.optimizer`, was given."""
    return getattr(optimizer, "optimizer", optimizer)


def _main_param(parameter: Tensor) -> Tensor | None:
    """Returns Megatron's float32 copy of a parameter."""
    found = getattr(parameter, "main_param", None)
    return found if isinstance(found, Tensor) else None
