"""A new head on the backbone of a trained drafter, be it ours or a public one."""

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel


HEAD_FIELDS = (
    "head",
    "use_selector",
    "head_rank",
    "gru_hidden_dim",
    "pure_draft_prefix_len",
    "markov_head_type",
    "use_confidence_head",
    "confidence_head_with_markov",
    "selector_hidden_size",
    "selector_num_heads",
    "selector_num_layers",
    "use_global_read",
    "use_history_read",
    "use_prefix_read",
    "use_rank_head",
    "use_repair_gate",
    "history_window",
    "pair_rank",
    "copy_order",
    "copy_window",
    "use_repaired_feature",
)
DRAFTING_FIELDS = ("pool_size", "proposal", "num_draft_tokens", "loop_gate", "max_stages", "confidence_threshold")
CONVOLUTION_FIELDS = ("conv_kernel_size", "conv_group_size")


def config_fields(config: DRelayConfig) -> dict:
    """All fields of a drafter's configuration, to build a similar one."""
    names = (*DRelayConfig.own_fields(), "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name) for name in names}


def new_head_config(base: DRelayConfig, fields: dict) -> DRelayConfig:
    """
    The configuration of `base` with another head: `fields` of it, and what they leave out as for a new drafter.

    Raises:
        ValueError: If a field is none of the head's.
    """
    foreign = sorted(set(fields) - {*HEAD_FIELDS, *DRAFTING_FIELDS, *CONVOLUTION_FIELDS})
    if foreign:
        raise ValueError(
            f"`{foreign[0]}` ({fields[foreign[0]]!r}) is no field of a head, and the drafter's backbone is kept as it "
            f"is; set {', '.join(HEAD_FIELDS[:3])} and their like, or train a new drafter with `drafter_config`."
        )
    own = {name: value for name, value in config_fields(base).items() if name not in HEAD_FIELDS}
    return DRelayConfig(**own | DRelayConfig.head_sizes(base.hidden_size) | {"head": "relay"} | fields)


def with_new_head(base: DRelayModel, fields: dict) -> DRelayModel:
    """The backbone of `base` under a new, untrained head; `fields` and errors are those of `new_head_config`."""
    drelay = DRelayModel(new_head_config(base.config, fields))
    if base.config.draft_vocab_size is not None:
        drelay.set_shortlist(base.drafter.draft_token_ids)
    drelay.drafter.load_state_dict(base.drafter.state_dict(), strict=False)  # convolutions may be new: they do nothing
    drelay.frozen_copies = base.frozen_copies
    return drelay
