"""Softmax over the queries: each column adds up to 1 instead of each row."""

from museum.parts import Attention, make_gpt

LINK = "labmlai/annotated_deep_learning_paper_implementations#282"
SYMPTOM = "Weights are normalised over the queries: every key must be used, and a query's weights do not add up to 1."
NEEDS = ("softmax", "axis", "add up", "sum", "queries")


class OverQueries(Attention):
    def weigh(self, scores, hidden):
        length = scores.shape[-1]
        return scores.masked_fill(~self.mask[:length, :length], float("-inf")).softmax(-2)


def make():
    return make_gpt(OverQueries)


def sound():
    return make_gpt()
