"""Trainer callbacks of `Monitor` and `QKClip`, for transformers and Lightning."""

import importlib
from typing import Any

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
    """Returns a `transformers.TrainerCallback` that gives a monitor the trainer's steps and closes it at the end."""

    class MonitorCallback(_import_base("trainer")):  # type: ignore[misc]
        def on_train_begin(self, args, state, control, **kwargs):
            monitor.watch()  # a second train() comes after the end of the first

        def on_step_begin(self, args, state, control, **kwargs):
            monitor.at_step(state.global_step + 1)

        def on_step_end(self, args, state, control, **kwargs):
            monitor.end_step()

        def on_train_end(self, args, state, control, **kwargs):
            monitor.close()

    return MonitorCallback()


def lightning_callback(monitor: Monitor) -> Any:
    """Returns a Lightning `Callback` for a monitor: its steps, its end, and its loggers where `log` is None."""

    class MonitorCallback(_import_base("lightning")):  # type: ignore[misc]
        def on_train_start(self, trainer, module):
            monitor.watch()
            monitor.use_loggers(trainer.loggers)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            monitor.at_step(trainer.global_step + 1)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            monitor.end_step()

        def on_train_end(self, trainer, module):
            monitor.close()

    return MonitorCallback()


def clip_trainer_callback(clip: QKClip) -> Any:
    """Returns a `transformers.TrainerCallback` that clips after each optimizer step."""

    class QKClipCallback(_import_base("trainer")):  # type: ignore[misc]
        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            clip.follow(optimizer)
            clip.step()

        def on_train_end(self, args, state, control, **kwargs):
            clip.close()

    return QKClipCallback()


def clip_lightning_callback(clip: QKClip) -> Any:
    """Returns a Lightning `Callback` that clips after each optimizer step; accumulated batches are no step."""

    class QKClipCallback(_import_base("lightning")):  # type: ignore[misc]
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
