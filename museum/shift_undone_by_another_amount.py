"""Longitude is shifted by the amount for latitude, and shifted back by its own: the map moves in every second layer."""

from museum.shifted_windows_not_masked import SHIFT, Windows, cut, make_swin

LINK = "NVIDIA/physicsnemo#1399"
SYMPTOM = "Right for square windows; for others every shifted layer adds what belongs to another place."
NEEDS = ("shift", "other place")


class Shifted(Windows):
    def cut(self, x):
        return cut(x.roll((-self.shift, -(self.shift // SHIFT)), (1, 2)))


def make():
    return make_swin(True, Shifted)


def sound():
    return make_swin(True)
