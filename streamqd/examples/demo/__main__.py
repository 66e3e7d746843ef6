"""Run the demonstration: `python -m streamqd.examples.demo [--serve] [--dir DIR]`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

from streamqd.examples.demo import summary
from streamqd.examples.demo.board import Board, Row, number
from streamqd.examples.demo.stage import DemoConsole, DemoDaemon, DemoError, Folder
from streamqd.examples.demo.tally import GROUPS, PARTITIONS, TOPIC, DemoTally

CLIENT_ADDRESS = r"^(\S+)"  # the key, so that the lines of one client go to one partition, in order
POLL_INTERVAL_SECONDS = 0.05
SETTLE_SECONDS = 0.3  # seconds without new counts before the demonstration queries Redis
STALL_SECONDS = 60.0


def run(folder: Folder, *, serve: bool) -> int:
    """Run the whole demonstration and return the exit code."""
    lines = folder.prepare()
    with contextlib.ExitStack() as running:
        if serve:
            running.enter_context(DemoConsole(folder)).print_address()
        return _run(folder, lines, serve=serve)


def _run(folder: Folder, lines: int, *, serve: bool) -> int:
    assignments = len(GROUPS) * len(PARTITIONS)
    print(
        f"Starting the daemon ({folder.config}) with an embedded server and {assignments} workers,"
    )
    print(f"one for each of {len(PARTITIONS)} partitions and 2 groups ({', '.join(GROUPS)}).")
    with DemoDaemon(folder) as daemon:
        daemon.wait_ready()
        print(f"Sending {number(lines)} lines of a real web server log, keyed by client address.\n")
        tally = DemoTally(folder, lines)
        good = summary.print_summary(tally, *_feed_and_watch(tally, daemon))
        summary.where_to_look(folder, tally, serving=serve)
        if serve:
            print("\nThe daemon keeps running. Press Ctrl-C to drain it.", flush=True)
            code = _wait_for_the_end(daemon)
            print(f"\nThe daemon exited with code {code}; see {folder.log}.")
            return 0 if code == 0 and good else 1
        code = daemon.drain()
        print(f"\nSent SIGTERM: the daemon drained and exited with code {code}.")
    if code == 0:
        with DemoDaemon(folder, "--burst") as again:
            code = again.process.wait(STALL_SECONDS)
        print(f"Started it again with --burst: nothing was left, and it exited with code {code}.")
    return 0 if good and code == 0 else 1


def _feed_and_watch(tally: DemoTally, daemon: DemoDaemon) -> tuple[float, float]:
    """Produce all lines, and show the progress until both groups have handled them.

    Returns two durations in seconds: until all lines were produced, and until the last message was
    handled.
    """
    source = ("--from", str(tally.folder.lines), "--key-regex", CLIENT_ADDRESS)
    began = last_change = time.monotonic()
    produce = subprocess.Popen(
        tally.folder.streamqd("produce", TOPIC, *source),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    board = Board()
    fed = 0.0
    handled = 0
    try:
        while True:
            daemon.check()
            now = time.monotonic()
            if not fed and produce.poll() is not None:
                fed = now - began
                if produce.returncode != 0:
                    raise DemoError(f"streamqd produce failed: {produce.communicate()[1].strip()}")
            before, handled = handled, tally.update()
            board.show(_rows(tally), now - began)
            if handled != before:
                last_change = now
            elif now - last_change > STALL_SECONDS:
                raise DemoError(
                    f"nothing has moved for {STALL_SECONDS:g} s; see {tally.folder.log}"
                )
            elif fed and now - last_change > SETTLE_SECONDS and tally.is_settled():
                break
            time.sleep(POLL_INTERVAL_SECONDS)
    finally:
        if produce.poll() is None:
            produce.terminate()
        produce.communicate()
    tally.update()
    tally.ask_redis()
    handled_after = last_change - began
    board.show(_rows(tally), handled_after, last=True)
    return fed, handled_after


def _rows(tally: DemoTally) -> list[Row]:
    rows = []
    for group in GROUPS:
        parts = " / ".join(number(tally.handled[group, each]) for each in PARTITIONS)
        dead = tally.count_group(tally.dead, group)
        remark = f"handled, {dead} dead" if dead else "handled"
        remark += f" (by partition {parts})"
        rows.append((group, tally.count_group(tally.handled, group), tally.lines, remark))
    return rows


def _wait_for_the_end(daemon: DemoDaemon) -> int:
    """Forward every Ctrl-C to the daemon and return its exit code."""
    while True:
        try:
            return daemon.process.wait()
        except KeyboardInterrupt:
            daemon.process.send_signal(signal.SIGINT)


def main() -> int:
    """Read the command line and run the demonstration."""
    parser = argparse.ArgumentParser(
        prog="python -m streamqd.examples.demo",
        description="The web-log example from start to end, with a real daemon on real input.",
    )
    parser.add_argument("--serve", action="store_true", help="stay until Ctrl-C")
    parser.add_argument(
        "--dir", type=Path, default=Path("var/demo"), help="folder of this run (var/demo)"
    )
    options = parser.parse_args()
    # After one of these signals, the daemon is drained before the exit.
    for number_ in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_, lambda signum, _frame: sys.exit(128 + signum))
    try:
        return run(Folder(options.dir), serve=options.serve)
    except DemoError as failure:
        print(f"\nIt did not work: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the daemon has been stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
