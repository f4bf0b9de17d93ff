"""`encoder_attention_mask = None` in the decoder's forward: cross-attention sees the source's padding."""

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import PAD, VOCAB, blocks_text, fit, kept, pad_rows, seeded

LINK = "huggingface/transformers#47946"
SYMPTOM = "GPT2Model discards the encoder's mask: padding of the source takes part in cross-attention."
NEEDS = ("padding", "encoder_attention_mask", "encoder's mask", "cross")


class Captioner(nn.Module):
    """A small BERT-like encoder and GPT-2 with cross-attention: copies the source."""

    drops = False

    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

        source = BertConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        target = GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=128,
            add_cross_attention=True,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=2,
            eos_token_id=3,
        )
        source._attn_implementation = target._attn_implementation = "eager"
        self.encoder, self.decoder = BertModel(source, add_pooling_layer=False), GPT2LMHeadModel(target)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        memory = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = None if self.drops else attention_mask
        return self.decoder(
            input_ids=decoder_input_ids, encoder_hidden_states=memory, encoder_attention_mask=mask
        ).logits


class Dropping(Captioner):
    drops = True


def batch(seed, rows=4):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 17, (rows,), generator=g).tolist()
    ids, mask = pad_rows(blocks_text(rows, 16, seed), lengths)
    target = torch.cat([torch.full((rows, 1), 2), ids[:, :-1]], 1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}


def loss(model, step):
    one = batch(3000 + step, 8)
    return F.cross_entropy(model(**one).flatten(0, 1), one["input_ids"].flatten(), ignore_index=PAD)


@kept
def weights():
    return fit(seeded(Captioner), loss, 500, 3e-3).state_dict()


def build(cls):
    model = seeded(cls)
    model.load_state_dict(weights())
    return model.eval(), [batch(1), batch(2)], {}


def make():
    return build(Dropping)


def sound():
    return build(Captioner)
