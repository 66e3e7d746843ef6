"""Known mistakes, put into the code on purpose: for each a named test must turn red."""
