"""Every architecture of transformers, made small from its configuration class, with random weights and a batch.

>>> from regard.health.models.tiny_architectures import make_model
>>> from regard.health.models.tiny_inputs import make_batch
>>> model = make_model("llama")
>>> model(**make_batch(model)).last_hidden_state.shape
torch.Size([2, 12, 64])

A number of a configuration is made small by the name of its field (`SIZES`), in nested configurations as well; what a
class derives from others is left to it. `NotBuilt` says why an architecture could not be made.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

HEADS, HEAD_DIM, WIDTH, LAYERS, VOCABULARY, POSITIONS = 4, 16, 64, 2, 128, 128
FIRST_SPECIAL = 100  # number of the first special token; ordinary ones are below
MAX_PARAMETERS = 40_000_000
WAYS = ("small", "filled", "shallow", "shallow and filled")  # of shrinking a configuration: see `shrink`


class NotBuilt(Exception):
    """Says in one line why an architecture could not be made small."""


class NoClass(NotBuilt):
    """Says that transformers has no such model class for a configuration."""


def list_names() -> list[str]:
    """Returns the model types that transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def make_model(name: str, seed: int = 0, kind: str | None = None, **options: Any) -> nn.Module:
    """Returns a small model of that type in evaluation mode; the caller's random numbers are left as they were.

    Args:
        name: a model type of transformers, "llama", "qwen2_5_vl_text", …
        seed: of the weights.
        kind: the ending of the class, "Model", "ForCausalLM", …; None for the plainest.
        options: fields of the configuration.

    Raises:
        NotBuilt: There is no such type, its class could not be found, or it could not be made.
    """
    return build_model(make_config(name, **options), seed, kind)


def build_model(
    config: Any, seed: int = 0, kind: str | type | None = None, attention: str | None = "eager"
) -> nn.Module:  # fmt: skip
    """Returns a float32 model of a small configuration, as `make_model`; `attention`: see `find_runnable`."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        given = {} if attention is None else dict(attn_implementation=attention)
        try:
            found: Any = kind if isinstance(kind, type) else find_class(config, kind)
            _check_size(found, config)
            model = found._from_config(config, dtype=torch.float32, **given)
        except NotBuilt:
            raise
        except Exception as error:
            raise NotBuilt(f"its model: {one_line(error)}") from error
        spread_weights(model)
    return model.eval()


def _check_size(kind: Any, config: Any) -> None:
    """Raises NotBuilt for a model of too many weights, before they take memory, where it can be made without."""
    try:
        with torch.device("meta"):
            total = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    except Exception:
        return
    if total > MAX_PARAMETERS:
        raise NotBuilt(f"its small model still has {total:,} parameters")


def make_config(name: str, way: str = WAYS[0], **options: Any) -> Any:
    """Returns the configuration of that type with every size made small."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[name]
    except (KeyError, ImportError, AttributeError) as error:
        raise NotBuilt(f"transformers has no configuration {name!r}: {one_line(error)}") from error
    try:
        default = kind()
    except Exception as error:
        raise NotBuilt(f"its configuration has no defaults: {one_line(error)}") from error
    try:
        return shrink(default, way, **options)
    except Exception as error:
        raise NotBuilt(f"its small configuration: {one_line(error)}") from error


def shrink(default: Any, way: str = WAYS[0], is_inner: bool = False, **options: Any) -> Any:
    """Returns a configuration of the same class as `default`, with small numbers; nested ones are shrunk too.

    A class whose numbers depend on one another in a way of its own may refuse the small ones. Ways to go on: "filled"
    gives numbers where the default is None, "shallow" leaves widths alone and makes only depth and tables small.
    """
    kind = type(default)
    given = _fields(default, "filled" in way)
    table = SIZES[:SHALLOW] if "shallow" in way else SIZES
    changed = {name: _shrink_field(name, value, given, table) for name, value in given.items()}
    for name in getattr(kind, "sub_configs", {}):
        inner: Any = getattr(default, name, None)
        if getattr(inner, "model_type", None) == "timm_backbone":  # of another library
            from transformers import AutoConfig

            inner = AutoConfig.for_model("resnet", out_indices=list(inner.out_indices))
        if inner is not None and hasattr(inner, "to_dict"):
            changed[name] = shrink(inner, way, is_inner=True)
    _fit_layers(changed, default)
    if is_inner:
        _fit_feature_maps(changed, default)
    if "shallow" not in way:
        _fit_rotary(changed, default)
        patch = PATCHES.get(kind.model_type, {})
        changed.update({} if is_inner and patch is _SWIN else patch)  # a backbone keeps its stages, which are named
    return kind(**{**{name: value for name, value in changed.items() if value is not KEEP}, **options})


