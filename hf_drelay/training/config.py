"""One dataclass for a training run: what Python code, a YAML file and command-line flags all set."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class DRelayTrainingConfig(TrainingArguments):
    r"""
    Arguments of a training run, on top of those of `transformers.TrainingArguments`.

    > Parameters that control the data

    Args:
        num_anchors (`int`): Blocks per sequence and step, drawn anew in every epoch.
        max_length (`int`): Sequences are cut to that many tokens.
        num_held_out (`int`): Examples kept from training to measure replay τ.
        num_replayed (`int`): Held-out greedy responses replayed at each evaluation.
        feature_bytes (`int`): Memory for hidden states of the target; beyond it they are computed anew each epoch.

    > Parameters that control the objective

    Args:
        train_selector (`bool`): Train the selector with the backbone; off trains the backbone alone.
        freeze_backbone (`bool`): Train the selector alone.
        num_selector_anchors (`int`): Blocks per sequence that the selector is trained on.
        decay, support_weight, support_margin, repair_weight, contribution_floor (`float`): See [`ObjectiveConfig`].
        contribution_start (`float`): Share of the training after which the slot weight of the selector's loss moves
            linearly from the decay to the contribution weight; 1 keeps the decay.
    """

    num_anchors: int = field(default=48, metadata={"help": "Blocks per sequence and step."})
    max_length: int = field(default=512, metadata={"help": "Longest sequence in tokens."})
    num_held_out: int = field(default=64, metadata={"help": "Examples kept from training."})
    num_replayed: int = field(default=16, metadata={"help": "Held-out responses replayed at an evaluation."})
    feature_bytes: int = field(default=8 << 30, metadata={"help": "Memory for hidden states of the target."})

    train_selector: bool = field(default=True, metadata={"help": "Train the selector too."})
    freeze_backbone: bool = field(default=False, metadata={"help": "Train the selector alone."})
    num_selector_anchors: int = field(default=16, metadata={"help": "Blocks per sequence for the selector."})
    decay: float = field(default=4.0, metadata={"help": "Time constant of the slot weight."})
    support_weight: float = field(default=0.1, metadata={"help": "Weight of the candidate-support loss."})
    support_margin: float = field(default=0.5, metadata={"help": "Margin of the candidate-support loss."})
    repair_weight: float = field(default=1.0, metadata={"help": "Weight of the selector's loss."})
    contribution_floor: float = field(default=0.1, metadata={"help": "Least contribution weight."})
    contribution_start: float = field(default=1.0, metadata={"help": "Where the contribution weight sets in."})

    def __post_init__(self):
        super().__post_init__()
        if self.freeze_backbone and not self.train_selector:
            raise ValueError("`freeze_backbone=True` with `train_selector=False` leaves nothing to train.")
        if self.num_anchors < 1 or self.num_selector_anchors < 1:
            raise ValueError(
                f"`num_anchors` {self.num_anchors} and `num_selector_anchors` {self.num_selector_anchors} must be at "
                "least 1."
            )
        if self.world_size > 1:
            raise NotImplementedError(
                f"{self.world_size} processes were started, but gradients of drafters are not synchronised between "
                "processes yet; start one."
            )
        # The trainer's batches carry lengths and keys that no forward signature names.
        self.remove_unused_columns = False
