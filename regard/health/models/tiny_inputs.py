"""A batch for a small model of transformers, by the names in its forward's signature: token ids, images, sounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.models.tiny_architectures import WAYS, WIDTH, NoClass, NotBuilt, build_model, one_line

FIRST_TOKEN, LAST_TOKEN = 5, 95  # ordinary tokens
GRID = 4  # patches of an image, up and across
IMAGES = ("pixel_values", "pixel_attention_mask", "spatial_shapes", "pixel_position_ids", "image_grid_thw", "grid_thw",
          "flattened_patches", "aspect_ratio_ids", "aspect_ratio_mask")  # fmt: skip
SOUNDS = ("input_features", "input_values", "input_features_mask", "audio_values")
BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_feat_size",
        "feature_projection_input_dim", "num_mels", "mel_bins", "input_dim")  # fmt: skip
SERIES = ("past_observed_mask", "past_time_features", "future_values", "future_time_features")
TEXTS = ("bbox", "decoder_input_ids", "encoder_hidden_states")
MORE = (
    (),
    ("pixel_values",),
    ("input_ids",),
    ("bbox",),
    IMAGES,
    SOUNDS,
    SERIES,
    (*IMAGES, *SOUNDS, *TEXTS),
)  # tried in this order
LAYOUTS = 3  # of sounds and videos: see `Inputs`


def find_runnable(
    make_config: Callable[[str], Any], kinds: Sequence[str | type | None] = (None,), attention: str | None = "eager",
    **sizes: int,
) -> tuple[nn.Module, Callable[..., dict[str, Any]]]:  # fmt: skip
    """Returns a small model whose forward runs, and what makes its batches: `make_batch` of that model.

    Args:
        make_config: a way of `WAYS` -> the small configuration.
        kinds: classes, or the endings of their names, best first; None for the plainest.
        attention: the implementation, None for the model's own.
        sizes: rows, length and padding of the batch that is tried.

    Raises:
        NotBuilt: Nothing ran; the reason is that of the first way.
    """
    reasons: list[str] = []
    absent: list[str] = []
    for way in WAYS:
        try:
            config = make_config(way)
        except NotBuilt as error:
            reasons.append(str(error))
            continue
        for kind in kinds:
            try:
                model = build_model(config, kind=kind, attention=attention)
            except NoClass as error:
                absent.append(str(error))
                continue
            except NotBuilt as error:
                reasons.append(str(error))
                continue
            given: list[dict[str, Any]] = []
            for more, layout in [(more, layout) for layout in range(LAYOUTS) for more in MORE]:
                make: Callable[..., dict[str, Any]] = partial(make_batch, model, more=more, layout=layout)
                try:
                    batch = make(**sizes)
                    if any(_is_same(batch, one) for one in given):
                        continue
                    given.append(batch)
                    with torch.no_grad(), torch.random.fork_rng(devices=[]):
                        model(**batch)
                    return model, make
                except NotBuilt as error:
                    reasons.append(str(error))
                except Exception as error:
                    reasons.append(f"its forward raised {one_line(error)}")
    raise NotBuilt((reasons or absent[-1:])[0])  # the plainest class is looked for last


def _is_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return {name: x.shape for name, x in a.items()} == {name: x.shape for name, x in b.items()}


def make_batch(
    model: nn.Module, rows: int = 2, length: int = 12, seed: int = 0, padding: int = 3, more: tuple[str, ...] = (),
    layout: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Returns a batch that the model's forward takes: token ids with padding, images, sounds; `more` if it takes them.

    Raises:
        NotBuilt: The forward asks for an input that is not known here.
    """
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(model.forward).parameters
    needed = [name for name, one in accepted.items() if one.default is one.empty and one.kind not in (2, 4)]
    main = getattr(model, "main_input_name", "input_ids")
    wanted = list(dict.fromkeys([*needed, *(name for name in (main, *more) if name in accepted)]))
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        wanted.append("decoder_input_ids")
    if "input_ids" in wanted and "attention_mask" in accepted:
        wanted.append("attention_mask")
    makers = Inputs(model.config, rows, length, padding, generator, layout)
    batch = {}
    for name in dict.fromkeys(wanted):
        make = getattr(makers, name, None)
        if make is None and name not in needed:
            continue
        if make is None:
            raise NotBuilt(f"its forward takes {name}, for which no input is made here")
        batch[name] = make()
    return batch


