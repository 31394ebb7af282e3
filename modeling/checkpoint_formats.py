"""Public drafter formats as pure maps: configuration keys and tensor names, to ours and back.

Read: z-lab (DFlash, DFlash 2), SpecForge (DFlash, Domino, DSpark, EAGLE-3; like z-lab, method keys inside
`dflash_config`), DeepSpec (flat keys, frozen copies of the target's tables) and speculators (backbone keys inside
`transformer_layer_config`, tapped layers counted from one). Written: the z-lab style and speculators. Nothing here
touches files or models.

The backbone's tensors look the same in both layouts, so the layout is read from what the file says about itself and is
never guessed: see `layout_of`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from .configuration_drelay import DRelayConfig, evenly_spaced_layers


FORMATS = ("zlab", "speculators")
_CODEBOOKS = ("predecessor_codebook", "successor_codebook")
_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "hidden_act",
    "layer_types",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass
class Imported:
    """
    A public checkpoint in our terms.

    Attributes:
        kind (`str`): What was read, e.g. `"deepspec markov"`.
        fields (`dict`): Arguments of [`DRelayConfig`].
        tensors (`dict[str, torch.Tensor]`): State dict of [`DRelayModel`].
        frozen (`dict[str, torch.Tensor]`): Copies of the target's tables, `embed_tokens` and `lm_head`.
        scales (`dict[str, float]`): What the file states of its target's embedding and head: factor of embeddings
            (`input_embedding_scale`) and soft-cap of logits (`final_logit_softcapping`, 0 for none).
    """

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)


def is_public_format(config: dict) -> bool:
    """Whether a `config.json` is of one of the public formats rather than ours."""
    if str(config.get("model_type", "")).startswith("drelay"):
        return False
    known = ("DFlash", "Domino", "DSpark", "Eagle3")
    names = " ".join(config.get("architectures") or [])
    return "speculators_model_type" in config or "dflash_config" in config or any(name in names for name in known)


def import_checkpoint(config: dict, tensors: dict[str, torch.Tensor], **overrides) -> Imported:
    """
    Translate a public checkpoint.

    Args:
        config (`dict`): Its `config.json`.
        tensors (`dict[str, torch.Tensor]`): Its weights, under their public names.
        overrides: Fields of [`DRelayConfig`] that the file does not tell, or tells wrongly: `layout`,
            `num_target_layers`, `target_layer_ids`, `mask_token_id`.

    Raises:
        ValueError: When the file leaves open what cannot be guessed.
    """
    tensors = {_strip(name): tensor for name, tensor in tensors.items()}
    names = set(tensors)
    head = _head_kind(config, names)
    family = _family(config, head, names)
    value = _lookup(config)
    fields = {name: value(name) for name in _COPIED if value(name) is not None}
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    fields["rope_parameters"] = _rope(value)
    fields["use_qk_norm"] = any(name.endswith("q_norm.weight") for name in names)
    fields["block_size"] = value(
        "block_size", value("ttt_length", 7) if head == "eagle3" else 8 if family == "speculators" else 16
    )
    fields["use_mask_embedding"] = "mask_embedding" in names
    fields["mask_token_id"] = _mask_token(value, head, fields, overrides)
    verifier = (value("speculators_config") or {}).get("verifier") or {}
    fields["target_name_or_path"] = value("target_name_or_path", verifier.get("name_or_path"))
    fields |= _layers(value, fields)
    fields |= _head_fields(head, value, tensors, fields["vocab_size"])
    fields["layout"] = (
        "shifted" if head == "eagle3" else overrides.get("layout") or layout_of(config, family, head, names)
    )
    fields |= _taps(config, value, head, family, fields, overrides)
    fields |= overrides
    own, frozen = _own_tensors(tensors, fields)
    known = {name: setting for name, setting in fields.items() if setting is not None}
    return Imported(f"{family} {head}", known, own, frozen, _target_scales(value, fields))


def layout_of(config: dict, family: str, head: str, names: set[str]) -> str:
    """
    `"fill_in"` or `"shifted"`.

    Raises:
        ValueError: When the file does not say.
    """
    value = _lookup(config)
    if value("sample_from_anchor") is not None:
        return "shifted" if value("sample_from_anchor") else "fill_in"
    if head == "recurrent" and value("shift_label") is not None:
        return "shifted" if value("shift_label") else "fill_in"
    architectures = config.get("architectures") or []
    is_dspark = "dspark" in (value("speculators_model_type"), value("projector_type")) or "DSpark" in str(
        architectures
    )
    if head == "markov" or family == "deepspec" or is_dspark:
        return "shifted"
    published = {"DFlashDraftModel", "DFlash2DraftModel"} & set(architectures)
    has_copies = {"embed_tokens.weight", "lm_head.weight"} <= names
    if family == "speculators" or (published and head != "recurrent" and not has_copies):
        return "fill_in"
    raise ValueError(
        f"`layout` of this checkpoint (architectures {config.get('architectures')}) is in none of its keys, and its "
        "tensors are the same in both; convert it with `hf-drelay convert SRC DST --target T`, which measures both "
        "layouts, or pass `layout='fill_in'` or `layout='shifted'`."
    )


def export_checkpoint(config: DRelayConfig, tensors: dict[str, torch.Tensor], format: str) -> tuple[dict, dict]:
    """
    `(config, tensors)` of a drafter in a public format; of a relay drafter its backbone (DFlash).

    Args:
        config (`DRelayConfig`): Of the drafter.
        tensors (`dict[str, torch.Tensor]`): State dict of the [`DRelayModel`].
        format (`str`): `"zlab"` (SpecForge's keys for heads that z-lab does not have) or `"speculators"`.

    Raises:
        ValueError: When the format cannot say what the drafter needs.
    """
    if format not in FORMATS:
        raise ValueError(f"`format` is {format!r}; expected one of {FORMATS}.")
    head = "eagle3" if config.backbone == "eagle3" else "independent" if config.head == "relay" else config.head
    _check_exportable(config, head, format)
    weights = {}
    for name, tensor in tensors.items():
        public = _public_name(name, head, format)
        if public is not None and not (name.startswith("selector.") and config.head == "relay"):
            weights[public] = tensor
    if config.use_own_head and config.draft_vocab_size is not None:
        ids = tensors["drafter.draft_token_ids"].long()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    write = _zlab_config if format == "zlab" else _speculators_config
    return write(config, head), weights


# Reading.


def _lookup(config: dict):
    """Look a key up where the formats put it: the nested groups first, then the top level."""
    groups = [config.get(name) or {} for name in ("dflash_config", "transformer_layer_config", "eagle_config")]

    def value(name, default=None):
        for group in [*groups, config]:
            if group.get(name) is not None:
                return group[name]
        return default

    return value


def _strip(name: str) -> str:
    """Name without the prefixes that only some files have."""
    name = name.removeprefix("logit_head.").removeprefix("model.")
    name = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}.get(name, name)
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _head_kind(config: dict, names: set[str]) -> str:
    if config.get("speculators_model_type") == "eagle3" or "Eagle3" in str(config.get("architectures")):
        return "eagle3"
    kinds = {
        "layers.0.hidden_norm.": "eagle3",
        "candidate_selector.": "bilinear",
        "embed_proj.": "recurrent",
        "markov_head.": "markov",
    }
    found = [kind for prefix, kind in kinds.items() if any(name.startswith(prefix) for name in names)]
    return found[0] if found else "independent"


def _family(config: dict, head: str, names: set[str]) -> str:
    if "speculators_model_type" in config:
        return "speculators"
    architecture = " ".join(config.get("architectures") or [])
    is_flat = "dflash_config" not in config and "eagle_config" not in config
    if is_flat and any(name in architecture for name in ("DSparkModel", "DFlashModel", "Eagle3Model")):
        return "deepspec"
    return "specforge" if head in ("recurrent", "markov", "eagle3") else "zlab"


def _rope(value) -> dict:
    rope = dict(value("rope_parameters") or value("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", value("rope_theta", 1_000_000.0 if value("model_type") != "llama" else 10_000.0))
    return rope


def _mask_token(value, head: str, fields: dict, overrides: dict) -> int:
    token = overrides.get("mask_token_id", value("mask_token_id"))
    if token is None and head != "eagle3" and not fields["use_mask_embedding"]:
        raise ValueError(
            "This checkpoint has no `mask_token_id`, whose embedding fills the slots of a block; pass the token that "
            "it was trained with as `mask_token_id`."
        )
    return token or 0


def _layers(value, fields: dict) -> dict:
    kinds = fields.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"]
    if value("use_swa") and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * len(kinds)
    causal = [kind == "sliding_attention" for kind in kinds]
    is_causal = value("is_causal", value("causal"))
    if is_causal is not None:
        causal = [bool(is_causal)] * len(kinds)
    elif value("sliding_window_non_causal", value("speculators_model_type") == "dflash2"):
        causal = [False] * len(kinds)
    window = value("swa_window_size", value("sliding_window")) if "sliding_attention" in kinds else None
    return {"layer_types": kinds, "block_causal": causal, "sliding_window": window}


def _head_fields(head: str, value, tensors: dict, vocab_size: int) -> dict:
    fields: dict[str, Any] = {"head": "independent" if head == "eagle3" else head}
    if "d2t" in tensors:
        fields |= {"draft_vocab_size": len(tensors["d2t"]), "use_own_head": True}
    elif "lm_head.weight" in tensors and len(tensors["lm_head.weight"]) != vocab_size:
        raise ValueError(
            f"`lm_head.weight` of this checkpoint has {len(tensors['lm_head.weight'])} rows for {vocab_size} tokens "
            "(`vocab_size`), and the tensor `d2t` that would tell which ones they are is missing; download it again."
        )
    if head == "eagle3":
        # Files with the whole vocabulary may leave the head to the target.
        fields |= {"block_causal": [True], "backbone": "eagle3", "use_own_head": "lm_head.weight" in tensors}
        fields["norm_before_residual"] = bool(value("norm_before_residual", False))
        for flag in ("norm_output", "norm_before_fc", "input_norm"):
            if value(flag):
                raise ValueError(f"`{flag}` of this checkpoint is a variant of EAGLE-3 that is not supported.")
    if head == "bilinear":
        fields |= {"head_rank": value("selector_rank", 256), "pool_size": value("selector_top_k", 16)}
    fields["conv_kernel_size"] = value("conv_kernel_size", 2) if any("attention_conv." in n for n in tensors) else 0
    fields["conv_group_size"] = value("conv_group_size", 16)
    if head == "recurrent":
        fields["head_rank"] = value("emb_dim", 256)
        fields["gru_hidden_dim"] = value("gru_hidden_dim", fields["head_rank"])
        fields["pure_draft_prefix_len"] = value("pure_draft_prefix_len", 1)
    if head == "markov":
        fields["head_rank"] = value("markov_rank", 256)
        fields["markov_head_type"] = value("markov_head_type", "vanilla")
        fields["use_confidence_head"] = any(name.startswith("confidence_head.") for name in tensors)
        fields["confidence_head_with_markov"] = bool(value("confidence_head_with_markov", True))
    return fields


def _taps(config: dict, value, head: str, family: str, fields: dict, overrides: dict) -> dict:
    """`num_target_layers` and `target_layer_ids`, counted from zero."""
    num_layers = overrides.get("num_target_layers") or value("num_target_layers")
    ids = overrides.get("target_layer_ids") or value("target_layer_ids")
    if ids is None and family == "speculators":
        counted_from_one = value("aux_hidden_state_layer_ids") or value("eagle_aux_hidden_state_layer_ids")
        ids = [i - 1 for i in counted_from_one] if counted_from_one else None
    elif ids is None and head == "eagle3":
        ids = value("eagle_aux_hidden_state_layer_ids")
    if ids is None and num_layers is None:
        raise ValueError(
            "This checkpoint names neither `target_layer_ids` nor `num_target_layers`, so its tapped layers are "
            "unknown; pass `num_target_layers`, or convert it with `hf-drelay convert SRC DST --target T`."
        )
    if ids is None:
        is_eagle = head == "eagle3"
        ids = [1, num_layers // 2 - 1, num_layers - 4] if is_eagle else None
        ids = ids or evenly_spaced_layers(num_layers, fields["num_hidden_layers"])
    return {"target_layer_ids": list(ids), "num_target_layers": num_layers or max(ids) + 2}


def _own_tensors(tensors: dict, fields: dict) -> tuple[dict, dict]:
    """`(tensors under our names, copies of the target's tables)`."""
    own, frozen = {}, {}
    for name, tensor in tensors.items():
        if name.startswith("verifier_") or name in ("t2d",):
            continue
        if name == "d2t":  # offsets, not ids
            own["drafter.draft_token_ids"] = torch.arange(len(tensor)) + tensor.long()
        elif name == "embed_tokens.weight" or (name == "lm_head.weight" and not fields.get("use_own_head")):
            frozen[name.removesuffix(".weight")] = tensor
        elif name.startswith("candidate_selector."):
            part = name.removeprefix("candidate_selector.")
            own["selector." + (part.removesuffix(".weight") if part.startswith(_CODEBOOKS) else part)] = tensor
        elif name.startswith("markov_head."):
            own["selector." + name.removeprefix("markov_head.")] = tensor
        elif name.startswith(("prefix_gru.", "embed_proj.", "confidence_head.")):
            own["selector." + name] = tensor
        else:
            own["drafter." + name] = tensor
    if "d2t" in tensors:
        ids = own["drafter.draft_token_ids"].sort().values
        if ids[0] < 0 or ids[-1] >= fields["vocab_size"] or len(ids.unique()) < len(ids):
            raise ValueError(
                f"`d2t` of this checkpoint names tokens from {ids[0]} to {ids[-1]}, {len(ids.unique())} of {len(ids)} "
                f"distinct, in a vocabulary of {fields['vocab_size']}; it must hold offsets from a draft's number to "
                "its token. Download it again."
            )
        if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero().flatten().cpu(), ids.cpu()):
            raise ValueError("`d2t` and `t2d` of this checkpoint name different tokens; download it again.")
    if "d2t" in tensors and fields["head"] != "independent":
        rows = torch.full((fields["vocab_size"],), fields["draft_vocab_size"], dtype=torch.int32)
        rows[own["drafter.draft_token_ids"]] = torch.arange(fields["draft_vocab_size"], dtype=torch.int32)
        own["selector.shortlist_rows"] = rows
    return own, frozen


def _target_scales(value, fields: dict) -> dict[str, float]:
    """Scales that a file states for its target; the drafter takes those of the target itself, so they must agree."""
    names = ("input_embedding_scale", "final_logit_softcapping")
    scales = {name: float(value(name)) for name in names if value(name) is not None}
    scale = scales.get("input_embedding_scale", 1.0)
    if float(value("output_multiplier", 1.0)) != 1.0 or (
        scale != 1.0 and abs(scale - fields["hidden_size"] ** 0.5) > 1e-2 * scale
    ):
        raise ValueError(
            f"`output_multiplier` {value('output_multiplier', 1.0)} and `input_embedding_scale` {scale} of this "
            "checkpoint are those of no known target; such files are not supported."
        )
    return scales


# Writing.


def _check_exportable(config: DRelayConfig, head: str, format: str) -> None:
    reasons = {
        f"`backbone` {config.backbone!r}": config.backbone not in ("parallel", "eagle3"),
        "`use_mask_embedding` True (a learned mask row)": config.use_mask_embedding,
        "`use_qk_norm` False (layers without norms of queries and keys)": head != "eagle3" and not config.use_qk_norm,
        "`layout` 'shifted'": format == "zlab" and config.layout == "shifted" and head in ("independent", "bilinear"),
        f"`head` {head!r}": format == "speculators" and head == "recurrent",
        "a head with a shortlist": head in ("bilinear", "recurrent", "markov")
        and config.draft_vocab_size is not None
        and not config.use_own_head,
        "`use_own_head` False (the format keeps a head of its own)": head == "eagle3" and not config.use_own_head,
        "`use_own_head` True": format == "zlab" and head != "eagle3" and config.use_own_head,
        f"`block_causal` {config.block_causal}": head != "eagle3"
        and config.block_causal not in _sayable_masks(config, format),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"`format` {format!r} has no way to say {reason}; save this drafter in our own format.")


def _sayable_masks(config: DRelayConfig, format: str) -> list[list[bool]]:
    """Choices of `block_causal` that a format has words for: without any, sliding layers are causal."""
    usual = [kind == "sliding_attention" for kind in config.layer_types]
    size = len(usual)
    return [usual, [False] * size, *([[True] * size] if format == "zlab" else [])]


def _public_name(name: str, head: str, format: str) -> str | None:
    """Public name of one of our tensors; `None` for one that has none."""
    if name in ("drafter.draft_token_ids", "selector.shortlist_rows"):
        return None
    part, _, rest = name.partition(".")
    if part == "drafter":
        if head == "eagle3" and format == "zlab" and rest.startswith("layers.0."):
            return "midlayer." + rest.removeprefix("layers.0.")
        return rest
    if head == "bilinear":
        return "candidate_selector." + rest
    return "markov_head." + rest if head == "markov" and not rest.startswith("confidence_head.") else rest


def _backbone_keys(config: DRelayConfig) -> dict:
    keys = {name: getattr(config, name) for name in _COPIED}
    theta = config.rope_parameters.get("rope_theta")
    has_window = "sliding_attention" in config.layer_types
    return keys | {
        "model_type": "qwen3" if config.use_qk_norm else "llama",
        "attention_dropout": config.attention_dropout,
        "rope_parameters": config.rope_parameters,
        "rope_theta": theta,  # readers of older files look here
        "sliding_window": config.sliding_window,
        "use_sliding_window": has_window,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
    }


def _zlab_config(config: DRelayConfig, head: str) -> dict:
    names = {"independent": "DFlash", "bilinear": "DFlash2", "recurrent": "Domino", "markov": "DSpark"}
    keys = _backbone_keys(config) | {
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "target_name_or_path": config.target_name_or_path,
    }
    if head == "eagle3":
        taps = {"eagle_aux_hidden_state_layer_ids": config.target_layer_ids}
        return keys | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.output_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            "eagle_config": taps,
        }
    method = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    if head == "bilinear":
        method |= {"selector_rank": config.head_rank, "selector_top_k": config.pool_size}
    if config.conv_kernel_size:
        method |= {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
    if head == "recurrent":
        method |= {
            "projector_type": "domino",
            "emb_dim": config.head_rank,
            "gru_hidden_dim": config.gru_hidden_dim,
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
            "shift_label": config.layout == "shifted",
        }
    if head == "markov":
        method |= {"projector_type": "dspark", "sample_from_anchor": config.layout == "shifted"} | _markov_keys(config)
    if len(set(config.block_causal)) == 1:
        method["is_causal"] = config.block_causal[0]
    return keys | {"architectures": [names[head] + "DraftModel"], "dflash_config": method}


def _speculators_config(config: DRelayConfig, head: str) -> dict:
    names = {"independent": "dflash", "bilinear": "dflash2", "markov": "dspark", "eagle3": "eagle3"}
    kind = names[head]
    classes = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "Eagle3"}
    taps = "eagle_aux_hidden_state_layer_ids" if head == "eagle3" else "aux_hidden_state_layer_ids"
    keys = {
        "architectures": [classes[kind] + "Speculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": _backbone_keys(config),
        "draft_vocab_size": config.output_vocab_size if config.use_own_head else config.vocab_size,
        "block_size": config.block_size,
        taps: [i + 1 for i in config.target_layer_ids],  # counted from one there
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.layout == "shifted",
        "sliding_window_non_causal": not any(config.block_causal),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_drafts}],
            "verifier": {"name_or_path": config.target_name_or_path, "architectures": []},
        },
    }
    if head == "markov":
        keys |= _markov_keys(config)
    if head == "eagle3":
        keys["norm_before_residual"] = config.norm_before_residual
    if head == "bilinear":
        keys |= {"selector_rank": config.head_rank, "selector_top_k": config.pool_size}
    if config.conv_kernel_size:
        keys |= {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
    return keys


def _markov_keys(config: DRelayConfig) -> dict:
    return {
        "markov_rank": config.head_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.use_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


__all__ = ["FORMATS", "Imported", "export_checkpoint", "import_checkpoint", "is_public_format", "layout_of"]
