"""regard_tap: writes what a model computes, from any framework, for `regard compare FOLDER golden.regard`.

Paste this file into JAX, MLX, llama.cpp's Python or an engine's worker; it needs numpy alone.

    tap = Tap("taps", tokens=ids, model="my port", dtype="bfloat16", heads=32, groups=8)
    tap("layers.0.input", x)            # [batch, tokens, width], before the block
    tap("layers.0.q", q)                # [batch, tokens, heads, width], after norms and rotary positions; so k and v
    tap("layers.0.attention", o)        # what the weights give, before the output projection
    tap("layers.0.output", x)           # the block's output
    tap("final", logits)
    tap.layer(0, scale=0.125, window=None)   # facts, where you know them
    tap.close()
"""

import json
import os

import numpy as np


class Tap:
    """Saves tensors by place in a folder, with a mapping file beside them."""

    def __init__(self, folder, tokens=None, mask=None, **facts):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.places, self.layers = folder, {}, {}
        self.facts = dict(facts)
        for name, given in (("tokens", tokens), ("mask", mask)):
            if given is not None:
                self.facts[name] = np.asarray(given).astype(int).tolist()

    def __call__(self, place, x):
        """Keep the first tensor of a place; returns x, so that a call can stand inside an expression."""
        if place not in self.places:
            name = "".join(c if c.isalnum() or c in "._-" else "_" for c in place) + ".npy"
            np.save(os.path.join(self.folder, name), self._plain(x), allow_pickle=False)
            self.places[place] = name
        return x

    @staticmethod
    def _plain(x):
        """float32 numpy of numpy, JAX, MLX or torch; their 16-bit floats are widened."""
        if hasattr(x, "detach"):
            x = x.detach().float().cpu().numpy()
        return np.asarray(x, dtype=np.float32)

    def layer(self, at, **facts):
        """Say what is known of a layer: scale, softcap, window, mask, heads, groups, width."""
        self.layers.setdefault(at, {}).update(facts)

    def close(self):
        """Write the mapping file, which makes the folder readable."""
        numbers = [int(place.split(".")[1]) for place in self.places if place.startswith("layers.")]
        layers = [self.layers.get(at, {}) for at in range(max(numbers, default=-1) + 1)]
        with open(os.path.join(self.folder, "regard.json"), "w", encoding="utf-8") as file:
            json.dump({**self.facts, "layers": layers, "tensors": self.places}, file)
