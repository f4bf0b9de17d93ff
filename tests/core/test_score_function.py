"""Score functions: every backend against torch written out, derivatives, and what is refused when one is made."""

import copy
import io
import pickle

import pytest
import score_functions
import torch
from score_functions import ALL, FADE, alibi, constant_slope, fade, written_out

import regard
from regard.bias import ScoreFunction
from regard.normalizers import jit, tl

pytest.importorskip("numba")

RATE = 0.7


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tensors(lq=9, lk=13, heads=4, groups=2, dtype=torch.float64, sharp=2.0):
    shapes = (2, heads, lq, 8), (2, groups, lk, 8), (2, groups, lk, 6)
    return [(sharp * draw(*shape, seed=at, dtype=dtype)).requires_grad_() for at, shape in enumerate(shapes)]


def attend_written_out(name, q, k, v, i, j, visible):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = written_out(name, q @ k.mT / q.shape[-1] ** 0.5, i, j).masked_fill(~visible, -torch.inf)
    return s.softmax(-1) @ v


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("name", list(ALL))
def test_a_function_is_what_torch_computes(name, bottom_right, backend):
    inputs = tensors()
    offset = 4 if bottom_right else 0
    i, j = torch.arange(9)[:, None] + offset, torch.arange(13)
    exact = attend_written_out(name, *inputs, i.double(), j.double(), j <= i)
    options = dict(attn_mask=regard.Mask.causal(bottom_right), enable_gqa=True, score_mod=ALL[name], backend=backend)
    out = regard.attention(*inputs, **options)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    upstream = draw(*out.shape, seed=7)
    for ours, right in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(exact, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, right, rtol=1e-8, atol=1e-8)


OPTIONS = {
    "entmax15": dict(normalizer="entmax15", is_causal=True),
    "sigmoid, window": dict(normalizer="sigmoid(bias=-2)", window=(4, 2)),
    "softmax1, temperature, bias": dict(normalizer="softmax1", temperature=0.7, attn_mask=draw(1, 4, 9, 13, seed=5)),
    "intervals": dict(attn_mask=regard.Mask.intervals([0] * 4 + [3] * 5, [5] * 6 + [3] * 3), normalizer="sparsemax"),
    "dense mask": dict(attn_mask=draw(9, 13, seed=6) > -0.5),
    "alibi": dict(attn_mask=(regard.Mask.lengths([13, 5]), regard.bias.alibi(4))),
}


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("options", list(OPTIONS))
def test_every_option_beside_it_on_the_cpu(options, name):
    inputs = tensors()
    given = dict(OPTIONS[options], enable_gqa=True, score_mod=ALL[name], return_stats=True)
    (out, stats), (exact, truths) = (regard.attention(*inputs, **given, backend=b) for b in ("cpu", "reference"))
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    for statistic, truth in truths.items():
        torch.testing.assert_close(stats[statistic], truth, rtol=1e-7, atol=1e-8, msg=statistic)
    upstream = draw(*out.shape, seed=7)
    found, right = (torch.autograd.grad(x, inputs, upstream) for x in (out, exact))
    torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-8)


def test_blocks_of_a_long_call_count_positions_and_heads():
    inputs = tensors(300, 330, dtype=torch.float32, sharp=0.5)
    given = dict(enable_gqa=True, score_mod=ALL["clamp"], normalizer="entmax15", window=(100, 20))
    out, exact = (regard.attention(*inputs, **given, backend=b) for b in ("cpu", "reference"))
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
    found, right = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, exact))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_soft_cap_is_the_option_softcap_to_the_bit(cap):
    inputs = tensors(dtype=torch.float32, sharp=5.0)
    given = dict(enable_gqa=True, return_stats=True, is_causal=True)
    ours, option = (
        regard.attention(*inputs, **given, **x)
        for x in (dict(score_mod=ScoreFunction.soft_cap(cap)), dict(softcap=cap))
    )
    assert torch.equal(ours[0], option[0]) and torch.equal(ours[1].entropy, option[1].entropy)
    path = regard.attention_path(*inputs, enable_gqa=True, score_mod=ScoreFunction.soft_cap(cap))
    assert "a soft cap" in str(path)
    per_head = regard.attention(*inputs, **given, score_mod=ScoreFunction.soft_cap(torch.full((4,), cap)))
    torch.testing.assert_close(per_head[0], option[0], rtol=1e-5, atol=1e-6)


def test_alibi_as_a_function_is_the_bias():
    inputs, bias = tensors(), regard.bias.alibi(4)
    function = ScoreFunction(alibi, constant_slope, (bias.slopes,))
    out = regard.attention(*inputs, enable_gqa=True, score_mod=function)
    torch.testing.assert_close(out, regard.attention(*inputs, bias, enable_gqa=True), rtol=1e-9, atol=1e-9)


