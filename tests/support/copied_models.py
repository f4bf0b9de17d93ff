"""nn.DataParallel over two devices on a machine that has none: copies as torch makes them, each in a thread."""

import threading

import torch
from torch import nn


class Copied(nn.DataParallel):
    """Its second device is `meta`, or the CPU too; outputs of copies on `meta` do not come back."""

    def __init__(self, module, second="meta"):
        super().__init__(module)
        self.device_ids, self.devices = [0, 1], ["cpu", second]

    def forward(self, x):
        outputs, grad = [], torch.is_grad_enabled()

        def run(device, part):
            with torch.set_grad_enabled(grad):
                outputs.append(replica(self.module, device)(part.to(device)))

        for pair in zip(self.devices, x.chunk(2), strict=True):
            thread = threading.Thread(target=run, args=pair)
            thread.start()
            thread.join()
        return torch.cat([output for output in outputs if not output.is_meta])


def replica(module, device):
    """As torch.nn.parallel.replicate makes it: a shallow copy that shares hooks, its weights no parameters."""
    copy = module._replicate_for_data_parallel()
    copy._former_parameters = {}
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else replica(child, device)
    for name, parameter in module._parameters.items():
        if parameter is None:
            copy._parameters[name] = None
        else:
            copy._former_parameters[name] = parameter.to(device).view_as(parameter)
            setattr(copy, name, copy._former_parameters[name])
    return copy
