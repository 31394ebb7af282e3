"""What a training run would take, from its configuration alone: parameters, memory, steps, arithmetic."""

import torch
from transformers import AutoConfig

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel

from .config import DRelayTrainingConfig
from .data import read_jsonl, response_files
from .run import starting_config


# Sustained rates to express the arithmetic in: two CPU cores with bf16 units, one and eight data-centre GPUs.
RATES = {"two CPU cores (0.7 TFLOP/s)": 0.7e12, "one GPU (250 TFLOP/s)": 250e12, "eight GPUs (2 PFLOP/s)": 2e15}
BYTES_PER_PARAMETER = 16  # weight, gradient and two moments, fp32
MEAN_LENGTH = 0.6  # of a sequence, as a share of `max_length`, when no file tells


def plan_run(config: DRelayTrainingConfig, num_processes: int = 1) -> dict[str, str]:
    """
    Rows for people, for a run on `num_processes` processes. Times are arithmetic divided by a rate that is assumed,
    not measured.
    """
    needs_target = config.target is not None and config.preset is None and config.drafter is None
    drafter = starting_config(config, AutoConfig.from_pretrained(config.target) if needs_target else None)
    with torch.device("meta"):
        model = DRelayModel(drafter)
    backbone = sum(p.numel() for p in model.drafter.parameters())
    selector = sum(p.numel() for p in model.selector.parameters()) if model.selector is not None else 0
    num_examples, mean_length = _examples(config)
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * num_processes
    steps = config.max_steps
    if steps <= 0:
        if num_examples is None:
            raise ValueError("`max_steps` is not set, and no file of `responses` can be read to count the examples.")
        steps = -(-num_examples // batch) * int(config.num_train_epochs)
    target = _target_parameters(drafter)
    flops = _flops_per_sequence(config, drafter, backbone, selector, target, mean_length) * batch * steps
    weights = (backbone + selector) * BYTES_PER_PARAMETER
    depth = config.loop_depth if config.loop_start < 1 else 1  # gradients keep all stages that are unrolled
    rows = config.per_device_train_batch_size * config.num_anchors * drafter.block_size * depth
    activations = rows * drafter.hidden_size * (drafter.num_hidden_layers * 34 + 12)
    logits = 4 * 4 * min(config.chunk_rows, rows) * drafter.output_vocab_size
    # The copy path compares every candidate with every token of the text, once as bool and once as float.
    copies = 0
    if getattr(model.selector, "copy_path", None) is not None:
        slots = config.per_device_train_batch_size * config.num_selector_anchors * drafter.num_drafts
        copies = 5 * slots * drafter.pool_size * drafter.copy_window
    known = "unknown" if num_examples is None else f"{num_examples:,}"
    return {
        "drafter parameters": f"{backbone / 1e6:,.1f} M backbone, {selector / 1e6:,.1f} M selector",
        "target parameters": f"about {target / 1e6:,.0f} M, frozen, {config.target_dtype}",
        "examples": f"{known}, about {mean_length:.0f} tokens each",
        "steps": f"{steps:,} of {batch} sequences and {batch * config.num_anchors:,} blocks",
        "processes": str(num_processes),
        "memory for weights and optimizer": f"{weights / 1e9:.1f} GB drafter, {2 * target / 1e9:.1f} GB target",
        "memory for activations": f"about {activations / 1e9:.1f} GB, and {logits / 1e9:.2f} GB of vocabulary logits",
        "memory for the copy path": f"at most {copies / 1e9:.2f} GB",
        "arithmetic": f"{flops / 1e15:,.2f} PFLOP",
        **{f"time at {name}": _duration(flops / rate) for name, rate in RATES.items()},
    }


def _examples(config: DRelayTrainingConfig) -> tuple[int | None, float]:
    """Number and mean length of the examples; `None` and a guess when the files are not there."""
    try:
        lengths = [len(row["response_ids"]) for path in response_files(config.responses) for row in read_jsonl(path)]
    except ValueError:
        lengths = []
    if not lengths and config.self_synthesise:
        return config.self_synthesise, MEAN_LENGTH * config.max_length
    if not lengths:
        return None, MEAN_LENGTH * config.max_length
    return len(lengths), min(config.max_length, sum(lengths) / len(lengths) + 64)


def _target_parameters(drafter: DRelayConfig) -> int:
    """About the size of the target: layers of the drafter's kind, and an embedding."""
    H, D = drafter.hidden_size, drafter.head_dim
    attention = H * D * (2 * drafter.num_attention_heads + 2 * drafter.num_key_value_heads)
    return drafter.num_target_layers * (attention + 3 * H * drafter.intermediate_size) + drafter.vocab_size * H


def _flops_per_sequence(config, drafter: DRelayConfig, backbone: int, selector: int, target: int, length: float):
    """Two operations for each weight and token forward, four backward; frozen weights need two of these less."""
    slots = config.num_anchors * drafter.num_drafts
    is_chain = drafter.backbone != "parallel"  # unrolled at every position, not at anchors alone
    rows = length * drafter.num_drafts if is_chain else config.num_anchors * drafter.block_size + length
    if drafter.use_own_head:
        backbone = backbone - drafter.output_vocab_size * drafter.hidden_size
    head = 6 * slots * drafter.output_vocab_size * drafter.hidden_size
    drafting = 6 * backbone * rows + head
    # Of a head's tables a slot reads a few rows; the selector looks at every candidate, the others at every slot.
    rank = drafter.pair_rank if drafter.head == "relay" else drafter.head_rank
    per_slot = drafter.pool_size if drafter.head == "relay" else 1
    num_tables = {"independent": 0, "recurrent": 1}.get(drafter.head, 2)
    tables = num_tables * rank * drafter.output_vocab_size
    drafting += 6 * (selector - tables) * config.num_selector_anchors * drafter.num_drafts * per_slot
    unrolled = 1 + (config.loop_depth - 1) * (1 - config.loop_start)
    return drafting * unrolled + 2 * target * length


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:,.1f} min"
