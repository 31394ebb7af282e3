"""What a configuration derives from a target, what it stores, and which fields it refuses."""

import json

import pytest
from transformers import Gemma3Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

from hf_drelay.modeling.configuration_drelay import (
    DRelayConfig,
    DRelayDrafterConfig,
    DRelaySelectorConfig,
    evenly_spaced_layers,
)


SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 777,
    "rms_norm_eps": 3e-6,
}
TOKENS = {"bos_token_id": 11, "eos_token_id": [12, 13], "pad_token_id": 14}
NO_TRUNK = {"use_rank_head": False, "use_repair_gate": False}
ROPE = {"rope_type": "default", "rope_theta": 5e5}
NESTED_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}

TARGETS = {
    "llama": LlamaConfig(**SIZES, **TOKENS, rope_parameters=dict(ROPE)),
    "mistral": MistralConfig(**SIZES, **TOKENS, rope_parameters=dict(ROPE), sliding_window=8),
    "qwen3": Qwen3Config(**SIZES, **TOKENS, rope_parameters=dict(ROPE)),
    "gemma3": Gemma3TextConfig(**SIZES, **TOKENS, rope_parameters=NESTED_ROPE, sliding_window=8),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **TOKENS, rope_parameters=dict(ROPE), num_experts=4),
}
every_target = pytest.mark.parametrize("target_config", TARGETS.values(), ids=TARGETS)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_target_layers": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pool_size": 8,
    "selector_hidden_size": 16,
    "selector_num_heads": 2,
}


class TestForTarget:
    @every_target
    def test_widths_are_the_targets(self, target_config):
        config = DRelayConfig.for_target(target_config)
        names = set(SIZES) - {"num_hidden_layers"}
        assert {name: getattr(config, name) for name in names} == {name: SIZES[name] for name in names}
        assert config.num_target_layers == SIZES["num_hidden_layers"]

    @every_target
    def test_special_tokens_are_the_targets(self, target_config):
        config = DRelayConfig.for_target(target_config)
        assert {name: getattr(config, name) for name in TOKENS} == TOKENS
        assert config.mask_token_id == TOKENS["pad_token_id"]

    @every_target
    def test_taps_are_five_evenly_spaced_layers(self, target_config):
        assert DRelayConfig.for_target(target_config).target_layer_ids == [1, 3, 5, 7, 9]

    @every_target
    def test_result_passes_through_a_saved_file(self, target_config, tmp_path):
        config = DRelayConfig.for_target(target_config)
        config.save_pretrained(tmp_path)
        assert DRelayConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()

    @pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "qwen3_moe"])
    def test_rope_is_copied_when_the_target_has_one(self, kind):
        assert DRelayConfig.for_target(TARGETS[kind]).rope_parameters == ROPE

    def test_rope_is_that_of_the_full_layers_when_each_layer_type_has_its_own(self):
        assert DRelayConfig.for_target(TARGETS["gemma3"]).rope_parameters == NESTED_ROPE["full_attention"]

    def test_scaled_rope_is_carried_over(self):
        rope = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
        target_config = LlamaConfig(**SIZES, rope_parameters=dict(rope))
        assert DRelayConfig.for_target(target_config).rope_parameters == rope

    def test_partial_rope_becomes_a_plain_one(self):
        """The drafter rotates whole heads, and a cut of the target's rope would change what its base means."""
        target_config = LlamaConfig(**SIZES, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})
        assert DRelayConfig.for_target(target_config).rope_parameters == ROPE

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [("llama", False), ("mistral", False), ("qwen3", True), ("gemma3", True), ("qwen3_moe", True)],
    )
    def test_qk_norm_follows_the_family(self, kind, expected):
        assert DRelayConfig.for_target(TARGETS[kind]).use_qk_norm is expected

    def test_text_part_is_used_when_the_target_is_multimodal(self):
        text = TARGETS["gemma3"].to_dict()
        config = DRelayConfig.for_target(Gemma3Config(text_config=text))
        assert (config.vocab_size, config.hidden_size) == (SIZES["vocab_size"], SIZES["hidden_size"])

    def test_end_tokens_of_the_whole_configuration_are_kept_when_the_text_part_knows_fewer(self):
        """Published Gemma 3 files name `<end_of_turn>` outside the text part only."""
        text = TARGETS["gemma3"].to_dict() | {"eos_token_id": 1}
        target_config = Gemma3Config(text_config=text, eos_token_id=[1, 106])
        assert set(DRelayConfig.for_target(target_config).eos_token_ids) == {1, 106}

    def test_mask_token_is_in_the_vocabulary_when_the_target_has_no_padding(self):
        config = DRelayConfig.for_target(LlamaConfig(**SIZES, pad_token_id=None))
        assert (config.mask_token_id, config.use_mask_embedding) == (0, True)

    def test_head_width_is_derived_when_the_target_does_not_state_it(self):
        target_config = LlamaConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"})
        assert DRelayConfig.for_target(target_config).head_dim == 12

    def test_selector_width_follows_the_targets_width(self):
        narrow = DRelayConfig.for_target(LlamaConfig(**SIZES | {"hidden_size": 1024}))
        wide = DRelayConfig.for_target(LlamaConfig(**SIZES | {"hidden_size": 1028}))
        assert (narrow.selector_hidden_size, narrow.pair_rank) == (256, 128)
        assert (wide.selector_hidden_size, wide.pair_rank) == (512, 256)

    def test_target_name_is_stored(self):
        target_config = LlamaConfig(**SIZES)
        target_config._name_or_path = "owner/model"
        assert DRelayConfig.for_target(target_config).target_name_or_path == "owner/model"

    def test_overrides_win_over_what_is_derived(self):
        config = DRelayConfig.for_target(TARGETS["llama"], num_hidden_layers=1, target_layer_ids=[4], eos_token_id=9)
        assert (config.num_hidden_layers, config.target_layer_ids, config.eos_token_id) == (1, [4], 9)

    def test_targets_configuration_is_not_changed_by_the_drafters(self):
        DRelayConfig.for_target(TARGETS["llama"]).rope_parameters["rope_theta"] = 1.0
        assert TARGETS["llama"].rope_parameters["rope_theta"] == ROPE["rope_theta"]


