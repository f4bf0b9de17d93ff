"""`regard.using`: swaps the normaliser, temperature, scale or soft cap of a model's attention, or gates its output."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from regard import normalizers
from regard._call.arguments import check_name
from regard._call.options import check_softcap, is_real
from regard._call.scores import resolve_scale
from regard.health.capture.call import Call
from regard.health.capture.forwards import find_caller, running_frame
from regard.health.capture.guard import Refused
from regard.health.capture.interception import Interception, check_model
from regard.health.watching.taps import has_compiled_parts
from regard.health.what_if import WhatIf
from regard.nn.validation import check_gates
from regard.temperature.named import unsized


class CopyWarning:
    """A hook without effect on a changed model; a copy or pickle of the model takes it along, and it warns then."""

    def __call__(self, module: nn.Module, inputs: tuple) -> None:
        return None

    def __deepcopy__(self, memo: dict) -> CopyWarning:
        return self.__reduce__()[0]()

    def __reduce__(self) -> tuple:
        warnings.warn(
            "a copy or a saved model does not have what regard.using changed, only the model's own attention; "
            "call regard.using on the copy, or restore() before copying",
            stacklevel=4,
        )
        return CopyWarning, ()


class using:
    """Makes every attention in `model` compute p = normaliser(cap(scale·q kᵀ)/T) until the block ends.

    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True).eval()
    >>> x = torch.randn(1, 6, 32)
    >>> before = layer(x)
    >>> with regard.using(layer, normalizer="entmax15", temperature=0.5):
    ...     other = layer(x)
    >>> bool((other != before).any()), bool((layer(x) == before).all())
    (True, True)

    Without `with` it stays until `.restore()`. The model itself is not changed: its weights, configuration and classes
    are as before, its attention calls are intercepted. Only what is given changes; a model's own soft cap, mask, sink
    and bias stay, except that a learned sink is dropped under a normaliser without an exponential denominator. A number
    that the model gives `regard.attention` as temperature, with no soft cap or bias, is part of its scale here: `scale`
    and `qk_norm` replace both, `temperature` multiplies. Any other temperature stays, or is replaced.

    A copy of the model, or the whole model pickled, loses the change and warns. A state dict holds weights only.

    Until the block ends, whatever `torch.compile` made in this process runs as it was written: a compiled model is
    changed too, given as it was written or as `torch.compile` returned it, and is as slow as uncompiled. Compile it
    before the block. A block that intercepted no call warns.

    With gradient checkpointing, which runs the forward again in backward, call `backward()` inside the block too:
    outside, the model's own attention would be differentiated.

    Args:
        model: any module that `regard.examine` can examine.
        normalizer: a name, as in `regard.attention`.
        temperature: a number, a tensor, "ssmax", "adaptive", or a policy such as `regard.temperature.SSMax(0.5)`.
        scale: a number, "sqrt", "inverse", "none" or a tensor per head.
        softcap: a positive number.
        qk_norm: divide queries and keys by their root mean square first, as `regard.nn.qk_norm` does; the scale is 1/√d
            then unless `scale` is given, whatever the model's was (1 where its queries were multiplied before).
        gate: "head" or "element": multiply the heads' outputs by σ of a linear layer of the module's input, one gate
            per head or per element (arXiv 2505.06708), for training from scratch. The layers are made in the first
            forward, as `.gates`, an nn.ModuleDict by module name: run the model once, then give
            `[*model.parameters(), *swap.gates.parameters()]` to the optimizer, and save `swap.gates.state_dict()`.
            They are not part of the model: DistributedDataParallel does not reduce their gradients.
        context_parallel: a DeviceMesh (or process group) of ranks that share each sequence: every rank calls the model
            with the whole inputs, computes its shard, and gets the whole outputs. Gradients of weights are this rank's
            share: sum them over the ranks before a step (docs/developers/parallel.md).

    Raises:
        TypeError: `model` is not an nn.Module, or `qk_norm` is not a bool.
        ValueError: Nothing is changed, a name or a number is unknown or outside its range, or, while the model runs,
            a call cannot be intercepted.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        normalizer: str | None = None,
        temperature: Any = None,
        scale: float | str | Tensor | None = None,
        qk_norm: bool = False,
        gate: str | None = None,
        context_parallel: Any = None,
        **options: Any,
    ) -> None:
        check_model(model)
        for name in options:
            check_name("using", name, ("normalizer", "temperature", "scale", "softcap"), {})
        if isinstance(temperature, str):
            temperature = unsized(temperature)
        if isinstance(temperature, int | float) and not (is_real(temperature) and 0 < temperature < math.inf):
            raise ValueError(f"temperature must be a positive, finite number, got {temperature!r}")
        check_softcap(options.get("softcap"))
        if not isinstance(qk_norm, bool):
            raise TypeError(f"qk_norm must be True or False, got {qk_norm!r}; softcap= bounds the scores by a number")
        given = dict(normalizer=normalizer, temperature=temperature, scale=scale, **options)
        self.changes = {name: value for name, value in given.items() if value is not None}
        if not self.changes and not qk_norm and gate is None and context_parallel is None:
            raise ValueError(
                "using() changes nothing; give normalizer, temperature, scale, softcap, qk_norm, gate or "
                "context_parallel"
            )
        check_gates(gate, forget_gate=False)
        if gate is not None and context_parallel is not None:
            raise ValueError("gate is made of whole inputs and cannot be combined with context_parallel; drop one")
        self._gate, self.gates = gate, nn.ModuleDict()
        if normalizer is not None:
            choice = normalizers.get(normalizer)
            choice.check_spec("regard.using")
            self.changes["normalizer"] = choice.spec
        resolve_scale(scale, 1)
        self._change = WhatIf("using", self.changes, qk_norm)
        self.calls = 0  # intercepted attention calls
        self._shards = None
        if context_parallel is not None:
            from regard.health.distributed.sequence_shards import ModelShards

            self._shards = ModelShards(model, context_parallel)
        self._interception: Interception | None = Interception(model, swap=self._swap, in_every_forward=True)
        self._interception.describe = self.describe
        self._interception.needs_frames = gate is not None
        self._interception.start()
        if has_compiled_parts(model):
            warnings.warn(
                "regard.using runs this compiled model as it was written, uncompiled, until the block ends",
                stacklevel=find_caller()[1] + 1,
            )
        self._mark = model.register_forward_pre_hook(CopyWarning())

    def describe(self) -> dict[str, Any]:
        """The options as a report records them: numbers and text."""
        more = {"qk_norm": self._change.qk_norm or None, "gate": self._gate}
        given = {**self.changes, **{name: value for name, value in more.items() if value is not None}}
        return {name: x if isinstance(x, (int, float, str)) else repr(x) for name, x in given.items()}

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.describe().items())
        return f"using({options}): {self.calls} calls so far" + ("" if self._interception else ", restored")

    def restore(self) -> None:
        """Restores the model's own attention; a second call does nothing."""
        if self._interception is not None:
            self._interception.stop()
            self._interception = None
            self._mark.remove()
            if self._shards is not None:
                self._shards.stop()

    def __enter__(self) -> using:
        return self

    def __exit__(self, kind, *_) -> None:
        self.restore()
        if self.calls == 0 and kind is None:
            warnings.warn(
                "regard.using intercepted no attention call: the model did not run, was compiled inside the block, ran "
                "in copies made by nn.DataParallel, or computes attention by hand (regard.examine says so)",
                stacklevel=2,
            )

    def _swap(self, call: Call) -> Call:
        try:
            return self._changed(call)
        except (ValueError, TypeError) as error:  # of an option that does not fit this call
            error.passes_regard = True  # type: ignore[union-attr]
            raise

    def _changed(self, call: Call) -> Call:
        if call.obstacle is not None:
            raise Refused(f"regard.using cannot intercept this call: {call.obstacle}")
        self.calls += 1
        changed = self._change(call).changed(kind="using", sliceable=False)
        if self._gate is not None:
            changed = changed.with_options(gate=self._gate_logits(changed))
        if self._shards is not None:
            if call.weights is not None:
                raise ValueError(
                    "context_parallel: no rank has the weights of whole rows; call the module with need_weights=False "
                    "(in transformers: output_attentions=False)"
                )
            changed = self._shards.shard_call(changed)
        changed.own = lambda _: changed.changed(dropout=0.0, weights=None).run()
        return changed

    def _gate_logits(self, call: Call) -> Tensor:
        """The logits [B, H, M, 1 or E] of the module's gate, whose linear layer is made on its first call."""
        batch, heads, queries = call.q.shape[:3]
        frame, shapes = running_frame(), ((batch, queries), (queries, batch))
        given = [] if frame is None else [x for x in frame.inputs if isinstance(x, Tensor) and x.is_floating_point()]
        x = next((x for x in given if x.ndim == 3 and tuple(x.shape[:2]) in shapes), None)
        name = self._interception.names[id(call.module)] if self._interception else ""
        if x is None:
            raise ValueError(
                f"regard.using(gate=): {name or 'the model'} was not given an input ({batch}, {queries}, width) that a "
                "gate could be made of"
            )
        if getattr(call.module, "batch_first", True) is False:
            x = x.transpose(0, 1)  # torch's modules take (L, B, width)
        width = 1 if self._gate == "head" else call.v.shape[-1]
        key = name.replace(".", "/") or "model"  # a name of a submodule has no dots
        if key not in self.gates:
            like = next((p for p in call.module.parameters() if p.is_floating_point()), x)
            with torch.inference_mode(False):
                self.gates[key] = nn.Linear(x.shape[-1], heads * width, False, device=x.device, dtype=like.dtype)
        return self.gates[key](x).unflatten(-1, (heads, width)).transpose(1, 2)
