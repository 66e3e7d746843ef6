"""Each missing package is reported with the same sentence, which names a command that works."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from streamqd import extras

ROOT = Path(__file__).parents[2]
# This code runs the command line as if a package were not installed.
WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from streamqd.cli import cli; cli()"
COMMANDS = {
    "archive": ["--archive", "archive"],
    "compact": ["--archive", "archive"],
    "replay": ["access"],
    "report": ["--out", "report"],
    "run": ["job:main", "--checkpoints", "checkpoints"],
    "sql": ["select 1"],
}
RECORDS = re.compile(r"docs/internals/transcripts/|tests/")  # records of past runs


def test_extras_table_equals_pyproject() -> None:
    """The table of extras lists the same packages as pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {name: tuple(needs) for name, needs in project["optional-dependencies"].items()}
    assert {name: stated[name] for name in extras.NEEDS} == extras.NEEDS


def test_no_file_names_an_unpublished_package() -> None:
    """No file says `pip install streamqd[…]`.

    That command would fail, because no index has the package.
    """
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("streamqd/**/*.py")]
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in files
        if not RECORDS.match(str(path.relative_to(ROOT)))
        for found in re.finditer(r"pip\s+install\s+\S*streamqd\[\S*", path.read_text())
    ]
    assert wrong == []


def test_install_hints_in_the_code_are_equal() -> None:
    """All code uses the same hint for a missing package."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in ROOT.glob("streamqd/**/*.py")
        for quoted in re.findall(r"""["'`]pip install[^\n]*""", path.read_text())
        if path.name != "extras.py" and "examples" not in path.parts and "{" not in quoted
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "package"),
    [
        *(
            (verb, package)
            for verb in COMMANDS
            for package in ("pyarrow", "pyspark")
            if (verb, package) != ("compact", "pyspark")
        ),
        *(("archive", "deltalake"), ("compact", "deltalake")),
        *(("report", package) for package in ("jinja2",)),
    ],
)
def test_pipeline_error_names_the_missing_packages(verb: str, package: str, tmp_path: Path) -> None:
    """Without pyarrow, `pipeline archive` exits with an error before it does any work."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "_archive.json").write_text('{"format": 1, "id": "0"}')
    (tmp_path / "job.py").write_text("def main(job): pass\n")
    (tmp_path / "streamq.toml").write_text('[redis]\nurl = "redis://127.0.0.1:1/0"\n')
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, "pipeline", verb, *COMMANDS[verb]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == f"Error: {package} cannot be imported: {extras.hint('spark')}\n"
    assert done.returncode == 1
    assert sorted(path.name for path in (tmp_path / "archive").iterdir()) == ["_archive.json"]
