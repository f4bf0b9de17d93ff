"""Small transformers models of many families, made from their configurations, with a batch for each."""

import os

import torch
import transformers
from transformers import AutoConfig, AutoModel

os.environ.setdefault("REGARD_HF_CHECK", "0")  # tests/test_hf_check.py alone runs the self-check

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)
ROPE = dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16,
              patch_size=4)  # fmt: skip
SIDES = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=3)  # fmt: skip

DECODERS = {
    "llama": {**SMALL, **ROPE},
    "mistral": {**SMALL, **ROPE, "sliding_window": 5},
    "qwen2": {**SMALL, **ROPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {**SMALL, **ROPE},
    "gemma2": {**SMALL, **ROPE, "sliding_window": 6, "attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SMALL, **ROPE, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "olmo2": {**SMALL, **ROPE},
    "phi3": {**SMALL, **ROPE},
    "cohere": {**SMALL, **ROPE},
    "granite": {**SMALL, **ROPE, "attention_multiplier": 0.2},
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=64, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": {**SMALL, "max_position_embeddings": 64},
    "opt": dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60,
                max_position_embeddings=64, word_embed_proj_dim=32),
    "gpt_oss": {**SMALL, **ROPE, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6,
                "rope_parameters": None},
    "deepseek_v3": {**SMALL, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "max_position_embeddings": 64},
}  # fmt: skip
ENCODERS = {
    "bert": SMALL,
    "roberta": {**SMALL, "max_position_embeddings": 64},
    "electra": {**SMALL, "embedding_size": 32},
    "modernbert": {**SMALL, "local_attention": 6, "max_position_embeddings": 64, "global_attn_every_n_layers": 2},
}
SEEING = {"vit": VISION, "dinov2": VISION, "siglip_vision_model": VISION, "clip_vision_model": VISION, "deit": VISION}
TWO_SIDED = {
    "t5": dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=60, decoder_start_token_id=0),
    "bart": dict(**SIDES, vocab_size=60, max_position_embeddings=64),
}
WHISPER = dict(**SIDES, vocab_size=60, num_mel_bins=8, max_source_positions=20, max_target_positions=30)


def all_names() -> list[str]:
    return [*DECODERS, *ENCODERS, *SEEING, *TWO_SIDED, "whisper"]


def tokens(*shape):
    return torch.randint(4, 60, shape)


def padded(batch=3, length=13, side="right"):
    """Returns token ids with padding of 0, 3, 6, … tokens on one side."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        cut = 3 * row
        mask[row, slice(length - cut, None) if side == "right" else slice(0, cut)] = 0
    return dict(input_ids=tokens(batch, length) * mask, attention_mask=mask)


def make_model(name, kind=AutoModel, **more):
    """Returns a small model of that family in evaluation mode."""
    sizes = next((group[name] for group in (DECODERS, ENCODERS, SEEING, TWO_SIDED) if name in group), WHISPER)
    special = {} if name in SEEING else SPECIAL
    config = AutoConfig.for_model(name, **{**special, **sizes, **more})
    kind = transformers.AutoModel if kind is None else kind
    model = kind.from_config(config)
    if name == "gpt_oss":
        model.set_experts_implementation("eager")
        for layer in model.modules():
            if hasattr(layer, "sinks"):
                torch.nn.init.normal_(layer.sinks)
    return sharpen(model).eval()


def make_batch(name, side="right"):
    """Returns inputs: padded text, images or sounds."""
    if name in SEEING:
        return dict(pixel_values=torch.randn(2, 3, 16, 16))
    if name == "whisper":
        return dict(input_features=torch.randn(2, 8, 40), decoder_input_ids=tokens(2, 9))
    batch = padded(side=side)
    return dict(batch, decoder_input_ids=tokens(3, 7)) if name in TWO_SIDED else batch


def sharpen(model):
    """Multiplies the weights of queries and keys, so that rows are of every kind: from flat to nearly one-hot."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and any(part in name for part in ("query", "q_proj", "c_attn", ".q.", "qkv", "q_b")):
                weight.mul_(2.0 if ".0." in name else 12.0)
    return model


def text_rows(batch, hidden):
    """Returns the rows of `hidden` [B, M, C] that are no padding."""
    mask = batch.get("attention_mask")
    return hidden.flatten(0, 1) if mask is None or "decoder_input_ids" in batch else hidden[mask.bool()]
