"""`--reload` applies edits no matter how an editor saves them, and broken edits change nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.daemon import GROUP, Daemon, Event
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]


@contextmanager
def run_watching(daemon: Daemon) -> Iterator[Daemon]:
    """Run a daemon that watches for edits."""
    daemon.start("--reload")
    try:
        daemon.wait_event("daemon.ready")
        daemon.wait_for(lambda: "streamqd: watcher" in daemon.titles(), what="it watches")
        yield daemon
    finally:
        daemon.close()


def version(daemon: Daemon, name: str) -> str:
    """Return another version of the handler's code.

    All versions have the same length, so that a change shows only in the file's time.
    """
    before = daemon.module_path.read_text()
    line = next(each for each in before.splitlines() if each.startswith("VERSION = "))
    return before.replace(line, f'VERSION = "{name}"')


def save_by_rename(path: Path, text: str) -> None:
    """Save like most editors: rename a new file over the old one."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.rename(path)


def save_with_backup(path: Path, text: str) -> None:
    """Save like some editors: move the old file away, so that none exists for an instant."""
    path.rename(path.with_name(f"{path.name}~"))
    path.write_text(text)


def save_in_place(path: Path, text: str) -> None:
    """Save like other editors: truncate the file and write it in pieces."""
    with path.open("w") as file:
        for start in range(0, len(text), 500):
            file.write(text[start : start + 500])
            file.flush()


def assert_version(daemon: Daemon, name: str) -> None:
    """Send a message, and check that this version handles it."""
    (uid,) = daemon.send(["ok"])
    daemon.wait_run(uid, "end")
    assert daemon.ledger.records_for(uid, "end")[0].text == name


def wait_reloaded(daemon: Daemon, after: int) -> Event:
    return daemon.wait_event("reload.finished", after=after)


def test_edits_take_effect_however_they_are_saved(new_daemon: NewDaemon):
    daemon = new_daemon(partitions=2)
    with run_watching(daemon):
        old = daemon.pids()
        saves = (save_by_rename, save_with_backup, save_in_place)
        for name, save in zip("234", saves, strict=True):
            mark = daemon.mark()
            save(daemon.module_path, version(daemon, name))
            wait_reloaded(daemon, mark)
            assert daemon.wait_event("reload.edited", after=mark)["file"].endswith("work.py")
            assert_version(daemon, name)
        assert not set(daemon.pids().values()) & set(old.values())
        assert len(daemon.events("reload.started")) == 3, "one reload for each edit"
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("def obey(message:\n", ("SyntaxError", "work.py", "line 1")),
        ("import os\nimport nothing_of_this_name\n", ("ModuleNotFoundError", "work.py:2")),
        ("import os\n\nos.there_is_no_such_thing\n", ("AttributeError", "work.py:3")),
    ],
    ids=["syntax", "import", "name"],
)
def test_broken_edit_is_logged_once_and_keeps_the_old_code(
    new_daemon: NewDaemon, broken: str, said: tuple[str, ...]
):
    daemon = new_daemon()
    good = version(daemon, "2")
    with run_watching(daemon):
        old = daemon.pids()
        save_by_rename(daemon.module_path, broken)
        refused = daemon.wait_event("reload.refused")
        for word in said:
            assert word in refused["problem"]
        assert_version(daemon, "1")
        assert daemon.pids() == old
        assert len(daemon.events("reload.refused")) == 1
        mark = daemon.mark()
        save_by_rename(daemon.module_path, good)
        wait_reloaded(daemon, mark)
        assert_version(daemon, "2")
        assert daemon.stop() == 0


