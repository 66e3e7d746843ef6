"""Look up known vulnerabilities of the installed packages, and write a bill of materials.

    python tests/support/audit.py FOLDER

The tools are installed in their own environment, FOLDER/venv. FOLDER/sbom.json is the bill
(CycloneDX). The exit code is 0 if no vulnerability is known, and 1 if one is known. It is 75 if the
advisories or the tools were not available, as on many mirrors of PyPI. In this case, the result is
unknown.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

CLEAN, FOUND, NO_RESULT = 0, 1, 75
TOOLS = ("pip-audit>=2.9", "cyclonedx-bom>=7")
SECONDS = 240.0
OURS = "streamqd"


def main(folder: Path) -> int:
    """Audit the environment of the interpreter that runs this script."""
    tools = folder / "venv"
    if not (tools / "bin" / "pip-audit").exists():
        venv.create(tools, with_pip=True, clear=True)
        install = [tools / "bin" / "pip", "install", "--quiet", *TOOLS]
        if run(*install).returncode != 0:
            return no_result("the tools cannot be installed")
    sbom = folder / "sbom.json"
    bill = run(tools / "bin" / "cyclonedx-py", "environment", sys.executable, "-o", sbom)
    if bill.returncode != 0:
        return no_result(f"no bill of materials: {bill.stderr[-300:]}")
    asked = run(
        *(tools / "bin" / "pip-audit", "--path", sysconfig.get_paths()["purelib"]),
        *("--format", "json", "--progress-spinner", "off"),
    )
    if not asked.stdout.startswith("{"):
        return no_result(f"the advisories do not answer: {asked.stderr[-300:]}")
    return judge(json.loads(asked.stdout)["dependencies"], sbom)


def judge(packages: list[dict[str, Any]], sbom: Path) -> int:
    """Print the vulnerabilities. A package that was not looked up does not count as clean."""
    unknown = [each["name"] for each in packages if "skip_reason" in each and each["name"] != OURS]
    vulnerable = [each for each in packages if each.get("vulns")]
    for each in vulnerable:
        for flaw in each["vulns"]:
            fixed = ", ".join(flaw["fix_versions"]) or "no release yet"
            print(f"{each['name']} {each['version']}: {flaw['id']}, mended in {fixed}")
    if vulnerable:
        return FOUND
    if unknown:
        return no_result(f"of {len(packages)} packages {len(unknown)} could not be looked up")
    print(f"{len(packages)} packages, no known vulnerability; bill of materials: {sbom}")
    return CLEAN


def no_result(why: str) -> int:
    """Report that the result is unknown, which does not mean that there are no vulnerabilities."""
    print(f"not audited: {why}", file=sys.stderr)
    return NO_RESULT


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool."""
    words = [str(part) for part in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
