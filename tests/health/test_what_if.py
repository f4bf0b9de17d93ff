"""What-ifs: read before any work, and then the reference's numbers under the change, with the model left as it is."""

import pytest
import torch
from health_subject import Own, dense, means

import regard
from regard.health.capture.call import Call
from regard.health.examine import examine
from regard.health.what_if import parse


def test_a_bad_what_if_is_told_before_any_work():
    for what_if, error, words in (
        (["temprature=2"], ValueError, "did you mean 'temperature=2'"),
        ("temperature", ValueError, "did you mean 'temperature=2'"),
        ("sparsemax", ValueError, "did you mean 'normalizer=sparsemax'"),
        ("entmax15", ValueError, "did you mean 'normalizer=entmax15'"),
        (["softcap=-1"], ValueError, "positive number"),
        (None, TypeError, "what_if must be strings such as 'temperature=2', got NoneType"),
        (5, TypeError, "got int"),
        ([["qk_norm"]], TypeError, "what_if must hold strings such as 'temperature=2', got list"),
    ):
        with pytest.raises(error, match=words):
            examine(Own(), [torch.randn(1, 5, 12)], what_if=what_if)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ssmax+temperature=2", "sets temperature twice, because ssmax is one"),
        ("temperature=2+ssmax", "sets temperature twice"),
        ("temperature=2+temperature=3", "sets temperature twice"),
        ("scale=sqrt+qk_norm+scale=2", "sets scale twice"),
        ("qk_norm+qk_norm", "sets qk_norm twice"),
    ],
)
def test_a_what_if_that_says_one_thing_twice_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_the_parts_of_a_what_if_stand_in_any_order():
    call = Call(Own(), *torch.randn(3, 1, 2, 5, 8), own=lambda rows: torch.zeros(()), kind="sdpa")
    one, other, alone = (parse(text)(call) for text in ("qk_norm+scale = 0.5", "scale=0.5 + qk_norm", "qk_norm"))
    assert one.options == other.options == dict(scale=0.5)
    assert alone.options == dict(scale=None)
    for changed in (one, other, alone):
        torch.testing.assert_close(changed.q.square().mean(-1), torch.ones(1, 2, 5), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("temperature=2", dict(temperature=2.0)),
        ("scale=inverse", dict(scale="inverse")),
        ("softcap=1.5", dict(softcap=1.5)),
        ("normalizer=entmax15", dict(normalizer="entmax15")),
        ("normalizer=entmax(alpha=1.25)", dict(normalizer="entmax(alpha=1.25)")),
        ("scale=none+temperature=3", dict(scale="none", temperature=3.0)),
        ("temperature=2e+0+normalizer=sigmoid(bias=+1)", dict(temperature=2.0, normalizer="sigmoid(bias=1)")),
    ],
)
def test_what_if_is_the_reference_under_the_change(change, options):
    module, x = Own(is_causal=True), torch.randn(2, 9, 12)
    report = examine(module, [x], what_if=change)
    with torch.no_grad():
        expected = regard.reference.attention(*module.project(x), is_causal=True, **options, return_stats=True)[2]
    for name in ("entropy", "max_weight", "max_logit"):
        torch.testing.assert_close(
            means(report.what_if[change], name), expected[name].mean((0, 2)), rtol=1e-4, atol=1e-6
        )
    plain = examine(module, [x])
    torch.testing.assert_close(means(report, "entropy"), means(plain, "entropy"))  # the model itself was not changed


def test_what_if_qk_norm_and_ssmax():
    module, x = Own(), torch.randn(2, 9, 12)
    report = examine(module, [x], what_if=["qk_norm", "ssmax"])
    assert max(head.statistics["max_logit"].max for head in report.what_if["qk_norm"].heads) <= 2.0 + 1e-5  # √d·cos
    n = torch.tensor(9.0)
    with torch.no_grad():
        q, k, v = module.project(x)
        expected = dense(q * 0.43 * n.log(), k, v)
    torch.testing.assert_close(
        means(report.what_if["ssmax"], "entropy"), expected.entropy.mean((0, 2)), rtol=1e-4, atol=1e-6
    )
