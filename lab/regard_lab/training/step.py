"""`Step`: one optimizer step, on CUDA captured once as a graph and replayed, because small models are launch-bound."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard_lab.training.experiment import Trial

EAGER = 3  # steps before the capture, so that everything is compiled and allocated


class Step:
    """One training step: `step(i)` draws batch i, `step(i, batch)` uses a given one. Losses stay on the device."""

    def __init__(self, trial: Trial, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.trial, self.optimizer, self.steps = trial, optimizer, steps
        self.device = next(trial.model.parameters()).device
        self.loss = torch.zeros((), device=self.device)
        self.bad = torch.full((), -1, dtype=torch.int64, device=self.device)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        if self.device.type == "cuda":
            for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
                group["lr"] = torch.tensor(float(rate), device=self.device)  # read by the graph at replay
            self.stream = torch.cuda.Stream()
            torch.backends.cuda.matmul.allow_tf32 = True
        self.eager = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()

    def __call__(self, step: int, batch: tuple[Tensor, ...] | None = None) -> None:
        if self.device.type != "cuda":
            self._step(step, batch, self._train)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._step(step, batch, self._capture_or_replay if self.trial.graph else self._train)
        torch.cuda.current_stream().wait_stream(self.stream)

    def first_bad(self) -> int | None:
        """Return the first step, counted from 1, whose loss was not finite, or None."""
        bad = int(self.bad)
        return None if bad < 0 else bad

    def _step(self, step: int, batch: tuple[Tensor, ...] | None, train: Callable[[tuple[Tensor, ...]], None]) -> None:
        factor = self.trial.schedule(step, self.steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(float(rate) * factor)
            else:
                group["lr"] = rate * factor
        train(self.trial.batch(step) if batch is None else batch)
        self.trial.after_step()
        self.bad.copy_(torch.where((self.bad < 0) & ~torch.isfinite(self.loss), step + 1, self.bad))

    def _train(self, batch: tuple[Tensor, ...]) -> None:
        loss = self.trial.loss(batch)
        self.optimizer.zero_grad(set_to_none=self.device.type != "cuda")
        loss.backward()
        if self.trial.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.trial.model.parameters(), self.trial.clip)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def _capture_or_replay(self, batch: tuple[Tensor, ...]) -> None:
        if self.eager < EAGER:
            self._train(batch)
            self.eager += 1
            return
        if self.graph is None:
            self.inputs = tuple(x.clone() for x in batch)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._train(self.inputs)
        for buffer, x in zip(self.inputs, batch, strict=True):
            buffer.copy_(x)
        self.graph.replay()