class TestTaps:
    @pytest.mark.parametrize(
        ("num_layers", "expected"),
        [
            (36, [1, 9, 17, 25, 33]),
            (40, [1, 10, 19, 28, 37]),
            (32, [1, 8, 15, 22, 29]),
            (64, [1, 16, 31, 46, 61]),
        ],
    )
    def test_taps_equal_the_published_ones(self, num_layers, expected):
        assert evenly_spaced_layers(num_layers, 5) == expected

    def test_single_tap_is_the_middle_layer(self):
        assert evenly_spaced_layers(36, 1) == [18]

    @pytest.mark.parametrize("num_layers", range(1, 14))
    def test_taps_are_distinct_layers_of_a_shallow_target(self, num_layers):
        taps = evenly_spaced_layers(num_layers, 5)
        assert 1 <= len(set(taps)) == len(taps) <= 5
        assert all(0 <= tap < num_layers for tap in taps)


class TestPresets:
    @pytest.mark.parametrize(
        ("name", "hidden_size", "taps", "num_drafts"),
        [
            ("smollm2-135m", 576, [1, 8, 14, 20, 27], 7),
            ("qwen3-4b", 2560, [1, 9, 17, 25, 33], 15),
            ("qwen3-8b", 4096, [1, 9, 17, 25, 33], 15),
        ],
    )
    def test_preset_has_the_targets_sizes(self, name, hidden_size, taps, num_drafts):
        config = DRelayConfig.preset(name)
        assert (config.hidden_size, config.target_layer_ids, config.num_drafts) == (hidden_size, taps, num_drafts)

    def test_preset_takes_overrides(self):
        config = DRelayConfig.preset("qwen3-4b", block_size=8, layout="shifted")
        assert (config.block_size, config.num_drafts, config.vocab_size) == (8, 8, 151936)

    def test_unknown_preset_names_the_known_ones(self):
        with pytest.raises(ValueError, match="`name` 'gpt2' is no preset.*qwen3-4b.*smollm2-135m"):
            DRelayConfig.preset("gpt2")


