"""A checkpoint folder becomes a complete Hub repository: built in a folder, checked there, and only then uploaded."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

from .card import check_card, eval_result_files, read_card_file, render_card, result_files
from .check import check_files, check_loads_and_is_lossless


AUTO_MAP = {"AutoConfig": "configuration_drelay.DRelayConfig", "AutoModel": "modeling_drelay.DRelayModel"}
MAX_SHARD_BYTES = 5_000_000_000
_EXTRA_FILES = ("training_log.json", "LICENSE")
# Removed from the repository when a push does not bring them: stale code or shards would break it.
_OWNED = ["*.py", "*.safetensors", "*.safetensors.index.json", "results/*", ".eval_results/*"]


def build_repository(
    folder: str | Path, output: str | Path, repo_id: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Path:
    """
    Write everything that is published into `output`, which must be empty or not there.

    Args:
        folder (`str` or `Path`): Checkpoint: `config.json`, safetensors, `card.yaml`; optional `training_log.json`,
            recipes (`*.yaml`) and `LICENSE`.
        output (`str` or `Path`): Where to write.
        repo_id (`str`, *optional*): Named in the card's examples.
        max_shard_bytes (`int`): Weights above this size are split.

    Raises:
        OSError: If something that is needed is missing, or `output` is not empty.
        ValueError: If the configuration or the card is wrong, or there are weights in another format.
    """
    folder, output = Path(folder), Path(output)
    if output.exists() and any(output.iterdir()):
        raise OSError(f"`output` {output} is not empty; name a new folder, so that nothing old is published.")
    _check_checkpoint(folder)
    output.mkdir(parents=True, exist_ok=True)
    _write_config(folder, output)
    _write_weights(folder, output, max_shard_bytes)
    for path in sorted(_code_folder().glob("*.py")):
        if path.name != "__init__.py":
            shutil.copyfile(path, output / path.name)
    (output / "custom_generate").mkdir()
    generate = files("hf_drelay.hub.templates").joinpath("custom_generate.py").read_text(encoding="utf-8")
    (output / "custom_generate" / "generate.py").write_text(generate, encoding="utf-8")
    recipes = [path.name for path in folder.glob("*.yaml") if path.name != "card.yaml"]
    for name in (*_EXTRA_FILES, *recipes):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, output / name)
    _write_results(folder, output)
    card = render_card(folder, repo_id)
    check_card(card)
    (output / "README.md").write_text(card, encoding="utf-8")
    check_files(output)
    return output


def push(
    folder: str | Path,
    repo_id: str,
    repository: str | Path,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Publish the drafter",
) -> str:
    """
    Upload a repository that `build_repository` wrote and `check_repository` passed.

    Args:
        folder (`str` or `Path`): The checkpoint it was built from; named in the commit.
        repo_id (`str`): `owner/name`.
        repository (`str` or `Path`): The folder to upload.
        private (`bool`, *optional*): Visibility of a new repository.
        revision (`str`, *optional*): Branch; it is made when it does not exist.
        create_pr (`bool`): Open a pull request instead of committing.

    Returns:
        `str`: Address of the commit or of the pull request.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=str(repository),
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        commit_description=f"From the checkpoint {Path(folder).resolve().name}.",
        delete_patterns=_OWNED,
    )
    return commit.pr_url or commit.commit_url


def check_repository(repository: str | Path, target: str | None = None) -> dict:
    """
    Load a built repository in a clean process and decode a few prompts with it; raises when that fails.

    Args:
        repository (`str` or `Path`): The folder.
        target (`str`, *optional*): Folder or Hub id of the target; default: the one of the configuration.
    """
    from hf_drelay.targets import DEMO_TARGET_ID, find_demo_target

    config = json.loads((Path(repository) / "config.json").read_text(encoding="utf-8"))
    target = target or config["target_name_or_path"]
    if target == DEMO_TARGET_ID:
        target = find_demo_target().location
    return check_loads_and_is_lossless(repository, target)


def _check_checkpoint(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise OSError(f"`folder` {folder} holds no `config.json`; pass a folder written by `save_pretrained`.")
    if not list(folder.glob("*.safetensors")):
        raise OSError(f"`folder` {folder} holds no `*.safetensors`; save the drafter with `save_pretrained`.")
    others = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for path in folder.glob(pattern)]
    if others:
        raise ValueError(
            f"`folder` {folder} holds {others[0]}, which may run code when loaded; keep safetensors only."
        )


def _write_config(folder: Path, output: Path) -> None:
    """The configuration as it is, checked field by field, with the names of the classes to load it by."""
    from hf_drelay import DRelayConfig

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    DRelayConfig.from_dict(dict(config))
    if not config.get("target_name_or_path"):
        raise ValueError(f"`target_name_or_path` of {folder / 'config.json'} is empty; name the Hub id of the target.")
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


def _write_results(folder: Path, output: Path) -> None:
    """Measured files beside the card that shows them, and the Hub's structured entries made from them."""
    sources = result_files(folder, read_card_file(folder))
    for target, contents in (
        ("results", {path.name: path.read_text(encoding="utf-8") for path in sources}),
        (".eval_results", eval_result_files(folder)),
    ):
        for name, text in contents.items():
            (output / target).mkdir(exist_ok=True)
            (output / target / name).write_text(text, encoding="utf-8")


def _code_folder() -> Path:
    return Path(str(files("hf_drelay.modeling").joinpath("modeling_drelay.py"))).parent
