"""Check the protocol with Spin:  python -m tests.protocol [--full] [--write]

Every variant of the protocol must hold, and every mutation must be found. `--full` adds the larger
scopes. `--write` writes the result to docs/internals/protocol-model.md, with the shortest
counterexamples.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.protocol import page
from tests.protocol import variants as known
from tests.protocol.checker import Checked, check

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "protocol-model.md"


def main() -> int:
    """Run the checker. Return 0 if every variant has the expected result."""
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the larger scopes too")
    parser.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args()
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            print(f"{tool} is missing. On Debian: apt-get install spin gcc", file=sys.stderr)
            return 2
    mutations = [*known.MUTATIONS, *known.SCHEDULE_MUTATIONS, *known.OUTBOX_MUTATIONS]
    large = known.LARGE if options.full else ()
    variants = [*known.SMALL, *large, *known.SCHEDULE, *known.OUTBOX, *mutations]
    results: list[Checked] = []
    wrong = 0
    # Each check is a process, so two threads keep two cores busy.
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(partial(check, shortest=options.write), variants):
            results.append(result)
            wrong += not result.expected
            print(page.line(result), flush=True)
    if options.write and not wrong:
        PAGE.write_text(page.render(results))
    held = sum(1 for each in results if not each.variant.breaks and each.expected)
    found = sum(1 for each in results if each.variant.breaks and each.expected)
    print(f"{held} variants hold, {found} of {len(mutations)} mutations found, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
