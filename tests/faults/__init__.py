"""The fault battery: the table of faults, the tests of each row, and the page about both."""
