"""Trainer callbacks that give a monitor the trainer's steps and close it when training ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.health.monitor import Monitor


def trainer_callback(monitor: Monitor) -> Any:
    """A `transformers.TrainerCallback` for this monitor."""
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError as error:
        raise ImportError('trainer_callback needs transformers: pip install "regard[hf]"') from error

    class MonitorCallback(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            monitor.at_step(state.global_step + 1)

        def on_train_end(self, args, state, control, **kwargs):
            monitor.close()

    return MonitorCallback()


def lightning_callback(monitor: Monitor) -> Any:
    """A Lightning `Callback` for this monitor."""
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as error:
        raise ImportError("lightning_callback needs lightning: pip install lightning") from error

    class MonitorCallback(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            monitor.at_step(trainer.global_step + 1)

        def on_train_end(self, trainer, module):
            monitor.close()

    return MonitorCallback()
