"""A batch for a small model of transformers, by the names in its forward's signature: token ids, images, sounds."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.models.tiny_architectures import WIDTH, NotBuilt

FIRST_TOKEN, LAST_TOKEN = 5, 95  # ordinary tokens
GRID = 4  # patches of an image, up and across


def make_batch(
    model: nn.Module, rows: int = 2, length: int = 12, seed: int = 0, padding: int = 3, more: tuple[str, ...] = ()
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
    makers = Inputs(model.config, rows, length, padding, generator)
    batch = {}
    for name in dict.fromkeys(wanted):
        make = getattr(makers, name, None)
        if make is None:
            raise NotBuilt(f"its forward takes {name}, for which no input is made here")
        batch[name] = make()
    return batch


class Inputs:
    """Makes inputs by their name in a forward's signature."""

    def __init__(self, config: Any, rows: int, length: int, padding: int, generator: torch.Generator) -> None:
        self.config, self.rows, self.length, self.padding, self.generator = config, rows, length, padding, generator

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

    def pixel_values(self) -> Tensor:
        size = self._number("image_size", "img_size", "input_size", default=32)
        return self._noise(self.rows, self._number("num_channels", "in_channels", "in_chans", default=3), size, size)

    def pixel_values_videos(self) -> Tensor:
        frames = self._number("num_frames", "frames_per_clip", default=8)
        return self._noise(self.rows, frames, *self.pixel_values().shape[1:])

    def input_features(self) -> Tensor:
        bins = self._number("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", default=16)
        return self._noise(self.rows, bins, 2 * self._number("max_source_positions", default=32))

    def input_values(self) -> Tensor:
        return self._noise(self.rows, 4000)

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
