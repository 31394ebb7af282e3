"""The model card of a drafter: a template, the words of its `card.yaml`, and numbers out of measured JSON only.

A checkpoint folder says in `card.yaml` what no file can know (licences, languages, limits) and which result files
belong to it. Everything with a number in it comes from `config.json`, `training_log.json` and those results.
"""

import json
import math
import re
import textwrap
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData
from huggingface_hub import eval_result_entries_to_yaml as entries_to_yaml

from hf_drelay.evaluation.records import without_folders

from .results import measurements, read_records, results_section


CARD_FILE = "card.yaml"
TAGS = ["speculative-decoding", "draft-model", "custom_code", "hf-drelay"]
_DATASET_TYPE = re.compile(r"([\w-]+/)?[\w.-]+", re.ASCII)  # the Hub's own rule for `model-index`
REQUIRED = ("license", "language", "training")
_RELATIONS = ("adapter", "finetune", "merge", "quantized")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)?|multilingual|code")  # ISO 639, as the Hub reads it
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_DEFAULTS = {
    "base_model_relation": None,
    "chat": "the target's default chat template; other templates lower the speed, not the quality.",
    "data": [],
    "languages_note": "the languages named above; others lower the speed, not the quality.",
    "license_link": None,
    "license_name": None,
    "license_note": "The weights have the licence named above; the target's own licence applies to the target.",
    "limits": "Made for the target named above and the text it was trained on. Other text is decoded correctly, but "
    "fewer drafts are accepted.",
    "long_context": "not measured beyond the lengths of the results above.",
    "quantized": "not measured; a quantised target accepts fewer drafts than the one the drafter was trained for.",
    "results": [],
    "result_datasets": {},
    "title": None,
}
_CONFIG_FIELDS = (
    "layout",
    "block_size",
    "num_draft_tokens",
    "num_hidden_layers",
    "hidden_size",
    "target_layer_ids",
    "draft_vocab_size",
    "pool_size",
    "head",
    "use_global_read",
    "use_history_read",
    "use_prefix_read",
    "use_rank_head",
    "use_repair_gate",
    "pair_rank",
    "copy_order",
    "loop_gate",
    "max_stages",
    "chat_template_mode",
    "dtype",
)


def read_card_file(folder: Path) -> dict:
    """
    Words of a checkpoint's card.

    Raises:
        OSError: If the folder has no `card.yaml`.
        ValueError: If a required entry is missing, or one is unknown.
    """
    path = Path(folder) / CARD_FILE
    if not path.is_file():
        raise OSError(
            f"{folder} has no `{CARD_FILE}`, so its model card cannot be written. Copy the one of a folder in "
            f"`hub_cards/` and say what is true of your drafter, at least {', '.join(REQUIRED)}."
        )
    words = load_words(path)
    missing = [name for name in REQUIRED if not words.get(name)]
    unknown = sorted(set(words) - set(REQUIRED) - set(_DEFAULTS))
    if missing or unknown:
        problem = f"lacks `{missing[0]}`" if missing else f"has the unknown entry `{unknown[0]}`"
        raise ValueError(f"`{path}` {problem}; it takes {sorted({*REQUIRED, *_DEFAULTS})}.")
    words = _DEFAULTS | {name: value for name, value in words.items() if value is not None}
    _check_words(path, words)
    return words


def _check_words(path: Path, words: dict) -> None:
    """Raise a `ValueError` for an entry that the template or the Hub could not use."""
    languages = words["language"] if isinstance(words["language"], list) else [words["language"]]
    wrong = [
        ("language", value, "a code such as `en`, in quotes where YAML reads something else (`'no'`)")
        for value in languages
        if not isinstance(value, str) or not _LANGUAGE.fullmatch(value)
    ]
    if not isinstance(words["license"], str) or not _LICENSE.fullmatch(words["license"]):
        wrong.append(("license", words["license"], "an identifier of the Hub such as `apache-2.0`, or `other`"))
    if (words["license"] == "other") != (words["license_name"] is not None):
        wrong.append(("license_name", words["license_name"], "a name with `license: other`, and with it alone"))
    if words["base_model_relation"] not in (None, *_RELATIONS):
        wrong.append(("base_model_relation", words["base_model_relation"], f"one of {', '.join(_RELATIONS)}"))
    if not _is_list_of(words["results"], str):
        wrong.append(("results", words["results"], "a list of files"))
    if not isinstance(words["result_datasets"], dict):
        wrong.append(("result_datasets", words["result_datasets"], "a data set's id for each prompt file"))
    needed = ("name", "part", "license")
    is_told = _is_list_of(words["data"], dict) and all(_is_text(d.get(name)) for d in words["data"] for name in needed)
    if not is_told:
        wrong.append(("data", words["data"], "a list of entries with `name`, `part`, `license` and perhaps `id`"))
    if wrong:
        name, value, expected = wrong[0]
        raise ValueError(f"`{name}` of `{path}` is {value!r}; expected {expected}.")


