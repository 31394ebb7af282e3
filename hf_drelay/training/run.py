"""A whole training run from one configuration: target, drafter, data, trainer, and the folder that comes out."""

import copy
import json
import shutil
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_drelay.evaluation.records import environment, replace_file, write_json
from hf_drelay.modeling.checkpoint_formats import is_public_format
from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.targets import describe_demo_target, load_demo_target

from .config import DRelayTrainingConfig
from .data import ResponseExample, frequent_tokens, load_responses, response_files, split_by_prompt
from .head_start import start_from_counts
from .new_head import new_head_config, with_new_head
from .responses import Decoding, prepare_responses
from .trainer import DRelayTrainer


logger = logging.get_logger(__name__)


def load_target(config: DRelayTrainingConfig):
    """The frozen target of a run with its tokenizer, on the device of the run. Returns `(model, tokenizer)`."""
    dtype = getattr(torch, config.target_dtype)
    if config.target is None:
        return load_demo_target(dtype=dtype, device=config.device)
    model = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype).to(config.device)
    return model.eval(), AutoTokenizer.from_pretrained(config.target)


def load_examples(
    config: DRelayTrainingConfig, tokenizer, mode: str | None = None
) -> tuple[list[ResponseExample], list[ResponseExample]]:
    """Training and held-out examples, in a chat template of that `mode`."""
    if not config.responses:
        raise ValueError("`responses` names no file; make some with `hf-drelay prepare-data`.")
    examples = load_responses(config.responses, tokenizer, config.max_length, mode=mode)
    if config.held_out:
        held_out = load_responses(config.held_out, tokenizer, config.max_length, mode=mode)
        prompts = {example.prompt for example in held_out}
        train = [example for example in examples if example.prompt not in prompts]
    else:
        train, held_out = split_by_prompt(examples, config.num_held_out)
    if not train:
        raise ValueError(
            f"All {len(examples)} responses are held out (`held_out` {config.held_out}, `num_held_out` "
            f"{config.num_held_out}); give more responses."
        )
    return train, held_out


def starting_config(config: DRelayTrainingConfig, target_config) -> DRelayConfig:
    """Configuration of the drafter that a run starts from."""
    if config.drafter is not None:
        # Of a public format the weights tell a part of the configuration.
        is_public = is_public_format(DRelayConfig.get_config_dict(config.drafter)[0])
        own = (
            DRelayModel.from_pretrained(config.drafter).config
            if is_public
            else DRelayConfig.from_pretrained(config.drafter)
        )
        return own if config.new_head is None else new_head_config(own, config.new_head)
    return drafter_config(config, target_config)


def drafter_config(config: DRelayTrainingConfig, target_config) -> DRelayConfig:
    """Configuration of a new drafter."""
    own = dict(config.drafter_config or {})
    preset = config.preset or ("smollm2-135m" if config.target is None else None)

    def build(**fields) -> DRelayConfig:
        return DRelayConfig.preset(preset, **fields) if preset else DRelayConfig.for_target(target_config, **fields)

    drafter = build(**own)
    feeding = drafter.num_target_layers - drafter.num_hidden_layers - 1
    if config.start_from_target and "target_layer_ids" not in own and feeding not in drafter.target_layer_ids:
        # The fused feature starts as the tap that feeds the copied layers; the highest tap lies closest to it.
        own["target_layer_ids"] = sorted({*drafter.target_layer_ids[:-1], feeding})
        drafter = build(**own)
    return drafter


def build_drafter(config: DRelayTrainingConfig, target, train_examples: list[ResponseExample]) -> DRelayModel:
    """The drafter that a run starts from, in fp32."""
    torch.manual_seed(config.seed)
    if config.drafter is not None:
        drelay = DRelayModel.from_pretrained(config.drafter, dtype=torch.float32)
        if config.new_head is not None:
            drelay = with_counts(with_new_head(drelay, config.new_head), config, train_examples)
        return drelay.to(config.device)
    own = drafter_config(config, target.config)
    drelay = DRelayModel(own)
    if own.draft_vocab_size is not None:
        drelay.set_shortlist(frequent_tokens(train_examples, own.draft_vocab_size, always=own.eos_token_ids))
    if config.start_from_target:
        drelay.drafter.initialize_from_target(target)
    return with_counts(drelay, config, train_examples).to(config.device)


def with_counts(drelay: DRelayModel, config: DRelayTrainingConfig, train_examples) -> DRelayModel:
    """The same drafter; its new head starts from counts if the run wants that."""
    if config.start_from_counts and config.train_selector:
        start_from_counts(drelay, train_examples)
    return drelay


