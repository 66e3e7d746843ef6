"""The live screen of `streamqd top`, apart from the terminal: what is shown, and where.

`columns` says what a row tells, `frame` lays out one screenful, `input` turns keys into changes of
what is shown; all three are pure. `terminal` is the only one that touches a terminal.
"""
