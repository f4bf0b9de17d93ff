"""A loss for every model, whatever the way in; and no way in finds less than ids alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.health import checks
from regard.health.checks import NotApplicable
from regard.health.examine import evaluation_mode
from regard.health.probe.task import GIVEN, LABELS, MASKED, NEXT, VISIBLE
from regard.health.probe.trial import Trial
from regard.health.tokens.forms import form_of_parts

WORDS = 40


def ids(rows=4, length=40, seed=0):
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """Logits of the next token: causal attention by hand, seeing the future or not."""

    def __init__(self, leaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.Linear(16, WORDS)
        self.leaks = leaks

    def logits(self, x):
        x = self.embedding(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        shown = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        scores = (q @ k.mT / 4).masked_fill(~(shown if self.leaks else shown.tril()), -torch.inf)
        return self.head(x + scores.softmax(-1) @ v)

    def forward(self, ids):
        return self.logits(ids)


class WithTargets(Model):
    def forward(self, idx, targets=None):
        logits = self.logits(idx)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Moving(Model):
    """Moves labels by one itself, as transformers does."""

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return dict(loss=loss, logits=logits)


class Masked(Model):
    def forward(self, input_ids, mask=None):
        assert mask is None or bool(((mask == 0) | (mask == 1)).all())
        return self.logits(input_ids)


class BertForMaskedLM(Model):
    """Named as transformers' are; nobody knows its mask token."""


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 3)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


class Translator(nn.Module):
    """A sound nn.Transformer over two texts; its decoder is causal."""

    def __init__(self, reads=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.reads = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS), reads
        self.core = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, src, tgt):
        order = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        source = self.embedding(src) * (1.0 if self.reads else 0.0)
        return self.head(self.core(source, self.embedding(tgt), tgt_mask=order))


def shifted(rows=4):
    text = ids(rows, 41)
    return text[:, :-1], text[:, 1:]


def trial(model, batches, loss=None, causal=None):
    return Trial(model.eval(), batches, [], [], causal, loss, model, None)


def judge(model, batches, codes=("RG1", "RG2", "RG8"), loss=None, causal=None):
    one, found, skipped = trial(model, batches, loss, causal), {}, {}
    with evaluation_mode(list(model.named_modules())), torch.no_grad(), one.probe.active():
        for module in filter(checks.runs_model, checks.modules()):
            if any(rule.code.startswith(codes) for rule in module.RULES):
                try:
                    found |= {finding.code: finding for finding in module.check(one)}
                except NotApplicable as reason:
                    skipped[module.RULES[0].code] = str(reason)
    left = {rule.code: str(reason) for rule, reason in one.skipped if rule.code.startswith(codes)}
    return found, skipped | left


def losses_of(model, batches, loss=None):
    one = trial(model, batches, loss)
    with torch.no_grad(), one.probe.active():
        return one.task.kind, one.losses, one.token_reading


def mean_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    ("model", "batch", "loss", "kind"),
    [
        (Model(), ids(), None, NEXT),
        (WithTargets(), shifted(), None, LABELS),
        (Model(), shifted(), None, LABELS),
        (Masked(), shifted(), None, LABELS),
        (Model(), shifted(), mean_loss, GIVEN),
        (Moving(), dict(input_ids=ids(), labels=ids()), None, LABELS),
        (Classifier(), (ids(), torch.tensor([0, 1, 2, 1])), None, LABELS),
        (BertForMaskedLM(), ids(), None, VISIBLE),
    ],
)
def test_one_loss_per_row(model, batch, loss, kind):
    found, losses, reading = losses_of(model, [batch], loss)
    assert found == kind and losses.shape == (4,) and bool(losses.isfinite().all())
    assert reading.tokens > 0 and reading.unigram is not None


def test_the_mask_token_is_the_tokenizers():
    one = trial(BertForMaskedLM(), [ids()])
    one.tokenizer = type("Tokenizer", (), dict(mask_token_id=2))()
    with torch.no_grad(), one.probe.active():
        assert one.task.kind == MASKED


def test_labels_of_a_row_alone_are_those_of_its_batch():
    text = shifted()
    own = [mean_loss(Model().eval(), (x[None], y[None])).item() for x, y in zip(*text, strict=True)]
    for model, batch, loss in ((Model(), text, None), (Model(), text, mean_loss), (WithTargets(), text, None)):
        assert losses_of(model, [batch], loss)[1].tolist() == pytest.approx(own, rel=1e-4)


