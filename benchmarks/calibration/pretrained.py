"""Pretrained models from folders with a configuration and weights, examined on pieces of text in their own language."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.calibration.record import Outcome
from regard.health import examine

REACTIONS = (
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1 OC(=O)c1ccccc1.CO>>COC(=O)c1ccccc1 "
    "Brc1ccccc1.OB(O)c1ccncc1>>c1ccc(-c2ccncc2)cc1 CCOC(=O)C=C.C1CCNC1>>CCOC(=O)CCN1CCCC1 "
    "O=Cc1ccco1.NCCO>>OCCNCc1ccco1 CN(C)C=O.O=S(Cl)Cl.OC(=O)CCl>>O=C(Cl)CCl "
)


def examine_pretrained(folders: Sequence[Path], texts: int = 4) -> list[Outcome]:
    """Examinations of each checkpoint on several pieces of text; chemistry where its name says reactions."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    outcomes = []
    for folder in folders:
        model = load(transformers, folder).eval()
        tokenize = make_tokenizer(folder)
        sample = REACTIONS * 20 if "rxn" in str(folder) else Path(__file__).read_text(encoding="utf-8") * 4
        for number in range(texts):
            text = sample[number * 97 :]
            ids = torch.tensor([tokenize(text[at * 211 :])[:96] for at in range(4)])
            report = examine(model, [dict(input_ids=ids, attention_mask=torch.ones_like(ids))], ablate=False)
            grave = sorted({one.kind for one in report.findings if one.severity != "note"})
            notes = sorted({one.kind for one in report.findings if one.severity == "note"})
            outcomes.append(Outcome(f"{folder.name}, text {number}", "pretrained", 1, grave, notes))
            print(outcomes[-1], flush=True)
    return outcomes


def load(transformers, folder: Path):
    """The model of a folder; an old configuration that names no kind of model is a BERT's."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "model_type" in config:
        return transformers.AutoModel.from_pretrained(folder)
    return transformers.BertModel.from_pretrained(folder, config=transformers.BertConfig(**config))


def make_tokenizer(folder: Path):
    """A function text → ids: the folder's tokenizer, or greedy pieces of its vocab.txt with [CLS] before."""
    import transformers

    vocabulary = folder / "vocab.txt"
    if (folder / "tokenizer.json").exists() or not vocabulary.exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return lambda text: tokenizer(text)["input_ids"]
    known = {token: at for at, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    longest = max(map(len, known))

    def tokenize(text: str) -> list[int]:
        ids, at = [known.get("[CLS]", 0)], 0
        while at < len(text):
            size = next((n for n in range(longest, 0, -1) if text[at : at + n] in known), 0)
            if size:
                ids.append(known[text[at : at + size]])
            at += size or 1
        return ids

    return tokenize
