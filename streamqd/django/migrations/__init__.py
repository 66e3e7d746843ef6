"""The migrations of the app `streamqd`."""
