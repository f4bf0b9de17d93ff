"""What `regard examine parallel_subject:subject` examines: a small encoder and seven batches of unequal sizes."""

import os
import time

import torch


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=48, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if os.environ.get("PARALLEL_SUBJECT") == "dies" and os.environ.get("RANK") == "1" and self.calls == 2:
            os._exit(9)
        if os.environ.get("PARALLEL_SUBJECT") == "fails" and x.shape[1] == 13:
            raise RuntimeError("batch of 13")
        if os.environ.get("PARALLEL_SUBJECT"):
            time.sleep(0.05)
        return self.body(x)


def subject():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # products round by the number of threads
    model = Encoder().eval()
    return model, [torch.randn(2, 9 + n, 32) for n in range(7)]
