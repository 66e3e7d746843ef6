"""Test infrastructure, such as servers, daemons, and a proxy that misbehaves on demand."""