@pytest.mark.parametrize("reads", [True, False])
def test_two_texts_are_changed_each_alone(reads):
    pairs = [(ids(2, 30), ids(2, 20, 1)), dict(src=ids(2, 30), tgt=ids(2, 20, 1))]
    for batch in pairs:
        found, skipped = judge(Translator(reads), [batch], causal=True)
        assert set(found) == (set() if reads else {"RG801"}) and "RG101" not in skipped


def test_what_ids_alone_find_labels_and_a_loss_find_too():
    x, y = shifted(8)
    ways = [
        (Model(leaks=True), x, None), (WithTargets(leaks=True), (x, y), None), (Model(leaks=True), (x, y), mean_loss),
        (Moving(leaks=True), dict(input_ids=x, labels=x), None),
    ]  # fmt: skip
    for model in (one for one, _, _ in ways):
        model.head.weight.data *= 20  # sure of itself, and wrong
    found = [set(judge(way[0], [way[1]], loss=way[2], causal=True)[0]) for way in ways]
    assert {"RG101", "RG802"} <= found[0] and all(found[0] <= more for more in found[1:])


def test_next_tokens_as_labels_say_that_the_model_is_causal():
    found, _ = judge(Model(leaks=True), [shifted()], ("RG101",))
    assert "its labels are the next tokens" in found["RG101"].evidence
    assert "RG101" in judge(Model(leaks=True), [ids()], ("RG101",))[1]


def test_labels_moved_twice_or_not_at_all():
    x, y = shifted()
    assert "i + 2" in judge(Moving(), [dict(input_ids=x, labels=y)], ("RG803",), causal=True)[0]["RG803"].evidence
    found = judge(WithTargets(), [(x, x)], ("RG803",), causal=True)[0]
    assert "which it reads" in found["RG803"].evidence
    assert not judge(Moving(), [dict(input_ids=x, labels=x)], ("RG803",), causal=True)[0]
    assert not judge(WithTargets(), [(x, y)], ("RG803",), causal=True)[0]


class Counting(nn.Module):
    """A trained model of the text 3, 4, 5, …: its row i predicts the token at i + `ahead`."""

    def __init__(self, ahead):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(9.0 * torch.eye(WORDS).roll(ahead, 1))

    def forward(self, ids):
        return self.embedding(ids)


def test_the_token_that_a_trained_model_predicts():
    text = (torch.arange(40) + torch.tensor([[0], [7], [19], [23]])) % WORDS
    for ahead in (0, 1, 2):
        found, _ = judge(Counting(ahead), [text], ("RG803",), causal=True)
        assert set(found) == (set() if ahead == 1 else {"RG803"})


def test_labels_that_are_all_ignored():
    labels = torch.full((4, 40), -100)
    found, _ = judge(Moving(), [dict(input_ids=ids(), labels=labels)], ("RG803",))
    assert "every batch are −100" in found["RG804"].evidence


def test_classes_and_constant_outputs():
    model = Classifier()
    labels = model(ids()).argmin(-1)
    found, skipped = judge(model, [(ids(), labels)], ("RG805", "RG806"))
    assert not skipped and not {one.code for one in found.values() if one.severity != "note"}
    model.head.weight.data *= 50
    labels = model(ids()).argmin(-1)
    assert judge(model, [(ids(), labels)], ("RG805",))[0]["RG805"].severity == "critical"
    model.head.weight.data.zero_()
    assert "RG806" in judge(model, [(ids(), labels)], ("RG806",))[0]
    assert not judge(nn.Flatten(), [torch.randn(2, 3, 4)], ("RG806",))[0]
    model.head.weight.data.fill_(torch.nan)  # NaN in every row is no proof that rows are alike
    found, skipped = judge(model, [(ids(), labels)], ("RG806",))
    assert not found and skipped["RG806"] == "the output is not finite"


def test_too_little_text_is_said():
    _, skipped = judge(Model(), [torch.arange(240).view(6, 40) % WORDS], ("RG802",), causal=True)
    assert skipped["RG802"].startswith("too little text")


def test_the_form_of_a_tuple():
    x, y = shifted()
    assert form_of_parts((x, y), Masked()).apart and form_of_parts((x, torch.ones_like(x)), Masked()).labels is None
    assert form_of_parts((x, y), WithTargets()).labels == 1 and not form_of_parts((x, y), WithTargets()).apart
    assert form_of_parts((x, y), Translator()).decoder == 1