class TestDerivedFields:
    @pytest.mark.parametrize(("layout", "expected"), [("fill_in", 5), ("shifted", 6)])
    def test_number_of_drafts_follows_the_layout(self, layout, expected):
        assert DRelayConfig(**SMALL, block_size=6, layout=layout).num_drafts == expected

    def test_sliding_layers_are_causal_inside_the_block_by_default(self):
        config = DRelayConfig(**SMALL, layer_types=["sliding_attention", "full_attention"], sliding_window=4)
        assert config.block_causal == [True, False]

    def test_block_causality_can_be_set_per_layer(self):
        config = DRelayConfig(**SMALL, block_causal=[False, True])
        assert (config.layer_types, config.block_causal) == (["full_attention"] * 2, [False, True])

    def test_rope_base_is_taken_from_the_old_field(self):
        assert DRelayConfig(**SMALL, rope_theta=123.0).rope_parameters["rope_theta"] == 123.0

    @pytest.mark.parametrize(("eos", "expected"), [(None, []), (3, [3]), ([3, 4], [3, 4])])
    def test_end_tokens_are_a_list(self, eos, expected):
        assert DRelayConfig(**SMALL, eos_token_id=eos).eos_token_ids == expected

    @pytest.mark.parametrize(("shortlist", "expected"), [(None, 64), (20, 20)])
    def test_output_vocabulary_is_the_shortlist_when_there_is_one(self, shortlist, expected):
        assert DRelayConfig(**SMALL, draft_vocab_size=shortlist).output_vocab_size == expected


class TestStorage:
    def test_every_field_passes_through_a_saved_file(self, tmp_path):
        changed = {
            "target_name_or_path": "owner/model",
            "target_revision": "abc",
            "chat_template_mode": "non_thinking",
            "target_layer_ids": [-1, 3, 11],
            "eos_token_id": [1, 2],
            "block_size": 5,
            "layout": "shifted",
            "mask_token_id": 7,
            "use_mask_embedding": True,
            "draft_vocab_size": 32,
            "use_qk_norm": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "block_causal": [False, True],
            "use_history_read": False,
            "history_window": 9,
            "pair_rank": 0,
            "provisional_norm": "hidden",
            "proposal": "greedy",
            "num_draft_tokens": 3,
            "loop_gate": float("-inf"),
            "max_stages": 4,
        }
        DRelayConfig(**SMALL | changed).save_pretrained(tmp_path)
        loaded = DRelayConfig.from_pretrained(tmp_path)
        assert {name: getattr(loaded, name) for name in changed} == changed

    def test_saved_file_is_json(self, tmp_path):
        DRelayConfig(**SMALL).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "drelay"

    @pytest.mark.parametrize(
        ("part", "model_type"), [(DRelayDrafterConfig, "drelay_drafter"), (DRelaySelectorConfig, "drelay_selector")]
    )
    def test_part_configuration_has_the_same_fields_under_its_own_type(self, part, model_type, tmp_path):
        whole = DRelayConfig(**SMALL)
        fields = {name: getattr(whole, name) for name in DRelayConfig.own_fields()}
        part(**fields).save_pretrained(tmp_path)
        loaded = part.from_pretrained(tmp_path)
        assert {name: getattr(loaded, name) for name in fields} == fields
        assert (loaded.model_type, whole.model_type) == (model_type, "drelay")

    def test_lists_of_two_configurations_are_separate(self):
        first, second = DRelayConfig(**SMALL), DRelayConfig(**SMALL)
        first.target_layer_ids.append(0)
        first.block_causal[0] = True
        assert (second.target_layer_ids, second.block_causal) == ([1, 3, 5, 7, 9], [False, False])


