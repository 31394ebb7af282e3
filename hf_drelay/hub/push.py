"""A drafter becomes a complete Hub repository: built in a folder, checked there, and only then uploaded.

The command `hf-drelay push` starts from a checkpoint folder, `DRelayModel.push_to_hub` from a model in memory, which
is written to such a folder first. From there on both are the same two calls, `prepare` and `push`.
"""

import json
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

import yaml
from huggingface_hub import CommitInfo
from huggingface_hub.utils import validate_repo_id
from transformers.utils.hub import convert_file_size_to_int

from hf_drelay.evaluation.records import new_folder, replace_rows, without_folders

from .card import check_card, eval_result_files, folder_records, read_card_file, read_record, render_card, result_files
from .check import check_files, check_loads_and_is_lossless
from .checkpoint import EXTRA_FILES, write_checkpoint


AUTO_MAP = {"AutoConfig": "configuration_drelay.DRelayConfig", "AutoModel": "modeling_drelay.DRelayModel"}
MAX_SHARD_SIZE = "5GB"
_TEXTS = ("text", "pieces")  # of result rows: answers of the target, to prompts that may be private
# Removed from the repository when a push does not bring them: stale code or shards would break it.
_OWNED = ["*.py", "*.safetensors", "*.safetensors.index.json", "results/*", ".eval_results/*"]


def push_model(
    model,
    repo_id: str,
    *,
    card: dict | str | Path | None = None,
    target: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str | None = None,
    tags: list[str] | str | None = None,
) -> CommitInfo:
    """
    Publish a drafter in memory. This is what `DRelayModel.push_to_hub` does.

    Args:
        model (`DRelayModel`): The drafter; its `config.target_name_or_path` names the target on the Hub.
        repo_id (`str`): `owner/name`, or a name under the account that is logged in.
        card (`dict`, `str` or `Path`, *optional*): Words of the model card, or a file of them, see
            [`write_checkpoint`]; default: the `card.yaml` of the folder that the model was loaded from.
        target (`str`, *optional*): Folder or Hub id of the target to check with; default: the configuration's.
        commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: As in
            `transformers.PreTrainedModel.push_to_hub`, but weights are split above 5 GB.

    Returns:
        `CommitInfo`: The commit, or the pull request.

    Raises:
        OSError: If the Hub refuses, or a file that the card names is missing.
        ValueError: If the card lacks something, the configuration is wrong, or `private` cannot be had.
        RuntimeError: If the repository does not load in a clean process, or is not lossless there.
    """
    repo_id = full_repo_id(repo_id, token)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(model, Path(scratch) / "checkpoint", card)
        options = {"target": target, "max_shard_size": max_shard_size, "tags": tags}
        repository, _ = prepare(folder, Path(scratch) / "repository", repo_id, **options)
        return push(
            repository,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
        )


def prepare(
    folder: str | Path,
    output: str | Path,
    repo_id: str | None = None,
    *,
    target: str | None = None,
    max_shard_size: int | str | None = None,
    tags: list[str] | str | None = None,
) -> tuple[Path, dict]:
    """
    Build a repository and check it: arguments as in [`build_repository`] and [`check_repository`].

    Returns:
        `(repository, report)`: Its folder, and what the check found.
    """
    with new_folder(output) as part:
        build_repository(folder, part, repo_id, max_shard_size=max_shard_size, tags=tags)
        try:
            report = check_repository(part, target)
        except RuntimeError as error:  # which speaks of the folder that it looked at
            raise RuntimeError(str(error).replace(str(part), str(output))) from error
    return Path(output), report


def build_repository(
    folder: str | Path,
    output: str | Path,
    repo_id: str | None = None,
    *,
    max_shard_size: int | str | None = None,
    tags: list[str] | str | None = None,
) -> Path:
    """
    Write everything that is published into `output`, which must be empty or not there.

    Args:
        folder (`str` or `Path`): Checkpoint: `config.json`, safetensors, `card.yaml`; optional `training_log.json`,
            recipes (`*.yaml`) and `LICENSE`.
        output (`str` or `Path`): Where to write.
        repo_id (`str`, *optional*): Named in the card's examples.
        max_shard_size (`int` or `str`, *optional*): Weight files above this size are split; bytes, or text such as
            `"5GB"`, which is the default.
        tags (`list[str]` or `str`, *optional*): Further tags of the card.

    Raises:
        OSError: If something that is needed is missing, or `output` is not empty.
        ValueError: If the configuration or the card is wrong, or there are weights in another format.
    """
    if repo_id is not None:
        validate_repo_id(repo_id)
    folder = Path(folder)
    _check_checkpoint(folder)
    max_shard_bytes = _num_bytes(max_shard_size or MAX_SHARD_SIZE)
    with new_folder(output) as part:
        _write_repository(folder, part, repo_id, max_shard_bytes, [tags] if isinstance(tags, str) else tags or ())
    return Path(output)


