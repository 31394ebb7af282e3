"""A drafter in memory as a checkpoint folder with the words of its card."""

import shutil
from pathlib import Path

import yaml

from .card import CARD_FILE, REQUIRED, load_words


# Fields that do not decide how is drafted: what saving and loading change, and the name by which the target is found,
# which publishing itself asks to be set.
_OTHER_FIELDS = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
    *("target_name_or_path", "target_revision"),
}
EXTRA_FILES = ("training_log.json", "LICENSE")


def write_checkpoint(model, folder: str | Path, card: dict | str | Path | None = None) -> Path:
    """
    Write the folder that [`build_repository`] publishes.

    The folder that the model was loaded from says what belongs to it. Recipes, training log and the type the weights
    are stored in are taken from it while its weights are those of the model; its card with the results only while its
    configuration is too, because whatever was measured with other weights or defaults is not true of these.

    Args:
        model (`DRelayModel`): The drafter.
        folder (`str` or `Path`): Where to write.
        card (`dict`, `str` or `Path`, *optional*): Entries of a `card.yaml`, or the path of one. `license`, `language`
            and `training` are needed; `results` lists measured files, relative to the path or to the current folder.

    Returns:
        `Path`: The folder.

    Raises:
        OSError: If `card` is no file.
        ValueError: If there are no words for the card.
    """
    folder = Path(folder)
    model.save_pretrained(folder)
    source = Path(model.name_or_path) if model.name_or_path else None
    has_same_weights = source is not None and _has_same_weights(folder, source)
    change = _changed_fields(folder, source) if has_same_weights else "the weights differ"
    words, base = _words(card, source, change)
    words["results"] = [str((base / name).resolve()) for name in words.get("results") or []]
    if has_same_weights:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        recipes = [path.name for path in source.glob("*.yaml")]
        weights = [path.name for path in source.glob("*.safetensors*")]
        for name in (*weights, *recipes, *EXTRA_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    (folder / CARD_FILE).write_text(yaml.safe_dump(words, allow_unicode=True), encoding="utf-8")
    return folder


def _words(card, source: Path | None, change: str | None) -> tuple[dict, Path]:
    """Entries of the card, and the folder that its results are relative to; `change` is what differs from `source`."""
    if isinstance(card, dict):
        return dict(card), Path.cwd()
    has_card = source is not None and (source / CARD_FILE).is_file()
    if card is None and has_card and change is not None:
        raise ValueError(
            f"`card` is missing: {change} from {source}, so its `{CARD_FILE}` and results tell nothing "
            "about this drafter. Measure again, and pass `card` with what is true of it."
        )
    if card is None and not has_card:
        example = "{'license': 'apache-2.0', 'language': ['en'], 'training': 'What it was trained on.'}"
        raise ValueError(
            f"`card` is missing: {source or 'a model that was loaded from no folder'} has no `{CARD_FILE}`. Pass what "
            f"no file can know, at least {', '.join(REQUIRED)}: `push_to_hub(repo_id, card={example})`."
        )
    path = source / CARD_FILE if card is None else Path(card)
    if not path.is_file():
        raise OSError(f"`card` {str(card)!r} is no file; pass the path of a `{CARD_FILE}`, or a dictionary.")
    return load_words(path), path.parent


def _has_same_weights(saved: Path, source: Path) -> bool:
    """Whether the folder `source` holds the tensors of `saved`, perhaps in a type of its own."""
    import torch
    from safetensors.torch import load_file

    ours, theirs = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (saved, source)
    )
    return ours.keys() == theirs.keys() and all(
        ours[name].shape == tensor.shape and torch.equal(ours[name], tensor.to(ours[name].dtype))
        for name, tensor in theirs.items()
    )


def _changed_fields(saved: Path, source: Path) -> str | None:
    """The configuration's fields in `saved` that `source` has otherwise, as the subject of a sentence."""
    from hf_drelay import DRelayConfig

    ours, theirs = (DRelayConfig.from_pretrained(folder).to_dict() for folder in (saved, source))
    names = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    names = [f"`{name}`" for name in names if name not in _OTHER_FIELDS]
    return f"the configuration ({', '.join(names)}) differs" if names else None
