"""`on_error = "hold-key"`: keep the order of each key during failures, without delaying other keys.

The handler stores the latest profile of each user. The key of a message is the user. While a user's
data is locked, for example during a migration, changes for this user wait in order. Changes for
all other users are handled.

Run it: `handlers = ["streamqd.examples.profiles"]`, then
`streamqd produce profiles '{"name": "Ann"}' --key ann`.
"""

from __future__ import annotations

from pathlib import Path

from streamqd import Context, Dead, Message, Retry, handler

_folder = Path()


def on_start(context: Context) -> None:
    """Create the directory of the profiles."""
    global _folder
    _folder = context.state_dir / "profiles"
    _folder.mkdir(parents=True, exist_ok=True)


@handler(
    topic="profiles",
    group="keep",
    on_error="hold-key",
    max_attempts=0,
    backoff={"kind": "fixed", "base": "200ms", "jitter": "none"},
    held_max=10_000,
)
def keep(msg: Message) -> None:
    """Replace the user's profile."""
    user = (msg.key or b"").decode()
    if not user.isalnum():
        raise Dead("the key of a profile is the name of its user")
    if (_folder / f"{user}.lock").exists():
        raise Retry(after=0.2)
    written = _folder / f"{user}.json.new"
    written.write_bytes(msg.payload)
    written.replace(_folder / f"{user}.json")
