"""Examples that ship with streamqd. They use the public API only."""
