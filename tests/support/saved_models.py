"""Tiny transformers models in folders, saved as people save them, and command lines that must fail on such."""

from regard.cli import main

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
        import transformers

        (path / "vocab.txt").write_text("\n".join(WORDS))
        transformers.BertTokenizer(vocab=str(path / "vocab.txt")).save_pretrained(path)
    return path


def bert():
    import transformers

    return transformers.BertModel(transformers.BertConfig(**SIZE))


def refused(capsys, *arguments, words):
    """Run a command line that must fail: nothing on standard output, one line on the other, no report."""
    capsys.readouterr()  # transformers writes a progress bar where a test saves a model
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert words in captured.err
    assert "\x1b" not in captured.err
