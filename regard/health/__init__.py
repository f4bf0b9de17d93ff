"""Health: measure every attention head of a model, report problems, try remedies, watch training."""

from regard.health.examine import examine
from regard.health.monitor import AttentionWarning, Monitor
from regard.health.report.comparison import Comparison, compare
from regard.health.report.report import Report
from regard.health.using import using
from regard.health.watching.alarms import Alarm

__all__ = ["Alarm", "AttentionWarning", "Comparison", "Monitor", "Report", "compare", "examine", "using"]