def _write_repository(folder: Path, output: Path, repo_id: str | None, max_shard_bytes: int, tags) -> None:
    _write_config(folder, output)
    _write_weights(folder, output, max_shard_bytes)
    for path in sorted(_code_folder().glob("*.py")):
        if path.name != "__init__.py":
            shutil.copyfile(path, output / path.name)
    (output / "custom_generate").mkdir()
    generate = files("hf_drelay.hub.templates").joinpath("custom_generate.py").read_text(encoding="utf-8")
    (output / "custom_generate" / "generate.py").write_text(generate, encoding="utf-8")
    recipes = [path.name for path in folder.glob("*.yaml") if path.name != "card.yaml"]
    for name in (*EXTRA_FILES, *recipes):
        if (folder / name).is_file():
            _copy_without_folders(folder / name, output / name)
    records = folder_records(folder)
    _write_results(folder, output, records)
    card = render_card(folder, repo_id, tags=tags, records=records)
    check_card(card)
    (output / "README.md").write_text(card, encoding="utf-8")
    check_files(output)


def push(
    repository: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
) -> CommitInfo:
    """
    Upload a repository that [`prepare`] built and checked.

    Args:
        repository (`str` or `Path`): The folder to upload.
        repo_id (`str`): `owner/name`.
        private (`bool`, *optional*): Visibility of a new repository; one that exists must have it already.
        token (`bool` or `str`, *optional*): Of the Hub; default: the one that is logged in.
        revision (`str`, *optional*): Branch, which is made when it does not exist, or a reference such as `refs/pr/1`.
        create_pr (`bool`): Open a pull request instead of committing.
        commit_message, commit_description (`str`, *optional*): Of the commit.

    Returns:
        `CommitInfo`: Its address; that of a pull request in `pr_url`.

    Raises:
        ValueError: If the repository exists and its visibility is not the one asked for.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    # The Hub leaves an existing repository as it is; weights that should be private must not get into a public one.
    if private is not None and api.model_info(repo_id).private != private:
        raise ValueError(
            f"`private` is {private}, but {repo_id} exists and is {'public' if private else 'private'}; change that "
            "in its settings, or leave `private` out."
        )
    if revision is not None and not revision.startswith("refs/"):
        try:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        except HfHubHTTPError as error:
            # Who may not write may still open a pull request against a branch that is there.
            if not (create_pr and error.response.status_code == 403):
                raise
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=str(repository),
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message or "Publish the drafter",
        commit_description=commit_description,
        delete_patterns=_OWNED,
    )


def full_repo_id(repo_id: str, token: bool | str | None = None) -> str:
    """`owner/name` for `repo_id`; a bare name belongs to the account that is logged in."""
    from huggingface_hub import HfApi

    validate_repo_id(repo_id)
    return repo_id if "/" in repo_id else f"{HfApi(token=token).whoami()['name']}/{repo_id}"


def check_repository(repository: str | Path, target: str | None = None) -> dict:
    """
    Load a built repository in a clean process and decode a few prompts with it; raises when that fails.

    Args:
        repository (`str` or `Path`): The folder.
        target (`str`, *optional*): Folder or Hub id of the target; default: the one of the configuration.

    Raises:
        ValueError: If the target is not on this machine.
        RuntimeError: If the repository does not load, drafts nothing, or a text differs by more than rounding.
    """
    config = json.loads((Path(repository) / "config.json").read_text(encoding="utf-8"))
    revision = config.get("target_revision") if target is None else None
    return check_loads_and_is_lossless(repository, _target_folder(target or config["target_name_or_path"], revision))


def _target_folder(target: str, revision: str | None) -> str:
    """Where the target lies on this machine; the process that checks has no network."""
    from huggingface_hub import try_to_load_from_cache

    from hf_drelay.targets import DEMO_TARGET_ID, find_demo_target

    if target == DEMO_TARGET_ID:
        return find_demo_target().location
    if Path(target).is_dir():
        return str(Path(target).resolve())
    try:
        cached = try_to_load_from_cache(target, "config.json", revision=revision)
    except ValueError:  # neither a folder nor a name that the Hub could know
        cached = None
    if not isinstance(cached, str):
        at = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"`target` {target!r}{at} is neither a folder nor in this machine's cache of the Hub, so drafting for it "
            f"cannot be checked. Download it (`hf download {target}`), or name its folder as `target`."
        )
    return str(Path(cached).parent)


def _num_bytes(size: int | str) -> int:
    try:
        return convert_file_size_to_int(size)
    except ValueError as error:
        raise ValueError(
            f"`max_shard_size` is {size!r}; give a number of bytes, or text such as '5GB' or '500MB'."
        ) from error


def _check_target_id(name: str | None) -> None:
    """The configuration must name the target in a way that means the same on every machine."""
    from huggingface_hub.errors import HFValidationError

    advice = "set it to the Hub id of the target, in `config.json` or as `drelay.config.target_name_or_path`"
    if not name:
        raise ValueError(f"`target_name_or_path` of the drafter's configuration is empty; {advice}.")
    try:
        validate_repo_id(name)
        is_elsewhere = not Path(name).exists()
    except HFValidationError:
        is_elsewhere = False
    if not is_elsewhere:
        raise ValueError(
            f"`target_name_or_path` of the drafter's configuration is {name!r}, which is no id on the Hub but a place "
            f"on this machine; {advice}, and name the folder as `target` of the check."
        )


def _check_checkpoint(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise OSError(f"`folder` {folder} holds no `config.json`; pass a folder written by `save_pretrained`.")
    weights = {path.name for path in folder.glob("*.safetensors")}
    if not weights:
        raise OSError(f"`folder` {folder} holds no `*.safetensors`; save the drafter with `save_pretrained`.")
    index = folder / "model.safetensors.index.json"
    own = set((read_record(index).get("weight_map") or {}).values()) if index.is_file() else {"model.safetensors"}
    for what, names in (("also holds", weights - own), ("lacks", own - weights)):
        if names:
            raise ValueError(
                f"`folder` {folder} {what} {min(names)}, and the drafter's weights are {', '.join(sorted(own))}; keep "
                "these files alone, whole."
            )
    others = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for path in folder.glob(pattern)]
    if others:
        raise ValueError(
            f"`folder` {folder} holds {others[0]}, which may run code when loaded; keep safetensors only."
        )


def _write_config(folder: Path, output: Path) -> None:
    """The configuration as it is, checked field by field, with the names of the classes to load it by."""
    from hf_drelay import DRelayConfig

    config = read_record(folder / "config.json")
    config.pop("_name_or_path", None)  # a place on somebody's machine
    DRelayConfig.from_dict(dict(config))
    _check_target_id(config.get("target_name_or_path"))
    text = json.dumps(config | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True)
    (output / "config.json").write_text(text + "\n", encoding="utf-8")


def _write_weights(folder: Path, output: Path, max_shard_bytes: int) -> None:
    """Files as they are where none is too large, else split, in the types they are stored in."""
    weights = sorted(folder.glob("*.safetensors"))
    if all(path.stat().st_size <= max_shard_bytes for path in weights):
        for path in (*weights, *folder.glob("*.safetensors.index.json")):
            shutil.copyfile(path, output / path.name)
        return
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    state = {name: tensor for path in weights for name, tensor in load_file(path).items()}
    save_torch_state_dict(state, output, max_shard_size=max_shard_bytes)


def _copy_without_folders(path: Path, copy: Path) -> None:
    """Copy a file; in records (JSON, YAML) absolute paths are cut, and without any the file stays as it is."""
    read = {".json": json.loads, ".yaml": yaml.safe_load}.get(path.suffix)
    try:
        record = None if read is None else read(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no valid {path.suffix[1:].upper()}: {error}. Mend or remove it.") from error
    public = without_folders(record)
    if public == record:
        shutil.copyfile(path, copy)
    elif path.suffix == ".json":
        copy.write_text(json.dumps(public, indent=1) + "\n", encoding="utf-8")
    else:
        copy.write_text(yaml.safe_dump(public, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _write_results(folder: Path, output: Path, records: dict) -> None:
    """Measured files, without generated texts, beside the card, and the Hub's structured entries made from them."""
    for path in result_files(folder, read_card_file(folder)):
        (output / "results").mkdir(exist_ok=True)
        rows = records["rows"].get(path.name)
        if rows is None:
            _copy_without_folders(path, output / "results" / path.name)
        else:
            public = [{name: value for name, value in row.items() if name not in _TEXTS} for row in rows]
            replace_rows(output / "results" / path.name, without_folders(public))
    for name, text in eval_result_files(folder, records).items():
        (output / ".eval_results").mkdir(exist_ok=True)
        (output / ".eval_results" / name).write_text(text, encoding="utf-8")


def _code_folder() -> Path:
    return Path(str(files("hf_drelay.modeling").joinpath("modeling_drelay.py"))).parent
