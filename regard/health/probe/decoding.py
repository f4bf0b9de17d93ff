"""Decoding with a cache: how a model takes and returns it, found out by its signature and its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.health.checks.rule import NotApplicable, NothingToCheck
from regard.health.probe.probe import Probe, Transform, main_output
from regard.health.tokens.text import TokenBatch

# arguments that take the state which an earlier call returned
STATES = (
    "past_key_values", "cache_params", "past_key_value", "layer_past", "past", "past_kv", "past_kvs", "kv_cache",
    "kv_caches", "kvcache", "cache", "caches", "state", "states",
)  # fmt: skip
SWITCHES = ("use_cache", "return_cache", "return_kv", "return_past", "return_state", "use_kv_cache")
# arguments that say where a call begins, of models that keep the cache themselves
STARTS = ("start_pos", "start_position", "start_index", "pos_offset", "past_length", "cache_len", "offset", "start")
PLACES = ("input_pos", "cache_position", "positions", "position_ids", "pos_ids", "pos")  # a tensor of positions
KEPT_NAMES = ("cache", "past", "kv", "state", "k_buf", "mem")  # in the names under which a module keeps its keys


class FirstOfEqual(TorchFunctionMode):
    """Inside, topk takes the first of equal scores, whatever their number: which it takes by itself is chance.

    Indexers of sparse attention end in a relu, so that many of their scores are 0.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk) and "out" not in kwargs:
            return sorted_topk(*args, **kwargs)
        return func(*args, **kwargs)


