"""Health: capture, readings, findings, what-if, report, monitor."""

from regard.health.examination import examine
from regard.health.report import Report

__all__ = ["Report", "examine"]