KEEP = object()  # what the class derives itself


def _fields(default: Any, fill: bool) -> dict[str, Any]:
    """Returns name → value of what the class declares; what it derives, because its default is None, is left out.

    With `fill` a whole number without a default is given one by its name.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        if field.init and field.name not in SKIPPED and field.name not in getattr(default, "sub_configs", {}):
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            if made is not None and made is not dataclasses.MISSING:
                try:
                    found[field.name] = getattr(default, field.name, made)
                except Exception:  # a number that differs between layers has no one value
                    found[field.name] = made
            elif fill and made is None and getattr(default, field.name, None) is None:
                if re.match(r"int\b", str(field.type)) and not TOKENS.match(field.name):
                    found[field.name] = FILLED
    return found


SKIPPED = {
    "id2label", "label2id", "problem_type", "architectures", "dtype", "transformers_version", "chunk_size_feed_forward",
    "return_dict", "output_hidden_states", "is_encoder_decoder",
}  # fmt: skip


def _limit(most: int) -> Callable[[int], int]:
    return lambda value: min(value, most)


FILLED = 2**20  # stands for a number without a default; its name's rule makes it small

# the first pattern that a field's name matches in full decides; a function takes the default value
SIZES: list[tuple[str, Any]] = [
    (r"(.*_)?vocab_size(_per_layer_input)?|.*_vocab_size|n_vocab|vocab", VOCABULARY),
    (r"topk_group|n_group", 1),
    (r"(num|n)_experts_per_tok|num_experts_per_token|.*_top_?k|top_?k(_.*)?|moe_k|moe_topk", _limit(2)),
    (r".*(num|n).*experts.*|moe_num_.*|.*n_routed_experts", _limit(4)),
    (r"inner_group_num", 1),
    (r"(.*_)?(num|n)_.*layers|(.*_)?n?_?layers?|(.*_)?depth|.*_layers|num_blocks|num_hidden_groups", _limit(LAYERS)),
    (r"num_queries|num_(latents|query_tokens|object_queries)|n_query|num_.*_queries", _limit(6)),
    (r".*source_positions|max_position_embeddings|n_positions|n_ctx|context_length", POSITIONS),
    # up to here (SHALLOW) rules leave widths alone
    (r"qk_(rope|nope)_head_dim|rotary_dim|rope_head_dim", 8),
    (r"mamba_(d_head|head_dim)|mamba_headdim", 16),
    (r"mamba_n(um)?_?heads|n_mamba_heads", 8),
    (r"mamba_n_groups|n_groups|mamba_ngroups", 1),
    (r"mamba_dt_rank|time_step_rank|dt_rank", _limit(8)),
    (r"(.*_)?(num_)?(key_value|kv|mem)_?(attention_)?heads?(_.*)?|.*key_value_heads?|n_head_kv|num_kv_heads", "kv"),
    (r"(.*_)?((num|n)_)?(.*_)?(attention_|attn_)?heads?(_num|_count)?|n_heads?|nhead|.*_num_heads", _limit(HEADS)),
    (r".*(head_dim|head_size|d_kv|dim_head|dim_per_head|qk_head_dim|v_head_dim|d_head)|kv_channels", HEAD_DIM),
    (r"index_topk.*|.*topk_blocks", 4),
    (r"(.*_)?(patch_size|patch_stride)", _limit(8)),
    (r"(.*_)?(image_size|img_size|image_resolution|input_size)|crop_size|pretrain_image_size", 32),
    (r".*(window|window_size|local_attention|attention_chunk_size|chunk_length|attention_span)", _limit(8)),
    (r"(.*_)?chunk_size|chunk_len|block_size|.*context_size.*", _limit(8)),
    (r"(.*_)?(max_.*positions?(_embeddings)?|max_seq.*len.*|max_length)", POSITIONS),
    (r".*(state_size|d_state|ssm_state.*)", _limit(8)),
    (r".*(lora_rank|_rank|r_dim)|lora_dim", 16),
    (r"num_mel_bins|feature_size|n_mels|num_mel.*", _limit(16)),
    (r"upsample_groups", WIDTH),
    (r"num_pos_feats", WIDTH // 2),  # a sine and a cosine each
    (r".*(conv_kernel|kernel_size|stride|expand|multiplier|factor|type_vocab.*|num_channels|in_channels).*", None),
    (r".*(intermediate|ffn|ff_|mlp|inner|feedforward|feed_forward|d_ff|fc_).*", WIDTH),
    (r".*(hidden|d_model|n_embd|embed|width|model_dim|emb_dim|encoder_dim|decoder_dim|bottleneck).*", WIDTH),
    (r"prediction_length", 8),
    (r"dim|.*_dim|.*_size|.*_channels|.*_features|.*_width", "big"),
]  # fmt: skip
SHALLOW = next(at for at, (pattern, _) in enumerate(SIZES) if pattern.startswith("qk_"))
TOKENS = re.compile(r".*(token_id|token_index|token_ids|_token)$")


def _shrink_field(name: str, value: Any, given: dict[str, Any], table: list[tuple[str, Any]]) -> Any:
    """Returns a field's small value; KEEP where it had none and no rule knows its name."""
    if isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
        return _shrink_list(name, value, given) if table is SIZES or re.search("depth|layers", name) else value
    if type(value) is not int or (value <= 0 and not TOKENS.match(name)):
        return value
    if TOKENS.match(name):
        special = {"pad": 0, "bos": 1, "eos": 2, "unk": 3, "decoder_start": 4}
        known = next((number for part, number in special.items() if name == f"{part}_token_id"), None)
        if known is not None or value < 0:
            return known if known is not None else value
        return FIRST_SPECIAL + [one for one in given if TOKENS.match(one)].index(name) % (VOCABULARY - FIRST_SPECIAL)
    rule = next((rule for pattern, rule in table if re.fullmatch(pattern, name)), None)
    if value == FILLED and rule is None:
        return KEEP
    if rule == "kv":
        heads = next((given[one] for one in ("num_attention_heads", "n_head", "num_heads") if one in given), None)
        return 1 if value == 1 else min(HEADS, value) if value == heads else 2
    if rule == "big":
        return min(value, WIDTH)
    return value if rule is None else rule(value) if callable(rule) else rule


