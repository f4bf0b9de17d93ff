"""Patches are unfolded and viewed without moving the channels: a token holds several patches of one channel."""

from museum.patches_cut_by_view import PATCH, ViT, make_vit

LINK = "gupta-abhay/pytorch-vit#7"
SYMPTOM = "Words come from different blocks in space; the model trains at one size and transfers to no other."
NEEDS = ("patch",)


class Unfolded(ViT):
    def cut(self, x):
        return x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).contiguous().view(len(x), self.count, -1)


def make():
    return make_vit(Unfolded)


def sound():
    return make_vit(ViT)
