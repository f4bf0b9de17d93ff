"""nnsight's LanguageModel left-pads several prompts and gives GPT-2 no position_ids."""

from torch import nn

from museum.unseen.parts import VOCAB, blocks_text, fit_lm, kept, pad_rows, seeded

LINK = "ndif-team/nnsight#673"
SYMPTOM = "Prompts shorter than the longest of the batch are mispredicted: their positions begin at the padding."
NEEDS = ("position",)


class LanguageModel(nn.Module):
    supply = False

    def __init__(self):
        super().__init__()
        import transformers

        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=2,
            eos_token_id=3,
            pad_token_id=0,
        )
        config._attn_implementation = "sdpa"
        self._model = transformers.GPT2LMHeadModel(config)

    def forward(self, input_ids, attention_mask=None):
        more = {}
        if self.supply and attention_mask is not None:
            more["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return self._model(input_ids=input_ids, attention_mask=attention_mask, **more)


class Supplied(LanguageModel):
    supply = True


@kept
def weights():
    return fit_lm(seeded(LanguageModel), 350, 3e-3, lambda seed: blocks_text(8, 24, seed, 4, 6)).state_dict()


def build(cls):
    model = seeded(cls)
    model.load_state_dict(weights())
    batches = []
    for at in range(2):
        ids, mask = pad_rows(blocks_text(4, 24, 60 + at, 4, 6), [24, 19, 15, 21], "left")
        batches.append({"input_ids": ids, "attention_mask": mask})
    return model.eval(), batches, {}


def make():
    return build(LanguageModel)


def sound():
    return build(Supplied)
