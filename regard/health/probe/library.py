"""Is a transformers model run by the library's own code? What was patched, registered, hooked or set is named."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

OWN = (
    "transformers", "torch", "regard", "accelerate", "peft", "safetensors", "huggingface_hub", "functools",
    "contextlib",
)  # fmt: skip
HELPERS = (
    "transformers.masking_utils", "transformers.cache_utils", "transformers.modeling_rope_utils",
    "transformers.integrations.sdpa_attention", "transformers.integrations.eager_paged",
    "transformers.integrations.flex_attention", "transformers.modeling_layers", "transformers.activations",
    "transformers.pytorch_utils", "transformers.loss.loss_utils",
)  # fmt: skip
PYTHON = Path(sysconfig.get_path("stdlib"))
FUNCTIONS = ("scaled_dot_product_attention", "softmax", "dropout", "linear", "layer_norm", "embedding")  # of torch


def is_library_model(model: nn.Module) -> bool:
    """True if the model's class is one of transformers."""
    return type(model).__module__.startswith("transformers.models.") and hasattr(model, "config")


def is_library_code(model: nn.Module) -> bool:
    """True if a transformers model runs nothing but the library's code."""
    return is_library_model(model) and next(foreign_code(model), None) is None


def foreign_code(model: nn.Module) -> Iterator[str]:
    """Yields what is not the library's own: classes, methods, functions, registered attention and hooks, by name."""
    modules: set[ModuleType] = set()
    for name, module in model.named_modules():
        kind = type(module)
        if not _is_own(kind.__module__):
            yield f"{name or 'the model'} is a {kind.__module__}.{kind.__name__}"
        elif kind.__module__.startswith("transformers.") and kind.__module__ in sys.modules:
            modules.add(sys.modules[kind.__module__])
        for attribute, value in vars(module).items():
            if callable(value) and not isinstance(value, (nn.Module, type)) and _is_foreign(value):
                yield f"{name or 'the model'}.{attribute} is {_describe(value)}"
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                if _is_foreign(hook):
                    yield f"{name or 'the model'} has the hook {_describe(hook)}"
    modules |= {sys.modules[name] for name in HELPERS if name in sys.modules}
    for source in sorted(modules, key=lambda one: one.__name__):
        yield from _foreign_in(source)
    for name in FUNCTIONS:
        found = getattr(nn.functional, name)
        if _is_foreign(found):
            yield f"torch.nn.functional.{name} is {_describe(found)}"
    yield from _foreign_registered(model)


def _foreign_in(source: ModuleType) -> Iterator[str]:
    """Functions of a module, and methods of its classes, that were put there from elsewhere."""
    for name, value in vars(source).items():
        if isinstance(value, type) and value.__module__ == source.__name__:
            for method, function in vars(value).items():
                function = getattr(function, "__func__", getattr(function, "fget", None) or function)
                if callable(function) and _is_foreign(function):
                    yield f"{source.__name__}.{name}.{method} is {_describe(function)}"
        elif callable(value) and not isinstance(value, type) and _is_foreign(value):
            yield f"{source.__name__}.{name} is {_describe(value)}"


def _foreign_registered(model: nn.Module) -> Iterator[str]:
    """The functions behind the model's attn_implementation, if others wrote them."""
    used: Any = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        utils = importlib.import_module("transformers.modeling_utils")
        masks = importlib.import_module("transformers.masking_utils")
        for title, table in (("attention", utils.AttentionInterface), ("mask", masks.AttentionMaskInterface)):
            found = {**table._global_mapping, **getattr(table, "_local_mapping", {})}.get(used)
            if found is not None and _is_foreign(found):
                yield f"the {title} function of {used!r} is {_describe(found)}"
    except (ImportError, AttributeError):
        return


def _is_foreign(function: Any) -> bool:
    """True for a Python function whose code stands in none of the libraries."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        if isinstance(function, partial):
            function = function.func
            continue
        if not _in_library(function):
            return True
        function = function.__wrapped__
    function = getattr(function, "__func__", function)
    return isinstance(function, FunctionType) and not _in_library(function)


def _in_library(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if code.co_filename.startswith("<"):  # made by a dataclass or torch.fx, or typed by the user
        return _is_own(function.__globals__.get("__name__", ""))
    return _is_library_file(code.co_filename)


def _is_own(module: str) -> bool:
    package = module.partition(".")[0]
    return package in OWN or package in sys.stdlib_module_names


@cache
def _is_library_file(name: str) -> bool:
    """True for a file of the packages as they are installed, or of Python, wherever the user's own code lies."""
    if Path(name).is_relative_to(PYTHON) and "site-packages" not in name:  # typing, abc: imported by transformers
        return True
    files = [Path(file) for package in OWN if (file := getattr(sys.modules.get(package), "__file__", None))]
    return any(Path(name).is_relative_to(file.parent if file.name == "__init__.py" else file) for file in files)


def _describe(function: Any) -> str:
    function = getattr(function, "func", function)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
