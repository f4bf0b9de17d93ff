"""Kinds of transformers models fresh from their configurations, tiny, which must get notes at most."""

from __future__ import annotations

import torch

from benchmarks.calibration.record import Outcome
from regard.health import examine

SIZES = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, vocab_size=300, d_model=64,
    n_embd=64, n_layer=3, n_head=4, num_layers=3, num_heads=4, d_ff=128, d_kv=16, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, ffn_dim=128,
    dim=64, hidden_dim=128, n_layers=3, n_heads=4, max_position_embeddings=128, n_positions=128, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, head_dim=16, num_key_value_heads=2, embedding_size=64,
    word_embed_proj_dim=64, kv_channels=16, type_vocab_size=2,
)  # fmt: skip
CAUSAL = [
    "GPT2",
    "GPTNeo",
    "GPTJ",
    "GPTNeoX",
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Phi",
    "OPT",
    "Bloom",
    "StableLm",
    "Olmo",
    "Starcoder2",
    "Falcon",
    "Cohere",
    "Granite",
    "BioGpt",
    "CodeGen",
    "XGLM",
    "Olmo2",
    "Phi3",
]
MASKED = [
    "Bert",
    "Roberta",
    "Electra",
    "Albert",
    "DistilBert",
    "Camembert",
    "MPNet",
    "ModernBert",
    "XLMRoberta",
    "ConvBert",
]
SEQ2SEQ = ["T5", "Bart", "MBart", "Pegasus", "Marian"]


def fresh_models() -> list[Outcome]:
    """An examination of each kind that this version of transformers has."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    outcomes = []
    names = [*((n, "ForCausalLM") for n in CAUSAL), *((n, "ForMaskedLM") for n in MASKED)]
    names += [(n, "ForConditionalGeneration") for n in SEQ2SEQ]
    for name, suffix in names:
        config_class = getattr(transformers, f"{name}Config", None)
        wanted = [f"{name}{suffix}", f"{name}LMHeadModel", f"{name}MTModel"]
        model_class = next((one for n in wanted if (one := getattr(transformers, n, None))), None)
        if config_class is None or model_class is None:
            continue
        torch.manual_seed(0)
        try:
            model = model_class(config_class(**SIZES)).eval()
            ids = torch.randint(3, 300, (6, 64))
            batch = dict(input_ids=ids)
            if suffix == "ForConditionalGeneration":
                batch["decoder_input_ids"] = ids.roll(1, 1)
            report = examine(model, [batch], ablate=False)
        except Exception as error:  # sizes that this kind does not take
            print(f"{name}: left out: {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        grave = sorted({one.kind for one in report.findings if one.severity != "note"})
        notes = sorted({one.kind for one in report.findings if one.severity == "note"})
        outcomes.append(Outcome(name, "fresh", 1, grave, notes))
        print(outcomes[-1], flush=True)
    return outcomes
