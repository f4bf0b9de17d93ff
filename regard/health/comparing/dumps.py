"""Folders of tensors that other programs wrote, read as a `Fingerprint`; nothing in them is executed.

    regard.json                                     a mapping file, also what regard_tap.py writes
    TP0_PP0_Rank0_pid1/Pass00000.pt                 SGLang, --debug-tensor-dump-output-folder
    step=0___rank=0___name=…___layer_id=3.pt        SGLang's dumper (older: forward_pass_id=…)
    step_0/model.layers.0.mlp/outputs_cuda_0.pt     vLLM's intermediate tensor logging
    step0/rank0/dump_tensor_data/Module.….pt        msProbe, task "tensor", level "L0" or "mix"

The first forward is read. Where there are several ranks, the tensors that all of them have alike are. Modules are named
as in transformers, `model.layers.3.mlp.down_proj`; a place is `layers.3.q`, `layers.3.output`, `final`, or a module
behind `at.`: `layers.3.at.mlp.down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.health.comparing.causes.rotary import recover
from regard.health.comparing.fingerprint import Fingerprint, check, parse_json, read_tensors
from regard.health.comparing.sketches import HEAD, HIDDEN, choose_tokens, sketch

MAPPING = "regard.json"
MOST_LAYERS = 4096
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer|block)\.(\d+)(?:\.(.+))?$")
HEADS = ("q", "k", "v", "attention")
WHOLE = ("input", "output")
ENDS = {"lm_head": "final", "logits_processor": "final", "logits": "final", "final": "final"}
UNITS = {"float64": 2.0**-22, "float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-11}
Tensors = dict[str, np.ndarray]


def read_dump(folder: str | Path) -> Fingerprint:
    """Read a folder in one of the layouts above; ValueError in one line for any other, or for what does not fit."""
    folder = Path(folder)
    facts: dict[str, Any] = {}
    if (folder / MAPPING).is_file():
        facts = parse_json((folder / MAPPING).read_bytes())
        if not isinstance(facts, dict):
            raise ValueError(f"{str(folder / MAPPING)!r} is no JSON object")
        found = _mapped(folder, facts)
    else:
        found = next((made for read in (_passes, _named_files, _vllm, _msprobe) if (made := read(folder))), {})
    if not found:
        raise ValueError(
            f"{str(folder)!r} holds no tensors in a layout that is known: regard.json, SGLang's, vLLM's or msProbe's"
        )
    try:
        return _as_fingerprint(found, facts)
    except (ArithmeticError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} cannot be read as a dump: {type(error).__name__} {error}") from None


def load_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a .npy, .npz, .safetensors or .pt file by name; pickled objects are refused."""
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    try:
        if path.suffix in (".npy", ".npz"):
            loaded = np.load(path, allow_pickle=False)
            return {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        return dict(_flatten("", torch.load(path, map_location="cpu", weights_only=True)))
    except Exception as error:  # torch, zip and numpy raise many kinds for files that are none
        said = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise ValueError(f"{str(path)!r} cannot be read without running code: {said}") from None


def _flatten(name: str, x: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(x, torch.Tensor):
        yield name, x.detach().to(torch.float32 if x.is_floating_point() else torch.int64).numpy()
    elif isinstance(x, dict) and "value" in x and not name:
        yield from _flatten("", x["value"])
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), value)
    elif isinstance(x, (list, tuple)):
        for at, value in enumerate(x):
            yield from _flatten(name if at == 0 else f"{name}#{at}", value)


def _mapped(folder: Path, facts: dict[str, Any]) -> Tensors:
    """`tensors` of the mapping file: {place: "file.npy" or "file.safetensors:name"}; {i} stands for every layer."""
    named = facts.get("tensors", {})
    if not isinstance(named, dict) or not all(isinstance(x, str) for x in named.values()):
        raise ValueError(f"{MAPPING}: tensors must map places to files")
    count = len(facts["layers"]) if isinstance(facts.get("layers"), list) else 256
    found: Tensors = {}
    for place, target in named.items():
        if "{i}" not in place:
            found[place] = _pick(folder, target)
            continue
        for at in range(count):
            file = target.replace("{i}", str(at))
            if not (folder / file.partition(":")[0]).is_file():
                break
            found[place.replace("{i}", str(at))] = _pick(folder, file)
    return found


def _pick(folder: Path, target: str) -> np.ndarray:
    name, _, key = target.partition(":")
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{MAPPING}: {target!r} leaves the folder")
    if not path.is_file():
        raise ValueError(f"{MAPPING}: there is no file {name!r}")
    tensors = load_file(path)
    if key not in tensors and not (key == "" and len(tensors) == 1):
        raise ValueError(f"{MAPPING}: {name!r} has no tensor {key!r}")
    return tensors[key] if key in tensors else next(iter(tensors.values()))


