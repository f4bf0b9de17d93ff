"""Watches the attention heads of a LightningModule's model while a Lightning Trainer fits it.

python examples/lightning_module.py --max_steps 60

The monitor is given the module that `training_step` calls, and takes its steps from the Trainer through
`monitor.lightning_callback()`. Needs `pip install lightning`.
"""

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

import regard


class LanguageModel(nn.Module):
    def __init__(self, layers, heads, width, length):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class LitLanguageModel(L.LightningModule):
    def __init__(self, **sizes):
        super().__init__()
        self.model = LanguageModel(**sizes)

    def training_step(self, batch, batch_idx):
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(args):
    L.seed_everything(0, verbose=False)
    ids = torch.tensor(list(args.data.read_bytes()))
    loader = DataLoader(ids.unfold(0, args.length + 1, 8), batch_size=8, shuffle=True)
    task = LitLanguageModel(layers=args.layers, heads=args.heads, width=args.width, length=args.length)
    rows = []  # or log=a TensorBoard writer, a wandb run, a path
    monitor = regard.Monitor(task.model, every=args.every, log=rows.append, heads=True, budget=1.0)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=args.max_steps, max_epochs=-1, callbacks=[monitor.lightning_callback()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, loader)

    for step in range(1, args.max_steps + 1, args.every):
        entropy = [row["entropy_ratio"] for row in rows if "head" in row and row["step"] == step]
        print(f"step {step}: entropy ratio of {len(entropy)} heads {min(entropy):.3f} to {max(entropy):.3f}")
    print(f"train_loss {trainer.callback_metrics['train_loss']:.3f} after {trainer.global_step} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__), help="text to train on; default: this file")
    for name, default in dict(layers=2, heads=4, width=64, length=64, max_steps=40, every=10).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # few workers, no logger
    main(parser.parse_args())
