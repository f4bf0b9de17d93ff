"""Training experiments, for the claims that only training can test.

>>> from regard_lab import training
>>> training.get("scale").question
'What does the scale of the scores do to loss, entropy and gradient gain over training, by d_k?'
"""

from regard_lab.training.experiment import Experiment, Preset, Setting, Trial, get, names
from regard_lab.training.results import has_shipped, shipped

__all__ = ["Experiment", "Preset", "Setting", "Trial", "get", "has_shipped", "names", "shipped"]
