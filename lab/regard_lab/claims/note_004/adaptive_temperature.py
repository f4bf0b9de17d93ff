"""Trained: max retrieval on rows of at most 16 items, tested on longer ones, with temperatures put in afterwards."""

from regard_lab import training
from regard_lab.claim import above, claim, conclude
from regard_lab.training.results import estimate, group_by_sign

TESTED = (16, 64, 256, 1024, 4096, 16384)
LONG, LONGER, LONGEST = TESTED[3:]


@claim(
    statement="Can an adaptive temperature keep attention sharp where it should be, on lengths never trained on? Put "
    "as a claim: it keeps max retrieval right.",
    derivation=r"T = 1/\max(\beta(H), 1), \quad H = \text{entropy of the row at } T = 1",
    rule=f"Core: put into models trained on at most 16 items, the refit temperature must win accuracy at {LONG} and at "
    f"{LONGER} items (95 % intervals over seeds). Beyond: at {LONGEST} items at least 90 % must be right. "
    f"Ours: the refit must win over the published polynomial at {LONG}, {LONGER} and {LONGEST} items.",
)
def measure(sampler):
    result = training.shipped("retrieval")
    runs = [r["final"] for r in result["records"] if r["variant"] == "softmax" and not r["diverged"]]

    def points(how, n):
        return estimate([final[f"{how}@{n}"] for final in runs])

    def gain(how, other, n):
        return estimate([final[f"{how}@{n}"] - final[f"{other}@{n}"] for final in runs])

    def lead(other):
        signs = group_by_sign({f"{n} items": gain("refit", other, n) for n in TESTED})
        return f"more at {signs[1]}; less at {signs[-1]}; not settled by the seeds at {signs[0]}"

    def row(how):
        return ", ".join(f"{points(how, n).value:.1f}" for n in (16, LONG, LONGER, LONGEST))

    return conclude(
        above(f"% correct won by the refit temperature, {LONG} items", 0.0, gain("refit", "own", LONG)),
        above(f"% correct won by the refit temperature, {LONGER} items", 0.0, gain("refit", "own", LONGER)),
        above(f"% correct with it, {LONGEST} items, against 90", 90.0, points("refit", LONGEST)).beyond(),
        *(
            above(f"% correct won over the published polynomial, {n} items", 0.0, gain("refit", "published", n)).ours()
            for n in (LONG, LONGER, LONGEST)
        ),
        condition="to keep means to lose less: far beyond the trained lengths accuracy falls with either",
        right="It does not help.",
        remark=f"% correct at 16, {LONG}, {LONGER} and {LONGEST} items: without {row('own')}; with the published "
        f"polynomial {row('published')}; refit {row('refit')}. The refit against none, points: {lead('own')}. The "
        f"refit against the published polynomial: {lead('published')}. Trained: {result['how']['command']}; "
        f"{len(runs)} seeds, differences seed by seed; {result['how']['where'][0]}.",
        figure=training.get("retrieval").figures(result)["afterwards"],
    )