def _passes(folder: Path) -> Tensors:
    ranks = [load_file(path) for path in sorted(folder.glob("TP*_PP*/Pass00000.pt"))]
    return _merge(ranks or [load_file(path) for path in sorted(folder.glob("Pass00000.pt"))])


def _named_files(folder: Path) -> Tensors:
    ranks: dict[str, Tensors] = {}
    for path in sorted(folder.rglob("*___*.pt")):
        said = dict(part.split("=", 1) for part in path.stem.split("___") if "=" in part)
        if "name" not in said or said.get("step", said.get("forward_pass_id", "0")) not in ("0", "1", "None"):
            continue
        at = said.get("layer_id")
        name = said["name"] if at is None else f"layers.{at}.{said['name']}"
        rank = said.get("rank", path.parent.name.rpartition("_")[2])
        for _, x in list(load_file(path).items())[:1]:
            ranks.setdefault(rank, {}).setdefault(name, x)
    return _merge(list(ranks.values()))


def _vllm(folder: Path) -> Tensors:
    ranks: dict[str, Tensors] = {}
    steps = [*sorted(folder.glob("step_0")), *sorted(folder.glob("*/step_0"))]
    for path in sorted(steps[0].glob("*/outputs*.pt")) if steps else ():
        device = path.stem.removeprefix("outputs_")
        number = device.split("_")[0]
        device = device.removeprefix(f"{number}_") if number.isdigit() else device
        for at, x in enumerate(load_file(path).values()):
            if at == 0 and number in ("0", device.split("_")[0]):
                ranks.setdefault(device, {}).setdefault(path.parent.name, x)
    for path in sorted(steps[0].glob("*/inputs_0*.pt")) if steps else ():
        if "embed" in path.parent.name:
            for x in list(load_file(path).values())[:1]:
                next(iter(ranks.values()), {}).setdefault("input_ids", x)
    return _merge(list(ranks.values()))


def _msprobe(folder: Path) -> Tensors:
    roots = [*sorted(folder.glob("step0/rank*/dump_tensor_data")), *sorted(folder.glob("rank*/dump_tensor_data"))]
    pattern = re.compile(r"Module\.(?:\d+\.)?(.+)\.[A-Za-z_]\w*\.forward\.0\.(output|input)\.0$")
    ranks: list[Tensors] = []
    for root in roots:
        found: Tensors = {}
        for path in sorted(root.glob("Module.*")):
            said = pattern.fullmatch(path.name.removesuffix(path.suffix))
            if said is None or path.suffix not in (".pt", ".npy"):
                continue
            module, part = said[1].removeprefix("module."), said[2]
            x = next(iter(load_file(path).values()))
            if part == "output":
                found[module] = x
            elif "embed" in module and x.dtype.kind == "i":
                found["input_ids"] = x
            elif (match := LAYER.search(module)) and not match[2]:
                found[f"layers.{match[1]}.input"] = x
        ranks.append(found)
    return _merge(ranks)


def _merge(ranks: list[Tensors]) -> Tensors:
    """The tensors that all ranks have alike: those that tensor parallelism does not split."""
    if not ranks:
        return {}
    first, *others = ranks
    alike = lambda x, y: y is not None and x.shape == y.shape and np.allclose(x, y, rtol=1e-2, atol=1e-6)  # noqa: E731
    return {name: x for name, x in first.items() if all(alike(x, one.get(name)) for one in others)}


def _as_fingerprint(found: Tensors, given: dict[str, Any]) -> Fingerprint:
    ids = _ids(found, given)
    batch, length = ids.shape if ids is not None else _shape(found)
    mask = np.asarray(given["mask"], bool) if "mask" in given else None
    rows = choose_tokens(batch, length, mask)
    heads: dict[str, int] = {name: int(given[name]) for name in ("heads", "groups") if name in given}
    tensors: dict[str, np.ndarray] = {} if ids is None else {"ids.0": ids.astype(np.int32)}
    if mask is not None:
        tensors["mask.0"] = mask.astype(np.int32)
    count, whole = 0, {}
    for name, x in found.items():
        for place, y in _places(name, x, heads):
            whole[place] = y
            match = LAYER.search(place)
            count = max(count, int(match[1]) + 1 if match else 0)
            if count > MOST_LAYERS:
                raise ValueError(f"{place[:60]!r} is of a layer beyond {MOST_LAYERS:,}")
            kept = _sketch(place, y, rows, (batch, length), heads)
            if kept is not None:
                tensors[place] = kept
    layers = given.get("layers")
    layers = layers if isinstance(layers, list) else [{} for _ in range(count)]
    layers = [dict(name=f"layers.{at}", kind="dump") | one | _rotary(whole, at) for at, one in enumerate(layers)]
    dtype = str(given.get("dtype", "float32"))
    if dtype not in UNITS:
        raise ValueError(f"dtype {dtype!r} is unknown; write one of {', '.join(UNITS)} into {MAPPING}")
    facts = dict(
        model=str(given.get("model", "dump")), dtype=dtype, rounding=UNITS[dtype], versions={}, config={},
        kernel="dump", tokens=[dict(rows=[list(row) for row in rows])], layers=layers, budgets={},
    )  # fmt: skip
    check(facts, tensors)
    return Fingerprint(facts, tensors)


