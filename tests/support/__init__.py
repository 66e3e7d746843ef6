"""Test infrastructure: servers, a proxy that misbehaves on demand, waiting."""
