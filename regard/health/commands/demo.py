"""regard demo: two small language models, a healthy and a collapsed one, examined on the same text."""

from __future__ import annotations

from pathlib import Path

from regard.health.commands.compare import by_finding, by_layer
from regard.health.commands.outputs import check, complain, save
from regard.health.commands.progress import counting
from regard.health.examine import examine
from regard.health.models.inputs import sample
from regard.health.models.tiny import batches, checkpoint

SUBJECTS = (("tiny-scaled", "with 1/√d_k"), ("tiny-unscaled", "without 1/√d_k, at a high learning rate"))
CHANGES = ["scale=sqrt", "qk_norm", "normalizer=entmax15"]


def arguments(parser) -> None:
    parser.add_argument(
        "--out", metavar="PATH", type=Path, default=Path("report.html"), help="where the ill one's report goes"
    )


def main(options) -> int:
    check(options, options.out, ".html")
    reports = []
    for name, what in SUBJECTS:
        model, notes = checkpoint(name)
        texts = batches(sample(), model.options["length"], 8)
        with counting(name, len(texts)) as advance:
            report = examine(model, texts, CHANGES, title=f"{name}, {what}", progress=advance)
        report.show()
        print(f"validation loss {notes['validation_loss']} after {notes['steps']} steps of training")
        reports.append(report)
    healthy, ill = reports
    print("\nA: with 1/√d_k    B: without")
    by_layer(healthy.to_json(), ill.to_json()).show()
    print()
    by_finding(healthy.to_json(), ill.to_json()).show()
    _, failed = save(ill, [options.out])
    if failed:
        complain("demo", *failed)
        return 1
    print(f"\nthe report of the second one: {options.out.resolve()}")
    return 0
