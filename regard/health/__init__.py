"""Health: look into every head of a model, say what is wrong, try the remedy, watch it while training."""

from regard.health.examine import examine
from regard.health.monitor import AttentionWarning, Monitor
from regard.health.report.report import Report
from regard.health.using import using

__all__ = ["AttentionWarning", "Monitor", "Report", "examine", "using"]
