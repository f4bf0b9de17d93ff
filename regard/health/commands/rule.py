"""regard rule [CODE]: explain a code of `regard check`, or list them all."""

import argparse
import json
from dataclasses import asdict

from regard.health import checks
from regard.health.checks import Rule
from regard.health.contract.selection import choose_rules
from regard.table import Table

COLUMNS = ["code", "kind", "what holds", "gravest", "needs"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", nargs="?", help="a code (RG101), the beginning of codes, or a kind")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the page of the documentation")


def main(options: argparse.Namespace) -> int:
    try:
        chosen = sorted(choose_rules(options.code))
    except ValueError as error:
        options.fail(str(error))
    rules = [checks.rule_of(code) for code in chosen]
    if options.json:
        print(json.dumps([asdict(rule) for rule in rules], ensure_ascii=False, indent=1))
    elif options.markdown:
        print(make_page(), end="")
    elif options.code is None or len(rules) > 8:
        Table(COLUMNS, [[rule.code, rule.kind, rule.title, rule.severity, rule.needs] for rule in rules]).show()
    else:
        print("\n\n".join(map(explain, rules)))
    return 0


def explain(rule: Rule) -> str:
    """A rule in a few lines."""
    rows = dict(holds=rule.title, gravest=rule.severity, needs=rule.needs, proves=rule.proves, cause=rule.cause)
    rows |= dict(fix=rule.fix, explains=", ".join(rule.explains), references=", ".join(rule.references))
    lines = [f"  {name:10} {text}" for name, text in rows.items() if text]
    return "\n".join([f"{rule.code} {rule.kind} ({rule.family})", *lines])


def make_page() -> str:
    """The table of rules, as docs/rules.md holds it."""
    lines = [
        "# Rules", "",
        "What `regard check` and `regard examine` look for. A code never changes its meaning. This page is written by",
        "`regard rule --markdown > docs/rules.md`.", "",
    ]  # fmt: skip
    family = None
    for rule in checks.rules().values():
        if rule.family != family:
            family = rule.family
            lines += ["" * bool(lines), f"## {rule.code[:3]}xx: {family}", ""]
            lines += ["| code | kind | what holds | gravest | needs | what a failure proves | usual cause | fix |"]
            lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        cells = (
            rule.code, rule.kind, rule.title, rule.severity, rule.needs, rule.proves, rule.cause,
            f"{rule.fix} {' '.join(f'[{one}]' for one in rule.references)}".strip(),
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    text = "\n".join(lines)
    return text.replace("\n\n\n", "\n\n") + "\n"
