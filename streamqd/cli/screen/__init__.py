"""The live screen of `streamqd top`, with its contents, layout, keys and terminal.

`columns` defines the cells of a row, `frame` lays out one screen, and `input` turns keys into
changes of the view. These three modules are pure. Only `terminal` uses a terminal.
"""
