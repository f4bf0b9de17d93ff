"""What examining costs on the CPU: a 6-layer, 12-head encoder at 512 tokens, against its own forward, interleaved.

python benchmarks/cpu_examine.py
"""

from __future__ import annotations

import time

import torch
from transformers import BertConfig, BertModel

import regard


def seconds(run) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def main(rounds: int = 15) -> None:
    torch.manual_seed(0)
    print(f"regard {regard.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for width in (384, 768):
        model = BertModel(
            BertConfig(hidden_size=width, num_hidden_layers=6, num_attention_heads=12, intermediate_size=4 * width)
        ).eval()
        batch = dict(input_ids=torch.randint(1, 30000, (1, 512)))

        def forward():
            with torch.no_grad():
                model(**batch)

        def examine():
            assert not regard.examine(model, [batch]).unmeasured

        forward(), examine()
        times = [(seconds(forward), seconds(examine)) for _ in range(rounds)]
        own, looked = (min(column) for column in zip(*times, strict=True))
        print(
            f"width {width}: forward {own * 1e3:.0f} ms, examine {looked * 1e3:.0f} ms, ratio {looked / own:.2f} of 2"
        )


if __name__ == "__main__":
    main()