def _rotary(whole: Tensors, at: int) -> dict[str, Any]:
    """The rotary positions of a layer whose q and k were written before and after them, [B, N, H, D]."""
    found: dict[str, Any] = {}
    for part in ("q", "k"):
        after = whole.get(f"layers.{at}.{part}")
        stem = f"layers.{at}.at."
        before = next((x for name, x in whole.items() if name.startswith(stem) and name.endswith(f"{part}_proj")), None)
        if after is None or before is None or after.ndim != 4 or before.size != after.size:
            continue
        pair = [torch.from_numpy(np.asarray(x, np.float64).reshape(after.shape)) for x in (before, after)]
        one = recover(pair[0].transpose(1, 2), pair[1].transpose(1, 2))
        found[part] = None if one is None or float(one.omega.abs().max()) < 1e-4 else one.to_json()
    return dict(rotary={part: one for part, one in found.items() if one is not None}) if len(found) == 2 else {}


def _ids(found: Tensors, given: dict[str, Any]) -> np.ndarray | None:
    """Token ids [B, N], from the mapping file or from the dump."""
    ids = given.get("tokens")
    if ids is None:
        ids = next((x for name, x in found.items() if name.endswith("input_ids") and x.dtype.kind == "i"), None)
    if ids is None:
        return None
    ids = np.asarray(ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.dtype.kind != "i":
        raise ValueError("the token ids are no [sequences, tokens] of whole numbers")
    return ids


def _shape(found: Tensors) -> tuple[int, int]:
    """Sequences and tokens, by the first tensor of a layer; [tokens, features] is one sequence."""
    x = next((x for name, x in found.items() if LAYER.search(name) and x.ndim >= 2), None)
    if x is None:
        raise ValueError("no tensor of a layer was found; name places layers.0.output, layers.0.q, …")
    return (1, x.shape[0]) if x.ndim == 2 else (x.shape[0], x.shape[1])


def _places(name: str, x: np.ndarray, heads: dict[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    """The places of a fingerprint that a tensor fills; stacked projections are taken apart."""
    name = name.split("#")[0]
    match = LAYER.search(name)
    if match is None:
        place = next((end for word, end in ENDS.items() if name.endswith(word)), None)
        if place is not None and "#" not in name:
            yield place, x
        return
    at, rest = match[1], match[2]
    if not rest:
        yield f"layers.{at}.output", x
    elif rest in (*HEADS, *WHOLE, "scores") or rest.startswith("at."):
        yield f"layers.{at}.{rest}", x
    elif rest.endswith("gate_up_proj"):
        stem, half = rest.removesuffix("gate_up_proj"), x.shape[-1] // 2
        yield f"layers.{at}.at.{stem}gate_proj", x[..., :half]
        yield f"layers.{at}.at.{stem}up_proj", x[..., half:]
    elif rest.endswith("qkv_proj") and len(heads) == 2:
        stem, width = rest.removesuffix("qkv_proj"), x.shape[-1] // (heads["heads"] + 2 * heads["groups"])
        ends = np.cumsum([heads["heads"] * width, heads["groups"] * width])
        for part, piece in zip(("q_proj", "k_proj", "v_proj"), np.split(x, ends, -1), strict=True):
            yield f"layers.{at}.at.{stem}{part}", piece
    elif rest.endswith("self_attn.attn") and "heads" in heads:
        yield f"layers.{at}.attention", x
    else:
        yield f"layers.{at}.at.{rest}", x


def _sketch(
    place: str, x: np.ndarray, rows: list[tuple[int, int]], shape: tuple[int, int], heads: dict[str, int]
) -> np.ndarray | None:
    """The sketch of x [B, N, …] or [B·N, …] at the chosen tokens; None where it has other tokens."""
    batch, length = shape
    x = np.asarray(x, np.float64)
    if x.shape[:2] != (batch, length) and x.shape[0] == batch * length:
        x = x.reshape(batch, length, *x.shape[1:])
    part = place.rpartition(".")[2]
    if place.count(".") == 2 and part in HEADS:
        if x.ndim == 3:
            count = heads.get("groups" if part in ("k", "v") else "heads", heads.get("heads", 1))
            x = x.reshape(*x.shape[:2], count, -1)
        elif x.ndim == 4 and x.shape[:2] != (batch, length) and (x.shape[0], x.shape[2]) == (batch, length):
            x = x.transpose(0, 2, 1, 3)
    if x.shape[:2] != (batch, length):
        return None
    picked = np.stack([x[b, n] for b, n in rows])
    if not np.isfinite(picked).all():
        raise ValueError(f"{place} holds values that are not finite")
    return sketch(picked, HIDDEN if part in WHOLE or place == "final" else HEAD)
