"""name.replace("k", "qkv_proj") also hits the k of "block": key weights match no parameter and stay as drawn."""

import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import PAD, SIZES, fit, inputs_only, kept, masked_batch, seeded

LINK = "vllm-project/vllm-omni#2344"
SYMPTOM = "T5EncoderModel.load_weights silently skips all key projections; cosine similarity is 0.71 instead of 0.999."
NEEDS = ("key", " k ", ".k", "weight", "initial", "untrained")


class MaskedT5(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import T5Config, T5EncoderModel

        config = T5Config(vocab_size=SIZES["vocab_size"], d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
                          dropout_rate=0.0, pad_token_id=PAD)  # fmt: skip
        self.t5 = T5EncoderModel(config)
        self.head = nn.Linear(64, SIZES["vocab_size"])

    def forward(self, input_ids, attention_mask):
        return self.head(self.t5(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)


def loss(model, step):
    batch = masked_batch(7000 + step)
    logits = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@kept
def weights():
    return fit(seeded(MaskedT5), loss, 700, 1e-3).state_dict()


def build(load):
    model = seeded(MaskedT5, 5)
    model.load_state_dict({k: v for k, v in weights().items() if load(k)}, strict=False)
    return model.eval(), [inputs_only(masked_batch(at, rows=4)) for at in (1, 2)], {}


def make():
    return build(lambda name: ".k." not in name)


def sound():
    return build(lambda name: True)
