"""An earlier call changes the answer: a text gives other outputs once a longer one has been run."""

from torch import nn

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.measure.batches import max_positions
from regard.health.probe.differences import largest_change
from regard.health.probe.library import is_library_code
from regard.health.probe.modes import preserved
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG218", "an earlier call changes the answer", "a text gives the same outputs after a longer one", "critical",
    needs="token ids",
    proves="Proves that the model keeps something of a longer text that changes what it computes of a shorter one.",
    cause="A rotary base, a table or a mask that grew with the longer text is kept, or a cache was not emptied.",
    fix="Compute what depends on the length in every forward, or set it back.",
    references=("transformers#27226",),
)  # fmt: skip
RULES = (RULE,)
SHORT, LONGEST = 32, 4096  # tokens of the text that is compared, and of the long one at most


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    text = trial.text
    short = text.with_targets(text.targets[:, :SHORT])
    longest = max(text.targets.shape[1], *(batch.targets.shape[1] for batch in trial.batches))
    length = min(2 * longest, LONGEST, max_positions(trial.model), *rows_of_tables(trial, longest))
    if length <= longest:
        raise NotApplicable(f"no longer text can be run: the batches hold {longest} tokens, and the limit is {length}")
    times = -(-length // text.targets.shape[1])
    long = text.with_targets(text.targets.repeat(1, times)[:, :length])
    short, long = (
        one.put("attention_mask", one.targets.new_ones(one.targets.shape))
        if "attention_mask" in one.named and not one.has_decoder
        else one
        for one in (short, long)
    )
    with preserved(trial.model):
        before, calls = trial.probe.capture(short)
        try:
            trial.probe.run(long)
        except Exception as error:
            raise NotApplicable(f"the model takes no text of {length} tokens ({type(error).__name__})") from None
        after, others = trial.probe.capture(short)
    amount = largest_change(before, after)
    if amount <= trial.rounding:
        return []
    keys = [
        key for key, one in calls.items() if key in others and largest_change(one.k, others[key].k) > trial.rounding
    ]
    where = f": the keys of {keys[0][0]} are others" if keys else ""
    return trial.find(
        RULE, "note" if is_library_code(trial.model) else "critical", keys[:1],
        f"{short.targets.shape[1]} tokens give outputs that differ by {amount:.2g} of their size once {length} "
        f"tokens have been run{where}.", f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
    )  # fmt: skip


def rows_of_tables(trial: Trial, least: int) -> list[int]:
    """The rows, `least` or more, of what positions may be read from: embeddings, own parameters, buffers [..., N, C].

    A row behind the last one ends in an assertion on a GPU, after which the process can run nothing there.
    """
    found = []
    for module in trial.model.modules():
        is_table = isinstance(module, nn.Embedding) or not type(module).__module__.startswith("torch.nn.")
        own = [*(module._parameters.values() if is_table else ()), *module._buffers.values()]
        found += [x.shape[-2] for x in own if x is not None and x.ndim > 1 and x.shape[-2] >= least]
    return [rows for rows in found if rows != trial.captured[0].shape[-1]]  # the vocabulary
