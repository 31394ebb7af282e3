"""`hf-drelay generate`: stream an answer, then say what the drafter won."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .shared import (
    Dtype,
    errors_as_sentences,
    format_number,
    load_drafter,
    load_target,
    parse_loop_gate,
    prepare_libraries,
)


class Proposal(StrEnum):
    """How drafts are drawn under sampling."""

    SAMPLE = "sample"
    GREEDY = "greedy"


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
        typer.Option(
            help="Log-confidence (at most 0) from which another stage is drafted, `off` for one stage, or `auto` to "
            "weigh gains against measured costs."
        ),
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

    with errors_as_sentences():
        sampling = _sampling_arguments(temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        options = _draft_options(
            loop_gate, max_stages=max_stages, proposal=proposal, num_draft_tokens=num_draft_tokens
        )
        if target is not None and drafter is None:
            raise ValueError(
                f"`--drafter` is missing: the bundled drafter fits the demo target only, not {target!r}. Pass the "
                "folder or Hub id of a drafter that was trained for this target."
            )
        prepare_libraries(threads)
        notes = Console(stderr=True, quiet=quiet)
        with notes.status("Loading target and drafter (the demo target is fetched on first use)"):
            # The small one first: it checks the options before the large one is loaded or fetched.
            drelay = load_drafter(drafter)
            view = drelay.with_options(**options)
            model, tokenizer = load_target(target, dtype)
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
        given["loop_gate"] = parse_loop_gate(loop_gate)
    return given


def _encode(prompt: str, tokenizer, drafter_config, raw: bool):
    """Token ids and attention mask of the prompt, each `(1, P)`, inside the chat template where there is one."""
    if raw or tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt")
        if inputs["input_ids"].shape[1] == 0:
            raise ValueError("`prompt` has no tokens; give some text.")
        return inputs
    from hf_drelay.evaluation.tasks import TEMPLATE_MODES

    # A drafter is at its best in the mode it was trained in.
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **TEMPLATE_MODES.get(drafter_config.chat_template_mode, {}),
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
        ("acceptance length τ (bonus counted)", format_number(statistics.acceptance_length, 2)),
        ("stages per round", format_number(statistics.mean_stages, 2)),
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
