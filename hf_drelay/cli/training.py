"""`hf-drelay prepare-data`, `check` and `train`: from a target to a drafter."""

import difflib
from pathlib import Path
from typing import Annotated

import typer

from .shared import Dtype, errors_as_sentences, load_target, prepare_libraries


def prepare_data(
    output: Annotated[Path, typer.Option(help="Folder for the responses; a call that was stopped goes on there.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="JSON-lines or text file, or a data set of the Hub as `name:split:column`. May be repeated."
        ),
    ] = None,
    self_synthesise: Annotated[
        int, typer.Option(min=0, help="Number of prompts that the target thinks of by itself.")
    ] = 0,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id; default: the embedded demo target.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Use at most so many of each source.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus, under sampling.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Candidates, under sampling; 0 keeps all.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 32,
    template_mode: Annotated[
        str | None, typer.Option(help="Mode of the chat template: thinking or non_thinking.")
    ] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Prompts of one file.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the random generator.")] = 0,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the target's weights.")] = Dtype.BFLOAT16,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
) -> None:
    """Let the target answer prompts: the text that its drafter is trained on."""
    from hf_drelay.training.responses import Decoding, prepare_responses

    with errors_as_sentences():
        if not prompts and not self_synthesise:
            raise ValueError("Nothing to answer: give `--prompts`, or `--self-synthesise` with a number.")
        decoding = Decoding(
            max_new_tokens, temperature, top_p, top_k, batch_size=batch_size, template_mode=template_mode
        )
        prepare_libraries(threads)
        model, tokenizer = load_target(target, dtype)
        paths = prepare_responses(
            model, tokenizer, output, prompts or [], self_synthesise, num_prompts, decoding, shard_size, seed
        )
        typer.echo(f"all prompts answered, {len(paths)} files in {output}")


def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with arguments of the run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would take, and stop.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes that `--dry-run` counts with.")] = 1,
) -> None:
    """
    Train a drafter. Every argument of the run is a flag too and wins over the file: `--max_steps 100`. A call with the
    same `--output_dir` goes on where the last one stopped.
    """
    with errors_as_sentences():
        if dry_run:
            from hf_drelay.training.plan import plan_run

            # Any machine can plan a run for a better one.
            arguments = _arguments(config, [*context.args, "--use_cpu", "true"])
            for name, value in plan_run(arguments, processes).items():
                typer.echo(f"{name}: {value}")
            return
        from hf_drelay.training.run import train as run

        typer.echo(f"trained drafter: {run(_arguments(config, context.args))}")


def check(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with arguments of the run.")] = None,
) -> None:
    """Look for what usually goes wrong with a training run, in a minute."""
    from hf_drelay.training.check import check_run
    from hf_drelay.training.run import build_trainer

    with errors_as_sentences():
        trainer, _ = build_trainer(_arguments(config, context.args))
        findings = []
        for finding in check_run(trainer):
            findings.append(finding)
            typer.echo(f"{'fine ' if finding.is_fine else 'WRONG'}  {finding.name}: {finding.detail}")
    if not all(finding.is_fine for finding in findings):
        raise typer.Exit(1)


def _arguments(config: Path | None, flags: list[str]):
    """Arguments of a run from a file and flags."""
    from transformers import HfArgumentParser

    from hf_drelay.training.config import DRelayTrainingConfig, read_yaml

    values = read_yaml(config) if config is not None else {}
    parser = HfArgumentParser(DRelayTrainingConfig, allow_abbrev=False)
    parser.set_defaults(**values)
    parsed, unknown = parser.parse_known_args(flags)
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        close = difflib.get_close_matches(name, parser._option_string_actions.keys(), n=1)
        hint = f"; did you mean `{close[0]}`?" if close else "; see the docstring of DRelayTrainingConfig."
        raise ValueError(f"`{unknown[0]}` is no argument of a training run{hint}")
    given = {name: value for name, value in vars(parsed).items() if value != parser.get_default(name)}
    return DRelayTrainingConfig(**values | given)
