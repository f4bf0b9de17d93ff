"""What regard builds on: every installed package's licence, and the advisories known against the pinned versions.

    python tools/audit.py

Ends with 1 if a package that a user of regard gets has a licence outside `FREE`, or an advisory is known. Where the
advisory service cannot be reached it says that nothing was looked up, which is no reassurance.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = ("gpu", "hf", "report", "lab")
FREE = (
    "apache", "bsd", "mit", "isc", "mozilla public", "mpl", "python software foundation", "psf", "unlicense", "zlib",
    "cc0", "hpnd", "public domain", "0bsd", "boost",
)  # fmt: skip
KNOWN = {"typing_extensions": "PSF", "nvidia-": "NVIDIA's own, for CUDA builds of torch"}  # metadata without a licence


def needed(name: str = "regard", extras=EXTRAS, seen: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """Every distribution that `regard[all]` pulls in and that is installed here."""
    seen = {} if seen is None else seen
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        key = requirement.name.lower().replace("_", "-")
        if key in seen:
            continue
        try:
            seen[key] = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        needed(requirement.name, tuple(requirement.extras), seen)
    return seen


def licence(package: Distribution) -> str:
    """What a distribution says about itself: the SPDX expression, the classifiers, or the first line of the field."""
    about = package.metadata
    classifiers = [
        line.split("::")[-1].strip() for line in about.get_all("Classifier") or () if line.startswith("License")
    ]
    stated = about.get("License-Expression") or ", ".join(classifiers) or (about.get("License") or "").strip()
    return stated.splitlines()[0] if stated else ""


def licences() -> list[str]:
    """Those whose licence is none of FREE, each in one line."""
    odd = []
    for name, package in sorted(needed().items()):
        stated = licence(package)
        known = next((why for start, why in KNOWN.items() if name.startswith(start.replace("_", "-"))), None)
        if known is None and not any(word in stated.lower() for word in FREE):
            odd.append(f"{name} {package.version}: licence {stated or 'not stated'}")
    return odd


def advisories() -> tuple[list[str], int, int]:
    """(advisories, packages looked up, packages pinned)."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / "constraints.txt"), "--no-deps"]
    command += ["--disable-pip", "--progress-spinner", "off", "--format", "json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not run.stdout.strip():
        return [], 0, 0 if "ConnectionError" in run.stderr else -1
    found = json.loads(run.stdout)["dependencies"]
    looked = [entry for entry in found if "skip_reason" not in entry]
    told = [f"{entry['name']} {entry['version']}: {flaw['id']}" for entry in looked for flaw in entry.get("vulns", ())]
    return told, len(looked), len(found)


def main() -> int:
    odd = licences()
    told, looked, pinned = advisories()
    for line in (*odd, *told):
        print(line, file=sys.stderr)
    if pinned < 0:
        print("pip-audit failed; run it alone to see why", file=sys.stderr)
        return 1
    counted = f"advisories: {len(told)} in {looked} of {pinned} pinned packages"
    note = "" if looked else " (the advisory service was not reached: nothing was audited)"
    print(f"licences: {len(needed())} packages, {len(odd)} odd; {counted}{note}")
    return 1 if odd or told else 0


if __name__ == "__main__":
    sys.exit(main())
