"""The check of the rights of the Redis user."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin.diagnosis.declaration import Check, CheckResult, Need, Severity
from streamqd.admin.diagnosis.facts import DiagnosisFacts

KEYS_SHOWN = 4


def _missing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    keys_of: dict[str, list[str]] = {}
    for command, key in facts.lacking:
        keys_of.setdefault(command, []).append(key)
    user = facts.settings.redis.username or "default"
    for command, keys in keys_of.items():
        name = command.lower().replace(" ", "|")
        shown = [key for key in keys if key]
        where = f" on {shown[0]}" if shown else ""
        more = f" and {len(shown) - 1} other keys" if len(shown) > 1 else ""
        patterns = f"{facts.settings.keys.control}:*", f"{facts.settings.keys.streams}:*"
        yield CheckResult(
            f"the Redis user {user} may not run {command}{where}{more}",
            f"`redis-cli ACL SETUSER {user} +{name} ~{patterns[0]} ~{patterns[1]}`",
            about=command,
            evidence={"command": command, "keys": shown[:KEYS_SHOWN]},
        )


CHECKS = (
    Check(
        "rights.missing",
        Severity.PROBLEM,
        "The Redis user may not run something that a daemon needs.",
        (Need.RIGHTS,),
        _missing,
    ),
)
