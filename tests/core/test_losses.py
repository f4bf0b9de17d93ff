"""Fenchel–Young losses: value, gradient, reductions, derivatives and errors, held to float64, torch and `entmax`."""

import math
from functools import partial

import pytest
import torch
from rows_data import with_dtypes
from torch.nn import functional
from torch.testing import assert_close

import regard
from regard import losses, normalizers, reference
from regard._core import ops

pytest.importorskip("numba")

NAMES = ["softmax", "sparsemax", "entmax15", "entmax(alpha=1.3)", "entmax(alpha=1.05)"]
EVERY_WAY = [*NAMES, "entmax(alpha=1)", "entmax(alpha=1.0005)"]

softmax_loss, sparsemax_loss, entmax15_loss = (
    partial(losses.fenchel_young_loss, normalizer=name) for name in ("softmax", "sparsemax", "entmax15")
)


def entmax_loss(logits, target, alpha):
    return losses.fenchel_young_loss(logits, target, normalizers.get("entmax", alpha=alpha))


def make_rows(count, n, dtype=torch.float64, seed=0):
    """Flat, usual and sharp rows; the second row's target is its largest logit, the fourth's the lowest."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([1e-3, 1.0, 10.0, 1.0], dtype=torch.float64).repeat(count)[:count, None]
    logits = (torch.randn(count, n, dtype=torch.float64, generator=generator) * spread + 3.0).to(dtype)
    target = torch.randint(n, (count,), generator=generator)
    target[1], target[3] = logits[1].argmax(), logits[3].argmin()
    return logits, target


@pytest.mark.drawn(10)
@pytest.mark.parametrize(("name", "dtype"), with_dtypes(NAMES))
@pytest.mark.parametrize("n", [1, 7, 130, 5000])
def test_losses_and_gradients_are_those_of_float64(name, n, dtype):
    logits, target = make_rows(9, n, dtype)
    upstream = torch.linspace(-1.0, 2.0, 9, dtype=torch.float64)
    wide = logits.double().requires_grad_()
    exact = reference.fenchel_young_loss(wide, target, name)
    (gradient,) = torch.autograd.grad(exact, wide, upstream)
    given = logits.clone().requires_grad_()
    found = losses.fenchel_young_loss(given, target, name)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.dtype == kind
    (ds,) = torch.autograd.grad(found, given, upstream.to(kind))
    assert ds.dtype == dtype
    eps = torch.finfo(kind).eps
    bound = 8 * eps * (1 + exact.abs() + logits.double().abs().amax(-1))
    assert ((found.double() - exact).abs() <= bound).all()
    assert ((ds.double() - gradient).abs().amax(-1) <= (torch.finfo(dtype).eps + 50 * eps) * upstream.abs()).all()


@pytest.mark.parametrize("name", EVERY_WAY)
def test_the_reference_has_the_gradient_p_minus_e(name):
    logits, target = make_rows(5, 11)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(reference.fenchel_young_loss(logits, target, name).sum(), logits)
    assert_close(gradient, reference.normalize(logits, name) - functional.one_hot(target, 11), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", EVERY_WAY)
def test_a_loss_is_not_negative_and_0_at_a_certain_target(name):
    logits = torch.zeros(3, 20)
    logits[:, 4] = 1000.0
    assert_close(losses.fenchel_young_loss(logits, torch.tensor([4, 4, 4]), name), torch.zeros(3), atol=1e-6, rtol=0)
    logits, target = make_rows(50, 20, torch.float32)
    assert (losses.fenchel_young_loss(logits, target, name) >= -1e-6).all()


def test_numbers_of_the_package_entmax():
    """entmax 1.3 on these logits in float64."""
    logits = torch.tensor([[0.3, -1.2, 2.0, 0.9], [5.0, -5.0, 4.9, 4.1]], dtype=torch.float64)
    target = torch.tensor([3, 0])
    for found, expected in (
        (sparsemax_loss(logits, target), [1.1, 0.2025]),
        (entmax15_loss(logits, target), [1.14640497, 0.35530563]),
        (entmax_loss(logits, target, 1.25), [1.25930168, 0.53009493]),
    ):
        assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0)


@pytest.mark.parametrize("reduction", ["none", "sum", "elementwise_mean"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_modules_agree_with_the_package_entmax(reduction, ignore_index):
    package = pytest.importorskip("entmax")
    logits, target = make_rows(40, 6)
    logits.requires_grad_()
    options = dict(ignore_index=ignore_index, reduction=reduction)
    for ours, theirs in (
        (losses.FenchelYoungLoss("sparsemax", **options), package.SparsemaxLoss(**options)),
        (losses.FenchelYoungLoss("entmax15", **options), package.Entmax15Loss(k=None, **options)),
        (losses.FenchelYoungLoss("entmax(alpha=1.25)", **options), package.EntmaxBisectLoss(1.25, **options)),
    ):
        found, expected = ours(logits, target), theirs(logits, target)
        assert_close(found, expected)
        gradients = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (found, expected)]
        assert_close(*gradients)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_softmax_is_torchs_cross_entropy(reduction):
    logits, target = make_rows(12, 30, torch.float32)
    target[::3] = -100
    logits.requires_grad_()
    ours = softmax_loss(logits, target, reduction=reduction)
    theirs = functional.cross_entropy(logits, target, reduction=reduction)
    assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    assert_close(*(torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, theirs)))
    assert_close(losses.FenchelYoungLoss(reduction=reduction)(logits, target), ours)


def test_rows_of_any_shape_and_strides_and_integers_of_any_width():
    logits, target = make_rows(12, 30)
    whole = entmax15_loss(logits, target)
    shaped = logits.view(3, 4, 30).transpose(1, 2).contiguous().transpose(1, 2)
    assert not shaped.is_contiguous()
    assert_close(entmax15_loss(shaped, target.view(3, 4).to(torch.uint8)), whole.view(3, 4))
    assert_close(entmax15_loss(logits[5], target[5].int()), whole[5])
    assert entmax15_loss(logits[:0], target[:0]).shape == (0,)
    assert entmax15_loss(logits[:0], target[:0], reduction="mean").isnan()


@pytest.mark.parametrize("name", NAMES)
def test_ignored_rows_take_no_part_whatever_they_hold(name):
    logits, target = make_rows(6, 20, torch.float32)
    logits[2] = math.nan
    target[2], target[4] = 9, 9
    logits.requires_grad_()
    loss = losses.fenchel_young_loss(logits, target, name, ignore_index=9, reduction="mean")
    kept = target != 9
    assert_close(loss, losses.fenchel_young_loss(logits[kept], target[kept], name).mean())
    loss.backward()
    assert (logits.grad[~kept] == 0).all() and (logits.grad[kept] != 0).any(-1).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_with_infinities_and_nan(name, backend):
    logits, target = make_rows(6, 20, torch.float32)
    logits[0, :5] = -math.inf  # classes that cannot be
    target[0], target[1] = 7, 3
    logits[1, 3] = -math.inf  # the target cannot be
    logits[2] = -math.inf
    logits[3, 2] = math.nan
    logits[4, 2] = math.inf
    logits.requires_grad_()
    loss = losses.fenchel_young_loss(logits, target, name, backend=backend)
    visible = losses.fenchel_young_loss(logits[:1, 5:], target[:1] - 5, name)
    assert_close(loss[0], visible[0])
    assert loss[1] == math.inf and loss[2:5].isnan().all() and loss[5].isfinite()
    (ds,) = torch.autograd.grad(loss[[0, 5]].sum(), logits)
    assert ds[[0, 5]].isfinite().all() and (ds[0, :5] == 0).all()


def test_an_index_that_is_no_class_is_nan_where_values_are_not_read():
    logits, target = make_rows(4, 20, torch.float32)
    target[0], target[1] = 20, -1
    choice = normalizers.get("entmax15")
    loss, state = ops.row_loss(logits, target, choice.spec, -100, "cpu")
    ds = ops.row_loss_backward(torch.ones(4), logits, target, state, choice.spec, -100, "cpu")
    assert loss.isnan().tolist() == [True, True, False, False]
    assert ds.isnan().all(-1).tolist() == [True, True, False, False]
    assert reference.fenchel_young_loss(logits, target, choice).isnan().tolist() == [True, True, False, False]


def test_backward_keeps_the_logits_and_three_numbers_of_a_row():
    kept = []
    logits, target = make_rows(8, 300, torch.float32)
    logits.requires_grad_()

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        entmax15_loss(logits, target).sum()
    others = [x for x in kept if x.data_ptr() != logits.data_ptr()]
    assert len(others) < len(kept) and sum(x.numel() for x in others) <= 8 * 5


@pytest.mark.parametrize("name", NAMES)
def test_first_and_second_derivatives(name):
    logits = torch.tensor([[0.3, -1.2, 0.8, 0.3, 0.1], [0.9, -0.4, 0.1, 0.5, 0.0]], dtype=torch.float64)
    target = torch.tensor([2, 4])

    def loss(z):
        return losses.fenchel_young_loss(z, target, name)

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())
    assert torch.autograd.gradgradcheck(loss, logits)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_functional_transforms(name):
    logits, target = make_rows(4, 9)

    def loss(z, y):
        return losses.fenchel_young_loss(z, y, name)

    exact = reference.normalize(logits, name) - functional.one_hot(target, 9)
    assert_close(torch.func.vmap(loss)(logits, target), loss(logits, target))
    assert_close(torch.func.grad(lambda z: loss(z, target).sum())(logits), exact)
    tangent = torch.ones_like(logits).cumsum(-1)
    _, change = torch.func.jvp(lambda z: loss(z, target), (logits,), (tangent,))
    assert_close(change, (exact * tangent).sum(-1))


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_compiled_without_a_graph_break(name):
    logits, target = make_rows(6, 40, torch.float32)
    criterion = losses.FenchelYoungLoss(name, ignore_index=3)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    given = [logits.clone().requires_grad_() for _ in range(2)]
    found = compiled(given[0], target), criterion(given[1], target)
    assert_close(*found)
    for loss in found:
        loss.backward()
    assert_close(given[0].grad, given[1].grad)


def test_the_op_is_what_it_says():
    logits, target = make_rows(4, 9)
    torch.library.opcheck(torch.ops.regard.row_loss.default, (logits.requires_grad_(), target, "entmax15", -100, "cpu"))
    torch.library.opcheck(torch.ops.regard.row_loss.default, (logits, None, "softmax", -100, "cpu"))


def test_autocast_changes_nothing():
    logits, target = make_rows(6, 40, torch.bfloat16)
    plain = entmax15_loss(logits, target)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(entmax15_loss(logits, target), plain, atol=0, rtol=0)


@pytest.mark.parametrize("alpha", [1.0, 1.0005, 1.05, 1.25, 2.0])
def test_every_alpha(alpha):
    logits, target = make_rows(5, 30)
    logits.requires_grad_()
    found = entmax_loss(logits, target, alpha)
    assert_close(found, reference.fenchel_young_loss(logits, target, f"entmax(alpha={alpha})"))
    (ds,) = torch.autograd.grad(found.sum(), logits)
    assert_close(ds, regard.entmax(logits, alpha) - functional.one_hot(target, 30), atol=1e-7, rtol=1e-7)


def test_alpha_learns():
    logits, target = (x[:3] for x in make_rows(4, 8))
    alpha = torch.tensor([[1.2], [1.6], [2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: entmax_loss(logits[:2], target[:2], a), alpha[:2])
    each = [entmax_loss(logits[i], target[i], a) for i, a in enumerate((1.2, 1.6, 2.0))]
    assert_close(entmax_loss(logits, target, alpha), torch.stack(each))
    criterion = losses.FenchelYoungLoss(normalizers.get("entmax", alpha=torch.nn.Parameter(torch.tensor(1.5))))
    criterion(logits.float(), target).backward()
    assert [name for name, _ in criterion.named_parameters()] == ["theta"] and criterion.theta.grad.isfinite()


def test_a_users_normalizer_has_its_loss(tmp_path):
    (tmp_path / "cubic.py").write_text(
        '''"""max(s/3 − τ, 0)³: entmax with α = 4/3."""
from regard.normalizers import Threshold, entmax, jit, tl

def reference(scores, visible, theta):
    return entmax.solve(scores, visible, 4.0 / 3.0)

@jit
def gain(theta):
    return 1.0 / 3.0

@jit
def value(t, theta):
    return t * t * t

@jit
def slope(t, theta):
    return t * t

@jit
def slope_of_weight(p, theta):
    return tl.exp2(tl.log2(tl.maximum(p, 1e-37)) * (2.0 / 3.0))

normalizer = Threshold(
    name="cubic_of_losses", formula="", sums_to="1", sparse=True, paper="", reference=reference, gain=gain,
    value=value, slope=slope, slope_of_weight=slope_of_weight,
)
'''
    )
    normalizers.discover(tmp_path)
    try:
        logits, target = make_rows(5, 30)
        expected = entmax_loss(logits, target, 4.0 / 3.0)
        assert_close(losses.fenchel_young_loss(logits, target, "cubic_of_losses"), expected)
    finally:
        del normalizers._members["cubic_of_losses"], normalizers._files["cubic_of_losses"]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_z_loss_and_entropy_penalty(reduction):
    logits, _ = make_rows(6, 12)
    logits[5, 3] = -math.inf
    logits.requires_grad_()
    reduce = {"none": lambda x: x, "sum": torch.sum, "mean": torch.mean}[reduction]
    log = torch.log_softmax(logits, -1)
    entropy = -(log.exp() * log.masked_fill(log == -math.inf, 0.0)).sum(-1)
    for found, expected in (
        (losses.z_loss(logits, 0.5, reduction=reduction), reduce(0.5 * torch.logsumexp(logits, -1) ** 2)),
        (losses.entropy_penalty(logits, 0.5, reduction=reduction), reduce(-0.5 * entropy)),
    ):
        assert_close(found, expected)
        gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, expected)]
        assert_close(*gradients)


def test_modules_say_what_they_are():
    text = repr(losses.FenchelYoungLoss("entmax(alpha=1.25)", ignore_index=0, reduction="sum"))
    assert text == "FenchelYoungLoss('entmax(alpha=1.25)', ignore_index=0, reduction='sum')"


LOGITS, TARGET = torch.zeros(3, 5), torch.tensor([0, 1, 2])
REFUSED = [
    (lambda: softmax_loss([0.0], TARGET), TypeError, "logits must be a torch.Tensor"),
    (lambda: softmax_loss(LOGITS.long(), TARGET), TypeError, "logits must be float64"),
    (lambda: softmax_loss(LOGITS[:, :0], TARGET), ValueError, "logits must have classes"),
    (lambda: softmax_loss(LOGITS, [0, 1, 2]), TypeError, "target must be a torch.Tensor"),
    (lambda: softmax_loss(LOGITS, TARGET.float()), TypeError, "target must hold class indices"),
    (lambda: softmax_loss(LOGITS, TARGET[:2]), ValueError, r"shape without the classes, \(3,\), got \(2,\)"),
    (lambda: softmax_loss(LOGITS, TARGET + 3), ValueError, r"must lie in \[0, 4\] or .*=-100, got 5"),
    (lambda: softmax_loss(LOGITS, TARGET - 1), ValueError, "got -1"),
    (lambda: softmax_loss(LOGITS, TARGET, reduction="average"), ValueError, "reduction must be one of"),
    (lambda: softmax_loss(LOGITS, TARGET, ignore_index=1.5), TypeError, "ignore_index must be an int"),
    (lambda: losses.fenchel_young_loss(LOGITS, TARGET, "sigmoid"), ValueError, "'sigmoid' has no Fenchel–Young loss"),
    (lambda: losses.fenchel_young_loss(LOGITS, TARGET, "softmax1"), ValueError, "no Fenchel–Young loss"),
    (lambda: losses.fenchel_young_loss(LOGITS, TARGET, "softmix"), ValueError, "unknown; did you mean"),
    (lambda: losses.fenchel_young_loss(LOGITS, TARGET, backend="cuda"), ValueError, "backend must be"),
    (lambda: entmax_loss(LOGITS, TARGET, 0.5), ValueError, "alpha must lie in"),
    (lambda: entmax_loss(LOGITS, TARGET, "2"), TypeError, "alpha must be a number"),
    (lambda: entmax_loss(LOGITS, TARGET, torch.full((3,), 1.5)), ValueError, r"broadcast to \(3, 1\)"),
    (lambda: losses.FenchelYoungLoss("relu"), ValueError, "no Fenchel–Young loss"),
    (lambda: losses.z_loss(LOGITS, "1"), TypeError, "coefficient must be a number"),
    (lambda: losses.entropy_penalty(LOGITS[:, :0]), ValueError, "logits must have classes"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_errors_name_the_argument(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
