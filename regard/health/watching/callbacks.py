"""Trainer callbacks of `Monitor` and `QKClip`, for transformers and Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.health.monitor import Monitor
    from regard.health.qk_clip.training import QKClip

BASES = {  # of callbacks: module, class, what is missing without it
    "trainer": ("transformers", "TrainerCallback", 'trainer_callback needs transformers: pip install "regard[hf]"'),
    "lightning": ("lightning.pytorch", "Callback", "lightning_callback needs lightning: pip install lightning"),
}


def _import_base(which: str) -> Any:
    module, name, hint = BASES[which]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ImportError(hint) from error


def trainer_callback(monitor: Monitor) -> Any:
    """Returns a `transformers.TrainerCallback` that gives a monitor the trainer's steps, loss and end, and saves it."""
    base: Any = _import_base("trainer")
    from transformers.trainer_callback import ExportableState

    class MonitorCallback(base, ExportableState):  # type: ignore[misc]
        def state(self):  # the trainer writes it into trainer_state.json
            return {"args": {}, "attributes": {"saved": monitor.state_dict()}}

        def on_train_begin(self, args, state, control, **kwargs):
            _load_from(monitor, type(self).__name__, state)
            monitor.watch()  # a second train() comes after the end of the first

        def on_step_begin(self, args, state, control, **kwargs):
            monitor.at_step(state.global_step + 1)

        def on_step_end(self, args, state, control, **kwargs):
            monitor.end_step()

        def on_log(self, args, state, control, logs=None, **kwargs):
            monitor.observe((logs or {}).get("loss"), (logs or {}).get("grad_norm"))

        def on_train_end(self, args, state, control, **kwargs):
            monitor.close()

    return MonitorCallback()


def lightning_callback(monitor: Monitor) -> Any:
    """Returns a Lightning `Callback` for a monitor: its steps, loss and end, its state in checkpoints, its loggers."""

    class MonitorCallback(_import_base("lightning")):  # type: ignore[misc]
        def state_dict(self):
            return monitor.state_dict()

        def load_state_dict(self, state):
            monitor.load_state_dict(state)

        def on_train_start(self, trainer, module):
            monitor.watch()
            monitor._teller.use_loggers(trainer.loggers)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            monitor.at_step(trainer.global_step + 1)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            monitor.observe(outputs.get("loss") if isinstance(outputs, dict) else outputs)
            monitor.end_step()

        def on_train_end(self, trainer, module):
            monitor.close()

    return MonitorCallback()


def clip_trainer_callback(clip: QKClip) -> Any:
    """Returns a `transformers.TrainerCallback` that clips after each optimizer step, and saves QKClip's state."""
    from transformers.trainer_callback import ExportableState

    class QKClipCallback(_import_base("trainer"), ExportableState):  # type: ignore[misc]
        def state(self):
            return {"args": {}, "attributes": {"saved": clip.state_dict()}}

        def on_train_begin(self, args, state, control, **kwargs):
            _load_from(clip, type(self).__name__, state)

        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            clip.follow(optimizer)
            clip.step()

        def on_train_end(self, args, state, control, **kwargs):
            clip.close()

    return QKClipCallback()


def _load_from(owner: Monitor | QKClip, name: str, state: Any) -> None:
    """Loads what a resumed trainer found in trainer_state.json; a file from before gets a place for the next save."""
    if isinstance(state.stateful_callbacks, dict):
        state.stateful_callbacks.setdefault(name, {"args": {}, "attributes": {}})
    known = (getattr(state, "stateful_callbacks", None) or {}).get(name)
    saved = known.get("attributes", {}).get("saved") if isinstance(known, dict) else None
    if state.global_step and saved:
        owner.load_state_dict(saved)


def clip_lightning_callback(clip: QKClip) -> Any:
    """Returns a Lightning `Callback` that clips after each optimizer step; accumulated batches are no step."""

    class QKClipCallback(_import_base("lightning")):  # type: ignore[misc]
        def state_dict(self):
            return clip.state_dict()

        def load_state_dict(self, state):
            clip.load_state_dict(state)

        def on_train_start(self, trainer, module):
            self.at = trainer.global_step
            for optimizer in trainer.optimizers:
                clip.follow(optimizer)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step != self.at:
                self.at = trainer.global_step
                clip.step()

        def on_train_end(self, trainer, module):
            clip.close()

    return QKClipCallback()
