"""What a mask shows: padding that a batch names, causal masks that are one key off; and which rows count."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

import regard
from regard.health.capture.call import clean_mask, merge_mask_and_bias
from regard.health.measure.query_rows import is_inverted, is_two_sided, padding_of

LENGTH = 12


class Reader(nn.Module):
    """One attention over token ids; `how(attention_mask [B, N])` gives its mask."""

    def __init__(self, how, **options):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.options, self.words = how, options, nn.Embedding(30, 32)

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids).unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, self.how(attention_mask), **self.options)


def batch(left=False):
    text = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [4]])
    text = text.flip(1) if left else text
    return dict(input_ids=torch.randint(30, text.shape), attention_mask=text.long())


def ignored(mask):
    return None


def keys(mask):
    return mask.bool()[:, None, None]


def triangle(over):
    return lambda mask: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(over)


def found(model, given):
    report = regard.examine(model, [given])
    (rows,) = {head.statistics.count("entropy") for head in report.heads}
    return rows, {one.kind: (one.severity, len(one.heads)) for one in report.findings if "scale" not in one.kind}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("how", "options", "sees"),
    [
        (ignored, {}, "both"),
        (keys, {}, "neither"),
        (ignored, dict(is_causal=True), "left"),
        (triangle(0), {}, "left"),
        (lambda mask: keys(mask) & triangle(0)(mask), {}, "neither"),
        (lambda mask: torch.where(keys(mask), 0.0, -1e9), {}, "neither"),
        (lambda mask: torch.zeros(1, 4, 1, LENGTH), {}, "both"),
    ],
)
def test_padding_does_not_count_and_a_layer_that_sees_it_is_reported(how, options, sees, left):
    given = batch(left)
    rows, kinds = found(Reader(how, **options), given)
    assert rows == given["attention_mask"].sum()
    assert ("sees padding" in kinds) == (sees == "both" or (sees == "left" and left))
    if "sees padding" in kinds:
        assert kinds["sees padding"] == ("warning", 4)


def test_a_mask_the_wrong_way_round_is_read_on_the_text():
    """Not on the padding, which alone is seen by anybody: the batch says which is which."""
    rows, kinds = found(Reader(lambda mask: ~keys(mask)), batch())
    assert rows == 7 + 4  # of the two texts with padding; the third sees nothing
    assert kinds["sees padding"] == ("warning", 4)


@pytest.mark.parametrize("length", [LENGTH, 300])
def test_a_mask_beside_torchs_causal_order(length):
    """Where torch takes both, both hide; long calls are held against the model's own output on sampled rows."""
    ids = torch.randint(30, (2, length))
    shown = torch.rand(1, 1, length, length, generator=torch.Generator().manual_seed(1)) < 0.7
    shown |= torch.eye(length, dtype=torch.bool)
    report = regard.examine(Reader(lambda mask: shown, is_causal=True), [dict(input_ids=ids)])
    assert report.unmeasured == []
    both = regard.examine(Reader(lambda mask: shown & torch.ones(length, length).bool().tril()), [dict(input_ids=ids)])
    for head, other in zip(report.heads, both.heads, strict=True):
        assert head.statistics["entropy"].mean == pytest.approx(other.statistics["entropy"].mean, rel=1e-6)


def padded(left=False):
    """The same texts with padding of one id, 29."""
    given = batch(left)
    ids = torch.where(given["attention_mask"].bool(), given["input_ids"] % 29, 29)
    return dict(input_ids=ids, attention_mask=given["attention_mask"])


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("how", [ignored, keys, lambda mask: torch.where(keys(mask), 0.0, -1e9)])
def test_a_batch_that_shows_its_padding_is_reported(how, left):
    given = padded(left)
    assert "mask inverted" not in found(Reader(how), given)[1]
    other = {**given, "attention_mask": 1 - given["attention_mask"]}
    assert found(Reader(how), other)[1]["mask inverted"] == ("warning", 4)


