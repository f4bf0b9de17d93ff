"""Queries are detached: q's projection never learns."""

from museum.parts import Attention, make_gpt

LINK = "paiml/aprender#2203"
SYMPTOM = "No gradient reaches the query's projection: it stays at its initialisation."
NEEDS = ("gradient",)


class Detached(Attention):
    def score(self, q, k):
        return super().score(q.detach(), k)


def make():
    return make_gpt(Detached)


def sound():
    return make_gpt()
