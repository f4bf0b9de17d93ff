"""Which training steps a monitor samples: dense at first, then one in `every`.

The first ten samples are one step apart, the next ten two steps, then four, and so on up to `every`, so that a short
fine-tuning is watched too. With `every` below 8, one step in `every` is sampled from the start. Steps 1, 1 + every,
1 + 2·every, … are always due.

>>> from regard.health.watching.schedule import Schedule
>>> schedule, found = Schedule(every=100), []
>>> for step in range(1, 40):
...     if schedule.is_due(step):
...         schedule.take(step)
...         found.append(step)
>>> found[:3], found[-4:]
([1, 2, 3], [28, 30, 34, 38])
"""

from collections.abc import Mapping

PER_GAP = 10  # samples before the gap doubles; a trend needs as many
DENSE_FROM = 8  # `every` from which on the start is denser than it
CLOSER = 10  # samples in a row that a suspicious head may draw closer


class Schedule:
    """Decides which steps are due; the same on every rank that takes the same samples."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.gap = 1 if every >= DENSE_FROM else every
        self._taken_at_gap = 0
        self._closer = 0  # samples taken closer because of suspicious heads
        self._next = 1

    def is_due(self, step: int) -> bool:
        """True if `step` is to be sampled."""
        is_on_grid = (step - 1) % self.every == 0
        return is_on_grid or (step >= self._next and (self.gap < self.every or self._closer > 0))

    def take(self, step: int) -> None:
        """Notes that `step` was sampled, or skipped to save time, and sets the next one."""
        self._taken_at_gap += 1
        if self._taken_at_gap >= PER_GAP and self.gap < self.every:
            self.gap, self._taken_at_gap = min(2 * self.gap, self.every), 0
        self._next = step + self.gap

    def state(self) -> dict[str, int]:
        """Returns where it is, for `load`."""
        return {"gap": self.gap, "taken": self._taken_at_gap, "next": self._next}

    def load(self, state: Mapping[str, int]) -> None:
        self.gap, self._taken_at_gap, self._next = min(state["gap"], self.every), state["taken"], state["next"]

    def look_closer(self, step: int, is_suspicious: bool) -> None:
        """Makes the next step due if a head is suspicious, for a few samples in a row."""
        self._closer = self._closer + 1 if is_suspicious and self._closer < CLOSER else 0
        if self._closer:
            self._next = step + 1
