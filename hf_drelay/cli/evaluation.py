"""`hf-drelay benchmark`, `sweep`, `headroom`, `report` and `check-lossless`: measure drafters and show the figures."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .shared import Dtype, errors_as_sentences, load_drafter, load_target, parse_loop_gate, prepare_libraries


ALL = "gsm8k,math500,aime25,humaneval,mbpp,livecodebench,mt_bench,alpaca"

Target = Annotated[
    str | None, typer.Option(help="Folder or Hub id of the target model; default: the embedded demo target.")
]
Drafters = Annotated[
    list[str] | None,
    typer.Option("--drafter", help="Folder or Hub id of a drafter; can be given several times. Default: the bundled."),
]
Drafter = Annotated[
    str | None, typer.Option(help="Folder or Hub id of the drafter; default: the one made for the demo target.")
]
Tasks = Annotated[str, typer.Option(help="Tasks, separated by commas.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with a <task>.jsonl for each task, in the place of the Hub's data sets.")
]
Output = Annotated[Path, typer.Option(help="File to write; an interrupted run goes on with --resume.")]
NumPrompts = Annotated[
    int | None, typer.Option(min=1, help="Prompts of each task, shuffled by the seed. Default: all.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability; 1 keeps all.")]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Limit of each answer.")]
Seed = Annotated[int, typer.Option(help="Seed of the prompts' order and of sampling.")]
Repeats = Annotated[int, typer.Option(min=1, help="Calls of each way on each prompt; the median counts.")]
Gate = Annotated[str | None, typer.Option(help="The fixed DLoop gate to compare; default: the drafter's, or -0.5.")]
Stages = Annotated[int | None, typer.Option(min=1, help="Limit of DLoop stages; default: the drafter's.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="NAME=VALUE of the drafter's options, such as num_draft_tokens=2; several times."),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compiled/--no-compiled",
        help="Measure plain decoding with a static cache and compilation; default: on a GPU. On a CPU compiling needs "
        "a C++ compiler, and minutes.",
    ),
]
TemplateMode = Annotated[
    str | None, typer.Option(help="thinking or non_thinking; default: what the first drafter was trained for.")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Type of the target's weights; default: float32 for the demo target.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no notes.")]


def benchmark(
    output: Output,
    target: Target = None,
    drafter: Drafters = None,
    tasks: Tasks = ALL,
    data_dir: DataDir = None,
    num_prompts: NumPrompts = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    repeats: Repeats = 1,
    loop_gate: Gate = None,
    max_stages: Stages = None,
    option: Options = None,
    compiled: Compiled = None,
    template_mode: TemplateMode = None,
    dtype: DtypeOption = None,
    threads: Threads = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Measure drafters against plain decoding, prompt by prompt side by side."""
    from hf_drelay.evaluation.summary import ALL_TASKS, markdown_table, summarize
    from hf_drelay.evaluation.ways import standard_ways

    with errors_as_sentences():
        options, gate = _parse_options(option, "max_stages"), None if loop_gate is None else _fixed_gate(loop_gate)
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        config = _config(**settings, seed=seed, repeats=repeats, template_mode=template_mode)
        conversations, sources = _load_prompts(tasks, data_dir, num_prompts, seed)
        model, tokenizer, drafters = _load(target, drafter or [None], dtype, threads, quiet)
        config = _with_mode(config, drafters)
        ways = standard_ways(model, drafters, gate, max_stages, compiled, **options)
        rows = _run(model, tokenizer, ways, conversations, config, output, sources, resume, quiet)
        typer.echo(markdown_table(summarize(rows), ALL_TASKS))