def test_packed_documents_count_within_each():
    q, k, v = (draw(11, 2, 8, seed=at) for at in range(3))
    out = regard.attention_varlen(q, k, v, [0, 4, 4, 11], causal=True, score_mod=FADE)
    for first, last in ((0, 4), (4, 11)):
        part = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        alone = regard.attention(*part, is_causal=True, score_mod=FADE)[0].transpose(0, 1)
        torch.testing.assert_close(out[first:last], alone, rtol=1e-9, atol=1e-9)


def test_params_have_gradients_by_the_reference():
    q, k, v = (draw(1, 2, 5, 4, seed=at) for at in range(3))
    rate = torch.tensor([0.3, 1.5], dtype=torch.float64, requires_grad=True)

    def attend(rate):
        return regard.attention(q, k, v, is_causal=True, score_mod=FADE.with_params(rate))

    assert torch.autograd.gradcheck(attend, rate)
    assert "params of score_mod" in str(regard.attention_path(q, k, v, score_mod=FADE.with_params(rate)))
    with pytest.raises(ValueError, match="params of score_mod"):
        regard.attention(q, k, v, score_mod=FADE.with_params(rate), backend="cpu")
    with torch.no_grad():
        assert regard.attention_path(q, k, v, score_mod=FADE.with_params(rate)).backend == "cpu"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
def test_gradients_have_gradients_and_tangents():
    q, k, v = (draw(1, 2, 4, 3, seed=at).requires_grad_() for at in range(3))

    def attend(q, k):
        return regard.attention(q, k, v, score_mod=ALL["bend"])

    assert torch.autograd.gradgradcheck(attend, (q, k))
    _, tangent = torch.func.jvp(lambda q: attend(q, k), (q.detach(),), (torch.ones_like(q),))
    step = 1e-6
    numeric = (attend(q + step, k) - attend(q - step, k)) / (2 * step)
    torch.testing.assert_close(tangent, numeric, rtol=1e-6, atol=1e-7)


def test_it_goes_through_the_custom_op():
    q, k, v = (draw(3, 2, 6, 4, seed=at) for at in range(3))

    def attend(q, k, v):
        return regard.attention(q, k, v, is_causal=True, score_mod=FADE)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    mapped = torch.vmap(attend)(q, k, v)
    torch.testing.assert_close(mapped, attend(q, k, v))


def test_a_module_counts_behind_its_cache():
    torch.manual_seed(0)
    layer = copy.deepcopy(regard.nn.MultiheadAttention(16, 4, score_mod=FADE).double())
    x = draw(2, 7, 16)
    whole = layer(x, is_causal=True)
    first, cache = layer(x[:, :4], is_causal=True, cache=True)
    rest, _ = layer(x[:, 4:], is_causal=True, cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    with pytest.raises(ValueError, match="score_mod"):
        regard.nn.MultiheadAttention(16, 4, score="additive", score_mod=FADE)


@jit
def doubled(s, i, j, h):
    return s * 2.0


@jit
def wrong_slope(s, i, j, h):
    return 1.0


@jit
def logarithm(s, i, j, h):
    return tl.log(s)


@jit
def reads_global(s, i, j, h):
    return s * RATE


@jit
def floors(s, i, j, h):
    return s + i // 2


@jit
def branches(s, i, j, h):
    if j > i:
        s = s * 2.0
    return s


@jit
def other_word(s, i, j, h):
    return tl.sin(s)


@jit
def late_head(s, i, j, h):
    return tl.where(h > 5, 2.0 * s, s)


@jit
def far_key(s, i, j, h):
    return tl.where(i - j > 5000, 2.0 * s, s)


@jit
def root(s, i, j, h):
    return s * tl.sqrt(4 - h)  # of four heads, as far as its author knows


@jit
def root_slope(s, i, j, h):
    return tl.sqrt(4 - h)


def unjitted(s):
    return s


def calls_unjitted(s, i, j, h):
    return unjitted(s)


@pytest.mark.parametrize(
    ("value", "slope", "params", "error", "words"),
    [
        (doubled, wrong_slope, (), ValueError, "slope is 1 .* derivative of value is 2"),
        (late_head, wrong_slope, (), ValueError, "slope is 1 .*, h = 6, where the derivative of value is 2"),
        (far_key, wrong_slope, (), ValueError, "slope is 1 .*, i = .* where the derivative of value is 2"),
        (logarithm, wrong_slope, (), ValueError, "value is not finite at s = "),
        (reads_global, wrong_slope, (), TypeError, "value: reads_global uses 'RATE'"),
        (floors, wrong_slope, (), TypeError, "value: floors uses 'FloorDiv'|'i // 2'"),
        (branches, wrong_slope, (), TypeError, "value: branches uses"),
        (other_word, wrong_slope, (), TypeError, "value: other_word uses 'tl.sin'"),
        (calls_unjitted, wrong_slope, (), TypeError, "unjitted, which calls_unjitted calls, must be"),
        (doubled, fade, (), TypeError, r"slope must take \(s, i, j, h\)"),
        (fade, constant_slope, (), TypeError, r"value must take \(s, i, j, h\)"),
        (lambda s, i, j, h: s, wrong_slope, (), TypeError, "value must be a function made by def"),
        (3, wrong_slope, (), TypeError, "value must be a function made by def"),
        (fade, constant_slope, ("much",), TypeError, r"params\[0\]"),
        (fade, constant_slope, (float("nan"),), ValueError, r"params\[0\] must be finite"),
        (fade, constant_slope, (torch.ones(2, 2),), ValueError, r"params\[0\]"),
        (fade, constant_slope, (torch.ones(2, dtype=torch.int64),), ValueError, r"params\[0\]"),
        (fade, constant_slope, (torch.ones(0),), ValueError, r"params\[0\]"),
    ],
)
def test_what_is_refused_when_it_is_made(value, slope, params, error, words):
    with pytest.raises(error, match=words):
        ScoreFunction(value, slope, params)


def test_heads_beyond_those_of_the_call_need_not_be_finite():
    x = draw(1, 4, 6, 8)
    function = ScoreFunction(root, root_slope)
    assert regard.attention(x, x, x, score_mod=function).isfinite().all()


@pytest.mark.parametrize("name", list(ALL))
def test_a_pickled_function_is_the_same(name):
    q, k, v = (x.detach() for x in tensors(groups=4))
    loaded = pickle.loads(pickle.dumps(ALL[name]))
    assert loaded.key == ALL[name].key and loaded.softcap == ALL[name].softcap
    ours, same = (regard.attention(q, k, v, score_mod=x) for x in (loaded, ALL[name]))
    assert torch.equal(ours, same)
    assert pickle.loads(pickle.dumps(ScoreFunction.soft_cap(30.0))).softcap == 30.0


def test_a_saved_layer_keeps_its_score_function():
    layer, file = regard.nn.MultiheadAttention(8, 2, score_mod=FADE.with_params(torch.tensor([0.3, 2.0]))), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = torch.randn(1, 5, 8)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))


