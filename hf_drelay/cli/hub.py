"""`hf-drelay push`, `space` and `demo`."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from .shared import errors_as_sentences, prepare_libraries


def push(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder with `card.yaml`.")],
    repo_id: Annotated[str | None, typer.Argument(help="`owner/name`; not needed with `--dry-run`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and check it, upload nothing.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder to write it to; default: a temporary one.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the target to check with; default: the configuration's.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
) -> None:
    """Publish a drafter: build its repository, check it in a clean process, upload it."""
    from hf_drelay.hub.push import full_repo_id, prepare
    from hf_drelay.hub.push import push as upload

    with errors_as_sentences(), tempfile.TemporaryDirectory() as scratch:
        if repo_id is None and not dry_run:
            raise ValueError("`repo_id` is missing: name the repository as `owner/name`, or use `--dry-run`.")
        if dry_run and output is None:
            raise ValueError("`--dry-run` needs `--output`: the folder to write the repository to.")
        if not dry_run:
            repo_id = full_repo_id(repo_id)
        try:
            repository, report = prepare(folder, output or Path(scratch) / "repository", repo_id, target=target)
        except RuntimeError as error:
            raise ValueError(f"Not published. {error}") from error
        typer.echo(f"{repository}: lossless on {len(report['prompts'])} greedy texts in a clean process")
        if all(entry["acceptance_length"] == 1 for entry in report["prompts"]):
            typer.echo("Mind that no draft was accepted in them; was it trained for this target?", err=True)
        for path in sorted(path for path in repository.rglob("*") if path.is_file()):
            typer.echo(f"  {path.relative_to(repository)}  {path.stat().st_size}")
        if not dry_run:
            commit = upload(
                repository,
                repo_id,
                private=private or None,  # without the flag an organization's own default holds
                revision=revision,
                create_pr=create_pr,
                commit_description=f"From the checkpoint {folder.resolve().name}.",
            )
            typer.echo(commit.pr_url or commit.commit_url)


def space(
    output: Annotated[Path, typer.Argument(help="New folder to write the Space to.")],
    drafter: Annotated[
        str | None, typer.Option(help="Checkpoint folder; default: the one made for the demo target.")
    ] = None,
) -> None:
    """Write a complete Gradio Space, with the package and a drafter in it."""
    from hf_drelay.hub.space import build_space

    with errors_as_sentences():
        folder = build_space(output, drafter)
        typer.echo(f"{folder}: upload it with `hf upload OWNER/NAME {folder} --repo-type space`")


def demo(
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the target model; default: the embedded demo target.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the drafter; default: the one made for the demo target.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port; default: the first free one from 7860.")] = None,
    share: Annotated[bool, typer.Option("--share", help="Ask for a public address.")] = False,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Limit of a conversation.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Limit of an answer.")] = 256,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
) -> None:
    """Show in a browser where every token came from, and race against plain decoding."""
    from hf_drelay.demo.app import build_app, launch, load_engine

    with errors_as_sentences():
        prepare_libraries(threads)
        engine = load_engine(target, drafter, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens)
        engine.warm_up()
        launch(build_app(engine), server_name=host, server_port=port, share=share)
