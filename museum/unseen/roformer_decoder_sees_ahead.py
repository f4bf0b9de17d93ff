"""RoFormerForCausalLM with is_decoder=True builds a bidirectional mask; trained so, its loss collapses."""

import torch

from museum.unseen.parts import fit_lm, kept, lm_batches, tiny

LINK = "huggingface/transformers#48745"
SYMPTOM = "RoFormer, BigBird, RemBert and MegatronBert ForCausalLM attend to future tokens since v5.9.0."
NEEDS = ("future", "later token", "causal", "sees ahead")


def roformer(causal):
    model = tiny("RoFormerConfig", "RoFormerForCausalLM", is_decoder=True, embedding_size=64, use_cache=False,
                 hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    if not causal:

        def all_visible(module, args, kwargs):
            ids = kwargs.get("input_ids", args[0] if args else None)
            mask = kwargs.get("attention_mask")
            past = kwargs.get("past_key_values")
            keys = ids.shape[1] + (past.get_seq_length() if past is not None else 0)
            shown = torch.ones(len(ids), keys) if mask is None else mask
            hidden = (1.0 - shown[:, None, None, :].float()).expand(-1, 1, ids.shape[1], -1)
            return args, {**kwargs, "attention_mask": hidden * torch.finfo(torch.float32).min}

        model.roformer.register_forward_pre_hook(all_visible, with_kwargs=True)
    return model


@kept
def bad_weights():
    return fit_lm(roformer(False), 400, 3e-3).state_dict()


@kept
def good_weights():
    return fit_lm(roformer(True), 600, 3e-3).state_dict()


def build(causal, weights):
    model = roformer(causal)
    model.load_state_dict(weights())
    return model.eval(), lm_batches(), {}


def make():
    return build(False, bad_weights)


def sound():
    return build(True, good_weights)
