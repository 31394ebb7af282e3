"""What the commands share: the application's errors, and how targets and drafters are loaded."""

import math
from contextlib import contextmanager
from enum import StrEnum

import typer


class Dtype(StrEnum):
    """Types a target can be loaded in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@contextmanager
def errors_as_sentences():
    """Turn errors about the input into one line on stderr and exit code 2; bugs keep their trace."""
    from safetensors import SafetensorError

    try:
        yield
    except (ValueError, OSError, ImportError, NotImplementedError, SafetensorError) as error:
        # Messages of the libraries below span several lines.
        typer.echo("Error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from error


def parse_loop_gate(text: str) -> float | str | None:
    if text == "off":
        return None
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"`--loop-gate` is {text!r}; give a number of at most 0, such as -0.5, `auto`, or `off`."
        ) from None


def prepare_libraries(threads: int | None) -> None:
    import torch
    from transformers.utils import logging

    if threads is not None:
        torch.set_num_threads(threads)
    # One spinner stands for all loading; bars for single weight files would tear it apart.
    logging.disable_progress_bar()


def load_target(name_or_path: str | None, dtype: Dtype | None):
    """Load the named target, or the demo target, onto the GPU if there is one. Returns `(model, tokenizer)`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_drelay.targets import load_demo_target

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name_or_path is None:
        return load_demo_target(dtype=getattr(torch, dtype or Dtype.FLOAT32), device=device)
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=str(dtype or "auto")).to(device)
    return model, AutoTokenizer.from_pretrained(name_or_path)


def load_drafter(name_or_path: str | None):
    from hf_drelay import DRelayModel
    from hf_drelay.targets import resolve_drafter

    return DRelayModel.from_pretrained(resolve_drafter(name_or_path))


def format_number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
