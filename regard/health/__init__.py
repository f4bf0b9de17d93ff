"""Health: measure every attention head of a model, report problems, try remedies, watch training."""

from regard.health.comparing.fingerprint import Fingerprint
from regard.health.comparing.result import ModelComparison
from regard.health.comparing.take import fingerprint
from regard.health.contract.check import check
from regard.health.contract.verdict import ContractError, Verdict  # noqa: F401  # ContractError is `regard.testing`'s
from regard.health.examine import examine
from regard.health.look import look
from regard.health.monitor import AttentionWarning, Monitor
from regard.health.report.comparison import compare
from regard.health.report.report import Report
from regard.health.using import using
from regard.health.watching.incidents import Alarm, Incident

__all__ = [
    "Alarm", "AttentionWarning", "Fingerprint", "Incident", "ModelComparison", "Monitor", "Report", "Verdict", "check",
    "compare", "examine", "fingerprint", "look", "using",
]  # fmt: skip