def _shrink_list(name: str, value: Any, given: dict[str, Any]) -> Any:
    """Returns a list of numbers made small: widths, depths, heads of the stages of a model."""
    heads = next((given[one] for one in ("num_attention_heads", "num_heads", "num_head") if one in given), None)
    if TOKENS.match(name):
        return type(value)(FIRST_SPECIAL + 20 + at for at in range(len(value)))
    if re.search(r"depth|layers_per|num_layers|blocks", name) and "index" not in name:
        return type(value)(min(one, LAYERS) for one in value)
    if re.search(r"hidden_sizes|embed_dims?|channels|widths|dims", name):
        if isinstance(heads, (list, tuple)) and len(heads) == len(value):
            return type(value)(8 * one for one in heads)
        return type(value)(min(one, 32) for one in value)
    if re.search(r"conv_dim", name):
        return type(value)(32 for _ in value)
    if re.search(r"image_size|img_size", name):
        return type(value)(32 for _ in value)
    if re.search(r"patch_size", name):
        return type(value)(min(one, 8) for one in value)
    if re.search(r"index|indices|out_features|layer_ids", name):
        return type(value)(sorted({min(one, LAYERS - 1) for one in value}))
    return value


def _fit_layers(changed: dict[str, Any], default: Any) -> None:
    """Gives a model of several kinds of layers so many that each kind is among them."""
    for count in ("num_hidden_layers", "n_layer", "n_layers"):
        if count not in changed:
            continue
        for names in ("layer_types", "layers_block_type", "block_types", "_block_types", "mlp_layer_types"):
            types = getattr(default, names, None)
            if isinstance(types, (list, tuple)) and types and isinstance(types[0], str):
                needed = max(types.index(one) for one in set(types)) + 1
                if needed <= 8:
                    changed[count] = max(changed[count], needed)
                elif names in {field.name for field in dataclasses.fields(default)}:
                    changed[count] = max(changed[count], len(set(types)))
                    changed[names] = list(dict.fromkeys(types))
        for name, value in list(changed.items()):  # a list with one entry for each layer
            if isinstance(value, (list, tuple)) and len(value) == getattr(default, count) and name != "layer_types":
                changed[name] = type(value)(value[: changed[count]])


