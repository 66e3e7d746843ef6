"""The outbox: messages that are sent by a transaction of the application's own database.

`outbox` inserts a message as a row of a table, over the application's connection, in its open
transaction. `relay` moves committed rows to Redis. `table` has the SQL statements of three
dialects, `rows` encodes and decodes a row, `adapters` insert over the connections of applications,
and `database` is the relay's own connection. No database driver is imported before a connection of
its kind is used.
"""

from __future__ import annotations
