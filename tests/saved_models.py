"""Tiny transformers models in folders, with a word-piece tokenizer of single letters, saved as people save them."""

import transformers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS)]
SIZE = dict(
    vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip


def save(model, path, tokenizer=True):
    """The model's folder."""
    path.mkdir(exist_ok=True)
    model.save_pretrained(path)
    if tokenizer:
        (path / "vocab.txt").write_text("\n".join(WORDS))
        transformers.BertTokenizer(vocab=str(path / "vocab.txt")).save_pretrained(path)
    return path


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZE))
