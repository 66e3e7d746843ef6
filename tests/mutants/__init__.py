"""Known mistakes, introduced on purpose. For each, a named test must fail."""
