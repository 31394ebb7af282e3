"""Command line of hf_drelay, one file for each group of commands. Thin: it parses, calls the library, prints.

Bad input ends in one sentence and exit code 2. Heavy imports happen inside the commands, so that `--help` is quick.
"""

import typer

from .environment import env
from .evaluation import benchmark, check_lossless, headroom, report, sweep
from .generate import generate


app = typer.Typer(
    help="Lossless speculative decoding with DRelay drafters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, benchmark, sweep, headroom, report, check_lossless, env):
    app.command()(command)
