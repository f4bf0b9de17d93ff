"""Ways to run one model that must not change its answer: training without dropout, checkpointing, another kernel.

Each is a context manager that leaves the model as it was: modes, buffers, attributes and configuration.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.health.checks.rule import NothingToCheck

# floats that are probabilities of leaving something out: dropout, attention_dropout, drop_path_rate, layerdrop, …
DROPOUT = re.compile(r"drop|jitter_noise|layerdrop", re.IGNORECASE)
DROPOUTS = re.compile(r"(alpha_|feature_|feature_alpha_)?dropout([123]d)?_?")  # functions of torch
CONFIG_SWITCHES = ("apply_spec_augment",)  # of a configuration, that make training random
IMPLEMENTATIONS = ("eager", "sdpa", "regard")  # flex_attention compiles for half a minute
INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # a module's tables of parameters, children and hooks
HOOKS = tuple(name for name in INTERNAL if "hooks" in name and isinstance(vars(nn.Module())[name], dict))
TENSORS, REACHED = 2**28, 100_000  # bytes of tensors that are copied, and objects that are looked at, at most
SIMPLE = (str, bytes, int, float, complex, type(None), type, nn.Module, nn.Parameter, ModuleType)
DICTS = (dict, OrderedDict, defaultdict)
OWNED = {*sys.stdlib_module_names, "torch"} - {"types"}  # packages whose objects are left alone: locks, loggers, meshes


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restores what a forward may leave behind: training flags, attributes and what they hold, numbers in buffers.

    >>> from regard.health.probe.modes import preserved
    >>> norm = nn.BatchNorm1d(2).train()
    >>> with preserved(norm):
    ...     _ = norm(torch.randn(8, 2)).sum(), norm.eval()
    >>> norm.training, norm.running_mean.tolist()
    (True, [0.0, 0.0])
    """
    modules = list(model.modules())
    plain = [{key: value for key, value in vars(module).items() if key not in INTERNAL} for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    # transformers adds hooks for the weights in the first forward that asks for them, and a mark that it has
    hooks = [(table, dict(table)) for module in modules for table in (vars(module)[name] for name in HOOKS)]
    inner, within = snapshot([value for own in plain for value in own.values()])
    held = [x for x in (*within, *(x for own in buffers for x in own.values() if x is not None)) if not x.is_meta]
    held = list({id(x): x for x in held}.values())
    copies = []
    if sum(x.numel() * x.element_size() for x in held) <= TENSORS:
        copies = [(x, x.detach().clone()) for x in held if not x.is_inference()]
    try:
        yield
    finally:
        for module, own, registered in zip(modules, plain, buffers, strict=True):
            for key in [key for key in vars(module) if key not in INTERNAL and key not in own]:
                del vars(module)[key]
            vars(module).update(own)
            module._buffers.clear()
            module._buffers.update(registered)
        for table, registered in hooks:
            if table.keys() != registered.keys():
                table.clear()
                table.update(registered)
        for restore in inner:
            restore()
        with torch.no_grad():
            for x, before in copies:
                if not torch.equal(x, before):  # batch norm changes its numbers without a new version
                    x.copy_(before)


def snapshot(values: Iterable[Any]) -> tuple[list[Callable[[], None]], list[Tensor]]:
    """(functions that restore the containers and objects that can be reached from `values`, the tensors in them).

    A cache that forwards fill is a dict, a list, or an object of the user's with such attributes.
    """
    restores: list[Callable[[], None]] = []
    tensors: list[Tensor] = []
    seen: set[int] = set()
    waiting = deque(values)
    while waiting and len(seen) < REACHED:
        value = waiting.popleft()
        if isinstance(value, SIMPLE) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list, set, deque)):
            waiting.extend(value)
            if not isinstance(value, tuple):
                fill = value.update if isinstance(value, set) else value.extend
                restores.append(partial(_put_back, value, copy.copy(value), fill))
        elif type(value) in DICTS or (hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in OWNED):
            own = value if type(value) in DICTS else vars(value)
            waiting.extend(own.values())
            restores.append(partial(_put_back, own, dict(own), own.update))
    return restores, tensors


def _put_back(held: Any, before: Any, fill: Callable[[Any], None]) -> None:
    """Restores a container, unless it holds the same objects."""
    if _parts(held) != _parts(before):
        held.clear()
        fill(before)


