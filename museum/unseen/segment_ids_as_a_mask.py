"""axolotl's multipack: with sdpa the segment ids stay in attention_mask, transformers casts them to bool."""

import torch
import transformers

from museum.unseen.parts import SIZES, blocks_text, llama_weights, seeded

LINK = "axolotl-ai-cloud/axolotl#3796"
SYMPTOM = "Documents packed in one row attend to one another with sdpa and eager."
NEEDS = ("document", "packed", "packing", "segment")


class Packed(transformers.LlamaForCausalLM):
    drop = False

    def forward(self, input_ids, attention_mask=None, position_ids=None, **more):
        if self.drop and position_ids is not None:
            attention_mask = None  # transformers then reads the documents from position_ids
            more["use_cache"] = False
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)


class Dropped(Packed):
    drop = True


def build(cls):
    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "sdpa"
    model = seeded(lambda: cls(config))
    model.load_state_dict(llama_weights())
    batches = []
    for at in range(3):
        parts = [blocks_text(1, n, 300 + 10 * at + i) for i, n in enumerate((17, 14, 19))]
        batches.append(
            {
                "input_ids": torch.cat(parts, 1),
                "attention_mask": torch.cat([torch.full_like(p, i + 1) for i, p in enumerate(parts)], 1),
                "position_ids": torch.cat([torch.arange(p.shape[1])[None] for p in parts], 1),
            }
        )
    return model.eval(), batches, {}


def make():
    return build(Packed)


def sound():
    return build(Dropped)
