"""Command line of hf_drelay. Thin: it parses, calls the library, prints.

Bad input ends in one sentence and exit code 2. Heavy imports happen inside the commands, so that `--help` is quick.
"""

import math
import os
import platform
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


app = typer.Typer(
    help="Lossless speculative decoding with DRelay drafters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Dtype(StrEnum):
    """Types a target can be loaded in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Proposal(StrEnum):
    """How drafts are drawn under sampling."""

    SAMPLE = "sample"
    GREEDY = "greedy"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to answer, or to continue with `--raw`.")],
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the target model; default: the embedded demo target.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the drafter; default: the one made for the demo target.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of generated tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the best.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random generator.")] = 0,
    loop_gate: Annotated[
        str | None,
        typer.Option(help="Log-confidence (at most 0) from which another stage is drafted, or `off` for one stage."),
    ] = None,
    max_stages: Annotated[int | None, typer.Option(help="Limit of drafting stages in a round.")] = None,
    proposal: Annotated[Proposal | None, typer.Option(help="How drafts are drawn under sampling.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Limit of tokens drafted in a stage.")] = None,
    compare: Annotated[bool, typer.Option(help="Generate without the drafter too, and compare.")] = True,
    raw: Annotated[bool, typer.Option("--raw", help="Do not put the prompt into the chat template.")] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Type of the target's weights; default: float32 for the demo target.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the generated text only.")] = False,
) -> None:
    """Stream an answer through a drafter, then compare its speed with plain generation."""
    from hf_drelay.evaluation.timing import timed_generate

    with _errors_as_sentences():
        sampling = _sampling_arguments(temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        options = _draft_options(
            loop_gate, max_stages=max_stages, proposal=proposal, num_draft_tokens=num_draft_tokens
        )
        if target is not None and drafter is None:
            raise ValueError(
                f"`--drafter` is missing: the bundled drafter fits the demo target only, not {target!r}. Pass the "
                "folder or Hub id of a drafter that was trained for this target."
            )
        _prepare_libraries(threads)
        notes = Console(stderr=True, quiet=quiet)
        with notes.status("Loading target and drafter (the demo target is fetched on first use)"):
            # The small one first: it checks the options before the large one is loaded or fetched.
            drelay = _load_drafter(drafter)
            view = drelay.with_options(**options)
            model, tokenizer = _load_target(target, dtype)
            drelay.to(model.device)
        inputs = _encode(prompt, tokenizer, drelay.config, raw).to(model.device)
        arguments = {"max_new_tokens": max_new_tokens, **sampling}
        notes.print(_resolved(model, drelay, arguments), style="dim", highlight=False, soft_wrap=True)

        # The first call pays for kernel selection and memory, which would count against whichever way runs first.
        timed_generate(model, inputs, seed, assistant_model=view, **{**arguments, "max_new_tokens": 2})
        drafted_ids, drafted_s = timed_generate(
            model, inputs, seed, assistant_model=view, streamer=_streamer(tokenizer), **arguments
        )
        if quiet:
            return
        statistics = view.statistics
        plain = timed_generate(model, inputs, seed, **arguments) if compare else None
        typer.echo()
        Console().print(_result_table(statistics, drafted_ids, drafted_s, plain, is_greedy=temperature == 0))


@app.command()
def env() -> None:
    """Print versions and hardware, as a bug report needs them."""
    import torch

    import hf_drelay
    from hf_drelay.evaluation.records import cpu_name

    cuda = torch.cuda.is_available()
    rows = {
        "hf_drelay": hf_drelay.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in ("torch", "transformers", "huggingface-hub", "tokenizers", "gguf")},
        "cpu": cpu_name(),
        "cpu cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
        "device": "cuda" if cuda else "cpu",
        "gpu": torch.cuda.get_device_name() if cuda else "none",
    }
    for name, value in rows.items():
        typer.echo(f"{name}: {value}")


@contextmanager
def _errors_as_sentences():
    """Turn errors about the input into one line on stderr and exit code 2; bugs keep their trace."""
    from safetensors import SafetensorError

    try:
        yield
    except (ValueError, OSError, ImportError, NotImplementedError, SafetensorError) as error:
        # Messages of the libraries below span several lines.
        typer.echo("Error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from error


def _sampling_arguments(temperature: float, **filters: float | None) -> dict:
    """Arguments of `generate()` for the sampling flags; `filters` are the ones that only act under sampling."""
    given = {name: value for name, value in filters.items() if value is not None}
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, **given}
    if given:
        name, value = next(iter(given.items()))
        flag = "--" + name.replace("_", "-")
        raise ValueError(
            f"`{flag}` {value} has no effect at `--temperature` 0, which decodes greedily. Give a temperature above 0 "
            f"or leave out `{flag}`."
        )
    return {"do_sample": False}


def _draft_options(loop_gate: str | None, **options) -> dict:
    """Keyword arguments of `with_options`; what was not given stays with the drafter's configuration."""
    given = {name: value for name, value in options.items() if value is not None}
    if "proposal" in given:
        given["proposal"] = str(given["proposal"])
    if loop_gate is not None:
        given["loop_gate"] = _parse_loop_gate(loop_gate)
    return given


def _parse_loop_gate(text: str) -> float | None:
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"`--loop-gate` is {text!r}; give a number of at most 0, such as -0.5, or `off`.") from None