def sweep(
    output: Output,
    target: Target = None,
    drafter: Drafter = None,
    tasks: Tasks = "gsm8k,mbpp,alpaca",
    data_dir: DataDir = None,
    num_prompts: NumPrompts = 8,
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    repeats: Repeats = 1,
    loop_gates: Annotated[str, typer.Option(help="DLoop gates, `off` and `auto` among them.")] = "off,-1.0,-0.5",
    max_stages: Annotated[str, typer.Option(help="Limits of stages.")] = "2,3",
    num_draft_tokens: Annotated[str, typer.Option(help="Drafts of a stage; `all` is the block.")] = "2,4,all",
    block_sizes: Annotated[
        str | None, typer.Option(help="Block sizes, for drafters whose weights do not depend on it.")
    ] = None,
    option: Options = None,
    write_best: Annotated[
        bool, typer.Option("--write-best", help="Write the fastest point into the drafter's config.json.")
    ] = False,
    template_mode: TemplateMode = None,
    dtype: DtypeOption = None,
    threads: Threads = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Try loop gates, stages, block sizes and verification lengths on a small sample."""
    from hf_drelay.evaluation import sweep as grid
    from hf_drelay.evaluation.summary import ALL_TASKS, markdown_table, summarize
    from hf_drelay.targets import resolve_drafter

    with errors_as_sentences():
        options = _parse_options(option, "max_stages", "num_draft_tokens")
        if write_best:
            grid.check_defaults(options)
        gates = [_sweep_gate(text) for text in _items(loop_gates)]
        tokens = [None if text == "all" else _whole(text, "num-draft-tokens") for text in _items(num_draft_tokens)]
        points = grid.sweep_options(gates, [_whole(text, "max-stages") for text in _items(max_stages)], tokens)
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "repeats": repeats}
        config = _config(**settings, template_mode=template_mode)
        conversations, sources = _load_prompts(tasks, data_dir, num_prompts, seed)
        model, tokenizer, drafters = _load(target, [drafter], dtype, threads, quiet)
        config = _with_mode(config, drafters)
        drelay = drafters[0][1]
        by_size = {drelay.config.block_size: drelay}
        if block_sizes is not None:
            sizes = [_whole(text, "block-sizes") for text in _items(block_sizes)]
            by_size = {size: _with_block_size(drelay, drafter, size) for size in sizes}
        ways = grid.sweep_ways(by_size, points, **options)
        rows = _run(model, tokenizer, ways, conversations, config, output, sources, resume, quiet)
        typer.echo(markdown_table(summarize(rows), ALL_TASKS))
        best = grid.best_point(rows)
        typer.echo(f"Fastest: {best['way']}, {best['speedup_total']:.2f} times plain decoding.")
        if write_best:
            fields = grid.write_best(resolve_drafter(drafter), rows)
            if best["speedup_total"] < 1:
                typer.echo("Mind that every point is slower than plain decoding.")
            typer.echo(f"Written into the configuration: {', '.join(f'{k} {v}' for k, v in fields.items())}.")


def headroom(
    output: Annotated[Path, typer.Option(help="JSON file to write, at the end; one that is there is replaced.")],
    target: Target = None,
    drafter: Drafter = None,
    tasks: Tasks = ALL,
    data_dir: DataDir = None,
    num_prompts: NumPrompts = 16,
    max_new_tokens: MaxNewTokens = 256,
    max_cases: Annotated[int, typer.Option(min=0, help="Suffix cases to score.")] = 100,
    seed: Seed = 0,
    option: Options = None,
    template_mode: TemplateMode = None,
    dtype: DtypeOption = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """How much a selector could win over the drafter's own choice, and how much this one wins."""
    from hf_drelay.evaluation.headroom import check_analysis, greedy_responses, headroom_table, measure_headroom
    from hf_drelay.evaluation.records import (
        check_output,
        cut_prompts,
        describe_drafter,
        describe_target,
        environment,
        write_json,
    )
    from hf_drelay.evaluation.tasks import encode_conversation, max_prompt_length

    with errors_as_sentences():
        check_output(output)
        options = _parse_options(option)
        config = _config(max_new_tokens=max_new_tokens, seed=seed, template_mode=template_mode)
        conversations, sources = _load_prompts(tasks, data_dir, num_prompts, seed)
        model, tokenizer, drafters = _load(target, [drafter], dtype, threads, quiet)
        config = _with_mode(config, drafters)
        drelay, limit = drafters[0][1], max_prompt_length(model, max_new_tokens)
        check_analysis(drelay, options)  # before minutes of decoding
        prompts = [encode_conversation(tokenizer, c.turns[:1], (), config.template_mode, limit) for c in conversations]
        num_cut = sum(prompt.num_cut > 0 for prompt in prompts)
        quiet = quiet or _is_piped()
        responses = greedy_responses(model, prompts, max_new_tokens, quiet=quiet)
        found = measure_headroom(drelay, model, responses, max_cases, quiet=quiet, **options).to_dict()
        record = {"command": _command(), "environment": environment(), **describe_target(model)}
        record |= describe_drafter(drelay)
        record |= {
            "sources": sources,
            "num_prompts": len(prompts),
            "num_prompts_cut": num_cut,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
        }
        write_json(output, record | {"options": options, "headroom": found})
        typer.echo(headroom_table(found))
        typer.echo(f"{len(prompts)} prompts{cut_prompts(num_cut)}.")


def report(
    rows: Annotated[list[Path], typer.Argument(help="Files of `hf-drelay benchmark` or `sweep`.")],
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the figures as PNG and SVG; default: beside the HTML file.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="File for the tables as Markdown.")] = None,
    headroom: Annotated[Path | None, typer.Option(help="File of `hf-drelay headroom` to show too.")] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Speculative decoding benchmark",
) -> None:
    """Make one self-contained HTML page, figures and tables of measured rows."""
    from hf_drelay.evaluation.report import read_headroom, write_report
    from hf_drelay.evaluation.summary import read_rows

    with errors_as_sentences():
        found = None if headroom is None else read_headroom(headroom)
        folder = figures or output.with_name(output.stem + "_figures")
        for path in write_report(read_rows(rows), output, folder, markdown, found, title):
            typer.echo(f"Wrote {path}")


