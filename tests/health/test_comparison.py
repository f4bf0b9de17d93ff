"""regard.compare: what is new, resolved and changed, and the first layer that differs."""

import io
import json

import pytest
import torch
from torch import nn

import regard
from regard.cli import main
from regard.health.models.tiny import TinyLM


def stack(sharp=(1.0, 1.0, 1.0)):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    with torch.no_grad():
        for one, factor in zip(model.layers, sharp, strict=True):
            one.self_attn.in_proj_weight[:32] *= factor
    return regard.examine(model, [torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(1))])


@pytest.fixture(scope="module")
def healthy():
    return stack((2.0, 2.0, 2.0))


def test_equal_reports_do_not_differ(healthy):
    same = regard.compare(healthy, healthy)
    assert same.new == same.resolved == same.changed == [] and same.first_differences == {}
    assert same.verdict == ("same", "B is the same as A in attention statistics.")
    assert "findings: the same in both" in str(same) and "first: no statistic differs" in str(same)


def test_a_change_is_located_at_its_layer(healthy):
    comparison = regard.compare(healthy, stack((2.0, 40.0, 2.0)))
    kinds = {change.kind for change in comparison.new}
    assert "scale off" in kinds and comparison.resolved == []
    assert all(layer == 1 for change in comparison.new if change.kind == "scale off" for layer, _ in change.appeared)
    first = comparison.first_differences["entropy_ratio"]
    assert (first.index, first.layer) == (1, "layers.1.self_attn") and first.amount > 0.1
    assert "first: layers.1.self_attn differs, in " in str(comparison)
    word, sentence = comparison.verdict
    assert word == "worse" and sentence.startswith("B is worse than A: scale off in layers.1.self_attn, heads 0–3")
    assert comparison.summary()[2].startswith("do first: ") and comparison.first_layer == 1
    back = regard.compare(stack((2.0, 40.0, 2.0)), healthy)
    assert back.verdict[0] == "better" and "no more scale off" in back.verdict[1]
    assert {change.kind for change in back.resolved} == kinds and back.new == []


@pytest.mark.parametrize(("rows", "words"), [(8, ("worse", "better")), (1, ("different", "different"))])
def test_a_loss_that_moved_is_not_the_same(rows, words, tmp_path):
    torch.manual_seed(0)
    model = TinyLM(layers=1, heads=2, width=16, length=32).eval()
    batches = [torch.randint(0, 90, (rows, 20))]
    reports = [regard.examine(model, batches), regard.examine(model, batches)]
    assert regard.compare(*reports).verdict[0] == "same"
    model.head.weight.data *= 30
    reports[1] = regard.examine(model, batches)
    assert tuple(regard.compare(*pair).verdict[0] for pair in (reports, reports[::-1])) == words
    paths = [report.save(tmp_path / f"{name}.json") for name, report in zip("ab", reports, strict=True)]
    assert regard.compare(*paths).verdict == regard.compare(*reports).verdict
    assert "the same attention statistics; loss 4." in regard.compare(*reports).verdict[1]


def test_a_finding_of_other_heads_is_changed():
    comparison = regard.compare(stack((40.0, 2.0, 2.0)), stack((2.0, 40.0, 2.0)))
    (change,) = [one for one in comparison.changed if one.kind == "scale off"]
    assert {layer for layer, _ in change.gone} == {0} and {layer for layer, _ in change.appeared} == {1}
    assert "in A only" in str(change) and "in B only" in str(change)


def test_what_one_report_was_not_checked_for_is_neither_new_nor_gone(tmp_path, capsys):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    batches = [torch.randn(2, 24, 16)]
    full = regard.examine(layer, batches, causal=True)  # an encoder sees the future
    bare = regard.examine(layer, batches, checks=False)
    assert "sees the future" in {one.kind for one in full.findings}
    for a, b, side in ((bare, full, "A"), (full, bare, "B")):
        comparison = regard.compare(a, b)
        assert [(one.kind, where) for one, where in comparison.unchecked if one.kind == "sees the future"] == [
            ("sees the future", side)
        ]
        assert "sees the future" not in {one.kind for one in [*comparison.new, *comparison.resolved]}
        assert comparison.verdict[0] == "same" and f"unchecked: in {side}: sees the future" in str(comparison)
        assert f"Not checked in {side}" in comparison.save(tmp_path / "both.html").read_text()