def _prepare_libraries(threads: int | None) -> None:
    import torch
    from transformers.utils import logging

    if threads is not None:
        torch.set_num_threads(threads)
    # One spinner stands for all loading; bars for single weight files would tear it apart.
    logging.disable_progress_bar()


def _load_target(name_or_path: str | None, dtype: Dtype | None):
    """Load the named target, or the demo target, onto the GPU if there is one. Returns `(model, tokenizer)`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_drelay.targets import load_demo_target

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name_or_path is None:
        return load_demo_target(dtype=getattr(torch, dtype or Dtype.FLOAT32), device=device)
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=str(dtype or "auto")).to(device)
    return model, AutoTokenizer.from_pretrained(name_or_path)


def _load_drafter(name_or_path: str | None):
    from hf_drelay import DRelayModel
    from hf_drelay.targets import resolve_drafter

    return DRelayModel.from_pretrained(resolve_drafter(name_or_path))


def _encode(prompt: str, tokenizer, drafter_config, raw: bool):
    """Token ids and attention mask of the prompt, each `(1, P)`, inside the chat template where there is one."""
    if raw or tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt")
        if inputs["input_ids"].shape[1] == 0:
            raise ValueError("`prompt` has no tokens; give some text.")
        return inputs
    # A drafter is at its best in the mode it was trained in. Templates without a thinking mode ignore the switch.
    modes = {"thinking": {"enable_thinking": True}, "non_thinking": {"enable_thinking": False}}
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **modes.get(drafter_config.chat_template_mode, {}),
    )


def _resolved(model, drelay, arguments: dict) -> str:
    """One line with what the flags and their defaults came to."""
    import torch

    settings = {
        "target": model.name_or_path,
        "drafter": Path(drelay.name_or_path).name,
        **arguments,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
    }
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _streamer(tokenizer):
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _result_table(statistics, drafted_ids, drafted_s, plain, *, is_greedy: bool) -> Table:
    """Speed with and without the drafter, and what the drafter did."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("with drafter", justify="right")
    rows = [
        ("tokens", str(len(drafted_ids))),
        ("tokens/s, prefill included", f"{len(drafted_ids) / drafted_s:.1f}"),
    ]
    extra = [
        ("acceptance length τ (bonus counted)", _number(statistics.acceptance_length, 2)),
        ("stages per round", _number(statistics.mean_stages, 2)),
        ("repairs right / harmful", f"{statistics.num_repaired_right} / {statistics.num_repaired_harmful}"),
    ]
    if plain is None:
        for row in rows + extra:
            table.add_row(*row)
        return table

    plain_ids, plain_s = plain
    table.add_column("without", justify="right")
    without = [str(len(plain_ids)), f"{len(plain_ids) / plain_s:.1f}"]
    for row, value in zip(rows, without, strict=True):
        table.add_row(*row, value)
    # Sampled runs differ in length, so the ratio is one of rates and not of times.
    speedup = (len(drafted_ids) / drafted_s) / (len(plain_ids) / plain_s)
    table.add_row("speedup", f"{speedup:.2f}x")
    for row in extra:
        table.add_row(*row)
    if is_greedy:
        table.add_row("same tokens as without", "yes" if drafted_ids == plain_ids else "no")
    return table


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    app()