def test_deleted_restored_and_new_modules_cause_a_reload(new_daemon: NewDaemon):
    """Modules that the handler imports from its directory are watched even before they exist."""
    daemon = new_daemon()
    code = daemon.module_path.read_text().replace('VERSION = "1"', "from words import VERSION")
    words = daemon.folder / "words.py"
    words.write_text('VERSION = "1"\n')
    daemon.write_code(code)
    with run_watching(daemon):
        assert_version(daemon, "1")
        words.unlink()
        refused = daemon.wait_event("reload.refused")
        assert "No module named 'words'" in refused["problem"]
        assert_version(daemon, "1")
        mark = daemon.mark()
        words.write_text('VERSION = "2"\n')
        wait_reloaded(daemon, mark)
        assert_version(daemon, "2")

        # The code imports a package from a directory that does not exist at first.
        mark = daemon.mark()
        save_by_rename(daemon.module_path, code.replace("from words", "from more.words"))
        daemon.wait_event("reload.refused", after=mark)
        mark = daemon.mark()
        (daemon.folder / "more").mkdir()
        (daemon.folder / "more" / "words.py").write_text('VERSION = "3"\n')
        os.utime(daemon.module_path)
        wait_reloaded(daemon, mark)
        assert_version(daemon, "3")
        mark = daemon.mark()
        (daemon.folder / "more" / "words.py").write_text('VERSION = "4"\n')
        wait_reloaded(daemon, mark)
        assert_version(daemon, "4")
        assert daemon.stop() == 0


def test_link_changed_to_another_file_counts_as_an_edit(new_daemon: NewDaemon):
    daemon = new_daemon()
    releases = daemon.folder / "releases"
    releases.mkdir()
    for name in "12":
        (releases / f"{name}.py").write_text(version(daemon, name))
    daemon.module_path.unlink()
    daemon.module_path.symlink_to(releases / "1.py")
    with run_watching(daemon):
        assert_version(daemon, "1")
        mark = daemon.mark()
        aside = daemon.folder / ".aside"
        aside.symlink_to(releases / "2.py")
        aside.rename(daemon.module_path)
        wait_reloaded(daemon, mark)
        assert_version(daemon, "2")
        # The target of the symbolic link is watched as well.
        mark = daemon.mark()
        save_by_rename(releases / "2.py", version(daemon, "3"))
        wait_reloaded(daemon, mark)
        assert_version(daemon, "3")
        assert daemon.stop() == 0


def test_configuration_file_is_watched(new_daemon: NewDaemon):
    daemon = new_daemon()
    with run_watching(daemon):
        old = daemon.pids()
        good = daemon.config_path.read_text()
        save_by_rename(daemon.config_path, good.replace("handler", "handlre"))
        problem = daemon.wait_event("reload.refused")["problem"]
        assert "handlre" in problem
        assert "did you mean" in problem
        mark = daemon.wait_event("reload.refused", problem=problem)["number"] + 1
        save_by_rename(daemon.config_path, "[redis\n")
        daemon.wait_event("reload.started", after=mark)
        daemon.wait_for(
            lambda: any(
                "one.toml:1:" in each["problem"] for each in daemon.events("reload.refused")
            ),
            what="no TOML",
        )
        assert daemon.pids() == old
        mark = daemon.mark()
        save_by_rename(daemon.config_path, good + "max_attempts = 1\n")
        wait_reloaded(daemon, mark)
        (uid,) = daemon.send(["fail"])
        daemon.wait_settled()
        assert [each["uid"] for each in daemon.letters()] == [uid]
        assert daemon.stop() == 0


def test_restarted_watcher_finds_edits_made_before_its_start(new_daemon: NewDaemon):
    daemon = new_daemon()
    with run_watching(daemon):
        psutil.Process(daemon.titles()["streamqd: watcher"]).kill()
        save_by_rename(daemon.module_path, version(daemon, "2"))
        wait_reloaded(daemon, 0)
        assert_version(daemon, "2")
        daemon.wait_for(lambda: "streamqd: watcher" in daemon.titles(), what="it watches again")
        assert daemon.stop() == 0


def test_autoreload_is_refused_with_burst_or_a_command(new_daemon: NewDaemon):
    daemon = new_daemon()
    with daemon:
        assert "streamqd: watcher" not in daemon.titles()
        assert daemon.stop() == 0
    command = [sys.executable, "-m", "streamqd", "--config", daemon.config_path.name, "--reload"]
    for more, what in (
        (["--burst"], "--burst cannot be used with"),
        (["status"], "--reload is an option of the daemon"),
    ):
        ended = subprocess.run(
            [*command, *more], cwd=daemon.folder, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 2
        assert what in ended.stderr