def test_what_may_be_text_is_not_called_padding():
    ids = torch.tensor([[7, 8, 9, 10, 29, 29, 29, 29]])

    def inverted(*shown, ids=ids, pad=None):
        return is_inverted(dict(input_ids=ids, attention_mask=torch.tensor([shown])), pad)

    assert inverted(0, 0, 0, 0, 1, 1, 1, 1) and not inverted(1, 1, 1, 1, 0, 0, 0, 0)
    assert not inverted(1, 0, 0, 0, 0, 0, 0, 0)  # one token is shown: of one id, and no wonder
    assert not inverted(0, 0, 0, 0, 0, 0, 1, 1) and inverted(0, 0, 0, 0, 0, 0, 1, 1, pad=29)
    assert not inverted(0, 0, 0, 1, 1, 1, 1, 1)
    same = torch.full((1, 8), 5)
    assert not inverted(1, 1, 1, 1, 0, 0, 0, 0, ids=same) and not inverted(0, 0, 0, 0, 0, 0, 0, 0)
    assert not is_inverted(ids) and not is_inverted(dict(input_ids=ids))


@pytest.mark.parametrize(
    ("others", "once"),
    [
        ({}, True),
        (dict(bos_token_id=5, eos_token_id=[5, 6]), True),
        (dict(bos_token_id=29), False),
        (dict(eos_token_id=29), False),
        (dict(eos_token_id=[5, 29]), False),
        (dict(decoder_start_token_id=29), False),
    ],
)
def test_an_id_that_also_begins_or_ends_texts_is_padding_if_it_stands_three_times(others, once):
    """One BOS before ids that are left over from a longer text is no inverted mask."""
    model = Reader(keys)
    model.config = SimpleNamespace(pad_token_id=29, **others)

    def told(*ids, shown, texts=1):
        given = dict(input_ids=torch.tensor([ids] * texts), attention_mask=torch.tensor([shown] * texts))
        return "mask inverted" in found(model, given)[1]

    for texts in (1, 3):
        assert told(29, 7, 8, 9, shown=[1, 0, 0, 0], texts=texts) == once
    assert told(7, 8, 9, 29, 29, 29, shown=[0, 0, 0, 1, 1, 1])


def test_what_a_batch_does_not_say_is_not_guessed():
    given = batch()
    whole = {**given, "attention_mask": torch.ones_like(given["attention_mask"])}
    assert found(Reader(ignored), whole) == (3 * LENGTH, {})
    assert padding_of({**given, "pixel_values": torch.zeros(1)}) == []
    assert padding_of({**given, "attention_mask": 2 * given["attention_mask"]}) == []
    assert padding_of({**given, "decoder_input_ids": given["input_ids"]}) == []  # of one shape: which is whose?
    assert (
        padding_of({**given, "labels": given["input_ids"]}, two_sided=True) == padding_of(given, two_sided=True) == []
    )
    (one,) = padding_of({**given, "decoder_input_ids": given["input_ids"][:, :5]}, two_sided=True)
    (same,) = padding_of({**given, "labels": given["input_ids"]})
    assert torch.equal(one, same) and torch.equal(one, given["attention_mask"].bool())
    assert padding_of(given["input_ids"]) == padding_of(len) == []
    for model, both in ((nn.Transformer(8, 2, 1, 1, 8, batch_first=True), True), (Reader(ignored), False)):
        assert is_two_sided(model, (name for name, _ in model.named_modules())) is both


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (triangle(1), ("warning", 4)),
        (triangle(-1), ("note", 4)),
        (triangle(0), None),
        (triangle(2), None),
        (lambda mask: triangle(1)(mask) & triangle(3)(mask).mT, None),  # a band: it looks both ways
        (lambda mask: torch.where(triangle(1)(mask), 0.0, -torch.inf), ("warning", 4)),
        (lambda mask: triangle(1)(mask)[None, None].expand(3, 4, -1, -1) & keys(mask), ("warning", 4)),
    ],
)
def test_a_causal_mask_that_is_one_key_off(how, kind):
    _, kinds = found(Reader(how), batch())
    assert kinds.get("mask off by one") == kind


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (lambda mask: triangle(0)(mask).float(), "mask hides nothing"),
        (lambda mask: (~triangle(0)(mask)).double(), "mask hides nothing"),  # triu(1), for −inf there
        (lambda mask: (triangle(0)(mask) & keys(mask)).float(), "mask hides nothing"),
        (lambda mask: (~(triangle(0)(mask) & keys(mask))).bfloat16(), "mask hides nothing"),
        (lambda mask: keys(mask).float(), "mask hides nothing"),
        (lambda mask: (~keys(mask)).float().expand(-1, 4, LENGTH, -1), "mask hides nothing"),
        (lambda mask: triangle(0)(mask).mT, "mask inverted"),
        (lambda mask: torch.zeros(LENGTH, LENGTH).masked_fill(triangle(-1)(mask), -math.inf), "mask inverted"),
        (lambda mask: triangle(0)(mask).mT & keys(mask), "mask inverted"),
        (triangle(0), None),
        (lambda mask: torch.where(triangle(0)(mask), 0.0, -math.inf), None),
        (lambda mask: torch.where(triangle(0)(mask), 1.0, -math.inf), None),
        (lambda mask: torch.where(keys(mask), 0.0, -1e9), None),
        (lambda mask: torch.ones(1, 1, 1, LENGTH), None),
        (lambda mask: triangle(0)(mask).float() * 0.5, None),
        (lambda mask: torch.eye(LENGTH), None),  # to itself, or to the first: a bias
        (lambda mask: (torch.arange(LENGTH) == 0).float().expand(LENGTH, LENGTH), None),
        (lambda mask: (torch.rand(LENGTH, LENGTH) > 0.5).float(), None),  # a graph's edges
        (lambda mask: -(torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() * torch.ones(4, 1, 1), None),
        (lambda mask: torch.randn(1, 4, LENGTH, LENGTH), None),
    ],
)
def test_a_mask_of_ones_or_transposed_is_reported_and_a_bias_is_not(how, kind):
    _, kinds = found(Reader(lambda mask: _as_words(how(mask))), batch())
    assert {name: kinds[name] for name in kinds if name.startswith("mask")} == ({kind: ("warning", 4)} if kind else {})