def _parts(held: Any) -> list[int]:
    return [id(part) for one in (held.items() if isinstance(held, dict) else [held]) for part in one]


@contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """Training mode in which nothing is dropped; norms over the batch stay in evaluation, because they differ there."""
    configs = list(configs_of(model))
    before = [dict(vars(config)) for config in configs]
    with preserved(model), DropoutOff():
        try:
            for config in configs:
                _drop_nothing(vars(config))
                for name in CONFIG_SWITCHES:
                    if getattr(config, name, None) is True:
                        setattr(config, name, False)
            for module in model.modules():
                module.training = not isinstance(module, nn.modules.batchnorm._NormBase)
                _drop_nothing(vars(module))
            yield
        finally:
            for config, own in zip(configs, before, strict=True):
                vars(config).clear()
                vars(config).update(own)


class DropoutOff(TorchFunctionMode):
    """Calls of torch's dropout functions drop nothing inside, whatever rate is written in the code.

    >>> from regard.health.probe.modes import DropoutOff
    >>> with DropoutOff():
    ...     torch.nn.functional.dropout(torch.ones(3), 0.9)
    tensor([1., 1., 1.])
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            named = {**named, "dropout_p": 0.0} if "dropout_p" in named else named
        elif DROPOUTS.fullmatch(name):
            args = (args[0], 0.0, *args[2:]) if len(args) > 1 else args
            named = named if len(args) > 1 else {**named, "p": 0.0}
        return func(*args, **named)


def _drop_nothing(own: dict[str, Any]) -> None:
    """Sets every probability of leaving something out to 0, among a module's or configuration's attributes."""
    for name, value in own.items():
        is_rate = DROPOUT.search(name) or (name in ("p", "prob") and "inplace" in own)
        if is_rate and isinstance(value, float) and 0.0 < value <= 1.0:
            own[name] = 0.0


def configs_of(model: nn.Module) -> Iterator[Any]:
    """The configurations that the modules of a model hold, each once."""
    seen: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "__dict__") and not isinstance(config, (type, nn.Module)):
            seen[id(config)] = config
    for config in list(seen.values()):
        for part in vars(config).values():
            if type(part).__name__.endswith("Config") and hasattr(part, "__dict__"):
                seen[id(part)] = part
    yield from seen.values()


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing inside the block; raises NothingToCheck if the model has none of transformers' kind."""
    enable, disable = (getattr(model, f"gradient_checkpointing_{name}", None) for name in ("enable", "disable"))
    if enable is None or disable is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise NothingToCheck("the model has no gradient_checkpointing_enable()")
    was = bool(getattr(model, "is_gradient_checkpointing", False))
    hidden = [(module, vars(module).get("_gradient_checkpointing_func")) for module in model.modules()]
    with preserved(model):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield
        finally:
            if not was:
                disable()
            for module, function in hidden:
                if function is not None:
                    module._gradient_checkpointing_func = function


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    """A transformers model with another attention implementation; raises ValueError if it does not take it."""
    change, config = getattr(model, "set_attn_implementation", None), cast(Any, getattr(model, "config", None))
    if change is None or not hasattr(config, "_attn_implementation"):
        raise ValueError("the model has no set_attn_implementation()")
    configs = [one for one in configs_of(model) if "_attn_implementation_internal" in vars(one)]
    before = [config._attn_implementation_internal for config in configs]
    try:
        try:
            change(name)
        except Exception as error:
            raise ValueError(str(error).strip().split("\n")[0][:160]) from error
        if config._attn_implementation != name:
            raise ValueError(f"{type(model).__name__} does not take {name!r}")
        yield
    finally:
        for one, own in zip(configs, before, strict=True):
            one._attn_implementation_internal = own


def implementations_of(model: nn.Module) -> list[str]:
    """The attention implementations that a transformers model may be tried with here, without its own."""
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if own is None or not hasattr(model, "set_attn_implementation"):
        return []
    flags = {"sdpa": "_supports_sdpa", "regard": "_supports_attention_backend"}
    return [name for name in IMPLEMENTATIONS if name != own and getattr(model, flags.get(name, ""), name == "eager")]
