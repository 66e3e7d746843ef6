"""Versions of the servers with flaws that clients use: code on the host, or rights got round.

For each line the first version without such a flaw that is known. Sources: the announcements of
July 2026, which close the flaws of October 2025 (CVE-2025-49844, CVE-2025-46817, in scripting) and
of May 2026 (CVE-2026-23479, CVE-2026-25243, CVE-2026-23631) as well; of Redis 8 the releases after
them, which close a way past the ACL in XREAD and XREADGROUP (8.2.9, 8.4.6, 8.6.6, 8.8.2, 8.10.0)
and more (8.10.1). Only this table goes by versions: what a server can do is found by trying.

- Redis: github.com/docker-library/official-images/pull/21922 and the release notes named there
- Valkey: release notes of 7.2.14, 8.0.10, 8.1.9, 9.0.5 and 9.1.1 (CVE-2026-56684, CVE-2026-63639)

A line that is not in the table and older than the newest one gets no fixes any more.
"""

from __future__ import annotations

import re

Version = tuple[int, ...]
MENDED: dict[str, dict[Version, int]] = {
    "redis": {
        (6, 2): 23,
        (7, 2): 15,
        (7, 4): 10,
        (8, 2): 9,
        (8, 4): 6,
        (8, 6): 6,
        (8, 8): 2,
        (8, 10): 1,
    },
    "valkey": {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
}
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def fix_of(product: str, version: str) -> str:
    """The version that a server should be updated to at least; '' when none is known.

    `product` is redis or valkey, `version` what the server says, as 7.2.4.
    """
    lines, found = MENDED[product], _VERSION.match(version)
    if found is None:
        return ""
    line, patch = (int(found[1]), int(found[2])), int(found[3])
    if line > max(lines):
        return ""
    if patch >= lines.get(line, patch + 1):
        return ""
    to = min(each for each in lines if each >= line)
    return ".".join(map(str, (*to, lines[to])))
