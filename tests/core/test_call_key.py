"""Keys of calls seen before are derived from declarations: a field that does not say how keys know it is refused."""

from dataclasses import field, fields, make_dataclass
from typing import Annotated, NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import _facts, normalizers
from regard._call import arguments, problem
from regard._call.arguments import AttentionOptions, Kept
from regard._call.problem import Problem
from regard._core import cudnn_forward, dispatch, plans

X = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))


class Wider(NamedTuple):
    scale: Annotated[float, Kept(float)] = 1.0
    tilt: Annotated[float, Kept(float)] = 0.0
    table: Annotated[torch.Tensor | None, Kept()] = None


class Silent(NamedTuple):
    scale: Annotated[float, Kept(float)] = 1.0
    tilt: float = 0.0


def test_a_new_option_is_part_of_the_key_or_refused():
    kept = arguments.find_kept(Wider)
    assert arguments.key_of(Wider(), kept) == arguments.key_of(Wider(1.0), kept)
    assert arguments.key_of(Wider(), kept) != arguments.key_of(Wider(tilt=0.5), kept)
    assert arguments.key_of(Wider(table=X), kept) is None and arguments.key_of(Wider(tilt="a"), kept) is None
    with pytest.raises(TypeError, match="'tilt' does not say how keys know it"):
        arguments.find_kept(Silent)


@pytest.mark.parametrize("name", AttentionOptions._fields)
def test_every_option_changes_the_key_or_has_none(name):
    others = dict(
        attn_mask=regard.Mask.causal(), dropout_p=0.5, is_causal=True, scale=0.5, enable_gqa=True, normalizer="relu",
        temperature=2.0, softcap=3.0, window=(1, 0), gate=X[..., 0], return_stats=True, backend="cpu",
    )  # fmt: skip
    plain = plans.call_key(X, X, X, AttentionOptions())
    other = AttentionOptions(**{name: others.get(name, X)})
    assert plain is not None and plans.call_key(X, X, X, other) != plain


def test_values_of_one_hash_and_another_type_have_keys_of_their_own():
    keys = [arguments.key_of(AttentionOptions(softcap=x)) for x in (1, 1.0)]
    assert keys[0] != keys[1] and arguments.key_of(AttentionOptions(softcap=True)) is None
    assert arguments.key_of(AttentionOptions(window=(True, 1))) is None
    with pytest.raises(ValueError, match="softcap must be a positive number"):
        regard.attention(X, X, X, softcap=1.0), regard.attention(X, X, X, softcap=True)


def test_a_new_field_of_a_problem_needs_a_mark():
    bare = make_dataclass("Bare", [("tilt", float, field(default=0.0))])
    with pytest.raises(TypeError, match=r"Problem\.tilt has no mark"):
        problem.find_mark(fields(bare)[0])
    assert {*problem.TENSORS, *problem.OPTIONS} == {one.name for one in fields(Problem)}


@pytest.mark.parametrize("name", [name for name in problem.OPTIONS if name != "kind"])
def test_every_option_of_a_problem_changes_its_key(name):
    own = Problem(X, X, X, normalizers.get("softmax"), 1.0)
    other = Problem(X, X, X, normalizers.get("softmax"), 1.0)
    assert own.key == other.key
    setattr(other, name, normalizers.get("relu") if name == "choice" else 7)
    assert own.key != other.key


def test_a_problem_survives_the_custom_op():
    own = Problem(X, X, X, normalizers.get("entmax15"), 0.5, softcap=2.0, causal=True, left=3, stats=("entropy",))
    other = problem.unflatten(problem.tensors_of(own), own.flatten())
    assert other.key == own.key and other.left == 3 and other.right is None


@pytest.mark.parametrize(
    "options", [{}, dict(return_stats=True), dict(normalizer="entmax15"), dict(window=(3, 0), return_stats=("mass",))]
)
def test_growing_keys_keep_their_plan(options):
    whole, q = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 1, 8)
    plans.plans.clear()
    for n in range(20, 40):
        k = whole[:, :, :n].contiguous() if n % 2 else whole[:, :, :n]
        found = regard.attention(q, k, k, **options)
        kept = dict(plans.plans)
        plans.plans.clear()
        expected = regard.attention(q, k, k, **options)
        plans.plans.update(kept)
        pairs = [(found, expected)] if not isinstance(found, tuple) else [
            (found[0], expected[0]), *zip(found[1].values(), expected[1].values(), strict=True)
        ]  # fmt: skip
        assert all(torch.equal(a, b) for a, b in pairs)
        assert len(plans.plans) == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((X, X), {}, "missing a required argument: 'v'"),
        ((X, X, X), dict(nothing=1), "unexpected keyword argument 'nothing'"),
        ((X, X, X, None), dict(attn_mask=None), "multiple values for argument 'attn_mask'"),
        ((X, X), dict(v=X, value=X), "got both v and value"),
        ((X, X, X), dict(mask=None), "it is called 'attn_mask' here"),
        ((X,) * 9, {}, "takes 8 positional arguments but 9"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args, kwargs, said):
    with pytest.raises(TypeError, match=said):
        regard.attention(*args, **kwargs)


def test_the_oldest_plan_goes_first(monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    plans.plans.clear()
    for scale in (0.1, 0.2, 0.3, 0.4):
        regard.attention(X, X, X, scale=scale)
    kept = list(plans.plans)
    regard.attention(X, X, X, scale=0.2)
    assert len(kept) == 3 and list(plans.plans) == kept


def test_a_choice_of_kernels_by_the_user_stands(monkeypatch):
    """cuDNN is asked first only where torch's settings are as they were."""
    monkeypatch.setattr(cudnn_forward, "has_bulk_copies", lambda device: True)
    gpu = torch.device("cuda")
    assert _facts.allowed_backends() is None and cudnn_forward.prefers_cudnn(gpu)
    with sdpa_kernel(SDPBackend.MATH):
        assert not cudnn_forward.prefers_cudnn(gpu)
        one = _facts.allowed_backends()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        assert _facts.allowed_backends() not in (None, one)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert not cudnn_forward.prefers_cudnn(gpu)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_lengths_of_a_class_take_one_path():
    """What the choice between backends asks of lengths is in the key; nothing else of them is."""
    few, many = (dispatch.classify_lengths((1, 8, m, 64), n) for m, n in ((1, 300), (1, 301)))
    assert few == many
    assert dispatch.classify_lengths((8, 16, 2048, 64), 2048) != dispatch.classify_lengths((8, 16, 2047, 64), 2048)


def test_a_tensor_alpha_is_looked_at_once(monkeypatch):
    seen = []
    aminmax = torch.Tensor.aminmax
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda x, **given: seen.append(1) or aminmax(x, **given))
    regard.entmax(torch.randn(3, 5), torch.tensor([[1.5], [1.7], [2.0]]))
    assert len(seen) == 1


def test_the_order_that_torch_sets_itself_is_no_choice_of_the_user(monkeypatch):
    """torch 2.11 puts cuDNN first at its first call on a Hopper GPU: a longer cache then took 30 ms at each step."""
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [3, 1, 2, 0, 4])
    assert _facts.allowed_backends() is None
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [2, 1, 0, 3, 4])
    assert _facts.allowed_backends() is not None