@pytest.mark.parametrize(("sharp", "status"), [((2.0, 40.0, 2.0), 1), ((2.0, 2.0, 2.0), 0)])
def test_two_files_end_with_1_if_b_is_worse(healthy, tmp_path, sharp, status):
    paths = [healthy.save(tmp_path / "a.json"), stack(sharp).save(tmp_path / "b.json")]
    assert main(["compare", *map(str, paths)]) == status
    assert main(["compare", *map(str, reversed(paths))]) == 0


def test_the_tolerance_is_relative_to_size_and_spread(healthy, tmp_path):
    data = healthy.to_json()
    spread = data["heads"][5]["statistics"]["max_logit"]
    spread["mean"] += 0.02 * max(abs(spread["mean"]), spread["std"])
    (tmp_path / "b.json").write_text(json.dumps(data))
    assert set(regard.compare(healthy, tmp_path / "b.json").first_differences) == {"max_logit"}
    assert regard.compare(healthy, tmp_path / "b.json", tolerance=0.03).first_differences == {}
    with pytest.raises(ValueError, match="tolerance must be"):
        regard.compare(healthy, healthy, tolerance=-1.0)
    with pytest.raises(TypeError, match="b must be a Report or the path"):
        regard.compare(healthy, 7)


def test_a_layer_in_one_report_only_differs(healthy, tmp_path):
    data = healthy.to_json()
    data["heads"] = [head for head in data["heads"] if head["index"] < 2]
    (tmp_path / "b.json").write_text(json.dumps(data))
    first = regard.compare(healthy, tmp_path / "b.json").first_differences["entropy"]
    assert first.index == 2 and first.amount == float("inf")


def test_it_is_saved_and_shown_as_a_page(healthy, tmp_path):
    comparison = regard.compare(healthy, stack((2.0, 40.0, 2.0)))
    html = comparison.save(tmp_path / "both.html").read_text()
    assert html.index("B is worse than A") < html.index("<h2>New in B</h2>") < html.index("Means over heads")
    assert "Gone in B, In other heads: nothing" in html
    shown = comparison._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="') and "<script" not in shown
    with pytest.raises(ValueError, match=r"path must end in \.html"):
        comparison.save(tmp_path / "both.json")


def test_files_are_called_by_their_names(healthy, tmp_path):
    (tmp_path / "old").mkdir()
    a, b, same = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "old" / "a.json"
    for path in (a, b, same):
        healthy.save(path)
    told = regard.compare(a, b).summary()[-2:]
    assert told[0].startswith("A: a.json (TransformerEncoder): ") and told[1].startswith("B: b.json (Trans")
    assert regard.compare(a, same).names == (str(a), str(same))
    assert regard.compare(healthy, healthy).names == ("TransformerEncoder (A)", "TransformerEncoder (B)")
    assert regard.compare(healthy, b).names == ("TransformerEncoder", "b.json")
    assert "<h1>a.json" in regard.compare(a, b).save(tmp_path / "both.html").read_text()


def test_a_deep_comparison_fits_a_screen(healthy, tmp_path):
    data = healthy.to_json()
    deep = []
    for report, factor in ((data, 1.0), (json.loads(json.dumps(data)), 0.5)):
        heads = [
            dict(json.loads(json.dumps(head)), index=head["index"] + 3 * k)
            for head in report["heads"]
            for k in range(16)
        ]
        for head in heads:
            if head["index"] >= 30:
                head["statistics"]["entropy_ratio"]["mean"] *= factor
        deep.append(tmp_path / f"{factor}.json")
        deep[-1].write_text(json.dumps(dict(report, heads=heads)))
    out = io.StringIO()
    regard.compare(*deep).show(out)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    assert any(line.split()[:2] == ["0–29", "="] for line in lines) and "… and 13 more layers that differ" in lines
