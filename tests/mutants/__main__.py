"""`python -m tests.mutants [WORDS]`: break the code on purpose, and check that the tests fail.

WORDS select the mutants whose name or file contains all of them. The exit code is 1 unless all are
killed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.mutants.catalogue import MUTANTS
from tests.mutants.runner import KILLED, Result, judge


def main() -> int:
    """Judge the mutants, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="judge only the mutants that these words name")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="list the mutants without judging them")
    parser.add_argument("--why", action="store_true", help="print why each mutant was killed")
    given = parser.parse_args()
    chosen = [
        one for one in MUTANTS if all(word in f"{one.name} {one.path}" for word in given.words)
    ]
    if given.list:
        for one in chosen:
            print(f"{one.name}  ({one.path})\n    breaks: {one.breaks}")
            print("".join(f"    {test}\n" for test in one.tests), end="")
        return 0
    if not chosen:
        print("no mutant has such a name", file=sys.stderr)
        return 1

    began = time.monotonic()
    print(f"{len(chosen)} mutants; first all of their tests without any", flush=True)
    results = judge(chosen, given.jobs, lambda result: _tell(result, why=given.why))
    counts = Counter(result.word for result in results)
    seconds = time.monotonic() - began
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    print(f"{len(results)} mutants in {seconds:.0f} s: {summary}")
    return 0 if counts[KILLED] == len(results) else 1


def _tell(result: Result, *, why: bool) -> None:
    print(f"{result.word:<10} {result.seconds:5.1f} s  {result.mutant.name}", flush=True)
    if why or result.word != KILLED:
        print(f"    breaks: {result.mutant.breaks}")
        print("".join(f"    {line}\n" for line in result.detail.splitlines()), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