class TestErrors:
    def test_unknown_field_suggests_the_close_one(self):
        with pytest.raises(ValueError, match="Unknown configuration field `block_szie`. Did you mean `block_size`"):
            DRelayConfig(**SMALL, block_szie=4)

    def test_unknown_field_points_to_the_docstring_when_nothing_is_close(self):
        with pytest.raises(ValueError, match="`zzzzzz`. See the docstring of DRelayConfig"):
            DRelayConfig(**SMALL, zzzzzz=4)

    def test_unknown_field_raises_for_a_part_and_for_a_target_too(self):
        with pytest.raises(ValueError, match="Did you mean `pair_rank`"):
            DRelaySelectorConfig(**SMALL, pair_rnk=4)
        with pytest.raises(ValueError, match="Did you mean `pool_size`"):
            DRelayConfig.for_target(TARGETS["llama"], pool_sizes=4)

    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"layout": "shift"}, "`layout` is 'shift'; expected one of .*fill_in.*shifted"),
            ({"block_size": 1}, "`block_size` 1 leaves nothing to draft"),
            ({"block_size": 1, "layout": "shifted"}, "`block_size` 1 leaves nothing to draft"),
            (NO_TRUNK, "`use_global_read` and `use_history_read` and `use_prefix_read` feed .* both off"),
            ({"num_key_value_heads": 3}, "`num_attention_heads` 4 .* `num_key_value_heads` 3"),
            ({"target_layer_ids": []}, "`target_layer_ids` .* must be distinct layers"),
            ({"target_layer_ids": [1, 1]}, "`target_layer_ids` .* must be distinct layers"),
            ({"target_layer_ids": [12]}, "`target_layer_ids` .*`num_target_layers` 12"),
            ({"target_layer_ids": [-2]}, "`target_layer_ids` .* from -1 .embedding. to 11"),
            ({"layer_types": ["full_attention"]}, "`layer_types` .1 entries.* `num_hidden_layers` 2"),
            ({"block_causal": [True]}, "`block_causal` .1.* `num_hidden_layers` 2"),
            ({"layer_types": ["full_attention", "linear"]}, "`layer_types` .*'linear'.* may hold only"),
            ({"layer_types": ["sliding_attention"] * 2}, "`sliding_window` is None"),
            ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 1}, "`sliding_window` is 1"),
            ({"mask_token_id": 64}, "`mask_token_id` 64 must be a token .*`vocab_size` 64"),
            ({"mask_token_id": -1}, "`mask_token_id` -1 must be a token"),
            ({"draft_vocab_size": 65}, "`draft_vocab_size` 65 must lie between 1 and `vocab_size` 64"),
            ({"draft_vocab_size": 0}, "`draft_vocab_size` 0 must lie"),
            ({"pool_size": 65}, "`pool_size` 65 must lie between 1 and the 64 tokens"),
            ({"pool_size": 8, "draft_vocab_size": 7}, "`pool_size` 8 must lie between 1 and the 7 tokens"),
            ({"pool_size": 0}, "`pool_size` is 0; expected a whole number"),
            ({"block_size": 2.5}, "`block_size` is 2.5; expected a whole number"),
            ({"num_key_value_heads": 0}, "`num_key_value_heads` is 0; expected a whole number"),
            ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0; expected a whole number"),
            ({"mask_token_id": None}, "`mask_token_id` None must be a token"),
            ({"pool_size": 1}, "`pool_size` 1 leaves the selector no choice"),
            ({"selector_num_heads": 3}, "`selector_hidden_size` 16 .* `selector_num_heads` 3"),
            ({"history_window": 0}, "`history_window` is 0"),
            ({"pair_rank": -1}, "`pair_rank` is -1"),
            ({"provisional_norm": "none"}, "`provisional_norm` is 'none'"),
            ({"proposal": "beam"}, "`proposal` is 'beam'"),
            ({"num_draft_tokens": 0}, "`num_draft_tokens` is 0"),
            ({"num_draft_tokens": True}, "`num_draft_tokens` is True"),
            ({"loop_gate": 0.1}, "`loop_gate` is 0.1"),
            ({"loop_gate": float("nan")}, "`loop_gate` is nan"),
            ({"loop_gate": "fast"}, "`loop_gate` is 'fast'"),
            ({"loop_gate": False}, "`loop_gate` is False"),
            ({"max_stages": 0}, "`max_stages` is 0"),
            ({"max_stages": 1.5}, "`max_stages` is 1.5"),
        ],
        ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )
    def test_contradiction_raises_and_names_the_field(self, fields, match):
        with pytest.raises(ValueError, match=match):
            DRelayConfig(**SMALL | fields)

    def test_contradiction_raises_when_a_saved_file_is_loaded_with_overrides(self, tmp_path):
        DRelayConfig(**SMALL).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="`block_size` 1"):
            DRelayConfig.from_pretrained(tmp_path, block_size=1)

    def test_unknown_override_of_a_saved_file_raises(self, tmp_path):
        DRelayConfig(**SMALL).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="`blok_size`. Did you mean `block_size`"):
            DRelayConfig.from_pretrained(tmp_path, blok_size=5)
        config, unused = DRelayConfig.from_pretrained(tmp_path, return_unused_kwargs=True, blok_size=5)
        assert config.block_size == DRelayConfig(**SMALL).block_size
        assert unused == {"blok_size": 5}

    def test_pool_of_one_is_fine_without_a_selector(self):
        assert DRelayConfig(**SMALL | {"pool_size": 1, "use_selector": False}).pool_size == 1

    @pytest.mark.parametrize("gate", [0, -0.5, float("-inf"), None])
    def test_gates_up_to_zero_are_accepted(self, gate):
        assert DRelayConfig(**SMALL, loop_gate=gate).loop_gate == gate
