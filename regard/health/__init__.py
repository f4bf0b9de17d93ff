"""Health: measure every attention head of a model, report problems, try remedies, watch training."""

from regard.health.examine import examine
from regard.health.look import look
from regard.health.model_comparison import ModelComparison
from regard.health.monitor import AttentionWarning, Monitor
from regard.health.report.comparison import Comparison, compare
from regard.health.report.report import Report
from regard.health.tokens.view import Look
from regard.health.using import using
from regard.health.watching.alarms import Alarm

__all__ = [
    "Alarm", "AttentionWarning", "Comparison", "Look", "ModelComparison", "Monitor", "Report", "compare", "examine",
    "look", "using",
]  # fmt: skip
