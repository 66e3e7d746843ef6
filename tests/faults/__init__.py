"""The fault battery: the table of faults, which tests show each row, and the page about both."""
