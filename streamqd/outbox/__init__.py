"""The outbox: send messages in a transaction of the application's own database.

`outbox` inserts a message as a row of a table, over the application's connection and in its open
transaction. `relay` moves committed rows to Redis. `table` contains the SQL statements in three
dialects, `rows` encodes and decodes rows, `adapters` inserts over the connections of applications,
and `database` is the relay's own connection. A database driver is imported only when its first
connection is used.
"""

from __future__ import annotations
