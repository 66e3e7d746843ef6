"""The wheel, the sdist and an editable install all find their Lua scripts and example data.

Nothing is downloaded, because the environments borrow the dependencies of the one that runs the
tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "lua").glob("[!_]*.lua"))
EXAMPLE_DATA = {"weblog.toml", "data/apache_access.log.gz", "data/README.md"}

# This program prints the location of the package, and then the name of one script per line.
PROBE = """
import streamqd
from streamqd.store import scripts
print(streamqd.__file__)
print(*sorted(scripts.load()), sep="\\n")
"""


def run(*command: str | Path, cwd: Path | None = None, **env: str) -> str:
    """Run a command and return its output. If the command fails, fail and show the output."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from the sdist, as a release does."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return next(built.glob("*.tar.gz"))


def make_venv(folder: Path) -> Path:
    """Create an environment with the dependencies, but without streamqd.

    Return its `bin` directory.

    A `.pth` file adds a directory to the path, but Python ignores the `.pth` files in that
    directory. An editable install is such a file, so streamqd itself is left out.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return folder / "bin"


def install(bin_dir: Path, *what: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", bin_dir / "python", "install"]
    run(*pip, "--quiet", "--no-index", "--no-deps", "--ignore-installed", *what)


def test_wheel_works_in_a_new_environment(wheel: Path, tmp_path: Path):
    bin_dir = make_venv(tmp_path / "venv")
    install(bin_dir, wheel)

    package, *names = run(bin_dir / "python", "-c", PROBE, cwd=tmp_path).splitlines()

    assert package.startswith(str(tmp_path / "venv"))
    assert names == SCRIPTS
    version = run(bin_dir / "streamqd", "--version", cwd=tmp_path)
    assert version.split()[:2] == ["streamqd", wheel.name.split("-")[1]]


def test_wheel_includes_the_fixtures(wheel: Path, tmp_path: Path):
    bin_dir = make_venv(tmp_path / "venv")
    install(bin_dir, wheel)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    example = ["-p", "no:cacheprovider", "--pyargs", "streamqd.examples.test_invoices"]

    told = run(bin_dir / "python", "-m", "pytest", *example, cwd=tmp_path)

    assert "4 passed" in told


def test_wheel_contains_only_the_package(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {f"streamqd/_lua/{name}.lua" for name in SCRIPTS} <= names
    assert {f"streamqd/examples/{name}" for name in EXAMPLE_DATA} <= names
    assert {"streamqd/py.typed", "streamqd/spark/pipelines/report.html.jinja"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "streamqd",
        "pyspark_streamq.py",  # Spark searches this module for data sources
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_can_be_built_and_installed(sdist: Path, tmp_path: Path):
    bin_dir = make_venv(tmp_path / "venv")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")

    package, *names = run(
        bin_dir / "python", "-c", PROBE, cwd=tmp_path, PYTHONPATH=str(source)
    ).splitlines()

    assert package == str(source / "streamqd/__init__.py")
    assert names == SCRIPTS


def test_sdist_contains_the_files_for_packagers(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "README.md",
        "etc/streamq.toml",
        "systemd/streamqd.service",
        "docs/index.md",
        "tests/test_house.py",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("var")]


def test_editable_install_works(tmp_path: Path):
    bin_dir = make_venv(tmp_path / "venv")
    install(bin_dir, "--no-build-isolation", "--editable", ROOT)

    package, *names = run(bin_dir / "python", "-c", PROBE, cwd=tmp_path).splitlines()

    assert package == str(ROOT / "streamqd/__init__.py")
    assert names == SCRIPTS