class Inputs:
    """Makes inputs by their name in a forward's signature.

    Layout 0: sounds [B, bins, N] and [B, N], images [B, C, h, w]. 1: sounds [B, N, bins] and [B, 1, N], videos in the
    place of images. 2: sounds [B, N, bins] where waves are meant as well, images as patches [B, P, C·p·p].
    """

    def __init__(
        self, config: Any, rows: int, length: int, padding: int, generator: torch.Generator, layout: int
    ) -> None:  # fmt: skip
        self.config, self.rows, self.length, self.padding = config, rows, length, padding
        self.generator, self.layout = generator, layout

    def _number(self, *names: str, default: int) -> int:
        """Returns a number of the configuration or of those in it: an image's size, channels, …"""
        subs = [getattr(self.config, name, None) for name in getattr(self.config, "sub_configs", {})]
        for config in (self.config, *subs):
            for name in names:
                value = getattr(config, name, None)
                value = value[0] if isinstance(value, (list, tuple)) and value else value
                if type(value) is int:
                    return value
        return default

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def input_ids(self) -> Tensor:
        ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (self.rows, self.length), generator=self.generator)
        image, queries = (getattr(self.config, name, None) for name in ("image_token_index", "num_query_tokens"))
        if type(image) is int and type(queries) is int:  # BLIP-2: a place for each vector that the Q-Former makes
            ids[:, :queries] = image
        return ids

    def qformer_input_ids(self) -> Tensor:
        return torch.randint(FIRST_TOKEN, LAST_TOKEN, (self.rows, self.length), generator=self.generator)

    def attention_mask(self) -> Tensor:
        mask = torch.ones(self.rows, self.length, dtype=torch.long)
        if self.rows > 1 and self.padding:
            mask[-1, -self.padding :] = 0
        return mask

    def decoder_input_ids(self) -> Tensor:
        return torch.randint(FIRST_TOKEN, LAST_TOKEN, (self.rows, self.length - 5), generator=self.generator)

    def bbox(self) -> Tensor:
        corner = torch.randint(0, 50, (self.rows, self.length, 2), generator=self.generator)
        return torch.cat([corner, corner + 20], -1)

    def query_embeds(self) -> Tensor:
        return self.inputs_embeds()

    def _image(self) -> Tensor:
        size = self._number("image_size", "img_size", "input_size", default=32)
        return self._noise(self.rows, self._number("num_channels", "in_channels", "in_chans", default=3), size, size)

    def pixel_values(self) -> Tensor:
        if self.layout == 2:
            channels, side = self._image().shape[1], self._number("patch_size", default=8)
            return self._noise(self.rows, GRID * GRID, channels * side * side)
        return self.pixel_values_videos() if self.layout == 1 else self._image()

    def flattened_patches(self) -> Tensor:
        width = self._number("patch_embed_hidden_size", default=768)
        places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).float() + 1.0
        patches = self._noise(self.rows, GRID * GRID, width)
        return torch.cat([places.expand(self.rows, -1, -1), patches], -1)

    def pixel_values_videos(self) -> Tensor:
        frames = self._number("num_frames", "frames_per_clip", default=8)
        image = self._image()
        return self._noise(self.rows, frames, *image.shape[1:])

    image = pixel_values

    def _bins(self) -> int:
        return self._number(*BINS, default=16)

    def input_features(self) -> Tensor:
        frames = 2 * self._number("max_source_positions", default=32)
        return self._noise(self.rows, *((self._bins(), frames) if self.layout == 0 else (frames, self._bins())))

    def input_features_mask(self) -> Tensor:
        frames = 2 * self._number("max_source_positions", default=32)
        return torch.ones(self.rows, frames, dtype=torch.long)

    def input_values(self) -> Tensor:
        if self.layout == 2:
            return self._noise(self.rows, self._number("max_length", default=128), self._bins())
        return self._noise(self.rows, *(1,) * self.layout, 4096)

    audio_values = input_values

    def past_values(self) -> Tensor:
        channels = self._number("num_input_channels", "input_size", default=1)
        lags = max(getattr(self.config, "lags_sequence", None) or (0,))
        length = self._number("context_length", default=32) + lags
        return self._noise(
            self.rows, length, *((channels,) if self.layout == 0 and not (lags and channels == 1) else ())
        )

    def past_observed_mask(self) -> Tensor:
        return torch.ones_like(self.past_values())

    def past_time_features(self) -> Tensor:
        return self._noise(*self.past_values().shape[:2], self._number("num_time_features", default=0))

    def future_values(self) -> Tensor:
        return self._noise(self.rows, self._number("prediction_length", default=8))

    def future_time_features(self) -> Tensor:
        return self._noise(*self.future_values().shape[:2], self._number("num_time_features", default=0))

    def pixel_attention_mask(self) -> Tensor:
        return torch.ones(self.rows, GRID * GRID, dtype=torch.long)

    def spatial_shapes(self) -> Tensor:
        return torch.tensor([[GRID, GRID]] * self.rows)

    def inputs_embeds(self) -> Tensor:
        return self._noise(self.rows, self.length, self._number("hidden_size", "d_model", default=WIDTH))

    def hidden_states(self) -> Tensor:
        if "vision" not in type(self.config).__name__.lower():
            return self.inputs_embeds()
        side = self._number("patch_size", default=8)
        width = self._number("in_channels", "in_chans", "num_channels", default=3) * side * side
        return self._noise(2 * GRID * GRID, width * self._number("temporal_patch_size", default=1))

    def grid_thw(self) -> Tensor:
        return torch.tensor([[1, GRID, GRID]] * 2)

    def encoder_hidden_states(self) -> Tensor:
        return self.inputs_embeds()
