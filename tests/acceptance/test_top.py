"""`streamqd top` runs in a terminal with a real daemon, real keys and real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemon import GROUP, ROOT, TOPIC, Daemon
from tests.support.servers import ProcessServer
from tests.support.terminal import Terminal

NewDaemon = Callable[..., Daemon]


def command(daemon: Daemon, *words: str) -> list[str]:
    return [sys.executable, "-m", "streamqd", "--config", str(daemon.config_path), *words]


def environment(**more: str) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("STREAMQ_")}
    return clean | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "NO_COLOR": ""} | more


def watch(daemon: Daemon, *words: str, size: tuple[int, int] = (80, 24), **more: str) -> Terminal:
    return Terminal(
        command(daemon, "top", "--interval", "0.2s", *words),
        columns=size[0],
        lines=size[1],
        cwd=daemon.folder,
        env=environment(**more),
    )


def rows(screen: Terminal) -> list[str]:
    """Return the partitions in the order in which the screen shows them, from top to bottom."""
    return re.findall(rf"^{TOPIC}/\d+/\S+", screen.shown, re.MULTILINE)


def test_top_shows_the_fleet_and_obeys_keys(new_daemon: NewDaemon) -> None:
    with new_daemon(partitions=40, groups=["bill"], consumer={"max_attempts": 1}) as one:
        one.send(["fail"] * 3, partition=7)
        one.send(["await gate"], partition=9)
        with watch(one) as top:
            top.wait_text("ValueError x3 orders/bill")
            top.wait_text("instances: 1 working")
            top.wait_text("dlq 3")
            assert "\x1b[31m" in top.raw or "\x1b[1;31m" in top.raw

            top.type("s")
            top.wait_text("of 40 by name")
            assert rows(top)[0] == "orders/0/bill"
            first = len(rows(top))
            top.type("p")
            top.wait_text(f"{first + 1}-{2 * first} of 40")
            assert rows(top)[0] == f"orders/{first}/bill"
            top.type("\x1b[A")
            top.wait_text(f"{first}-{2 * first - 1} of 40")
            top.type("/")
            top.wait_text("Enter keeps it")
            top.type("/9/\r")
            top.wait_text("1-1 of 1 by name  //9/")
            top.type("\x1b")
            top.wait_text("of 40 by name  q quit")
            top.type("?")
            top.wait_text("shows why a partition makes no progress")
            top.type("?")
            top.wait_text("1-")

            top.type(" ")
            top.wait_text("FROZEN")
            frozen = top.shown.partition("FROZEN")[2]
            frames = top.frames
            top.wait_for(lambda: top.frames > frames + 3, "it goes on painting")
            assert top.shown.partition("FROZEN")[2] == frozen
            top.type(" ")
            top.wait_for(lambda: "FROZEN" not in top.shown, "it goes on")

            top.type("q")
            assert top.wait_end() == 0
            assert "1049" not in top.modes  # `top` has left the alternate screen
            assert "25" in top.modes  # the cursor is visible again
        (one.folder / "gate").touch()


def test_top_fits_every_size_and_follows_a_resize(new_daemon: NewDaemon) -> None:
    with new_daemon(partitions=3) as one, watch(one) as top:
        top.wait_text(f"{TOPIC}/2/{GROUP}")
        assert "LAG/S" not in top.shown
        top.resize(200, 50)
        top.wait_text("EPOCH")
        top.wait_text("LAG/S")
        top.resize(30, 8)
        top.wait_for(lambda: "LAG/S" not in top.shown and "orders/0" in top.shown, "it shrinks")
        top.type("q")
        assert top.wait_end() == 0


def test_top_shows_the_same_words_without_color(new_daemon: NewDaemon) -> None:
    with new_daemon(partitions=1) as one:
        one.pause()
        with watch(one, NO_COLOR="1") as top:
            top.wait_text("PAUSED")
            top.wait_text("! instance one is paused")
            top.type("q")
            assert top.wait_end() == 0
            assert not re.search(r"\x1b\[[0-9;]*3[0-9]", top.raw)
            assert "\x1b[7m" in top.raw


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_top_restores_the_terminal_on_signals(
    new_daemon: NewDaemon, number: signal.Signals, code: int
) -> None:
    one = new_daemon()
    with watch(one) as top:
        top.wait_text("streamqd")
        top.wait_for(lambda: not top.echoes, "it has taken the terminal")
        top.signal(number)
        assert top.wait_end() == code
        assert "1049" not in top.modes
        assert top.echoes


def test_top_handles_ctrl_c_and_ctrl_z(new_daemon: NewDaemon) -> None:
    one = new_daemon()
    with watch(one) as top:
        top.wait_text("streamqd")
        for number in (signal.SIGTSTP, signal.SIGSTOP):
            top.signal(number)
            top.wait_for(lambda: top.stopped, "it stops")
            if number is signal.SIGTSTP:
                top.wait_for(lambda: "1049" not in top.modes, "it leaves the screen")
                assert top.echoes
            frames = top.frames
            top.signal(signal.SIGCONT)
            top.wait_for(lambda seen=frames: top.frames > seen, "it paints again")
            assert "1049" in top.modes
            assert not top.echoes
        top.type("\x03")
        assert top.wait_end() == 130
        assert top.echoes


def test_top_survives_an_outage_of_redis(
    new_daemon: NewDaemon, fresh_server: ProcessServer
) -> None:
    with new_daemon(redis_url=fresh_server.url, partitions=2) as one, watch(one) as top:
        top.wait_text(f"{TOPIC}/1/{GROUP}")
        fresh_server.kill()
        top.wait_text("REDIS UNAVAILABLE, data ")
        assert f"{TOPIC}/1/{GROUP}" in top.shown
        top.type("?")
        top.wait_text("shows why a partition makes no progress")
        top.type("?")
        fresh_server.start()
        top.wait_for(lambda: "REDIS UNAVAILABLE" not in top.shown, "it has found Redis again")
        top.wait_text("instances: 1 working")
        top.type("q")
        assert top.wait_end() == 0


def test_top_starts_during_an_outage_of_redis(
    new_daemon: NewDaemon, fresh_server: ProcessServer
) -> None:
    one = new_daemon(redis_url=fresh_server.url)
    fresh_server.kill()
    with watch(one) as top:
        top.wait_text("cannot connect to")
        fresh_server.start()
        top.wait_text("instances: none")
        top.type("q")
        assert top.wait_end() == 0


# --- without a terminal ---------------------------------------------------------------------------


def run(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(daemon, "top", *words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=daemon.folder,
        env=environment(),
        check=False,
    )


def test_top_without_a_terminal_suggests_once(new_daemon: NewDaemon) -> None:
    ended = run(new_daemon())

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "top needs a terminal; pass --once" in ended.stderr


def test_top_once_and_json_need_no_terminal(new_daemon: NewDaemon) -> None:
    with new_daemon(partitions=30, consumer={"max_attempts": 1}) as one:
        one.send(["ok", "fail"] * 5, partition=3)
        one.wait_settled()

        def told() -> dict[str, Any]:
            seen = json.loads(run(one, "--json").stdout)
            # The rate of arriving messages needs two measurements.
            known = [each for each in seen["assignments"] if each["arriving"] is not None]
            three = next((each for each in known if each["partition"] == 3), None)
            counted = seen["totals"]["dead_letters"] == 5
            return {**seen, "three": three} if three and counted else {}

        seen = one.wait_for(told, what="the summary tells of the dead letters")
        three = seen["three"]
        assert (three["owner"], three["state"], three["lag"]) == ("one", "ready", 0)
        assert three["p99_seconds"] >= three["p50_seconds"] > 0
        assert three["arriving"] >= 0
        (failure,) = seen["failures"]
        assert (failure["error"], failure["count"]) == ("ValueError", 5)

        once = run(one, "--once").stdout
        assert "\x1b" not in once
        assert len(re.findall(rf"^{TOPIC}/\d+/{GROUP} ", once, re.MULTILINE)) == 30


def test_top_measures_a_partition_without_an_owner(new_daemon: NewDaemon) -> None:
    one = new_daemon(partitions=3, daemon={"max_partitions": 2})
    with one:
        one.send(["ok"] * 4, partition=2)
        seen = one.wait_for(
            lambda: [
                each
                for each in json.loads(run(one, "--json").stdout)["assignments"]
                if each["state"] == "free" and each["lag"] == 4
            ],
            what="the free partition is shown with its lag",
        )
        assert [each["owner"] for each in seen] == [""]