def sorted_topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """What torch.topk returns, with the first of equal entries.

    >>> from regard.health.probe.decoding import sorted_topk
    >>> sorted_topk(torch.tensor([0.0, 2.0, 0.0, 0.0]), 2).indices
    tensor([1, 0])
    """
    values, places = torch.sort(input, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


@dataclass(frozen=True)
class Decoder:
    """One way in which a model decodes; `call(ids, start, state)` returns (its result, the state after it)."""

    name: str
    call: Callable[[Tensor, int, Any], tuple[Any, Any]]

    def steps(
        self, probe: Probe, ids: Tensor, cuts: Sequence[int], transform: Transform | None = None
    ) -> Iterator[tuple[int, int, Tensor, Any]]:
        """Yields (begin, end, output, state) of chunks that end at `cuts`; `transform` sees every attention call."""
        state, start = None, 0
        for end in cuts:
            chunk = ids[:, start:end]
            result, state = probe.call(partial(self.call, chunk, start, state), transform)
            output = main_output(result)
            if output.ndim < 3 or output.shape[1] != chunk.shape[1]:
                raise NotApplicable("with a cache the output has no row per token")
            yield start, end, output, state
            start = end

    def run(self, probe: Probe, ids: Tensor, cuts: Sequence[int]) -> Tensor:
        """The outputs of all tokens, [B, N, …]."""
        return torch.cat([output for _, _, output, _ in self.steps(probe, ids, cuts)], 1)


def find_decoders(probe: Probe, batch: TokenBatch) -> list[Decoder]:
    """The ways in which a model decodes the batch's text; raises NotApplicable if it has none that is understood."""
    accepted = inspect.signature(probe.model.forward).parameters
    name = next((name for name in STATES if name in accepted), None)
    if name is not None:
        return _find_working(probe, batch, name)
    start = next((one for one in (*STARTS, *PLACES) if one in accepted), None)
    if start is None:
        raise NothingToCheck("forward takes no cache (past_key_values, cache, state, start_pos, …)")
    if not keeps_cache(probe.model):
        raise NotApplicable(f"forward takes {start}=, but neither takes a cache nor keeps one")
    decoder = Decoder(f"its own cache, {start}=", OwnState(probe.model, batch, start))
    if why := why_not(probe, decoder, batch.targets):
        raise NotApplicable(why)
    return [decoder]


def _find_working(probe: Probe, batch: TokenBatch, name: str) -> list[Decoder]:
    """One decoder for each class of cache: with a mask of all tokens so far, as in generation, or else without."""
    makers: list[tuple[str, Callable[[], Any] | None]] = [(name, None)]
    if name == "past_key_values":
        makers = [*_caches_of(probe.model, batch)] or makers
    found, reasons = [], []
    for label, make in makers:
        for shows in (True, False) if name != "cache_params" else (False,):  # a state has no mask of its past
            decoder = Decoder(label, GivenState(probe.model, batch, name, make, shows))
            why = why_not(probe, decoder, batch.targets)
            if not why:
                found.append(decoder)
                break
            reasons.append(why)
    if not found:
        raise NotApplicable(reasons[0])
    return found


def why_not(probe: Probe, decoder: Decoder, ids: Tensor, cuts: Sequence[int] = ()) -> str:
    """Why chunks that end at `cuts`, or a prompt and one step, cannot be run in this way; empty if they can."""
    try:
        for _ in decoder.steps(probe, ids, cuts or (ids.shape[1] - 1, ids.shape[1])):
            pass
    except NotApplicable as reason:
        return str(reason)
    except Exception as error:  # the user's own
        first = str(error).strip().split("\n")[0][:120]
        return f"a step with {decoder.name} raised {type(error).__name__}: {first}"
    return ""


@dataclass(frozen=True)
class GivenState:
    """Calls a model with the state that it returned before."""

    model: nn.Module
    batch: TokenBatch
    name: str  # of the argument
    make: Callable[[], Any] | None = None  # the state of the first call
    shows: bool = True  # pass a mask of all tokens so far, if the batch has one
    positions: bool = False  # pass position_ids

    def __call__(self, chunk: Tensor, start: int, state: Any) -> tuple[Any, Any]:
        accepted = inspect.signature(self.model.forward).parameters
        args, named = with_chunk(self.batch, chunk)
        named.update({switch: True for switch in SWITCHES if switch in accepted})
        if state is None and self.make is not None:
            state = self.make()
        if state is not None:
            named[self.name] = state
        mask = self.batch.mask_name
        if isinstance(self.batch.named.get(mask), Tensor) and (self.shows or not start):
            named[mask] = chunk.new_ones(chunk.shape[0], start + chunk.shape[1])
        if self.positions:
            place = torch.arange(start, start + chunk.shape[1], device=chunk.device)
            named["position_ids"] = place[None].expand_as(chunk)
        result = self.model(*args, **named)
        return result, find_state(result, self.name, state)


@dataclass(frozen=True)
class OwnState:
    """Calls a model that keeps its cache itself and is told where a call begins."""

    model: nn.Module
    batch: TokenBatch
    name: str

    def __call__(self, chunk: Tensor, start: int, state: Any) -> tuple[Any, Any]:
        place: Any = start
        if self.name in PLACES:
            place = torch.arange(start, start + chunk.shape[1], device=chunk.device)
        args, named = with_chunk(self.batch, chunk)
        return self.model(*args, **{**named, self.name: place}), None


def with_chunk(batch: TokenBatch, chunk: Tensor) -> tuple[tuple, dict[str, Any]]:
    """(args, keywords) of a forward over a chunk of the text, beside an encoder's inputs if there are some."""
    short = batch.with_targets(chunk)
    own = {"decoder_attention_mask", "labels", "position_ids", "cache_position", "decoder_position_ids"}
    if not batch.has_decoder:
        own |= {
            name for name, x in short.named.items()
            if isinstance(x, Tensor) and x is not chunk and x.shape[:2] == batch.targets.shape
        }  # fmt: skip
    return short.args, {name: x for name, x in short.named.items() if name not in own}


def keeps_cache(model: nn.Module) -> bool:
    """True if some module holds a tensor, list or module whose name says that it is a cache."""
    for module in model.modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        for key, value in {**own, **module._buffers, **module._modules}.items():
            if any(part in key.lower() for part in KEPT_NAMES) and not isinstance(value, (bool, int, float, str)):
                return True
    return False


def _caches_of(model: nn.Module, batch: TokenBatch) -> list[tuple[str, Callable[[], Any]]]:
    """(name, constructor) of transformers' caches that a model takes."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return []
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    config, length = config.get_text_config(decoder=True), batch.targets.shape[1]

    def two() -> EncoderDecoderCache:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    if getattr(model.config, "is_encoder_decoder", False):
        return [("EncoderDecoderCache", two)]
    made: list[tuple[str, Callable[[], Any]]] = [("DynamicCache", lambda: DynamicCache(config=config))]
    if getattr(model, "_can_compile_fullgraph", False):
        made.append(("StaticCache", lambda: StaticCache(config=config, max_cache_len=length)))
    return made


def find_state(result: Any, name: str, before: Any) -> Any:
    """The state that a call returned: under the argument's name, under one like it, or beside the output in a tuple."""
    named: Mapping[str, Any] = result if isinstance(result, Mapping) else getattr(result, "__dict__", {})
    if named.get(name) is not None:
        return named[name]
    found = next((x for key, x in named.items() if x is not None and any(part in key for part in KEPT_NAMES)), None)
    if found is not None:
        return found
    if isinstance(result, (tuple, list)):
        output = main_output(result)
        rest = [part for part in result if part is not None and part is not output]
        rest = [part for part in rest if not (isinstance(part, Tensor) and part.ndim == 0)]  # a loss
        if rest:
            return rest[0] if len(rest) == 1 or not all(isinstance(part, Tensor) for part in rest) else tuple(rest)
    if before is not None:
        return before  # changed in place
    raise NotApplicable(f"forward takes {name}=, but a call returns nothing to give it")


def is_recurrent(state: Any) -> bool:
    """True for a cache of transformers with layers that hold a state in place of keys."""
    parts: Any = getattr(state, "layers", None) or getattr(getattr(state, "self_attention_cache", None), "layers", ())
    return any("Linear" in type(layer).__name__ or "Mamba" in type(layer).__name__ for layer in parts)
