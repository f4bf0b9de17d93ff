"""What other checkers say of a model of the museum: each is given what regard is given, the model and its batches.

All run in this process by the functions that their own commands call. One that is not installed is left out.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks import NotApplicable
from regard.health.measure.query_rows import pad_of
from regard.health.probe.decoding import find_decoders
from regard.health.probe.probe import Probe, main_output
from regard.health.probe.texts import plain_text
from regard.health.tokens.text import as_token_batch


def judge_pytest_torch(model: nn.Module, batch: Any) -> Iterator[str]:
    """The tests of `pytest --torch-model`, and streaming with the cache that regard finds."""
    from pytest_torch import contract, invariance, training
    from pytest_torch.checkpoint import assert_checkpoint_roundtrip
    from pytest_torch.utils import flatten

    def add_up(output: Any) -> Tensor:
        found = [x for _, x in flatten(output) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
        return torch.stack([x.float().mean() for x in found]).sum()

    def make_other() -> nn.Module:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_()
        return other

    if isinstance(batch, dict) and "use_cache" in inspect.signature(model.forward).parameters:
        batch = {**batch, "use_cache": False}  # as its own command does
    limits: dict[str, Any] = dict(rtol=1e-4, atol=1e-4)  # its own for models of this size
    for one in contract.check_inference_contract(model, batch, raise_on_failure=False, **limits).failures:
        yield one.name
    vocabulary = max((one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)), default=2)
    tests: dict[str, Callable[[], Any]] = {
        "layout": lambda: invariance.assert_layout_invariant(model, batch, **limits),
        "checkpoint": lambda: assert_checkpoint_roundtrip(make_other, batch, model=model, **limits),
        "gradients": lambda: training.assert_gradients_finite(copy.deepcopy(model).train(), batch, add_up),
        "streaming": lambda: stream(model, batch),
    }
    if isinstance(batch, dict) and "attention_mask" in batch and "input_ids" in batch:
        tests["padding"] = lambda: invariance.assert_padding_invariant(model, batch, **limits)
        tests["mask"] = lambda: invariance.assert_mask_invariant(model, batch, vocab_size=vocabulary, **limits)
    for name, test in tests.items():
        try:
            test()
        except AssertionError:
            yield name
        except Exception:  # the rival cannot run this model so: the same on the twin
            continue


def stream(model: nn.Module, batch: Any) -> None:
    """Chunks against one forward, for a model whose cache regard knows how to use."""
    from pytest_torch import assert_streaming_equivalent

    tokens = as_token_batch(batch, torch.device("cpu"), model)
    if tokens is None:
        return
    text, probe = plain_text(tokens, pad_of(model)), Probe(model)
    with torch.no_grad(), probe.active():
        try:
            decoder = find_decoders(probe, text)[0]
        except NotApplicable:
            return

    def run(ids: Tensor, state: tuple[int, Any]) -> tuple[Tensor, tuple[int, Any]]:
        result, after = decoder.call(ids, *state)
        return main_output(result), (state[0] + ids.shape[1], after)

    assert_streaming_equivalent(
        lambda ids: main_output(decoder.call(ids, 0, None)[0]), run, text.targets, init_state=lambda: (0, None)
    )


def judge_torchtest2(model: nn.Module, batch: Any) -> Iterator[str]:
    """`torchtest2.check_model` on one batch; its warnings count too."""
    import torchtest2

    given = [batch] if isinstance(batch, Tensor) else batch
    report = torchtest2.check_model(model, given)
    yield from (one.name for one in (*report.failures, *report.warnings))


def judge_model_clinic(model: nn.Module, batch: Any) -> Iterator[str]:
    """`model-clinic exam` on the weights; its runtime part needs a tokenizer and a model that generates."""
    import model_clinic

    for one in model_clinic.diagnose(model.state_dict()):
        if one.severity in ("ERROR", "WARN"):
            yield f"{one.condition} {one.param_name}"


RIVALS: dict[str, Callable[[nn.Module, Any], Iterator[str]]] = {
    "pytest-torch": judge_pytest_torch, "torchtest2": judge_torchtest2, "model-clinic": judge_model_clinic,
}  # fmt: skip


def installed() -> list[str]:
    """The names of the rivals that can be imported."""
    return [name for name in RIVALS if importlib.util.find_spec(name.replace("-", "_")) is not None]


def judge(name: str, model: nn.Module, batch: Any) -> set[str]:
    """What a rival complains of."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return set(RIVALS[name](model, batch))
