"""One dataclass for a training run: what Python code, a YAML file and command-line flags all set."""

from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from transformers import TrainingArguments

from .objective import ObjectiveConfig


def _field(default, help: str):
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class DRelayTrainingConfig(TrainingArguments):
    r"""
    Arguments of a training run, on top of those of `transformers.TrainingArguments`.

    > What is trained

    Args:
        target (`str`, *optional*): Folder or Hub id of the target; the embedded demo target by default.
        target_dtype (`str`): Type of its weights while training.
        drafter (`str`, *optional*): Folder or Hub id of a drafter to start from; a new one by default.
        preset (`str`, *optional*): Preset of a new drafter's configuration, see [`DRelayConfig.preset`]; derived from
            the target by default.
        drafter_config (`dict`): Fields of a new drafter's configuration that differ from the preset's.
        start_from_target (`bool`): Start a new drafter from the target's last layers.
        new_head (`dict`, *optional*): Give `drafter` a new head and keep its backbone; fields of its configuration
            that differ, such as `{"head": "relay"}`.
        start_from_counts (`bool`): Start a new relay head from counts: its pair path from neighbouring tokens in the
            responses, its copy path from the weights that such a path has (see `head_start.py`).

    > The data

    Args:
        responses (`list[str]`): Response files, folders of them, or patterns.
        prompts (`list[str]`): Sources of prompts (see `read_prompts`) that the target answers before the training,
            into the one folder that `responses` then names. What is there already is kept.
        self_synthesise (`int`): Prompts that the target thinks of by itself, for the same purpose.
        response_tokens (`int`): Longest of these responses.
        held_out (`list[str]`): Response files to measure replay τ on; their prompts are not trained on. Without them,
            `num_held_out` examples are kept from the training.
        num_anchors (`int`): Blocks per sequence and step, drawn anew in every epoch.
        max_length (`int`): Sequences are cut to that many tokens.
        num_held_out (`int`): Examples kept from training to measure replay τ.
        num_replayed (`int`): Held-out greedy responses replayed at each evaluation.
        feature_bytes (`int`): Memory for features of the target; beyond it they are computed anew each epoch.
        feature_folder (`str`, *optional*): Keep the features there instead of in memory.
        feature_folder_bytes (`int`): Largest size of that folder; a run that needs more does not start.

    > The objective

    Args:
        train_selector (`bool`): Train the selector, or whatever head the drafter has; off trains the backbone alone.
        selector_start (`float`): Share of the training after which the head joins in.
        freeze_backbone (`bool`): Train the head alone.
        num_selector_anchors (`int`): Blocks per sequence that the head is trained on.
        head_learning_rate (`float`, *optional*): Peak learning rate of the head; by default `learning_rate`. A head
            that is new beside a trained backbone takes a larger one.
        loop_start (`float`): Share of the training after which stages are unrolled as DLoop drafts them; 1 is never.
        loop_depth (`int`): Stages that are unrolled then.
        loop_tokens (`int`, *optional*): Tokens of such a stage; by default those that the drafter drafts by default.
        contribution_start (`float`): Share of the training after which the slot weight of the selector's loss moves
            linearly from the decay to the contribution weight; 1 keeps the decay.
        base_anchor_end (`float`): Share of the training over which the base loss hands over to the head's, as Domino
            does; 0 keeps both.
        base_loss, soft_weight, slot_weight, decay, base_weight, support_weight, support_margin, repair_weight,
        head_l1_share, head_kl_share, confidence_weight, contribution_floor, chunk_rows: See [`ObjectiveConfig`].
        num_soft_targets (`int`): Tokens of the target's distribution that the losses with soft targets look at.

    > Stopping

    Args:
        least_acceptance_length (`float`): A run whose replay τ is lower after `least_after` is stopped as hopeless.
        least_after (`float`): Share of the training after which that is tested.
    """

    target: str | None = _field(None, "Folder or Hub id of the target; default: the embedded demo target.")
    target_dtype: str = _field("bfloat16", "Type of the target's weights while training.")
    drafter: str | None = _field(None, "Folder or Hub id of a drafter to start from.")
    preset: str | None = _field(None, "Preset of a new drafter's configuration.")
    drafter_config: dict | str | None = _field(None, "Fields of a new drafter's configuration, as JSON.")
    start_from_target: bool = _field(True, "Start a new drafter from the target's last layers.")
    new_head: dict | str | None = _field(None, "Fields of a new head on the backbone of `drafter`, as JSON.")
    start_from_counts: bool = _field(True, "Start a new relay head from counts of the responses.")

    responses: list[str] = _field([], "Response files.")
    prompts: list[str] = _field([], "Sources of prompts to answer before the training.")
    self_synthesise: int = _field(0, "Prompts that the target thinks of before the training.")
    response_tokens: int = _field(256, "Longest response to these prompts.")
    held_out: list[str] = _field([], "Response files to measure replay τ on.")
    num_anchors: int = _field(48, "Blocks per sequence and step.")
    max_length: int = _field(512, "Longest sequence in tokens.")
    num_held_out: int = _field(64, "Examples kept from training.")
    num_replayed: int = _field(16, "Held-out responses replayed at an evaluation.")
    feature_bytes: int = _field(8 << 30, "Memory for features of the target.")
    feature_folder: str | None = _field(None, "Keep features of the target there instead of in memory.")
    feature_folder_bytes: int = _field(64 << 30, "Largest size of that folder.")

    train_selector: bool = _field(True, "Train the selector.")
    selector_start: float = _field(0.0, "Where the selector joins in.")
    freeze_backbone: bool = _field(False, "Train the selector alone.")
    num_selector_anchors: int = _field(16, "Blocks per sequence for the selector.")
    head_learning_rate: float | None = _field(None, "Peak learning rate of the head; default: `learning_rate`.")
    loop_start: float = _field(1.0, "Where stages are unrolled as DLoop drafts them.")
    loop_depth: int = _field(3, "Stages that are unrolled then.")
    loop_tokens: int | None = _field(None, "Tokens of such a stage.")
    contribution_start: float = _field(1.0, "Where the contribution weight sets in.")
    base_loss: str = _field("ce", "ce, kl or l1.")
    soft_weight: float = _field(0.5, "Share of the divergence in the base loss.")
    num_soft_targets: int = _field(32, "Tokens of the target's distribution that are looked at.")
    slot_weight: str = _field("decay", "decay or dpace.")
    decay: float = _field(4.0, "Time constant of the slot weight.")
    base_weight: float = _field(1.0, "Weight of the backbone's own losses.")
    support_weight: float = _field(0.1, "Weight of the candidate-support loss.")
    support_margin: float = _field(0.5, "Margin of the candidate-support loss.")
    repair_weight: float = _field(1.0, "Weight of the head's loss.")
    head_l1_share: float = _field(0.0, "Share of the distance from the target's distribution in it.")
    head_kl_share: float = _field(0.0, "Share of the divergence from the target's distribution in it.")
    confidence_weight: float = _field(1.0, "Weight of the confidence's loss.")
    base_anchor_end: float = _field(0.0, "Where the base loss has handed over to the head's.")
    contribution_floor: float = _field(0.1, "Least contribution weight.")
    chunk_rows: int = _field(1024, "Slots whose vocabulary logits exist at the same time.")

    least_acceptance_length: float = _field(1.1, "Stop a run whose replay τ is lower.")
    least_after: float = _field(0.5, "Share of the training after which that is tested.")

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "drafter_config", "new_head"]

    def __post_init__(self):
        if self.metric_for_best_model is None:  # there is no evaluation loss
            self.metric_for_best_model = "eval_acceptance_length"
        self._refuse_to_publish()
        super().__post_init__()
        if self.train_selector and self.repair_weight <= 0:
            raise ValueError(
                f"`repair_weight` {self.repair_weight} leaves the selector without a loss; use a weight above 0, or "
                "`train_selector=False`."
            )
        has_head_loss = self.train_selector and self.selector_start == 0 and not self.base_anchor_end
        if self.base_weight < 0 or (self.base_weight == 0 and not has_head_loss):
            raise ValueError(
                f"`base_weight` is {self.base_weight}; expected at least 0, and more than that where the head is not "
                "trained from the first step on, because no other loss is left."
            )
        if self.freeze_backbone and not self.train_selector:
            raise ValueError("`freeze_backbone=True` with `train_selector=False` leaves nothing to train.")
        if self.freeze_backbone and self.selector_start > 0:
            raise ValueError(
                f"`freeze_backbone=True` with `selector_start` {self.selector_start} has nothing to train before it; "
                "use `selector_start=0`."
            )
        if self.base_anchor_end and (self.freeze_backbone or self.selector_start > 0):
            raise ValueError(
                f"`base_anchor_end` {self.base_anchor_end} hands the loss over from the backbone to the head from the "
                "first step on; leave out `freeze_backbone` and `selector_start`."
            )
        if self.head_learning_rate is not None and (self.head_learning_rate <= 0 or not self.train_selector):
            raise ValueError(
                f"`head_learning_rate` is {self.head_learning_rate}; expected a number above 0 for a head that is "
                "trained. Leave it out for that of the backbone."
            )
        if self.target_dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"`target_dtype` is {self.target_dtype!r}; expected float32, bfloat16 or float16.")
        if self.fsdp:
            raise NotImplementedError(
                "`fsdp` is not supported: training calls parts of the drafter on their own, which sharded modules do "
                "not see. A drafter is small; start one process for each GPU without it."
            )
        counts = ("num_anchors", "num_selector_anchors", "loop_depth", "chunk_rows", "num_soft_targets")
        for name in (*counts, "num_replayed"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; expected at least 1.")
        for name in ("selector_start", "loop_start", "contribution_start", "base_anchor_end", "least_after"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; expected a share between 0 and 1.")
        makes_responses = bool(self.prompts or self.self_synthesise)
        if makes_responses and (len(self.responses) != 1 or ".jsonl" in self.responses[0]):
            raise ValueError(
                f"`responses` is {self.responses}; with `prompts` or `self_synthesise` it must name the one folder to "
                "write the responses into."
            )
        if makes_responses and self.world_size > 1:
            raise ValueError(
                "`prompts` and `self_synthesise` make responses in one process; run `hf-drelay prepare-data` first, "
                "and leave them out."
            )
        if self.drafter and (self.preset or self.drafter_config):
            raise ValueError(
                "`drafter` brings its own configuration; leave out `preset` and `drafter_config`, or the `drafter`."
            )
        if self.new_head is not None and not self.drafter:
            raise ValueError(
                f"`new_head` {self.new_head} needs the `drafter` whose backbone it gets; name one, or set the fields "
                "of a new drafter with `drafter_config`."
            )
        if self.new_head is not None and not isinstance(self.new_head, dict):
            raise ValueError(f'`new_head` is {self.new_head!r}; expected fields as JSON, such as {{"head": "relay"}}.')
        if self.new_head is not None and not self.train_selector:
            raise ValueError("`train_selector=False` would leave the `new_head` untrained; leave one of them out.")
        # The trainer's batches carry lengths and keys that no forward signature names.
        self.remove_unused_columns = False
        self.objective()

    def _refuse_to_publish(self) -> None:
        """The trainer would upload checkpoints without a card and unchecked, and a token would get into the recipe."""
        for f in fields(self):
            if (f.name == "push_to_hub" or f.name.startswith("hub_")) and getattr(self, f.name) != f.default:
                value = "set" if f.name == "hub_token" else repr(getattr(self, f.name))
                raise ValueError(
                    f"`{f.name}` is {value}, but a training run publishes nothing; leave it out. Afterwards publish "
                    "the drafter with `hf-drelay push FOLDER OWNER/NAME` or `DRelayModel.push_to_hub`, which write a "
                    "card and check it."
                )

    def objective(self) -> ObjectiveConfig:
        """Weights of the loss, at the start of the run."""
        names = {f.name for f in fields(ObjectiveConfig)} & {f.name for f in fields(self)} - {"loop_depth"}
        return ObjectiveConfig(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_yaml(cls, path: str | Path, **changes) -> "DRelayTrainingConfig":
        """Read a YAML file; `changes` win over what it says."""
        return cls(**read_yaml(path) | changes)


def read_yaml(path: str | Path) -> dict:
    """Fields that a YAML file sets; a `ValueError` names one that does not exist."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"`{path}` is not valid YAML: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"`{path}` must hold one `name: value` in each line.")
    unknown = set(values) - {f.name for f in fields(DRelayTrainingConfig) if f.init}
    if unknown:
        raise ValueError(f"`{path}` sets `{sorted(unknown)[0]}`, which is no argument of a training run.")
    for f in fields(DRelayTrainingConfig):
        # YAML takes numbers such as 1e-3, without a point, for text.
        if f.name in values and isinstance(values[f.name], str) and f.type in (float, int):
            try:
                values[f.name] = f.type(values[f.name])
            except ValueError:
                raise ValueError(f"`{path}` sets `{f.name}` to {values[f.name]!r}, which is no number.") from None
    return values
