"""Command line of hf_drelay, one file for each group of commands. Thin: it parses, calls the library, prints.

Bad input ends in one sentence and exit code 2. Heavy imports happen inside the commands, so that `--help` is quick.
"""

import typer

from .convert import convert
from .environment import env
from .evaluation import benchmark, check_lossless, headroom, report, sweep
from .generate import generate
from .hub import demo, push, space
from .training import check, prepare_data, train


app = typer.Typer(
    help="Lossless speculative decoding with DRelay drafters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    generate,
    prepare_data,
    benchmark,
    sweep,
    headroom,
    report,
    check_lossless,
    convert,
    push,
    space,
    demo,
    env,
):
    app.command()(command)
for command in (check, train):  # their flags are those of the training configuration, known to its parser only
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(command)
