"""Trainer callbacks of `Monitor` and `QKClip`, for transformers and Lightning: steps, loss, saved state, the end."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.health.monitor import Monitor
    from regard.health.qk_clip.training import QKClip

BASES = {  # of callbacks: module, class, what is missing without it
    "trainer": ("transformers", "TrainerCallback", 'trainer_callback needs transformers: pip install "regard[hf]"'),
    "lightning": ("lightning.pytorch", "Callback", "lightning_callback needs lightning: pip install lightning"),
}


def _make(which: str, owner: Monitor | QKClip, **events: Callable) -> Any:
    """Returns a callback of a trainer that runs `events` by their names, saves the owner's state, and closes it."""
    module, base, hint = BASES[which]
    try:
        bases: tuple = (getattr(importlib.import_module(module), base),)
    except ModuleNotFoundError as error:
        raise ImportError(hint) from error
    name = f"{type(owner).__name__}Callback"  # under which a trainer saves its state
    saved: dict[str, Callable] = {"state_dict": owner.state_dict, "load_state_dict": owner.load_state_dict}
    if which == "trainer":
        bases += (importlib.import_module("transformers.trainer_callback").ExportableState,)
        saved = {"state": lambda: {"args": {}, "attributes": {"saved": owner.state_dict()}}}  # for trainer_state.json
    events = {"on_train_end": lambda *_, **__: owner.close(), **saved, **events}
    return type(name, bases, {event: staticmethod(act) for event, act in events.items()})()


def trainer_callback(monitor: Monitor) -> Any:
    """Returns a `transformers.TrainerCallback` that gives a monitor the trainer's steps, loss and end, and saves it."""

    def begin(args: Any, state: Any, control: Any, **_: Any) -> None:
        _load_from(monitor, state)
        monitor.watch()  # a second train() comes after the end of the first

    def log(args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        monitor.observe((logs or {}).get("loss"), (logs or {}).get("grad_norm"))

    return _make(
        "trainer", monitor, on_train_begin=begin, on_log=log,
        on_step_begin=lambda args, state, control, **_: monitor.at_step(state.global_step + 1),
        on_step_end=lambda args, state, control, **_: monitor.end_step(),
    )  # fmt: skip


def lightning_callback(monitor: Monitor) -> Any:
    """Returns a Lightning `Callback` for a monitor: its steps, loss and end, its state in checkpoints, its loggers."""

    def start(trainer: Any, module: Any) -> None:
        monitor.watch()
        monitor._teller.use_loggers(trainer.loggers)

    def end_batch(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        monitor.observe(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        monitor.end_step()

    return _make(
        "lightning", monitor, on_train_start=start, on_train_batch_end=end_batch,
        on_train_batch_start=lambda trainer, *_: monitor.at_step(trainer.global_step + 1),
    )  # fmt: skip


def clip_trainer_callback(clip: QKClip) -> Any:
    """Returns a `transformers.TrainerCallback` that clips after each optimizer step, and saves QKClip's state."""

    def step(args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        clip.follow(optimizer)
        clip.step()

    return _make(
        "trainer", clip, on_optimizer_step=step,
        on_train_begin=lambda args, state, control, **_: _load_from(clip, state),
    )  # fmt: skip


def _load_from(owner: Monitor | QKClip, state: Any) -> None:
    """Loads what a resumed trainer found in trainer_state.json; a file from before gets a place for the next save."""
    name = f"{type(owner).__name__}Callback"
    if isinstance(state.stateful_callbacks, dict):
        state.stateful_callbacks.setdefault(name, {"args": {}, "attributes": {}})
    known = (getattr(state, "stateful_callbacks", None) or {}).get(name)
    saved = known.get("attributes", {}).get("saved") if isinstance(known, dict) else None
    if state.global_step and saved:
        owner.load_state_dict(saved)


def clip_lightning_callback(clip: QKClip) -> Any:
    """Returns a Lightning `Callback` that clips after each optimizer step; accumulated batches are no step."""
    at = 0

    def start(trainer: Any, module: Any) -> None:
        nonlocal at
        at = trainer.global_step
        for optimizer in trainer.optimizers:
            clip.follow(optimizer)

    def end_batch(trainer: Any, *_: Any) -> None:
        nonlocal at
        if trainer.global_step != at:
            at = trainer.global_step
            clip.step()

    return _make("lightning", clip, on_train_start=start, on_train_batch_end=end_batch)
