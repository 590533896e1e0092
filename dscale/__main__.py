"""`python -m dscale`."""

from dscale.cli import app

app()