def _fit_feature_maps(changed: dict[str, Any], default: Any) -> None:
    """Lets a backbone return as many feature maps as it does by default: of the same stages, or of the last layers."""
    taken = getattr(default, "_out_indices", None)
    if taken and "num_hidden_layers" in changed:
        count = changed["num_hidden_layers"] = max(changed["num_hidden_layers"], len(taken))
        taken = range(count - len(taken) + 1, count + 1)
    if taken:
        changed["out_indices"] = list(taken)


def _fit_rotary(changed: dict[str, Any], default: Any) -> None:
    """Shortens lists of rotary frequencies to half of the small head."""
    if "mrope_section" in (getattr(default, "ignore_keys_at_rope_validation", None) or ()):
        given = getattr(default, "rope_parameters", None) or {}
        if "full_attention" not in given:
            changed["rope_parameters"] = {**given, "mrope_section": given.get("mrope_section", [16, 24, 24])}
    for name, value in list(changed.items()):
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            changed[name] = _fit_rope(value, changed)


def _fit_rope(rope: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    half = int(changed.get("head_dim", HEAD_DIM) * rope.get("partial_rotary_factor", 1.0)) // 2
    fitted = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            fitted[name] = _fit_rope(value, changed)
        elif name in ("short_factor", "long_factor"):
            fitted[name] = value[:half]
        elif name.endswith("mrope_section"):
            parts = [max(1, one * half // sum(value)) for one in value]
            fitted[name] = [half - sum(parts[1:]), *parts[1:]]
        elif name == "original_max_position_embeddings":
            fitted[name] = POSITIONS // 2
    return fitted


# fields that no rule of names can know
_FULL_AND_SLIDING = ["sliding_attention", "full_attention"]
_GEMMA4 = dict(num_hidden_layers=2, layer_types=_FULL_AND_SLIDING, global_head_dim=32, hidden_size_per_layer_input=16)
_MAMBA2_HYBRID = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2)
_SWIN = dict(depths=(2, 2), num_heads=(3, 6), embed_dim=24, image_size=32, window_size=4)  # 8 × 8, then 4 × 4 patches
_SERIES = dict(prediction_length=8, context_length=24)
_HIERA = (16, 32, 48, 64)  # widths of SAM 2's stages, which pool where the width changes
PATCHES: dict[str, dict[str, Any]] = {
    "sam2_hiera_det_model": dict(
        hidden_size=_HIERA[0], image_size=[64, 64], blocks_per_stage=[1, 1, 2, 1], embed_dim_per_stage=[*_HIERA],
        num_attention_heads_per_stage=[1, 2, 2, 2], window_size_per_stage=[4, 4, 2, 2], global_attention_blocks=[3],
    ),
    "sam2_vision_model": dict(
        backbone_channel_list=[*_HIERA[::-1]], backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]]
    ),
    "sam2_prompt_encoder": dict(image_size=64, patch_size=16),
    "mobilevitv2": dict(image_size=64),  # of which 32 × 32 pixels make a place
    "pp_formulanet_vision": dict(post_conv_in_channels=WIDTH),
    "swin2sr": dict(depths=(2, 2), num_heads=(2, 2), embed_dim=32, window_size=4),
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "textnet": dict(stem_out_channels=32),
    "vits": dict(  # random durations would say a token for minutes; without noise two forwards are equal
        speaking_rate=1e9, noise_scale=0.0, noise_scale_duration=0.0, upsample_initial_channel=32, spectrogram_bins=17,
    ),
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "bamba": dict(num_hidden_layers=3, attn_layer_indices=[1], **_MAMBA2_HYBRID),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "blip-2": dict(image_token_index=FIRST_SPECIAL),
    "deepseek_ocr2_text": dict(mlp_layer_types=["dense", "sparse"]),
    "esm": dict(vocab_size=VOCABULARY, pad_token_id=1),
    "falcon_h1": dict(mamba_d_ssm=128, **_MAMBA2_HYBRID),
    "gemma3n_text": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=16, laurel_rank=8,
        intermediate_size=WIDTH, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        layer_types=_FULL_AND_SLIDING * 2,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(
        num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], **_MAMBA2_HYBRID
    ),
    "instructblip": dict(image_token_index=FIRST_SPECIAL),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "llama4_vision_model": dict(intermediate_size=4 * WIDTH),
    "longcat_flash": dict(head_dim=8),
    "mamba2": dict(num_heads=8, head_dim=16, state_size=8, n_groups=1),
    "qwen2_5_vl_vision": dict(window_size=32),
    "sam_vision_model": dict(num_pos_feats=WIDTH // 2, output_channels=WIDTH),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(num_hidden_layers=6, layers_block_type=["linear_attention"] * 2 + ["hybrid", "linear_attention"] * 2),
    "zamba2": dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, adapter_rank=8,
                   n_mamba_heads=8, mamba_d_state=8, intermediate_size=64, num_key_value_heads=4),
}  # fmt: skip


