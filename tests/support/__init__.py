"""What tests stand on: servers, a proxy that misbehaves on demand, waiting."""