def test_a_function_inside_another_cannot_be_pickled():
    @jit
    def shift(s, i, j, h):
        return s + 1.0

    function = ScoreFunction(shift, wrong_slope)
    with pytest.raises(TypeError, match=r"value of this ScoreFunction, .*shift, cannot be imported by name"):
        pickle.dumps(function)
    assert copy.copy(function).value is function.value


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(score_mod=doubled), TypeError, "score_mod must be a regard.bias.ScoreFunction"),
        (dict(score_mod=FADE, softcap=2.0), ValueError, "softcap and score_mod"),
        (dict(score_mod=FADE.with_params(torch.ones(3))), ValueError, r"params\[0\] of score_mod"),
        (dict(score_mod=FADE, backend="torch"), ValueError, "a score function"),
        (dict(score_mod=ScoreFunction.soft_cap(2.0).with_params(-2.0)), ValueError, "softcap"),
    ],
)
def test_what_a_call_refuses(options, error, words):
    with pytest.raises(error, match=words):
        regard.attention(*tensors(groups=4), **options)


@pytest.mark.parametrize("cap", [0, -2.0, float("nan"), torch.tensor([1.0, -1.0])])
def test_a_soft_cap_is_positive(cap):
    with pytest.raises(ValueError, match="cap must be positive, got"):
        ScoreFunction.soft_cap(cap)


def test_parallel_takes_a_soft_cap_alone():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = draw(1, 2, 8, 4)
        capped = regard.parallel.attention(x, x, x, score_mod=ScoreFunction.soft_cap(2.0))
        torch.testing.assert_close(capped, regard.attention(x, x, x, softcap=2.0))
        with pytest.raises(ValueError, match="score_mod: regard"):
            regard.parallel.attention(x, x, x, score_mod=FADE)
    finally:
        torch.distributed.destroy_process_group()


def test_the_list_has_every_function_written_out():
    s = draw(2, 3, 3, seed=1)
    i, j = torch.arange(3.0)[:, None], torch.arange(3.0)
    for name, function in score_functions.ALL.items():
        torch.testing.assert_close(function.modify(s, i, j), written_out(name, s, i, j))


def test_a_layer_owns_the_parameters_of_its_score_function():
    rates = torch.nn.Parameter(torch.tensor([0.3, 0.1]))
    layer = regard.nn.MultiheadAttention(8, 2, score_mod=FADE.with_params(rates))
    assert any(x is rates for x in layer.parameters()) and "score_params.0" in layer.state_dict()
    copied = copy.deepcopy(layer)
    layer(torch.randn(1, 5, 8)).sum().backward()
    assert rates.grad is not None and float(rates.grad.abs().sum()) > 0
    with torch.no_grad():
        copied.score_params[0].zero_()
    x = torch.randn(1, 5, 8)
    assert not torch.allclose(copied(x), layer(x))  # the copy's function reads the copy's parameter
    assert regard.nn.MultiheadAttention(8, 2, score_mod=FADE).score_params is None
