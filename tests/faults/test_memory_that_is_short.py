"""The kernel kills a worker for its memory, in real control groups where they can be created."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streamqd.cgroups import CONTROL_GROUPS, find_oom_group
from streamqd.process import Exit
from streamqd.supervisor.limits import OOM_KILL_SECONDS, OomMonitor, find_counter
from tests.support.daemon import GROUP, Daemon
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]
LIMIT = 400 << 20
KILLED = Exit(None, signal.SIGKILL)


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    """Write a counter file in the kernel's format."""
    path = tmp_path / "memory.events"
    path.write_text("low 0\nhigh 0\nmax 31\noom 7\noom_kill 3\n")
    return path


def kill(counter: Path, count: int) -> None:
    counter.write_text(f"low 0\noom {count}\noom_kill {count}\noom_group_kill 0\n")


@pytest.mark.fault("F5")
def test_oom_kill_of_the_kernel_explains_one_exit(counter: Path):
    kills = OomMonitor(counter)
    kills.count_kills(1.0)
    assert str(kills.explain(KILLED)) == "signal SIGKILL", "those before our time"
    kill(counter, 5)
    kills.count_kills(2.0)
    assert kills.explain(Exit(1, None)) == Exit(1, None)
    assert kills.explain(Exit(None, signal.SIGSEGV)).out_of_memory is False
    assert str(kills.explain(KILLED)) == "signal SIGKILL, out of memory"
    kills.count_kills(2.5)
    assert kills.explain(KILLED).out_of_memory, "the kernel counts before it kills"
    assert not kills.explain(KILLED).out_of_memory, "there were two"


@pytest.mark.fault("F5")
def test_old_oom_kill_explains_no_exit(counter: Path):
    kills = OomMonitor(counter)
    kill(counter, 4)
    kills.count_kills(1.0)
    kills.count_kills(1.5 + OOM_KILL_SECONDS)
    assert not kills.explain(KILLED).out_of_memory
    counter.unlink()
    kills.count_kills(9.0)
    assert not kills.explain(KILLED).out_of_memory, "the cause is unknown without a count"


@pytest.mark.parametrize(
    ("line", "there", "found"),
    [
        ("0::/system.slice/streamqd.service", "system.slice/streamqd.service/memory.events", True),
        ("0::/kubepods/pod1/c1", "memory.events", True),
        ("9:cpu:/x\n4:memory:/docker/c1", "memory/docker/c1/memory.oom_control", True),
        ("4:memory:/docker/c1", "memory/memory.oom_control", True),
        ("4:cpu:/docker/c1", "memory.events", False),
    ],
)
def test_oom_kill_counter_is_found_in_the_cgroup(
    tmp_path: Path, line: str, there: str, found: bool
):
    root = tmp_path / "root"
    path = root / there
    path.parent.mkdir(parents=True)
    path.touch()
    membership = tmp_path / "cgroup"
    membership.write_text(line + "\n")
    assert find_counter(membership, root) == (path if found else None)
    assert find_counter(tmp_path / "absent", root) is None


@pytest.mark.parametrize(
    ("line", "ones", "found"),
    [
        ("0::/system.slice/streamqd.service", ["system.slice/streamqd.service"], 0),
        ("0::/pods/one/c1", ["pods/one/c1", "pods/one"], 1),
        ("0::/pods/one/c1", ["pods/other", "pods/one/c1/inner"], None),
        ("0::/kubepods/one/c1", ["."], 0),
        ("4:memory:/docker/c1", ["docker/c1"], None),
    ],
)
def test_cgroup_killed_as_a_whole_is_found(
    tmp_path: Path, line: str, ones: list[str], found: int | None
):
    """The daemon finds the outermost control group that the kernel kills as a whole."""
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    membership.write_text(line + "\n")
    name = line.rpartition(":")[2].strip("/")
    if ones != ["."]:  # otherwise this is a container, which sees its own group as the root
        (root / name).mkdir(parents=True)
        (root / name / "memory.oom.group").write_text("0\n")
    for one in ones:
        (root / one).mkdir(parents=True, exist_ok=True)
        (root / one / "memory.oom.group").write_text("1\n")
    expected = None if found is None else root / ones[found]
    assert find_oom_group(membership, root) == expected
    assert find_oom_group(tmp_path / "absent", root) is None


def test_start_in_a_cgroup_killed_as_a_whole_warns(new_daemon: NewDaemon, tmp_path: Path):
    there = tmp_path / "cgroup"
    there.mkdir()
    (there / "memory.oom.group").write_text("1\n")
    mount = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount --bind {there} {CONTROL_GROUPS} && exec "$@"',
    ]
    if shutil.which("unshare") is None or subprocess.run([*mount, "sh", "true"]).returncode:
        pytest.skip("no mount namespaces here")
    daemon = new_daemon()
    daemon.within = [*mount, "sh"]
    with daemon:
        daemon.wait_event("daemon.ready")
        said = [each["about"] for each in daemon.events("config.warning")]
        [about] = [each for each in said if "memory.oom.group" in each]
        assert f"kills all processes of {CONTROL_GROUPS} together" in about
        assert "OOMPolicy=continue" in about
        assert daemon.stop() == 0


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """Create a control group that has little memory."""
    own = find_counter(Path("/proc/self/cgroup"))
    if own is None:
        pytest.skip(f"no memory controller below {CONTROL_GROUPS}")
    folder = own.parent / f"streamqd-test-{os.getpid()}"
    limit = "memory.max" if own.name == "memory.events" else "memory.limit_in_bytes"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.fault("F5")
def test_out_of_memory_worker_exits_alone_with_the_cause(
    new_daemon: NewDaemon, limited_cgroup: Path
):
    daemon = new_daemon(partitions=2, consumer={"max_crashes": 2})
    daemon.within = ["sh", "-c", f'echo $$ > {limited_cgroup}/cgroup.procs; exec "$@"', "sh"]
    with daemon:
        supervisor, others = daemon.pid, daemon.pids()[1]
        adjusted = Path(f"/proc/{others}/oom_score_adj").read_text()
        assert int(adjusted) == 500 + int(Path(f"/proc/{supervisor}/oom_score_adj").read_text())
        (greedy,) = daemon.send([f"leak {4 * LIMIT}"], partition=0)
        uids = daemon.send(["ok"] * 20, partition=1)
        daemon.wait_settled(60.0)
        (letter,) = daemon.letters()
        assert (letter["uid"], letter["reason"], letter["signal"]) == (greedy, "crashes", "SIGKILL")
        assert "out of memory" in letter["errorMessage"]
        crashed = daemon.events("worker.crashed")
        assert {each["how"] for each in crashed} == {"signal SIGKILL, out of memory"}
        audit = daemon.ledger.audit(GROUP)
        assert audit == Audit(lost=[greedy], repeated={greedy: 2})
        assert set(uids) <= daemon.ledger.finished_uids(GROUP)
        assert daemon.pids()[1] == others
        assert psutil.pid_exists(supervisor)
        assert daemon.stop() == 0
