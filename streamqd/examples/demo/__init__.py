"""The complete web-log example, with a real daemon on real input: `make run`.

It starts `streamqd`, sends 10,000 lines with `streamqd produce`, and shows the progress of both
groups. Finally, it prints a summary and checks that all counts match. The demonstration uses only
the command line of streamqd and the databases of the handlers.
"""