def check_lossless(
    output: Output,
    target: Target = None,
    drafter: Drafters = None,
    tasks: Tasks = ALL,
    data_dir: DataDir = None,
    num_prompts: NumPrompts = 16,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    option: Options = None,
    template_mode: TemplateMode = None,
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="Type of the target's weights; several times; default: float32.")
    ] = None,
    threads: Threads = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Compare greedy outputs with plain decoding; exit code 1 when rounding does not explain a difference."""
    from hf_drelay.evaluation import lossless
    from hf_drelay.evaluation.records import check_output
    from hf_drelay.evaluation.ways import accepts, drafter_way

    with errors_as_sentences():
        check_output(output)
        options = _parse_options(option)
        config = _config(max_new_tokens=max_new_tokens, seed=seed, template_mode=template_mode)
        conversations, _ = _load_prompts(tasks, data_dir, num_prompts, seed)
        rows = []
        for kind in dtype or [Dtype.FLOAT32]:
            model, tokenizer, drafters = _load(target, drafter or [None], kind, threads, quiet)
            ways = []
            for name, drelay in drafters:
                ways.append(drafter_way(name, drelay, **(options | {"loop_gate": None})))
                open_gate = options | {"loop_gate": float("-inf")}
                ways.append(drafter_way(f"{name} + DLoop wide open", drelay, **open_gate))
                if accepts(drelay, loop_gate="auto"):
                    ways.append(drafter_way(f"{name} + DLoop auto", drelay, **(options | {"loop_gate": "auto"})))
            config = _with_mode(config, drafters)
            rows += lossless.check_lossless(
                model,
                tokenizer,
                ways,
                conversations,
                _with_mode(config, drafters),
                output,
                resume,
                quiet or _is_piped(),
                _command(),
            )
            del model, drafters, ways  # before the next type is loaded
        for row in rows:
            if row["divergence"] is not None:
                typer.echo(lossless.explain(row))
        records = lossless.summarize_lossless(rows)
        for record in records:
            typer.echo(
                f"{record['dtype']}, {record['way']}: {record['num_prompts']} prompts, {record['num_tokens']} tokens, "
                f"{record['num_different']} outputs differ from plain decoding, {record['num_unexplained']} of them "
                "by more than rounding."
            )
    raise typer.Exit(int(any(record["num_unexplained"] for record in records)))


def _load(target: str | None, names: list, dtype, threads: int | None, quiet: bool):
    """`(model, tokenizer, [(name, drafter), ...])`."""
    if target is not None and None in names:
        raise ValueError(
            f"`--drafter` is missing: the bundled drafter fits the demo target only, not {target!r}. Pass the folder "
            "or Hub id of a drafter that was trained for this target."
        )
    prepare_libraries(threads)
    with Console(stderr=True, quiet=quiet).status("Loading target and drafters"):
        # The small ones first: a mistyped name shows before the large one is loaded or fetched.
        drafters = [load_drafter(name) for name in names]
        model, tokenizer = load_target(target, dtype)
    labels: list[str] = []
    for drelay in drafters:
        drelay.to(model.device)
        label = Path(drelay.name_or_path).name or "drafter"
        count = sum(other == label or other.startswith(f"{label} #") for other in labels)
        labels.append(label if not count else f"{label} #{count + 1}")
    return model, tokenizer, list(zip(labels, drafters, strict=True))


def _load_prompts(tasks: str, data_dir: Path | None, num_prompts: int | None, seed: int):
    """Conversations of all tasks, and the data set of each."""
    from hf_drelay.evaluation.tasks import describe_source, load_task

    names = list(dict.fromkeys(_items(tasks)))
    conversations = [c for name in names for c in load_task(name, num_prompts, data_dir, seed)]
    return conversations, {name: describe_source(name, data_dir) for name in names}


def _config(**fields):
    from hf_drelay.evaluation.benchmark import BenchmarkConfig

    if fields["template_mode"] not in (None, "thinking", "non_thinking"):
        raise ValueError(f"`--template-mode` is {fields['template_mode']!r}; use thinking or non_thinking.")
    return BenchmarkConfig(**fields)


def _with_mode(config, drafters: list):
    """The template mode of the first drafter, unless one was given: a drafter is at its best in its own mode."""
    from dataclasses import replace

    return replace(config, template_mode=config.template_mode or drafters[0][1].config.chat_template_mode)


def _run(model, tokenizer, ways, conversations, config, output: Path, sources: dict, resume: bool, quiet: bool):
    """Run a benchmark; its resolved settings are printed and lie beside its rows."""
    from dataclasses import asdict

    from hf_drelay.evaluation.benchmark import run_benchmark
    from hf_drelay.evaluation.records import check_output, write_json

    check_output(output)
    ways_named = {way.name: way.description for way in ways}
    resolved = {"command": _command(), "settings": asdict(config), "sources": sources, "ways": ways_named}
    Console(stderr=True, quiet=quiet).print_json(data={"settings": asdict(config), "ways": list(ways_named)})
    settings_file = output.with_name(output.name + ".config.json")
    if not output.exists() or not settings_file.exists():  # a resumed run keeps those it was started with
        write_json(settings_file, resolved)
    return run_benchmark(
        model, tokenizer, ways, conversations, config, output, sources, _command(), resume, quiet or _is_piped()
    )


def _is_piped() -> bool:
    return not sys.stderr.isatty()


def _command() -> str:
    from hf_drelay.evaluation.records import command_line

    return command_line("hf-drelay")


def _items(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError(f"{text!r} names nothing; give at least one item, separated by commas.")
    return items


def _whole(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`--{flag}` has {text!r}; give whole numbers, separated by commas.") from None


def _fixed_gate(text: str) -> float:
    gate = parse_loop_gate(text)
    if not isinstance(gate, float):
        raise ValueError(
            f"`--loop-gate` is {text!r}; give the number to compare. DLoop off, and cost-aware where the drafter can, "
            "are measured anyway."
        )
    return gate


def _sweep_gate(text: str) -> float | str | None:
    return "auto" if text == "auto" else parse_loop_gate(text)


def _parse_options(pairs: list[str] | None, *flags: str) -> dict:
    """Options of `with_options` from NAME=VALUE, values read as YAML; those in `flags` have a flag of their own."""
    from dataclasses import fields

    import yaml

    from hf_drelay.modeling.draft_view import DraftOptions

    known = sorted({f.name for f in fields(DraftOptions)} - {"loop_gate", *flags})
    options = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        name = name.replace("-", "_")
        if not separator or not name:
            raise ValueError(f"`--option` is {pair!r}; give NAME=VALUE, such as num_draft_tokens=2.")
        if name == "loop_gate":
            raise ValueError("`--option loop_gate=...` is not taken: the gate is what the ways differ in.")
        if name in flags:
            raise ValueError(f"`--option` is {pair!r}; give that as `--{name.replace('_', '-')}` instead.")
        if name not in known:
            raise ValueError(f"`--option` is {pair!r}, but {name!r} is no option; expected one of {', '.join(known)}.")
        if name in options:
            raise ValueError(f"`--option` gives {name!r} twice; keep one of both.")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"`--option` is {pair!r}, whose value is no YAML ({error}).") from error
    return options


def _with_block_size(drelay, name: str | None, size: int):
    """The drafter loaded with another block size."""
    from hf_drelay import DRelayModel
    from hf_drelay.targets import resolve_drafter

    if size == drelay.config.block_size:
        return drelay
    try:
        return DRelayModel.from_pretrained(resolve_drafter(name), block_size=size).to(drelay.device)
    except RuntimeError as error:
        raise ValueError(
            f"`--block-sizes` {size}: the weights of this drafter belong to `block_size` {drelay.config.block_size} "
            f"({str(error).splitlines()[0]}). Use `--num-draft-tokens` to verify fewer tokens of a block."
        ) from error
