"""``python -m cbatch``: the command line, installed or not."""

from cbatch.cli import app

app(prog_name="cbatch")