def _is_text(value) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_list_of(value, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def load_words(path: Path) -> dict:
    """Entries of a card file as they are; a `ValueError` for a file of another form."""
    try:
        words = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"`{path}` is no valid YAML: {error}. Mend it.") from error
    if not isinstance(words, dict):
        raise ValueError(f"`{path}` holds a {type(words).__name__}, not entries such as `license: apache-2.0`.")
    return words


def read_record(path: Path) -> dict:
    """A JSON file with an object in it; a `ValueError` names it when it is another one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}. Mend it, or save it again.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a {type(record).__name__}, not an object; save it again.")
    return record


def result_files(folder: Path, words: dict) -> list[Path]:
    """The measured files that the card names, relative to its folder."""
    paths = [(Path(folder) / name).resolve() for name in words["results"]]
    for path in paths:
        if not path.is_file():
            raise OSError(
                f"`results` of {Path(folder) / CARD_FILE} names {path}, which does not exist; measure first."
            )
    names = [path.name for path in paths]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(
            f"`results` of {Path(folder) / CARD_FILE} names two files called {double}; they are published side by "
            "side, so rename one."
        )
    return paths


def folder_records(folder: str | Path) -> dict:
    """What the card of a checkpoint folder shows of its results: those of the drafter in the folder."""
    return read_records(result_files(Path(folder), read_card_file(Path(folder))), folder)


def render_card(
    folder: str | Path, repo_id: str | None = None, tags: Sequence[str] = (), records: dict | None = None
) -> str:
    """
    The card of a checkpoint folder, front matter included.

    Args:
        folder (`str` or `Path`): Holds `config.json`, weights, `card.yaml` and, where there is one,
            `training_log.json`.
        repo_id (`str`, *optional*): Where it will be published; by default an owner to fill in.
        tags (`Sequence[str]`): Further tags of the front matter.
        records (`dict`, *optional*): What [`folder_records`] found, if it is known already.
    """
    folder = Path(folder)
    repo_id = repo_id or f"OWNER/{folder.resolve().name}"
    words = read_card_file(folder)
    config = read_record(folder / "config.json")
    words["title"] = words["title"] or f"DRelay drafter for {config['target_name_or_path'].rpartition('/')[2]}"
    records = folder_records(folder) if records is None else records
    template = files("hf_drelay.hub.templates").joinpath("model_card.md.jinja").read_text(encoding="utf-8")
    content = (
        _environment()
        .from_string(template)
        .render(
            card=words,
            config=config,
            repo_id=repo_id,
            config_rows=_config_rows(config, folder),
            recipe_rows=_recipe_rows(folder),
            results=results_section(records),
            citation=_CITATION,
        )
    )
    data = card_data(words, config, records, repo_id, tags)
    return f"---\n{data.to_yaml()}\n---\n\n{content.rstrip()}\n"


def card_data(words: dict, config: dict, records: dict, repo_id: str, tags: Sequence[str] = ()) -> ModelCardData:
    """Front matter by the conventions of the Hub."""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=entry["dataset"],
            dataset_name=entry["dataset"],
            metric_type="speedup",
            metric_name=f"speedup, {entry['way']}"
            + (f", temperature {entry['temperature']:g}" if entry["temperature"] else ""),
            metric_value=round(entry["speedup"], 4),
        )
        for entry in measurements(records, words["result_datasets"])
    ]
    return ModelCardData(
        base_model=config["target_name_or_path"],
        base_model_relation=words["base_model_relation"],
        datasets=[data["id"] for data in words["data"] if data.get("id")] or None,
        eval_results=results or None,
        language=words["language"],
        library_name="transformers",
        license=words["license"],
        license_name=words["license_name"],
        license_link=words["license_link"],
        model_name=repo_id.rpartition("/")[2] if results else None,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*TAGS, *tags])),
    )


def eval_result_files(folder: str | Path, records: dict | None = None) -> dict[str, str]:
    """
    Contents of `.eval_results/`: one YAML file for each data set of the results, by file name. The task ids are our
    own, `speedup_...`, which no leaderboard of these data sets ranks. `records` as in [`render_card`].
    """
    words = read_card_file(Path(folder))
    found: dict[str, list[EvalResultEntry]] = {}
    records = folder_records(folder) if records is None else records
    for entry in measurements(records, words["result_datasets"]):
        found.setdefault(entry["prompts"], []).append(
            EvalResultEntry(
                dataset_id=entry["dataset"],
                task_id=entry["task_id"],
                value=round(entry["speedup"], 4),
                notes=entry["notes"],
            )
        )
    return {
        f"{name}.yaml": yaml.safe_dump(entries_to_yaml(entries), sort_keys=False) for name, entries in found.items()
    }


def check_card(text: str) -> None:
    """Raise a `ValueError` when a card lacks what the Hub and its readers need. Needs no network."""
    card = ModelCard(text)
    needed = ("base_model", "library_name", "pipeline_tag", "tags", "language", "license")
    missing = [name for name in needed if not card.data.get(name)]
    if missing:
        raise ValueError(f"The card's front matter lacks `{missing[0]}`; add it to `{CARD_FILE}` or `config.json`.")
    for result in card.data.eval_results or []:
        if not _DATASET_TYPE.fullmatch(result.dataset_type):
            raise ValueError(
                f"`result_datasets` names {result.dataset_type!r}, which the Hub refuses; give the id of a data set, "
                "such as `openai/gsm8k`."
            )
    headings = ("## Use", "## Configuration", "## Training", "## Results", "## Limits", "## Licence", "## Citation")
    absent = [heading for heading in headings if f"\n{heading}\n" not in card.text]
    if absent:
        raise ValueError(f"The card has no section {absent[0]!r}; render it from the template.")


def _config_rows(config: dict, folder: Path) -> list[tuple[str, str]]:
    rows = [(f"`{name}`", _shown(config[name])) for name in _CONFIG_FIELDS if name in config]
    num_parameters, num_bytes = _weight_sizes(folder)
    return [*rows, ("parameters", f"{num_parameters:,}"), ("weights on disk", f"{num_bytes:,} bytes")]


def _weight_sizes(folder: Path) -> tuple[int, int]:
    """Parameters and bytes of all weight files, from their headers alone."""
    from safetensors import SafetensorError, safe_open

    num_parameters = num_bytes = 0
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes += path.stat().st_size
        try:
            with safe_open(path, framework="pt") as weights:
                shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118, no dictionary
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}); save or download it again.") from error
        num_parameters += sum(math.prod(shape) for shape in shapes)
    return num_parameters, num_bytes


def _recipe_rows(folder: Path) -> list[tuple[str, str]]:
    path = folder / "training_log.json"
    if not path.is_file():
        return []
    log = read_record(path)
    rows = without_folders({**(log.get("recipe") or {}), **(log.get("target") or {})})
    return [(f"`{name}`", _shown(value)) for name, value in rows.items()]


def _shown(value) -> str:
    """A value as the cell of a table."""
    text = "; ".join(value) if _is_list_of(value, str) else "off" if value is None else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _environment():
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["cell"] = _shown
    return environment


_CITATION = textwrap.dedent(
    """\
    @misc{drelay, title = {DRelay}, note = {Selector that revisits the slots of a drafted block}}
    @misc{dloop, title = {DLoop}, note = {Chained drafting stages before one verification}}
    @misc{dflash, title = {DFlash}, eprint = {2602.06036}, archivePrefix = {arXiv}}"""
)
