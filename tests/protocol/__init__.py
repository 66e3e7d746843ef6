"""The protocol of one partition as a model for Spin, and its known mutations."""