def _as_words(mask):
    """In the words' dtype, if it is added."""
    return mask if mask.dtype == torch.bool else mask.float()


@pytest.mark.parametrize("how", ["attention", "padding"])
def test_torchs_own_layers_given_ones_for_true(how):
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1, enable_nested_tensor=False
    )
    x, late = torch.randn(3, LENGTH, 32), torch.ones(LENGTH, LENGTH).triu(1)
    padded = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [7], [4]])
    for ones in (False, True):
        given = (
            (late if ones else late.bool(), None) if how == "attention" else (None, padded.float() if ones else padded)
        )
        report = regard.examine(model, [lambda m, given=given: m(x, *given)])
        assert ("mask hides nothing" in {one.kind for one in report.findings}) == ones


@pytest.mark.parametrize("left", [False, True])
def test_texts_of_two_tokens_cannot_tell_a_triangle(left):
    text = (torch.arange(LENGTH) < 2).expand(3, LENGTH)
    text = text.flip(1) if left else text
    given = dict(input_ids=torch.randint(30, text.shape), attention_mask=text.long())
    model = Reader(lambda mask: keys(mask).expand(-1, -1, LENGTH, -1))
    assert "mask off by one" not in found(model, given)[1]


def test_masks_of_older_models_hide_and_biases_add():
    assert clean_mask(torch.tensor([[0.0, -1e4]])).tolist() == [[True, False]]
    bias = torch.tensor([[0.5, -1e4]])  # not only 0 beside it: a bias
    assert torch.equal(clean_mask(bias), bias)
    both, causal = merge_mask_and_bias(torch.tensor([[1.0, -math.inf]]), torch.tensor([[0.5, 0.5]]), False, 1, 2)
    assert both.tolist() == [[1.5, -math.inf]] and not causal


class Cached(nn.Module):
    """Self-attention behind a cache that a call of it is given."""

    def __init__(self, bottom: bool, filled: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.filled, self.qkv = bottom, filled, nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        past = torch.zeros(2, 1, k.shape[1], 20, 8)
        past = past.normal_(generator=torch.Generator().manual_seed(0)) if self.filled else past
        past = past.expand(-1, len(k), -1, -1, -1)
        k, v = (torch.cat(pair, 2) for pair in zip(*((past, (k, v)) if self.filled else ((k, v), past)), strict=True))
        order = causal_lower_right(q.shape[2], k.shape[2]) if self.bottom else None
        return F.scaled_dot_product_attention(q, k, v, order, is_causal=not self.bottom)


@pytest.mark.parametrize("length", [1, 6])
def test_torchs_causal_order_behind_a_cache(length):
    x = torch.randn(3, length, 16)
    found = [cause.finding for cause in regard.examine(Cached(bottom=False), [x]).diagnosis]
    assert [(one.kind, one.severity, one.heads) for one in found] == [
        ("causal at the wrong end", "warning", (("", 0), ("", 1)))
    ]
    for sound in (Cached(bottom=True), Cached(bottom=False, filled=False)):  # as its remedy says; a static cache
        assert regard.examine(sound, [x]).findings == []
