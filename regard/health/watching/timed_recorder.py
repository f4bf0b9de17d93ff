"""A recorder that measures its own cost and never makes a training step fail."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from regard.health.capture.call import Call
from regard.health.measurement.recorder import Recorder


class TimedRecorder(Recorder):
    """Counts the seconds beyond the model's own; a failed measurement is noted as the layer's reason."""

    seconds = 0.0
    replaces = False

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        own, outputs, model_failed = 0.0, [], False

        def run_model() -> Tensor:
            nonlocal own, model_failed
            before = _synchronized_time(call.q)
            model_failed = True
            outputs.append(run_original())
            model_failed = False
            own += _synchronized_time(call.q) - before
            return outputs[-1]

        before = _synchronized_time(call.q)
        try:
            output = super().__call__(call, name, run_model)
        except Exception as error:
            if model_failed:
                raise
            self.layers[self.key].mark_unmeasured(f"measuring failed: {type(error).__name__}: {error}")
            self._batch.pop(self.key, None)
            output = outputs[-1] if outputs else run_model()
        self.seconds += _synchronized_time(call.q) - before - own
        return output


def _synchronized_time(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
