"""The contract of attention as tests: `pytest --regard-model=hf-tiny:llama` adds one test per rule.

A module beside the package, because pytest imports its plugins in every run: torch is imported only with the option.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("regard", "the contract of attention")
    group.addoption(
        "--regard-model", action="append", default=[], metavar="TARGET",
        help="a test per rule for this model: a folder, a hub name, hf-tiny:NAME, module:function, script.py:trainer",
    )  # fmt: skip
    group.addoption("--regard-select", action="append", metavar="CODES", help="check only these: RG1,RG401")
    group.addoption("--regard-ignore", action="append", metavar="CODES", help="leave these out")
    group.addoption(
        "--regard-golden",
        metavar="FILE",
        help="compare the model with this fingerprint too (of regard fingerprint)",
    )


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    targets = session.config.getoption("--regard-model")
    if session.config.getoption("--regard-golden") and len(targets) != 1:
        raise pytest.UsageError("--regard-golden needs one --regard-model, which is compared with the file")
    for target in targets:
        items.extend(ModelRules.from_parent(session, name=f"regard[{target}]", target=target).collect())


class ModelRules(pytest.Collector):
    """One test per rule for one model, which is loaded and checked when the first of them runs."""

    def __init__(self, *, target: str, **named: Any) -> None:
        super().__init__(**named)
        self.target = target
        self._subject: Any = None
        self._verdict: Any = None

    def collect(self) -> list[pytest.Item]:
        from regard.health import checks
        from regard.health.contract.selection import choose_rules

        config = self.config
        try:
            chosen = choose_rules(config.getoption("--regard-select"), config.getoption("--regard-ignore"))
        except ValueError as error:
            raise pytest.UsageError(f"--regard-{error}") from None
        rules = [rule for code, rule in checks.rules().items() if code in chosen]
        items: list[pytest.Item] = [
            RuleItem.from_parent(self, name=f"{rule.code} {rule.kind}", code=rule.code) for rule in rules
        ]
        golden = config.getoption("--regard-golden")
        return items + ([GoldenItem.from_parent(self, name=f"golden {golden}", path=golden)] if golden else [])

    def judge(self) -> Any:
        """The verdict; fails the test if the target cannot be loaded or run."""
        if self._verdict is None:
            self._verdict = self.attempt(self._check)
        return self._verdict

    def load(self) -> Any:
        """The model, its batches and its tokenizer."""
        from regard.health.models.targets import load_target

        if self._subject is None:
            given = dict(text=None, length=None, batch=4, limit=8, device="cpu", dtype=None, pickle=False)
            self._subject = load_target(self.target, **given)
        return self._subject

    def attempt(self, step: Any) -> Any:
        """Returns step(), or fails the test with one line."""
        from regard.health.commands.files import describe_failure

        try:
            return step()
        except Exception as error:
            reason = describe_failure(error, self.target)
        pytest.fail(reason, pytrace=False)

    def _check(self) -> Any:
        from regard.health.contract.check import check

        subject = self.load()
        select, ignore = self.config.getoption("--regard-select"), self.config.getoption("--regard-ignore")
        return check(
            subject.predictor or subject.model, subject.batches, select, ignore, tokenizer=subject.tokenizer,
            trained=subject.trained, title=subject.title,
        )  # fmt: skip


class RuleItem(pytest.Item):
    """One rule: fails with the verdict's line, is skipped with the reason why it was not checked."""

    parent: ModelRules

    def __init__(self, *, code: str, **named: Any) -> None:
        super().__init__(**named)
        self.code = code

    def runtest(self) -> None:
        from regard.health.contract.verdict import describe

        verdict = self.parent.judge()
        lines = [describe(one) for one in verdict.failures if one.code == self.code]
        if lines:
            pytest.fail("\n".join(lines), pytrace=False)
        reason = next((one.reason for one in verdict.skipped if one.code == self.code), None)
        if reason is not None and self.code not in verdict.passed:
            pytest.skip(reason)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.config.rootpath, None, f"{self.parent.target}: {self.name}"


class GoldenItem(pytest.Item):
    """The model against a fingerprint: fails with the first layer that differs and why, and if there is no file."""

    parent: ModelRules

    def __init__(self, *, path: str, **named: Any) -> None:
        super().__init__(**named)
        self.golden = path

    def runtest(self) -> None:
        import regard

        def compare() -> Any:
            subject = self.parent.load()
            return regard.compare(regard.Fingerprint.load(self.golden), subject.predictor or subject.model)

        found = self.parent.attempt(compare)
        if not found.same:
            pytest.fail(f"A is {self.golden}, B the model: {found}", pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.config.rootpath, None, f"{self.parent.target}: {self.name}"
