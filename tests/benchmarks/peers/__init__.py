"""streamqd and its peers, each in its own environment, against one private server."""
