"""`on_error = "hold-key"`: the order of each key, also over failures, while other keys go on.

It keeps the latest profile of each user. The key of a message is the user. While a user's data is
locked, for example because it is being moved, that user's changes wait in their order, and those of
all others pass.

Run it: `handlers = ["streamqd.examples.profiles"]`, then
`streamqd produce profiles '{"name": "Ann"}' --key ann`.
"""

from __future__ import annotations

from pathlib import Path

from streamqd import Context, Dead, Message, Retry, handler

_folder = Path()


def on_start(context: Context) -> None:
    """Make the folder that the profiles are in."""
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
    """Write the profile over the one before."""
    user = (msg.key or b"").decode()
    if not user.isalnum():
        raise Dead("the key of a profile is the name of its user")
    if (_folder / f"{user}.lock").exists():
        raise Retry(after=0.2)
    written = _folder / f"{user}.json.new"
    written.write_bytes(msg.payload)
    written.replace(_folder / f"{user}.json")
