"""Command line of hf_drelay, one file for each group of commands. Thin: it parses, calls the library, prints.

Bad input ends in one sentence and exit code 2. Heavy imports happen inside the commands, so that `--help` is quick.
"""

import typer

from .environment import env
from .generate import generate
from .hub import demo, push


app = typer.Typer(
    help="Lossless speculative decoding with DRelay drafters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, env, push, demo):
    app.command()(command)
