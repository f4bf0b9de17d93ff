"""Windows are cut by view without permute, and joined with it: the map comes back with its places exchanged."""

from museum.shifted_windows_not_masked import WINDOW, Windows, make_swin

LINK = "ByChelsea/CMOS#4"
SYMPTOM = "The feature map is misaligned after every layer of window attention."
NEEDS = ("permute", "other place")


class ByView(Windows):
    def cut(self, x):
        x = x.roll((-self.shift, -self.shift), (1, 2))
        return x.reshape(-1, WINDOW * WINDOW, x.shape[-1])


def make():
    return make_swin(True, ByView)


def sound():
    return make_swin(True)
