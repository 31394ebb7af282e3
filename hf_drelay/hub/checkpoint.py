"""A drafter in memory as a checkpoint folder with the words of its card."""

import shutil
from pathlib import Path

import yaml

from .card import CARD_FILE, REQUIRED, load_words


EXTRA_FILES = ("training_log.json", "LICENSE")


def write_checkpoint(model, folder: str | Path, card: dict | str | Path | None = None) -> Path:
    """
    Write the folder that [`build_repository`] publishes.

    The folder that the model was loaded from says what belongs to it: card, results, recipes, training log, and the
    type the weights are stored in. It is asked only while its weights are those of the model, because whatever was
    measured with other weights is not true of these.

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
    is_unchanged = source is not None and _has_same_weights(folder, source)
    words, base = _words(model, card, source, is_unchanged)
    words["results"] = [str((base / name).resolve()) for name in words.get("results") or []]
    if is_unchanged:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        recipes = [path.name for path in source.glob("*.yaml")]
        weights = [path.name for path in source.glob("*.safetensors*")]
        for name in (*weights, *recipes, *EXTRA_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    (folder / CARD_FILE).write_text(yaml.safe_dump(words, allow_unicode=True), encoding="utf-8")
    return folder


def _words(model, card, source: Path | None, is_unchanged: bool) -> tuple[dict, Path]:
    """Entries of the card, and the folder that its results are relative to."""
    if isinstance(card, dict):
        return dict(card), Path.cwd()
    has_card = source is not None and (source / CARD_FILE).is_file()
    if card is None and has_card and not is_unchanged:
        raise ValueError(
            f"`card` is missing: the weights are no longer those of {source}, so its `{CARD_FILE}` and results tell "
            "nothing about them. Measure again, and pass `card` with what is true of these weights."
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
