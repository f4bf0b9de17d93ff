"""candle's T5: the relative position bias of a decoding step does not take the cache into account."""

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from museum.unseen.parts import VOCAB, blocks_text, fit, kept, seeded

LINK = "huggingface/candle#899"
SYMPTOM = (
    "With the KV cache on, T5 generates other text: the query of every step is biased as if it were at position 0."
)
NEEDS = ("bias", "position", "distance")


class Forgets(T5Attention):
    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        return super().compute_bias(query_length, key_length, device=device, past_seen_tokens=0)


def new():
    config = T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=0,
    )
    return seeded(lambda: T5ForConditionalGeneration(config))


def batch(seed, rows=8):
    ids = blocks_text(
        rows, 20, seed, 4, 4
    )  # the target repeats itself: the self-attention of the decoder needs distances
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@kept
def weights():
    return fit(new(), lambda m, s: m(**batch(1000 + s)).loss, 350, 4e-3).state_dict()


def build(bug):
    model = new()
    model.load_state_dict(weights())
    if bug:
        model.decoder.block[0].layer[0].SelfAttention.__class__ = Forgets
    return model.eval(), [batch(5, 4), batch(6, 4)], {}


def make():
    return build(True)


def sound():
    return build(False)
