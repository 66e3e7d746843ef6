"""streamqd and its peers, each in its own environment, on one private server."""
