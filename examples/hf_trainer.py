"""Watches the attention heads of a transformers model while its Trainer trains it.

python examples/hf_trainer.py --max_steps 40

The monitor takes its steps from the Trainer through `monitor.trainer_callback()`, so gradient accumulation counts as
one step. Needs `pip install 'regard[hf]' accelerate`. The model is a small Llama with random weights: no download.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import regard


def make_dataset(path, length):
    """Returns the bytes of a file in windows of `length`, as a Trainer takes them."""
    ids = torch.tensor(list(path.read_bytes()))
    return [{"input_ids": window, "labels": window} for window in ids.unfold(0, length, length // 4)]


def main(args):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=2 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads // 2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = []  # or log=a TensorBoard writer, a wandb run, a path
    monitor = regard.Monitor(model, every=args.every, log=rows.append, heads=True, budget=1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=args.max_steps, per_device_train_batch_size=4, learning_rate=3e-3,
            gradient_accumulation_steps=2, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=make_dataset(args.data, args.length), callbacks=[monitor.trainer_callback()]
        )
        loss = trainer.train().training_loss

    print(f"mean loss {loss:.3f} over {monitor.steps} steps; {monitor.samples} of them measured")
    step = rows[-1]["step"]
    print(f"{f'step {step}':32}  entropy ratio  largest weight  largest logit")
    for row in [row for row in rows if row["step"] == step and "head" in row]:
        name = f"{row['layer']} head {row['head']}"
        print(f"{name:32}  {row['entropy_ratio']:13.3f}  {row['max_weight']:14.3f}  {row['max_logit']:13.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__), help="text to train on; default: this file")
    for name, default in dict(layers=2, heads=4, width=64, length=64, max_steps=20, every=5).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    main(parser.parse_args())
