"""Examples that ship with streamqd. They use only the public API."""
