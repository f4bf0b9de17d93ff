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
from regard.health.report.page import payload, report_page
from regard.health.report.page.causes import is_judged_again
from regard.health.report.screen import describe_place
from regard.health.report.summary import find_unusual, list_names, name_layers
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
    causes = page[page.index('id="causes"') : page.index('id="explorer"')]
    assert all(causes.count(f"<code>{cause.code}</code>") == 1 for cause in ill.diagnosis if cause.severity != "note")
    assert "locks.1–2.attention, all heads</button>" in causes and 'data-kind="scale off"' in causes
    order = ["<b>Do first:</b>", 'id="copy"', "<b>Gain now, without training:</b>"]
    assert sorted(order, key=causes.index) == order
    assert "<b>Sure:</b> Proves" in causes and "<summary>Threshold</summary>" in causes


def test_a_fact_is_told_once(ill):
    page = report_page.render(ill)
    assert all(page.count(f"<code>{finding.code}</code>") == 1 for finding in ill.findings)
    assert page.count("Reported if") == len(ill.findings)


def test_a_page_says_which_text_was_measured(ill):
    assert "The text begins: <q>the cat sat on the mat" in report_page.render(ill)
    assert "comes with regard" not in report_page.render(ill)
    sample = report_page.render(replace(ill, how={**ill.how, "input": "the built-in sample"}))
    assert "Measured on the built-in sample." in sample and "The sample comes with regard" in sample


def test_a_page_without_problems_shows_unusual_heads(sound):
    page = report_page.render(sound)
    assert "No problem found in these" in page
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
    whole = [replace(finding, scope="model") for finding in ill.findings]
    assert payload.list_flagged(whole) == []  # a finding of the whole model is no finding of each of its heads


def test_curves_belong_to_their_statistic(ill):
    head = payload.make_payload(ill, 8, 3)["treatments"][0]["heads"][0]
    assert set(head["curves"]) == {"at", "entropy_ratio", "max_weight", "distance"}
    assert len(head["curves"]["at"]) == len(head["curves"]["distance"])
    assert head["curves"]["distance"] != head["curves"]["max_weight"]


def test_a_change_ends_only_what_it_is_judged_by_again():
    """A what-if measures heads anew: it neither looks at a module's weights nor runs the model's checks."""
    codes = {rule.kind: rule.code for module in checks.modules() for rule in module.RULES}
    judged = {kind: is_judged_again(codes[kind]) for kind in ("collapsed", "diffuse", "dead")}
    assert judged == dict(collapsed=True, diffuse=True, dead=False) and not is_judged_again("RG802")


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
    assert "Loss 2.5 ± 0.1 (next token, 8 sequences); guessing by the token before: 2.2." in header
    assert "25 checks made, 1 not: padding (why)." in header  # 24 of the heads' numbers
    assert re.search(r"<td class=\"words\">2, helps \(Δ [^<]+\)</td>", page)
    assert re.search(r"qk_norm: loss 2.5 → 2, helps \(Δ [^<;]+\), ends it in 4 of 4 heads", page)
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
    assert "No tokens to show: tokens are shown of batches that are token ids" in report_page.render(report)


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


def test_places_are_named_in_words(ill):
    finding = ill.findings[0]
    name = finding.heads[0][0]

    def where(*places):
        layers = tuple(index for index, _ in places)
        heads = tuple((name, head) for _, head in places)
        return describe_place(ill, replace(finding, heads=heads, indices=layers))

    first, last = (list_names(ill)[index] for index in (0, 2))
    both = name_layers([0, 2], list_names(ill))
    assert where((2, 1)) == f"{last}, head 1"
    assert where((0, 0), (1, 0), (2, 0)) == f"{first.replace('0', '0–2')}, head 0"
    assert where((0, 0), (0, 1), (2, 0), (2, 1)) == f"{both}, all heads" and both == first.replace("0", "0, 2")
    assert where((0, 0), (2, 1)) == f"{both}, 2 heads"
