"""Run the commands in docs/internals/transcripts/systemd.md, and write their output.

    python -m tests.support.systemd_transcript

A separate Debian system is created once below .cache/. It is booted for each run, without a
network, and its changes are discarded. In the page, a command follows `$ `. A command that only
prepares another one is in a comment, `<!-- $ command -->`. This needs root, debootstrap and
systemd-nspawn (on Debian: apt-get install debootstrap systemd-container), and Debian's Python for
the wheels.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.support.daemon import ROOT
from tests.support.waiting import wait_until

PAGE = ROOT / "docs" / "internals" / "transcripts" / "systemd.md"
SYSTEM = ROOT / ".cache" / "systemd-root"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,redis-tools,procps"
PART = re.compile(r"^<!-- \$ (?P<hidden>[^\n]+) -->$|^```text\n(?P<shown>.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)

HANDLER = """\
import os
import time

from streamqd import Message


def handle(msg: Message) -> None:
    text = msg.text()
    if text.startswith("sleep "):
        time.sleep(float(text.split()[1]))
    if text == "chown":
        try:
            os.chown("/var/lib/streamqd", 0, 0)
        except OSError as error:
            print(f"chown: {error.strerror}")
    print(f"handled {text!r}, attempt {msg.attempt}")
"""
SETTINGS = """\
[redis]
url = "{url}"

[daemon]
instance = "{name}"
state_dir = "/var/lib/{folder}"

[http]
bind = "127.0.0.1:{port}"

[topics.access]
partitions = 2

[[consumers]]
topic = "access"
group = "hits"
handler = "work:handle"
"""
FILES = {
    "work.py": HANDLER,
    "streamq.toml": SETTINGS.format(url="embedded:", name="one", folder="streamqd", port=9464),
    "two.toml": SETTINGS.format(
        url="redis://127.0.0.1:6379/0", name="two", folder="streamqd-two", port=9465
    ),
}
INSTALL = """\
set -e
python3 -m venv /opt/streamqd
/opt/streamqd/bin/pip install --quiet --no-index --find-links /wheels 'streamqd[embedded]'
ln -s /opt/streamqd/bin/streamqd /usr/local/bin/
cp -r /settings /etc/streamqd
cp /units/*.service /etc/systemd/system/
useradd --create-home ana
"""


class Machine:
    """A booted Debian system. Switch it off with `close`."""

    def __init__(self, folder: Path) -> None:
        boot = (
            "mount -t cgroup2 none /sys/fs/cgroup && exec systemd-nspawn --quiet --boot"
            " --private-network --volatile=overlay --register=no --keep-unit"
            f" --directory={SYSTEM} --bind-ro={folder}/wheels:/wheels"
            f" --bind-ro={folder}/settings:/settings --bind-ro={folder}/units:/units"
        )
        with (folder / "boot.log").open("wb") as log:
            self._outer = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", boot],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._up, timeout=60, what="the machine boots")

    def _up(self) -> bool:
        return "running" in self.type("systemctl is-system-running")[0]

    def type(self, command: str) -> tuple[str, int]:
        """Run a command in a shell of the machine. Return its output and its exit code."""
        inner = [each.pid for each in psutil.Process(self._outer.pid).children()]
        if not inner:
            return "", 1
        words = ["nsenter", "--all", f"--target={inner[0]}", "env", "-i", "HOME=/root"]
        path = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            [*words, path, "LANG=C.UTF-8", "COLUMNS=200", "bash", "-c", command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120,
        )  # fmt: skip
        return done.stdout, done.returncode

    def close(self) -> None:
        """Switch the machine off."""
        family = psutil.Process(self._outer.pid).children()
        for each in family:  # for process 1, which is systemd, this is an orderly halt
            each.send_signal(signal.SIGRTMIN + 3)
        self._outer.wait(60)


def prepare(folder: Path) -> None:
    """Create the system if it is missing, and the wheels and files of this version."""
    if not (SYSTEM / "usr/bin/systemctl").exists():
        made = SYSTEM.with_suffix(".making")
        include = f"--include={PACKAGES}"
        subprocess.run(
            ["debootstrap", "--variant=minbase", include, "bookworm", made, MIRROR], check=True
        )
        made.rename(SYSTEM)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
    # redis-py needs async-timeout with Debian's Python 3.11.2, but no longer with 3.11.3.
    wanted = [f"{ROOT}[embedded]", "async-timeout"]
    subprocess.run([*wheel, "--wheel-dir", folder / "wheels", *wanted], check=True)
    shutil.copytree(ROOT / "systemd", folder / "units")  # this resolves the links
    (folder / "settings").mkdir()
    for name, text in FILES.items():
        (folder / "settings" / name).write_text(text)


def run_commands(machine: Machine, commands: list[str]) -> str:
    """Return a block of the page, with the current output of its commands."""
    parts = []
    for command in commands:
        printed, code = machine.type(command)
        lines = [line.rstrip() for line in printed.splitlines()]
        if code:
            lines.append(f"(exit code {code})")
        parts.append("\n".join([f"$ {command}", *lines]))
    return "```text\n" + "\n\n".join(parts) + "\n```"


def main() -> None:
    """Rewrite the page."""
    missing = [each for each in ("debootstrap", "systemd-nspawn") if shutil.which(each) is None]
    if missing or os.geteuid():
        sys.exit(f"left out: {PAGE.name} needs root and {' and '.join(missing) or 'its tools'}")
    SYSTEM.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        machine = Machine(folder)
        try:
            printed, code = machine.type(INSTALL)
            assert code == 0, printed

            def again(part: re.Match[str]) -> str:
                if part["hidden"]:
                    printed, code = machine.type(part["hidden"])
                    assert code == 0, f"{part['hidden']}: {printed}"
                    return part[0]
                return run_commands(machine, COMMAND.findall(part["shown"]))

            PAGE.write_text(PART.sub(again, PAGE.read_text()))
        finally:
            machine.close()


if __name__ == "__main__":
    main()
