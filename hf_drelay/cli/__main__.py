"""`python -m hf_drelay.cli`."""

from . import app


app()
