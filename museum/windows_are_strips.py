"""Windows are cut and joined by view alone, which agree: but a window is two rows of the image and no square."""

from museum.shifted_windows_not_masked import SIDE, make_swin
from museum.windows_cut_by_view import ByView

LINK = "ByChelsea/CMOS#4"
SYMPTOM = "A patch sees those at its left and right edge, and not those above and below it."
NEEDS = ("window",)


class Strips(ByView):
    def join(self, y, batch):
        return y.reshape(batch, SIDE, SIDE, -1).roll((self.shift, self.shift), (1, 2))


def make():
    return make_swin(True, Strips)


def sound():
    return make_swin(True)
