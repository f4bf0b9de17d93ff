"""The report's page answers a reader's questions: what, where, since when, why, what next, on which text."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import regard
from regard.health import checks
from regard.health.contract.run import Ablation, Checks, LossChange, LossReading
from regard.health.models.tiny import CHARACTERS, TinyLM, encode
from regard.health.report import glossary
from regard.health.report.glossary import link_words
from regard.health.report.page import payload, problems, report_page
from regard.health.report.page.problems import find_unusual
from regard.health.tokens.kinds import KINDS, MIXED

DOCS = Path(__file__).parents[2] / "docs" / "glossary.md"
TEXT = "the cat sat on the mat and the dog sat on the log, for the cat and the dog were old friends there. "


def examine(sharp=1.0, **options):
    torch.manual_seed(0)
    model = TinyLM(layers=3, heads=2, width=32, length=64)
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.attention.qkv.weight[:64] *= sharp
    ids = encode(2 * TEXT)[:192].reshape(3, 64)
    return regard.examine(model, [ids], tokenizer=CHARACTERS.__getitem__, title="tiny", **options)


@pytest.fixture(scope="module")
def ill():
    return examine(sharp=12.0, what_if=["qk_norm"])


@pytest.fixture(scope="module")
def sound():
    return replace(examine(), findings=[])


def test_problems_come_first_with_layer_remedy_and_gain(ill):
    page = report_page.render(ill)
    order = ['id="causes"', 'id="explorer"', 'id="chosen"', 'id="findings"', 'id="what-if"', 'id="checked"']
    assert sorted(order, key=page.index) == order
    assert re.search(r"[Ss]ince layer 1, in \d of 6 heads \(layers 1 to 2\)", page)
    card = page[page.index("<article") : page.index("</article>")]
    assert all(f"<dt>{part}</dt>" in card for part in ("Where", "What to do", "What it would gain"))
    assert "qk_norm ends it in" in card and "<summary>Why?</summary>" in card
    assert card.index("What to do") < card.index("Why?")
    first = sorted(ill.findings[0].places)[0]
    assert f'Look first at <a href="#layer-{first[0]}-head-{first[1]}">' in page
    assert "<b>Do first:</b>" in page[: page.index('id="explorer"')] and 'id="copy"' in page
    causes = page[page.index('id="causes"') : page.index('id="explorer"')]
    assert all(causes.count(f"<code>{cause.code}</code>") == 1 for cause in ill.diagnosis if cause.severity != "note")


def test_a_page_says_which_text_was_measured(ill):
    assert "It begins: <q>the cat sat on the mat" in report_page.render(ill)
    assert "comes with regard" not in report_page.render(ill)
    sample = replace(ill, how={**ill.how, "input": "the built-in sample"})
    assert "Measured on the built-in sample. It comes with regard" in report_page.render(sample)


def test_a_page_without_problems_shows_unusual_heads(sound):
    page = report_page.render(sound)
    assert "Nothing was found to be wrong" in page and "No problem found in these" in page
    assert 'id="unusual"' in page and "where the middle head has" in page
    assert 'id="causes"' not in page


def test_the_head_that_differs_most_is_the_first(sound):
    heads = [
        SimpleNamespace(statistics=SimpleNamespace(mean=lambda name, x=x: x), head=at)
        for at, x in enumerate([0.5, 0.52, 0.9, 0.48, 0.51])
    ]
    assert [one.head.head for one in find_unusual(heads, 1)] == [2]
    assert find_unusual(heads[:3]) == []


def test_marks_follow_the_what_if(ill):
    measured, changed = (one["flagged"] for one in payload.make_payload(ill, 0, 3)["treatments"])
    assert {place[0] for place in measured} >= {1, 2} and len(changed) < len(measured)
    assert all(severity in checks.SEVERITIES and kinds for _, _, severity, kinds in measured)


def test_curves_belong_to_their_statistic(ill):
    head = payload.make_payload(ill, 8, 3)["treatments"][0]["heads"][0]
    assert set(head["curves"]) == {"at", "entropy_ratio", "max_weight", "distance"}
    assert len(head["curves"]["at"]) == len(head["curves"]["distance"])
    assert head["curves"]["distance"] != head["curves"]["max_weight"]


def test_checks_are_drawn_where_there_are_some(ill):
    places = [(head.index, head.head) for head in ill.heads]
    checks = Checks(
        done=["two equal forwards agree"],
        skipped=[("padding", "there is none")],
        loss=LossReading("next token", 2.5, 2.4, 2.6, 8, tokens=512, unigram=3.0, bigram=2.2),
        what_if={"qk_norm": LossChange(2.0, -0.5, -0.6, -0.4)},
        ablation=Ablation("loss", 2.5, {(index, head): 0.1 * head for index, head in places}),
    )
    checked = replace(ill, checks=checks)
    page = report_page.render(checked)
    header = re.sub("<[^>]+>", "", page[page.index("<header>") : page.index("</header>")])
    assert header.count("loss 2.5 nats per token") == 1 and "unigrams reach 3, its bigrams 2.2" in header
    assert re.search(r"<td>2, helps \(Δ [^<]+\)</td>", page) and "qk_norm ends it in" in page
    assert re.search(r", loss 2.5 → 2, helps \(Δ [^<;]+\)", page)
    assert "two equal forwards agree" in page and "there is none" in page
    drawn = payload.make_payload(checked, 8, 3)
    at = drawn["statistics"].index("ablation")
    assert [head["numbers"][at][0] for head in drawn["treatments"][0]["heads"]] == [0.1 * head for _, head in places]
    unchecked = report_page.render(replace(ill, checks=None))
    assert "was not measured" in unchecked


def test_tokens_travel_with_the_report(ill, tmp_path):
    tokens = ill.tokens
    assert "".join(tokens["text"]).startswith("the␣cat␣sat") and len(tokens["heads"]) == 6
    for head in tokens["heads"]:
        assert len(head["keys"]) == len(head["weights"]) == 64
        assert all(len(row) <= 4 for row in head["keys"]) and sum(head["received"]) == pytest.approx(1.0, abs=0.05)
        assert head["kind"] in (*KINDS, MIXED)
    loaded = regard.health.Report.load(ill.save(tmp_path / "report.json"))
    assert loaded.tokens == tokens and loaded.to_json() == ill.to_json()
    assert payload.make_payload(loaded, 0, 3)["tokens"] == tokens


def test_batches_without_tokens_have_no_token_view():
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    report = regard.examine(layer, [torch.randn(1, 20, 16)])
    assert report.tokens is None and "tokens" not in report.to_json()
    assert "No tokens to show: the batches do not hold token ids" in report_page.render(report)


def test_a_model_that_refuses_one_sequence_says_so():
    class Pairs(TinyLM):
        def forward(self, ids):
            if len(ids) != 2:
                raise RuntimeError("two sequences, please")
            return super().forward(ids)

    report = regard.examine(Pairs(layers=1, heads=2, width=16), [encode(TEXT)[:64].reshape(2, 32)])
    assert report.tokens == {"reason": "RuntimeError: two sequences, please"}
    assert "two sequences, please" in report_page.render(report)


def test_words_are_linked_once_and_escaped():
    html = link_words("The entropy ratio <b> and the Entropy ratio; QK-norm, logits, what_if=['scale=2']")
    assert html.count('href="#word-entropy-ratio"') == 1 and "&lt;b&gt;" in html
    assert 'href="#word-qk-norm"' in html and 'href="#word-logit"' in html and 'href="#word-scale"' not in html


def test_every_word_of_a_report_is_in_the_glossary():
    known = glossary.words()
    assert all(glossary.describe_kind(kind) for kind in checks.kinds())
    assert {name.replace("_", " ") for name in (*regard.statistics.NAMES, "entropy_ratio", "gain_ratio")} <= set(known)
    assert {f"{kind} head" for kind in (*KINDS, MIXED)} <= set(known)
    assert {*checks.SEVERITIES} <= set(known)
    listed = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE))
    assert {word: listed.get(word) for word in known} == known


def test_layers_are_named_in_words(ill):
    finding = ill.findings[0]
    name = finding.heads[0][0]

    def where(*layers):
        return problems.describe_where(ill, replace(finding, heads=((name, 0),) * len(layers), indices=layers))

    assert where(2) == "in layer 2 only, in 1 of 6 heads"
    assert where(0, 1, 2) == "in every layer, in 3 of 6 heads"
    assert where(0, 2) == "since layer 0, in 2 of 6 heads (layers 0, 2)"
