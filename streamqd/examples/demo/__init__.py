"""The web-log example from start to end, with a real daemon on real input: `make run`.

It starts `streamqd` as anyone would, feeds it 10,000 lines with `streamqd produce`, shows how both
groups come on, and ends with a summary whose figures are counted, compared and judged. Nothing here
reaches into streamqd: it uses the command line, and the databases of the handlers.
"""