def find_class(config: Any, kind: str | None = None) -> Any:
    """Returns the model class of a configuration: that of AutoModel, or the plainest that transformers has for it."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if kind in (None, "Model"):
        try:
            found = MODEL_MAPPING[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
        except Exception:  # not in the mapping, or its module could not be imported: looked for below
            pass
    name = type(config).__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise NotBuilt(f"its code could not be imported: {one_line(error)}") from error
    classes = [
        one
        for one in vars(module).values()
        if inspect.isclass(one) and issubclass(one, PreTrainedModel) and one.__module__ == name
        and getattr(one, "config_class", None) is type(config) and "forward" in vars(one)
    ]  # fmt: skip
    endings = (kind,) if kind else ("Model", "ForConditionalGeneration", "ForCausalLM", "Encoder", "")
    for ending in endings:
        for one in classes:
            if one.__name__.endswith(ending):
                return one
    raise NoClass(f"{name.rpartition('.')[2]} has no {kind or 'model'} for {type(config).__name__}")


def spread_weights(model: nn.Module) -> None:
    """Gives matrices the standard deviation 1/√fan_in, and vectors 0.3 around 1 (weights of norms) or 0.

    With transformers' 0.02 every row of the attention of a small model is flat, and errors in it hardly show. What
    the class itself has drawn does not count, so that it may have drawn nothing.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point() or weight.numel() == 0:
                continue
            if weight.ndim > 1:
                is_convolved = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.modules.conv._ConvNd)
                fan_in = weight[0].numel() if weight.ndim != 3 or is_convolved else weight.shape[-1]
                weight.normal_(0.0, max(fan_in, 1) ** -0.5)
            else:
                weight.normal_(float(name.endswith("weight")), 0.3)
        for name in model.state_dict().keys() & dict(model.named_buffers()).keys():
            buffer = model.get_buffer(name)
            if buffer.is_floating_point() and buffer.ndim > 1 and not bool(buffer.any()):
                buffer.normal_()  # a codebook, which is 0 until it is loaded


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text[:200]}"
