"""Run `streamqd pipeline …` as a process, on this machine or with its own executors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
CLUSTER = "local-cluster[2,1,1024]"  # two executors, each a JVM with one core and 1 GiB
# The runs are so short that the optimizing compiler does not pay off.
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUICK = tuple(
    part
    for role in ("driver", "executor")
    for part in ("--conf", f"spark.{role}.extraJavaOptions={_QUICK}")
)
EXECUTOR = "CoarseGrainedExecutorBackend"


def spark_home(folder: Path) -> Path:
    """Link the Spark of the package pyspark into a folder to which executors may write.

    Spark's standalone workers write their logs below SPARK_HOME.
    """
    home = folder / "spark"
    link_spark(home)
    return home


def link_spark(home: Path) -> None:
    """Link the programs and jars of the package pyspark into a folder, which may already exist.

    The package's Python code is left out, so that workers import the installed package. Otherwise,
    each worker would compile all modules that it imports from `python/lib/pyspark.zip`.
    """
    import pyspark

    home.mkdir(exist_ok=True)
    for name in ("bin", "jars", "sbin"):
        link = home / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path(pyspark.__file__).parent / name)


def cluster_conf() -> dict[str, str]:
    """Return settings that make Java start fast, even with `spark_home` and in executors.

    An archive of classes is valid only if its jars come first and in the same order.
    """
    found = {"spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", _QUICK)}
    if home := os.environ.get("SPARK_HOME"):
        jars = Path(home) / "jars"
        paths = [*jars.glob("slf4j-api-*.jar"), jars / "*"]  # this is Spark's own order
        for role in ("driver", "executor"):
            found[f"spark.{role}.extraClassPath"] = os.pathsep.join(map(str, paths))
    return found


def need_spark() -> None:
    """Skip the test with the reason if Spark cannot run, or fail it in CI."""
    from streamqd import spark

    try:
        spark.need_spark()
        spark.ensure_java()
    except (spark.SparkMissingError, spark.JavaMissingError) as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@contextlib.contextmanager
def pipeline(
    folder: Path, config: Path, *arguments: str, home: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start the command. When the block ends, kill the process and all its descendants."""
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    if home is not None:
        environment["SPARK_HOME"] = str(home)
    with (folder / "pipeline.out").open("w") as out, (folder / "pipeline.err").open("w") as err:
        running = subprocess.Popen(
            [sys.executable, "-m", "streamqd", "--config", str(config), "pipeline", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        left = [] if running.poll() is not None else family(running.pid)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        running.wait(30)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def process_name(one: psutil.Process) -> str:
    """Return the name of a process, or '' if it has exited since it was listed."""
    try:
        return str(one.name())
    except psutil.NoSuchProcess:
        return ""


def executors(pid: int) -> list[psutil.Process]:
    """Return those executors of a driver that are separate JVMs."""
    found = []
    for each in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if any(EXECUTOR in part for part in each.cmdline()) and each.name() == "java":
                found.append(each)
    return found


def read_output(folder: Path) -> str:
    """Return the command's output so far, to be shown if a test fails."""
    return "".join((folder / f"pipeline.{each}").read_text() for each in ("out", "err"))
