"""Names for transformers: after `import regard.hf` a model takes `attn_implementation="regard"`, any normaliser's too.

>>> import regard.hf
>>> from transformers import LlamaConfig, LlamaModel
>>> config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=9)
>>> model = LlamaModel._from_config(config, attn_implementation="regard:entmax15")
>>> model(torch.arange(6)[None]).last_hidden_state.shape
torch.Size([1, 6, 32])

"regard" is softmax; "regard:entmax15" and "regard:entmax(alpha=1.25)" name a normaliser. Masks are those that
transformers makes for "sdpa", as bool. Scale, soft cap, sinks and position biases are the model's own.

The first model of an architecture is checked when it is made: a small twin of it, with random weights, is run with
the model's eager code and with "regard", and a difference raises (`REGARD_HF_CHECK=0` leaves that out).
`unregister()` takes all of it back.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from regard import normalizers

try:
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError('regard.hf needs transformers 4.57 or newer: pip install "regard[hf]"') from error

from regard.hf.attention import attention_forward, reading
from regard.hf.self_check import check_architecture

__all__ = ["reading", "register", "unregister"]

NAME = "regard"
NEEDS_FLOAT_MASK = {"deepseek_v4"}  # it joins its additive block bias to the mask in the mask's dtype
_CHECK = "get_correct_attn_implementation"
_names: list[str] = []


def register(normalizer: str = "softmax") -> str:
    """Registers a normaliser with transformers and returns the name to give as `attn_implementation`.

    >>> import regard.hf
    >>> regard.hf.register("entmax(alpha=1.25)")
    'regard:entmax(alpha=1.25)'

    Importing `regard.hf` registers every name of `regard.normalizers.names()`. A name with a parameter is registered
    when a model asks for it; a name is registered by hand only where no model does, as in a sub-configuration.

    Raises:
        ValueError: The normaliser is unknown or its parameter is outside its range.
    """
    normalizers.get(normalizer)
    _wrap_check()
    return _register(f"{NAME}:{normalizer}", normalizer)


def unregister() -> None:
    """Takes back what importing `regard.hf` and `register` did; `importlib.reload(regard.hf)` registers again.

    A model that was given such a name cannot run under it afterwards: give it another attention first.
    """
    known = [name for name in AttentionInterface._global_mapping if name == NAME or name.startswith(f"{NAME}:")]
    for name in {*_names, *known}:  # a reload forgets the names that were registered before it
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    _names.clear()
    wrapped = getattr(PreTrainedModel, _CHECK)
    if hasattr(wrapped, "regard_original"):
        setattr(PreTrainedModel, _CHECK, wrapped.regard_original)


def _register(name: str, normalizer: str) -> str:
    AttentionInterface.register(name, partial(attention_forward, normalizer=normalizer))
    AttentionMaskInterface.register(name, _make_mask)
    if name not in _names:
        _names.append(name)
    return name


def _make_mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """Returns the mask of a call: bool as for "sdpa"; additive for models that add to it."""
    make = eager_mask if getattr(config, "model_type", None) in NEEDS_FLOAT_MASK else sdpa_mask
    return make(*args, config=config, **kwargs)


def _wrap_check() -> None:
    """Wraps a model's check of `attn_implementation`: "regard:…" is registered and the architecture checked first."""
    check = getattr(PreTrainedModel, _CHECK)
    check = getattr(check, "regard_original", check)

    @wraps(check)
    def wrapped(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if isinstance(requested_attention, str) and requested_attention.partition(":")[0] == NAME:
            if ":" in requested_attention:
                register(requested_attention.partition(":")[2])
            if not self._can_set_attn_implementation():
                raise ValueError(
                    f"{type(self).__name__} computes attention by its own code, not by transformers' "
                    f"AttentionInterface; attn_implementation={requested_attention!r} would change nothing"
                )
            check_architecture(type(self), self.config)
        return check(self, requested_attention, *args, **kwargs)

    wrapped.regard_original = check  # type: ignore[attr-defined]
    setattr(PreTrainedModel, _CHECK, wrapped)


_wrap_check()
_register(NAME, "softmax")
for _name in normalizers.names():
    register(_name)
