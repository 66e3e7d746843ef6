"""Counts the results of the handlers and the entries in Redis, and compares them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamqd.examples.demo.stage import Folder

TOPIC = "access"
PARTITIONS = range(4)
GROUPS = ("hits", "agents")
TABLES = {"hits": "path, status", "agents": "agent"}  # columns by which the table of a group counts

GroupPartition = tuple[str, int]  # a group and a partition


@dataclass
class DemoTally:
    """The figures of one run, per group and partition."""

    folder: Folder
    lines: int  # number of input lines
    handled: Counter[GroupPartition] = field(default_factory=Counter)
    dead: Counter[GroupPartition] = field(default_factory=Counter)
    added: Counter[int] = field(default_factory=Counter)  # entries written to Redis, by partition
    unsettled: int | None = (
        None  # unread and pending messages and waiting retries, or None if a lag is unknown
    )
    dead_letters: list[dict[str, Any]] = field(default_factory=list)

    # --- looking ---

    def update(self) -> int:
        """Count the messages handled so far, per group and partition. Return the sum."""
        for group in GROUPS:
            for partition in PARTITIONS:
                rows = query(self.folder.database(group, partition), "SELECT count(*) FROM seen")
                self.handled[group, partition] = rows[0][0] if rows else 0
        return self.handled.total()

    def is_settled(self) -> bool:
        """Return True if, according to Redis, both groups have handled all messages."""
        assignments = self.folder.ask("partitions", TOPIC)["assignments"]
        known = {assignment["group"] for assignment in assignments} == set(GROUPS)
        if known and all(assignment["lag"] is not None for assignment in assignments):
            self.unsettled = sum(
                assignment["lag"] + assignment["pending"] + assignment["waiting_retries"]
                for assignment in assignments
            )
        return self.unsettled == 0

    def ask_redis(self) -> None:
        """Count the entries that were written to Redis, and read the dead letters."""
        for row in self.folder.ask("topic", "describe", TOPIC)["partitions"]:
            self.added[row["partition"]] = row["added"]
        for row in self.folder.ask("dlq", "list", TOPIC)["rows"]:
            self.dead[row["group"], int(row["id"].partition(":")[0])] += 1
            self.dead_letters.append(self.folder.ask("dlq", "show", TOPIC, row["id"]))

    # --- results ---

    def count_group(self, counts: Counter[GroupPartition], group: str) -> int:
        """Return the sum of a group's counts over the partitions."""
        return sum(counts[group, partition] for partition in PARTITIONS)

    def top(self, group: str) -> list[tuple[Any, ...]]:
        """Return a group's table, summed over the partitions, with the largest counts first."""
        sums: Counter[tuple[Any, ...]] = Counter()
        for partition in PARTITIONS:
            statement = f"SELECT {TABLES[group]}, count FROM {group}"  # noqa: S608 - our own names
            for *what, count in query(self.folder.database(group, partition), statement):
                sums[tuple(what)] += count
        return [(*what, count) for what, count in sums.most_common()]

    def checks(self) -> list[tuple[bool, str]]:
        """Compare the lines sent, the entries in Redis and the results of the handlers.

        Returns for each check its result and a sentence.
        """
        checks = [
            (self.added.total() == self.lines, "every line of the file is in Redis"),
            (self.unsettled == 0, "no message is unread, pending or waiting"),
        ]
        for group in GROUPS:
            whole = all(
                self.handled[group, each] + self.dead[group, each] == self.added[each]
                for each in PARTITIONS
            )
            stored = sum(row[-1] for row in self.top(group))
            once = stored == self.count_group(self.handled, group)
            checks.append(
                (whole, f"{group}: handled + dead-lettered = produced, in every partition")
            )
            checks.append((once, f"{group}: each handled message is counted exactly once"))
        return checks


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """Return rows from a handler's database, or an empty list before its worker created it."""
    if not path.exists():
        return []
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return database.execute(statement).fetchall()
    except sqlite3.OperationalError:
        return []
