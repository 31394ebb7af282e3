"""Bad input is refused with a sentence that names the argument at fault and says what to do instead."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Cache, DynamicCache, GenerationConfig, QuantizedCache, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.modeling_drafter import DRelayDrafterModel
from hf_drelay.modeling.modeling_drelay import DRelayModel


NAN = float("nan")


@pytest.fixture(scope="module")
def target(toolbox):
    return toolbox.target("llama")


@pytest.fixture(scope="module")
def drafter(toolbox, target):
    return toolbox.drafter(target)


@pytest.fixture
def generate(toolbox, target, drafter):
    """Generate with the drafter and arguments that do not fit."""

    def call(assistant=drafter, input_ids=None, model=target, **kwargs):
        return toolbox.greedy(model, toolbox.prompt(6) if input_ids is None else input_ids, assistant, 8, **kwargs)

    return call


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 100}, r"`assistant_model` has `vocab_size` 100.*LlamaForCausalLM has 96.*train one"),
        ({"hidden_size": 64}, r"`assistant_model` has `hidden_size` 64.*LlamaForCausalLM has 32.*train one"),
        (
            {"num_target_layers": 12, "target_layer_ids": [1, 9]},
            r"`target_layer_ids` \[1, 9\] need a target of more than 9 layers.*LlamaForCausalLM has 4.*train one",
        ),
    ],
    ids=["vocabulary", "hidden_size", "too_few_layers"],
)
def test_drafter_is_refused_when_it_was_made_for_another_target(toolbox, target, generate, fields, message):
    with pytest.raises(ValueError, match=message):
        generate(toolbox.drafter(target, **fields))


def test_batch_is_refused_in_the_loop_of_the_host(toolbox, drafter, generate):
    with pytest.raises(ValueError, match=r"`input_ids` has a batch of 2.*once for each.*`decoding_loop='own'`"):
        view = drafter.with_options(decoding_loop="host")
        generate(view, input_ids=torch.cat([toolbox.prompt(6), toolbox.prompt(6, seed=1)]))


def test_beams_are_refused(generate):
    with pytest.raises(ValueError, match=r"`num_beams` is 3.*use `num_beams=1`"):
        generate(num_beams=3)


def test_several_return_sequences_are_refused_in_the_loop_of_the_host(target, drafter, toolbox):
    prompt = toolbox.prompt(6)
    with pytest.raises(ValueError, match=r"`num_return_sequences` is 2.*once for each"):
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=drafter.with_options(decoding_loop="host"),
            do_sample=True,
            num_return_sequences=2,
            max_new_tokens=4,
        )


def test_filled_cache_is_refused_in_the_loop_of_the_host(toolbox, target, drafter, generate):
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(toolbox.prompt(5), **{toolbox.cache_keyword(): cache})
    with pytest.raises(ValueError, match=r"`past_key_values` already holds 5 tokens.*with an empty cache"):
        generate(drafter.with_options(decoding_loop="host"), **{toolbox.cache_keyword(): cache})


def test_filled_cache_is_refused_when_nothing_is_left_to_feed(toolbox, target, generate):
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(toolbox.prompt(6), **{toolbox.cache_keyword(): cache})
    with pytest.raises(ValueError, match=r"already holds 6 tokens, but the prompt has 6.*at least one new token"):
        generate(**{toolbox.cache_keyword(): cache})


def test_empty_cache_of_the_user_is_fine(toolbox, target, generate):
    cache = DynamicCache(config=target.config)
    expected = toolbox.greedy(target, toolbox.prompt(6), max_new_tokens=8)
    assert torch.equal(generate(**{toolbox.cache_keyword(): cache}), expected)


def test_call_without_a_cache_is_refused(generate):
    with pytest.raises(ValueError, match=r"`use_cache=False`.*with `use_cache=True`, or without `assistant_model`"):
        generate(use_cache=False)


def test_encoder_decoder_target_is_refused(drafter, toolbox):
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(
        ValueError, match=r"`assistant_model`.*T5ForConditionalGeneration is an encoder-decoder.*without"
    ):
        toolbox.greedy(model, toolbox.prompt(6), drafter, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_lookup_num_tokens", 3), ("use_mtp", True), ("speculation_type", "dflash"), ("assistant_early_exit", 1)],
)
def test_second_source_of_drafts_is_refused(target, generate, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` is set.*leave `{name}` unset"):
        generate(generation_config=GenerationConfig(**{name: value}, max_new_tokens=4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assistant_lookbehind", 5),
        ("target_lookbehind", 5),
        ("max_matching_ngram_size", 2),
        ("num_assistant_tokens", 7),
    ],
)
def test_option_of_another_assistant_is_refused(generate, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}, but this drafter has options of its own"):
        generate(generation_config=GenerationConfig(**{name: value}, max_new_tokens=4))


def test_decoding_by_other_logits_is_refused(generate):
    with pytest.raises(ValueError, match="`dola_layers` is 'low', which decodes by other logits"):
        generate(generation_config=GenerationConfig(dola_layers="low", max_new_tokens=4))


def test_lossy_ensemble_is_refused(generate):
    with pytest.raises(ValueError, match=r"`assistant_ensemble_weight` 0.5 makes decoding lossy.*leave it unset"):
        generate(generation_config=GenerationConfig(assistant_ensemble_weight=0.5, max_new_tokens=4))


def test_assistant_tokenizer_is_refused(toolbox, generate):
    tokenizer = toolbox.tokenizer(toolbox.VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"`assistant_tokenizer` is not needed.*Leave it out"):
        generate(tokenizer=tokenizer, assistant_tokenizer=tokenizer)


def test_statistics_stay_those_of_the_last_good_call_when_a_call_is_refused(generate, drafter):
    view = drafter.with_options()
    generate(view)
    statistics = view.statistics
    with pytest.raises(ValueError, match="num_beams"):
        generate(view, num_beams=3)
    assert view.statistics is statistics and statistics.num_rounds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_stages": 0}, r"`max_stages` is 0.*at least 1"),
        ({"max_stages": 1.5}, r"`max_stages` is 1.5.*at least 1"),
        ({"loop_gate": 0.5}, r"`loop_gate` is 0.5.*at most 0.*None"),
        ({"loop_gate": NAN}, r"`loop_gate` is nan.*at most 0.*None"),
        ({"loop_gate": "often"}, r"`loop_gate` is 'often'.*at most 0.*'auto'.*None"),
        ({"num_draft_tokens": 0}, r"`num_draft_tokens` is 0; use .*at least 1, or None"),
        ({"num_draft_tokens": 2.5}, r"`num_draft_tokens` is 2.5; use .*at least 1, or None"),
        ({"proposal": "beam"}, r"`proposal` is 'beam'; expected one of"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("place", ["with_options", "configuration"])
def test_drafting_option_is_refused_when_its_value_is_impossible(drafter, place, options, message):
    with pytest.raises(ValueError, match=message):
        if place == "with_options":
            drafter.with_options(**options)
        else:
            DRelayConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoding_loop": "mine"}, r"`decoding_loop` is 'mine'; expected one of"),
        ({"tree_budget": 0}, r"`tree_budget` is 0; use .*at least 1, or None"),
        ({"tree_budget": 4, "decoding_loop": "host"}, r"`tree_budget` 4 needs `decoding_loop='own'`"),
        ({"proposal": "coupled", "decoding_loop": "host"}, r"`proposal='coupled'` needs `decoding_loop='own'`"),
    ],
    ids=["loop", "budget", "tree_in_the_host", "coupled_in_the_host"],
)
def test_option_of_verification_is_refused_when_it_cannot_be(drafter, options, message):
    with pytest.raises(ValueError, match=message):
        drafter.with_options(**options)


def test_quantized_cache_is_refused(generate, target, toolbox):
    cache = QuantizedCache.__new__(QuantizedCache)  # made without a backend, which need not be installed
    Cache.__init__(cache, layer_class_to_replicate=DynamicLayer)
    with pytest.raises(ValueError, match=r"`cache_implementation='quantized'` cannot take rejected tokens back"):
        generate(**{toolbox.cache_keyword(): cache})


@pytest.mark.parametrize("name", ["loop_gates", "block_size"])
def test_option_is_refused_when_it_is_unknown(drafter, name):
    with pytest.raises(TypeError, match=rf"unknown option `{name}`; it takes .*'loop_gate'"):
        drafter.with_options(**{name: 1})


def test_selector_is_refused_when_the_drafter_has_none(toolbox, target):
    drafter = toolbox.drafter(target, use_selector=False)
    with pytest.raises(ValueError, match=r"`use_selector` is True, but this drafter has no selector; leave"):
        drafter.with_options(use_selector=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 1}, r"`block_size` 1 leaves nothing to draft.*at least 2"),
        ({"block_size": 1, "layout": "shifted"}, r"`block_size` 1 leaves nothing to draft.*at least 2"),
        ({"pool_size": 97}, r"`pool_size` 97 must lie between 1 and the 96 tokens.*lower it"),
        ({"pool_size": 9, "draft_vocab_size": 8}, r"`pool_size` 9 must lie between 1 and the 8 tokens.*lower it"),
        ({"pool_size": 1}, r"`pool_size` 1 leaves the selector no choice.*at least 2"),
        ({"draft_vocab_size": 97}, r"`draft_vocab_size` 97 must lie between 1 and `vocab_size` 96"),
        ({"pool_sise": 8}, r"Unknown configuration field `pool_sise`. Did you mean `pool_size`"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_configuration_is_refused_when_a_field_cannot_be(target, fields, message):
    with pytest.raises(ValueError, match=message):
        DRelayConfig.for_target(target.config, **fields)


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_folder_is_refused_when_its_weights_lack_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["drafter.fc.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of DRelayModel.*`drafter\.fc\.weight`.*again"):
        DRelayModel.from_pretrained(folder)


def test_folder_is_refused_when_its_weights_have_another_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pair_rank": 4}))
    with pytest.raises(RuntimeError, match=r"pair_path\.successor_table|size mismatch|ignore_mismatched_sizes"):
        DRelayModel.from_pretrained(folder)


@pytest.mark.parametrize("size", [0, 4, 2000], ids=["empty", "without_header", "cut_short"])
def test_folder_is_refused_when_its_weight_file_is_corrupt(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"`pretrained_model_name_or_path` .*corrupt weight file.*again"):
        DRelayModel.from_pretrained(folder)


def test_folder_is_refused_when_it_has_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        DRelayModel.from_pretrained(folder)


def test_folder_is_refused_when_it_is_empty(tmp_path):
    with pytest.raises(OSError, match=r"no file named model\.safetensors|does not appear to have a file named config"):
        DRelayModel.from_pretrained(tmp_path)


def test_folder_of_one_part_is_refused_when_the_whole_is_asked_for(drafter, tmp_path):
    drafter.drafter.save_pretrained(tmp_path / "part")
    with pytest.raises(ValueError, match=r"lacks \d+ weights of DRelayModel.*`selector\.|`pair_path"):
        DRelayModel.from_pretrained(tmp_path / "part")


def test_folder_of_the_whole_gives_its_drafter_when_the_part_is_asked_for(drafter, folder, tmp_path):
    # The backbone alone can be taken from a whole checkpoint, like any base model of transformers.
    shutil.copytree(folder, tmp_path / "copy")
    loaded = DRelayDrafterModel.from_pretrained(tmp_path / "copy")
    assert torch.equal(loaded.fc.weight, drafter.drafter.fc.weight)
