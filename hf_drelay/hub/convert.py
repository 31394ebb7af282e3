"""Converting drafters between our format and the public ones; the maps themselves are `checkpoint_formats.py`."""

import json
from pathlib import Path

import torch

from hf_drelay.evaluation.records import new_folder
from hf_drelay.evaluation.replay import replay_response
from hf_drelay.modeling.checkpoint_formats import FORMATS, export_checkpoint, import_checkpoint
from hf_drelay.modeling.modeling_drelay import DRelayModel, read_tensors


PROMPT = "Write a Python function that returns the sum of the squares of a list of numbers, and explain it."


def convert(source: str, destination: str | Path, target=None, tokenizer=None, format: str = "hf_drelay") -> dict:
    """
    Write the drafter of `source` to `destination` in another format.

    Args:
        source (`str`): Path or Hub id of a drafter in any known format.
        destination (`str` or `Path`): New folder.
        target (`PreTrainedModel`, *optional*): Its target. With it, copies of the target's tables are compared whole,
            and a layout that the file does not tell is measured.
        tokenizer (`PreTrainedTokenizer`, *optional*): Of the target; needed to measure a layout.
        format (`str`): `"hf_drelay"`, `"zlab"` or `"speculators"`.

    Returns:
        `dict`: What was read and decided: `kind`, `layout`, and, when it was measured, `acceptance_length` by layout.
    """
    if format not in ("hf_drelay", *FORMATS):
        raise ValueError(f"`format` is {format!r}; expected one of {('hf_drelay', *FORMATS)}.")
    if format == "zlab" and target is None and not _tells_depth(_read_config(source)):
        raise ValueError(
            f"`target` is needed: the configuration of {source!r} does not tell `num_target_layers`, which `format` "
            "'zlab' has to. Pass the target."
        )
    with new_folder(destination, "destination") as part:
        model, report = load_any(source, target, tokenizer)
        if format == "hf_drelay":
            model.save_pretrained(part)
        else:
            from safetensors.torch import save_file

            config, tensors = export_checkpoint(model.config, model.state_dict(), format)
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (part / "config.json").write_text(text, encoding="utf-8")
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    return report | {"format": format, "layout": model.config.layout, "head": model.config.head}


def load_any(source: str, target=None, tokenizer=None) -> tuple[DRelayModel, dict]:
    """`(drafter, report)` of a checkpoint in any known format, with its layout measured if the file does not tell."""
    fields = {} if target is None else {"num_target_layers": _num_layers(target)}
    config = _read_config(source)
    if config.get("model_type") == "drelay":
        return DRelayModel.from_pretrained(source), {"kind": "hf_drelay"}
    tensors = read_tensors(source)
    report = {}
    try:
        imported = import_checkpoint(config, tensors, **fields)
    except ValueError as error:
        if "`layout`" not in str(error) or target is None:
            raise
        if tokenizer is None:
            raise ValueError(
                "`tokenizer` of the target is needed to measure the layout of this checkpoint."
            ) from error
        candidates = {
            layout: import_checkpoint(config, tensors, layout=layout, **fields) for layout in ("fill_in", "shifted")
        }
        report["acceptance_length"] = measure_layouts(candidates, target, tokenizer)
        imported = candidates[max(report["acceptance_length"], key=report["acceptance_length"].get)]
    model = DRelayModel.from_imported(imported)
    if target is not None:
        _compare_tables(imported.frozen, target)
        model.adapter(target)  # compares what else the file states of its target
    elif imported.frozen or imported.scales:
        stated = [*(f"a copy of `{name}`" for name in imported.frozen), *(f"`{name}`" for name in imported.scales)]
        report["not_compared"] = f"{', '.join(stated)} of the target; pass the target to compare them"
    return model, {"kind": imported.kind} | report


def measure_layouts(candidates: dict, target, tokenizer, max_new_tokens: int = 64) -> dict[str, float]:
    """
    Replay τ of each layout on a short text that the target writes greedily. The wrong layout drafts every token one
    place off, so its τ is hardly above one.
    """
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": PROMPT}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        ids = ids["input_ids"] if hasattr(ids, "keys") else ids
    ids = ids.to(target.device)
    text = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    lengths = {}
    for layout, imported in candidates.items():
        model = DRelayModel.from_imported(imported).to(target.device)
        statistics = replay_response(model.with_options(loop_gate=None), target, text[0], ids.shape[1])
        lengths[layout] = round(statistics.acceptance_length, 4)
    if len(set(lengths.values())) == 1:
        raise ValueError(
            f"Both layouts of this checkpoint accept the same number of tokens on the target's text ({lengths}), so "
            "its layout stays unknown; check that `target` is the model it was trained for, or pass `layout`."
        )
    return lengths


def _read_config(source: str) -> dict:
    from transformers import PreTrainedConfig

    return PreTrainedConfig.get_config_dict(source)[0]


def _tells_depth(config: dict) -> bool:
    """Whether a configuration, or one of the groups in it, says how many layers the target has."""
    groups = [config, *(group for group in config.values() if isinstance(group, dict))]
    return any(group.get("num_target_layers") is not None for group in groups)


def _num_layers(target) -> int:
    return target.config.get_text_config(decoder=True).num_hidden_layers


def _compare_tables(frozen: dict[str, torch.Tensor], target) -> None:
    """Raise a `ValueError` unless the copies of the target's tables are those of `target`."""
    modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
    for name, copy in frozen.items():
        own = modules[name].weight.detach().cpu()
        if own.shape != copy.shape or not torch.allclose(own.to(copy.dtype).float(), copy.float(), rtol=1e-2):
            raise ValueError(
                f"The checkpoint's copy of `{name}` differs from the one of the target {type(target).__name__}; pass "
                "the target that the drafter was trained for."
            )


__all__ = ["convert", "load_any", "measure_layouts"]
