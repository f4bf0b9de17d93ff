"""GitForCausalLM shifts the labels and hands them to a loss function that shifts them again."""

import torch
from transformers import GitConfig, GitForCausalLM

from museum.unseen.parts import VOCAB, blocks_text, fit, kept, seeded

LINK = "huggingface/transformers#47394"
SYMPTOM = "Position t is trained to predict token t + 2; each row's last target comes from the next row."
NEEDS = ("shift", "t + 2", "t+2", "two tokens", "second next", "2 tokens")


class Git(GitForCausalLM):
    twice = False

    def forward(self, input_ids=None, pixel_values=None, labels=None, attention_mask=None, **more):
        out = super().forward(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask, **more)
        if labels is not None:
            n = self.git.encoder.layer[0].attention.self.image_patch_tokens
            shifted_logits = out.logits[:, n:-1, :].contiguous()
            labels = labels[:, 1:].contiguous()
            if self.twice:
                out["loss"] = self.loss_function(
                    shifted_logits.view(-1, self.config.vocab_size), labels.view(-1), vocab_size=self.config.vocab_size
                )
            else:
                out["loss"] = self.loss_function(
                    shifted_logits, labels, vocab_size=self.config.vocab_size, shift_labels=labels
                )
        return out


class GitTwice(Git):
    twice = True


def batch(seed, rows=8):
    g = torch.Generator().manual_seed(seed)
    ids = blocks_text(rows, 24, seed, 6, 6)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=g),
        "labels": ids.clone(),
    }


def new(cls):
    config = GitConfig(
        vision_config=dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        ),
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        num_image_with_embedding=None,
    )
    return seeded(lambda: cls(config))


def trained(cls):
    return fit(new(cls), lambda m, s: m(**batch(1000 + s)).loss, 300, 2e-3).state_dict()


@kept
def bad_weights():
    return trained(GitTwice)


@kept
def good_weights():
    return trained(Git)


def build(cls, weights):
    model = new(cls)
    model.load_state_dict(weights)
    return model.eval(), [batch(7, 4), batch(8, 4)], {}


def make():
    return build(GitTwice, bad_weights())


def sound():
    return build(Git, good_weights())
