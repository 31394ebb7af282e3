"""`hf-drelay convert`: public drafter formats to ours and back."""

from enum import StrEnum
from typing import Annotated

import typer

from .shared import Dtype, errors_as_sentences, load_target, prepare_libraries


class Format(StrEnum):
    """Formats that can be written."""

    HF_DRELAY = "hf_drelay"
    ZLAB = "zlab"
    SPECULATORS = "speculators"


def convert(
    source: Annotated[str, typer.Argument(help="Path or Hub id of a drafter in any known format.")],
    destination: Annotated[str, typer.Argument(help="New folder.")],
    target: Annotated[
        str | None, typer.Option(help="Its target: compares copied tables, and measures a layout not told.")
    ] = None,
    format: Annotated[Format, typer.Option(help="Format to write.")] = Format.HF_DRELAY,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the target's weights.")] = None,
) -> None:
    """Convert a drafter between our format and the public ones (z-lab, SpecForge, DeepSpec, speculators)."""
    with errors_as_sentences():
        prepare_libraries(None)
        from hf_drelay.hub.convert import convert as run

        model, tokenizer = (None, None) if target is None else load_target(target, dtype)
        report = run(source, destination, model, tokenizer, str(format))
    for name, value in report.items():
        typer.echo(f"{name}: {value}")
    if "acceptance_length" in report:
        typer.echo("The file does not tell its layout; the one with the larger acceptance length was taken.")
    typer.echo(f"written to {destination}")
