"""The Mamba layers of a hybrid do not get the attention mask: left padding runs through convolution and state."""

from museum.unseen.parts import blocks_text, fit_lm, kept, pad_rows, tiny

LINK = "huggingface/transformers#31540"
SYMPTOM = "Batched generation with left padding gives other tokens than the same prompts alone."
NEEDS = ("padding",)


def bamba():
    return tiny(
        "BambaConfig",
        "BambaForCausalLM",
        num_hidden_layers=3,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=16,
        tie_word_embeddings=False,
    )


@kept
def weights():
    return fit_lm(bamba(), 600, 3e-3).state_dict()


def batches():
    out = []
    for seed in (51, 52):
        ids, mask = pad_rows(blocks_text(3, 32, seed), [32, 23, 18], side="left")
        out.append({"input_ids": ids, "attention_mask": mask})
    return out


def sound():
    model = bamba()
    model.load_state_dict(weights())
    return model.eval(), batches(), {}


def make():
    model, data, options = sound()

    def without(module, args, kwargs):
        return args, {**kwargs, "attention_mask": None}

    for layer in model.model.layers:
        if getattr(layer, "mamba", None) is not None:
            layer.mamba.register_forward_pre_hook(without, with_kwargs=True)
    return model, data, options
