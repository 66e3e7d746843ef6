"""An async handler: it waits for another service without delaying other messages.

With `concurrency = 20`, a worker handles up to 20 messages of its partition at the same time, in
coroutines of one event loop. `order = "key"` keeps messages with the same key in order.

Run it: `streamqd --config lookup.toml` with `handlers = ["streamqd.examples.lookup"]`, then
`streamqd produce lookups 127.0.0.1`.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from streamqd import Context, Dead, Message, handler

_folder = Path()


async def on_start(context: Context) -> None:
    """Open your clients and pools here: this hook runs on the event loop of the handler."""
    global _folder
    _folder = context.state_dir / "lookups"
    _folder.mkdir(parents=True, exist_ok=True)


@handler(topic="lookups", group="names", concurrency=20, order="key", timeout="10s")
async def look_up(msg: Message) -> None:
    """Find the name of an address. A second run writes the same file again."""
    loop = asyncio.get_running_loop()
    try:
        name, _service = await loop.getnameinfo((msg.text(), 0), socket.NI_NAMEREQD)
    except OSError as error:
        raise Dead(f"unknown address: {error}") from error
    file = _folder / msg.uid.replace("/", "-")
    await asyncio.to_thread(file.write_text, name)