def build_trainer(config: DRelayTrainingConfig):
    """Everything of a run, ready to start. Returns `(trainer, tokenizer)`."""
    if not (config.prompts or config.self_synthesise):
        response_files(config.responses)  # a wrong name should not cost the time to load a target
    target, tokenizer = load_target(config)
    mode = starting_config(config, target.config).chat_template_mode
    if config.prompts or config.self_synthesise:
        decoding = Decoding(config.response_tokens, template_mode=mode)
        prepare_responses(
            target,
            tokenizer,
            config.responses[0],
            config.prompts,
            config.self_synthesise,
            decoding=decoding,
            seed=config.seed,
        )
    train_examples, held_out = load_examples(config, tokenizer, mode)
    drelay = build_drafter(config, target, train_examples)
    return DRelayTrainer(drelay, target, config, train_examples, held_out), tokenizer


def train(config: DRelayTrainingConfig) -> Path:
    """
    Run the training, or go on where an earlier call with the same `output_dir` stopped.

    Returns:
        The folder with the trained drafter (`output_dir/drafter`). Beside it lie `recipe.yaml` and
        `training_log.json`.
    """
    output = Path(config.output_dir)
    _claim(output, config)
    started = time.perf_counter()
    trainer, _ = build_trainer(config)
    trainer.train(resume_from_checkpoint=last_checkpoint(output))
    trainer.evaluate()
    if trainer.is_world_process_zero():
        trainer.model.requires_grad_(True)
        save_release(trainer.model, output / "drafter")
        log = {
            "environment": environment(),
            "target": describe_demo_target(trainer.target) if config.target is None else {"name": config.target},
            "num_examples": len(trainer.train_dataset),
            "num_tokens": trainer.train_dataset.num_tokens,
            "minutes_of_this_sitting": (time.perf_counter() - started) / 60,
            "recipe": recipe(config),
            "log": trainer.state.log_history,
        }
        write_json(output / "training_log.json", log)
        shutil.copyfile(output / "training_log.json", output / "drafter" / "training_log.json")
        shutil.copyfile(output / "recipe.yaml", output / "drafter" / "recipe.yaml")
    return output / "drafter"


def last_checkpoint(folder: Path) -> str | None:
    """Newest checkpoint that was written to its end; the state is written last."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            logger.warning(f"hf_drelay: `{path}` was not written to its end; going on from the one before.")
            continue
        return str(path)
    return None


def recipe(config: DRelayTrainingConfig) -> dict:
    """
    What a configuration sets: the arguments that differ from their defaults, but for the folder. A resumed run is
    compared with it, so paths are whole; they are cut when the drafter is published.
    """
    defaults = DRelayTrainingConfig(output_dir=config.output_dir, use_cpu=config.use_cpu)
    unsaid = ("output_dir", "logging_dir", "hub_token")  # the token is a secret, wherever it was set
    names = [f.name for f in fields(DRelayTrainingConfig) if f.init and f.name not in unsaid]
    values = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(defaults, name)}
    return json.loads(json.dumps(values, default=str))


def save_release(drelay: DRelayModel, folder: Path) -> None:
    """Weights in bfloat16 and a configuration that loads them as float32, in which CPUs are fast. No code files."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy.deepcopy(drelay).to(torch.bfloat16).save_pretrained(scratch)
        config = json.loads((Path(scratch) / "config.json").read_text()) | {"dtype": "float32"}
        config.pop("use_cache", None)  # put there by the trainer
        write_json(folder / "config.json", config)
        replace_file(
            folder / "model.safetensors", lambda part: shutil.copyfile(Path(scratch) / "model.safetensors", part)
        )


def _claim(output: Path, config: DRelayTrainingConfig) -> None:
    """Note the recipe in the folder of the run; refuse one that holds checkpoints of another recipe."""
    file = output / "recipe.yaml"
    own = recipe(config)
    if file.exists() and last_checkpoint(output) is not None:
        other = yaml.safe_load(file.read_text(encoding="utf-8"))
        different = sorted(name for name in {**own, **other} if own.get(name) != other.get(name))
        if different:
            raise ValueError(
                f"`output_dir` {str(output)!r} holds a run with another `{different[0]}` "
                f"({other.get(different[0])!r}, now {own.get(different[0])!r}); give another folder, or the same "
                "arguments to go on."
            )
    if config.process_index > 0:
        return
    text = yaml.safe_dump(own, sort_keys=False, allow_unicode=True)
    replace_file(file, lambda part: part.write_text(text, encoding="utf-8"))
