"""Synthetic checkpoints in every public layout, under their exact tensor names, load, draft and round-trip."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_drelay.hub.convert import convert
from hf_drelay.modeling.checkpoint_formats import export_checkpoint, import_checkpoint
from hf_drelay.modeling.modeling_drelay import DRelayModel


H, INNER, HEADS, KV, D, V, N, TAPS, RANK, GRU = 32, 64, 4, 2, 8, 96, 4, [0, 1, 2], 8, 12


@pytest.fixture(scope="module")
def target(toolbox):
    return toolbox.target("qwen3")


def shapes(num_layers: int = 2, width: int = H, prefix: str = "layers.{i}.", norms: bool = True) -> dict:
    """Names and shapes of decoder layers."""
    table = {}
    for i in range(num_layers):
        name = prefix.format(i=i)
        table |= {
            name + "input_layernorm.weight": (H,),
            name + "post_attention_layernorm.weight": (H,),
            name + "self_attn.q_proj.weight": (HEADS * D, width),
            name + "self_attn.k_proj.weight": (KV * D, width),
            name + "self_attn.v_proj.weight": (KV * D, width),
            name + "self_attn.o_proj.weight": (H, HEADS * D),
            name + "mlp.gate_proj.weight": (INNER, H),
            name + "mlp.up_proj.weight": (INNER, H),
            name + "mlp.down_proj.weight": (H, INNER),
        }
        if norms:
            table |= {name + "self_attn.q_norm.weight": (D,), name + "self_attn.k_norm.weight": (D,)}
    return table


def dflash() -> dict:
    own = {"fc.weight": (H, len(TAPS) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    return own | shapes()


BASE = {
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "num_target_layers": N,
}
NESTED = {"mask_token_id": 3, "target_layer_ids": TAPS}
CONV = {
    f"layers.{i}.{part}.{name}": shape
    for i in range(2)
    for part in ("attention_conv", "mlp_conv")
    for name, shape in {"base_kernel": (2, 2, H), "kernel_projection.weight": (2 * 2 * (H // 4), H)}.items()
}
SELECTOR = {
    "candidate_selector.predecessor_codebook": (V, RANK),
    "candidate_selector.successor_codebook": (V, RANK),
    "candidate_selector.hidden_projection.weight": (RANK, H),
}
GRU_HEAD = {
    "prefix_gru.weight_ih_l0": (3 * GRU, H),
    "prefix_gru.weight_hh_l0": (3 * GRU, GRU),
    "embed_proj.0.weight": (RANK, H + GRU),
    "embed_proj.2.weight": (V, RANK),
}
MARKOV = {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK)}
CONFIDENCE = {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
TABLES = {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
DOMINO = NESTED | {"projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": RANK, "gru_hidden_dim": GRU}
DSPARK = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
EAGLE = {"fc.weight": (H, len(TAPS) * H), "norm.weight": (H,), "lm_head.weight": (40, H), "d2t": (40,), "t2d": (V,)}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": {k: v for k, v in BASE.items() if k != "num_target_layers"},
    "draft_vocab_size": V,
    "block_size": 5,
    "aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
    "mask_token_id": 3,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
}


def eagle(prefix: str, norms: bool = False) -> dict:
    return shapes(1, 2 * H, prefix, norms) | {prefix.format(i=0) + "hidden_norm.weight": (H,)}


# name: (config, tensors, expected layout, expected head)
PUBLIC = {
    "zlab_dflash": (
        BASE | {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": NESTED},
        dflash(),
        "fill_in",
        "independent",
    ),
    "zlab_dflash2": (
        BASE
        | {
            "architectures": ["DFlash2DraftModel"],
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "dflash_config": NESTED
            | {
                "block_size": 5,
                "selector_rank": RANK,
                "selector_top_k": 16,
                "conv_kernel_size": 2,
                "conv_group_size": 4,
            },
        },
        dflash() | CONV | SELECTOR,
        "fill_in",
        "bilinear",
    ),
    "deepspec_dflash": (
        BASE | {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "markov_rank": 0} | NESTED,
        dflash() | TABLES,
        "shifted",
        "independent",
    ),
    "deepspec_dspark": (
        BASE
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "markov_head_type": "vanilla"}
        | NESTED
        | DSPARK,
        dflash() | TABLES | MARKOV | CONFIDENCE,
        "shifted",
        "markov",
    ),
    "deepspec_eagle3": (
        BASE
        | {"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1, "layer_types": None, "ttt_length": 4}
        | NESTED,
        {k: v for k, v in EAGLE.items() if k[1:] not in ("2t", "2d")}
        | {"lm_head.weight": (V, H), "embed_tokens.weight": (V, H)}
        | eagle("layers.{i}.", norms=True),
        "shifted",
        "eagle3",
    ),
    "specforge_domino": (
        BASE
        | {"architectures": ["DominoDraftModel"], "block_size": 4, "dflash_config": DOMINO | {"shift_label": True}},
        dflash() | GRU_HEAD,
        "shifted",
        "recurrent",
    ),
    "old_domino": (
        BASE
        | {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": DOMINO | {"shift_label": False}},
        dflash() | {f"logit_head.{name}": shape for name, shape in GRU_HEAD.items()},
        "fill_in",
        "recurrent",
    ),
    "specforge_dspark_gated": (
        BASE
        | {
            "architectures": ["DSparkDraftModel"],
            "block_size": 4,
            "dflash_config": NESTED | DSPARK | {"projector_type": "dspark", "markov_head_type": "gated"},
        },
        dflash()
        | MARKOV
        | CONFIDENCE
        | {"markov_head.gate_proj.weight": (RANK, H + RANK), "markov_head.gate_proj.bias": (RANK,)},
        "shifted",
        "markov",
    ),
    "specforge_dspark_rnn": (
        BASE
        | {
            "architectures": ["DSparkDraftModel"],
            "block_size": 4,
            "dflash_config": NESTED | {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "rnn"},
        },
        dflash()
        | MARKOV
        | {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + H), "markov_head.joint_proj.bias": (3 * RANK,)},
        "shifted",
        "markov",
    ),
    "specforge_eagle3": (
        BASE
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "layer_types": None,
            "draft_vocab_size": 40,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS},
        },
        EAGLE | eagle("midlayer."),
        "shifted",
        "eagle3",
    ),
    "speculators_dflash": (SPECULATORS, dflash(), "fill_in", "independent"),
    "speculators_dflash_reduced": (
        SPECULATORS | {"draft_vocab_size": 40, "sample_from_anchor": True},
        dflash() | {"lm_head.weight": (40, H), "embed_tokens.weight": (V, H), "d2t": (40,), "t2d": (V,)},
        "shifted",
        "independent",
    ),
    "speculators_dspark_reduced": (
        SPECULATORS
        | {"speculators_model_type": "dspark", "draft_vocab_size": 40, "sample_from_anchor": True}
        | DSPARK,
        dflash()
        | CONFIDENCE
        | {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (40, RANK)}
        | {"lm_head.weight": (40, H), "embed_tokens.weight": (V, H), "d2t": (40,), "t2d": (V,)},
        "shifted",
        "markov",
    ),
    "speculators_dspark_without_markov": (
        SPECULATORS | {"speculators_model_type": "dspark", "markov_rank": 0},
        dflash(),
        "shifted",
        "independent",
    ),
    "speculators_eagle3_target_head": (
        SPECULATORS
        | {
            "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
            "transformer_layer_config": BASE | {"num_hidden_layers": 1, "layer_types": None, "model_type": "llama"},
        },
        {"fc.weight": (H, len(TAPS) * H), "norm.weight": (H,)} | eagle("layers.{i}."),
        "shifted",
        "eagle3",
    ),
    "speculators_eagle3": (
        SPECULATORS
        | {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 40,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
            "transformer_layer_config": BASE | {"num_hidden_layers": 1, "layer_types": None, "model_type": "llama"},
        },
        EAGLE | eagle("layers.{i}."),
        "shifted",
        "eagle3",
    ),
}


def make_tensors(table: dict, target) -> dict:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in sorted(table.items()):
        tensors[name] = 0.2 * torch.randn(shape, generator=generator) + ("norm" in name)
    ids = torch.randperm(V, generator=generator)[:40].sort().values
    if "d2t" in table:
        tensors["d2t"] = ids - torch.arange(40)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    copies = {"embed_tokens.weight": target.get_input_embeddings(), "lm_head.weight": target.get_output_embeddings()}
    for name, module in copies.items():
        if table.get(name) == (V, H) and not (name == "lm_head.weight" and "layers.0.hidden_norm.weight" in table):
            tensors[name] = module.weight.detach().clone()
    return tensors


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_checkpoint_loads_and_drafts_losslessly(toolbox, target, tmp_path, record, name):
    config, table, layout, head = PUBLIC[name]
    folder = write(tmp_path / "public", config, make_tensors(table, target))
    drafter = DRelayModel.from_pretrained(str(folder))
    assert drafter.config.layout == layout
    assert head == ("eagle3" if drafter.config.backbone == "eagle3" else drafter.config.head)
    assert drafter.config.target_layer_ids == TAPS
    prompt = toolbox.prompt(7)
    for gate in (None, float("-inf")):
        ids = toolbox.greedy(target, prompt, drafter.with_options(loop_gate=gate), max_new_tokens=12)
        toolbox.assert_same_text(target, ids, toolbox.greedy(target, prompt, max_new_tokens=12))
    assert record.count(lambda r: r.draft_ids) >= 4


WRITTEN = [
    ("zlab_dflash", "zlab"),
    ("zlab_dflash", "speculators"),
    ("zlab_dflash2", "zlab"),
    ("zlab_dflash2", "speculators"),
    ("deepspec_dflash", "speculators"),
    ("deepspec_dspark", "zlab"),
    ("deepspec_dspark", "speculators"),
    ("specforge_domino", "zlab"),
    ("old_domino", "zlab"),
    ("specforge_dspark_rnn", "zlab"),
    ("specforge_eagle3", "zlab"),
    ("specforge_eagle3", "speculators"),
    ("speculators_dspark_reduced", "speculators"),
    ("speculators_eagle3", "speculators"),
    ("speculators_dflash_reduced", "speculators"),
]


@pytest.mark.parametrize(("name", "format"), WRITTEN)
def test_a_checkpoint_comes_back_from_a_public_format(target, name, format):
    config, table, layout, head = PUBLIC[name]
    tensors = make_tensors(table, target)
    imported = import_checkpoint(config, tensors)
    model = DRelayModel.from_imported(imported)
    again = import_checkpoint(*export_checkpoint(model.config, model.state_dict(), format))
    second = DRelayModel.from_imported(again)
    assert set(again.tensors) == set(imported.tensors)
    for key, tensor in imported.tensors.items():
        torch.testing.assert_close(again.tensors[key], tensor, rtol=0, atol=0)
    skipped = {"rope_parameters", "target_name_or_path"}
    for field in set(DRelayModel.config_class.own_fields()) - skipped:
        assert getattr(second.config, field) == getattr(model.config, field), field


@pytest.mark.parametrize("name", ["zlab_dflash", "zlab_dflash2", "specforge_domino"])
def test_written_tensors_have_the_public_names(target, name):
    config, table, _, _ = PUBLIC[name]
    model = DRelayModel.from_imported(import_checkpoint(config, make_tensors(table, target)))
    written, tensors = export_checkpoint(model.config, model.state_dict(), "zlab")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == table
    assert written["architectures"] == config["architectures"]


class TestErrors:
    def load(self, tmp_path, target, name, change_config=None, change_tensors=None, **fields):
        config, table, _, _ = PUBLIC[name]
        config, tensors = json.loads(json.dumps(config)), make_tensors(table, target)
        if change_config:
            change_config(config)
        if change_tensors:
            change_tensors(tensors)
        return DRelayModel.from_pretrained(str(write(tmp_path / "bad", config, tensors)), **fields)

    def test_missing_tensor_is_named(self, tmp_path, target):
        with pytest.raises(ValueError, match=r"lacks \['drafter.layers.1.mlp.up_proj.weight'\]"):
            self.load(tmp_path, target, "zlab_dflash", change_tensors=lambda t: t.pop("layers.1.mlp.up_proj.weight"))

    def test_unknown_tensor_is_named(self, tmp_path, target):
        with pytest.raises(ValueError, match=r"unknown tensors \['drafter.fc_norm.0.weight'\]"):
            self.load(
                tmp_path, target, "zlab_dflash", change_tensors=lambda t: t.update({"fc_norm.0.weight": torch.ones(H)})
            )

    def test_wrong_shape_is_named(self, tmp_path, target):
        with pytest.raises(ValueError, match=r"`drafter.norm.weight`.*\(31,\).*\(32,\)"):
            self.load(
                tmp_path, target, "zlab_dflash", change_tensors=lambda t: t.update({"norm.weight": torch.ones(31)})
            )

    @pytest.mark.parametrize("name", ["specforge_domino", "old_domino"])
    def test_domino_without_its_label_asks_for_a_target(self, tmp_path, target, name):
        with pytest.raises(ValueError, match=r"`layout`.*hf-drelay convert SRC DST --target T"):
            self.load(tmp_path, target, name, lambda c: c["dflash_config"].pop("shift_label"))

    def test_dflash_with_copied_tables_is_ambiguous(self, tmp_path, target):
        with pytest.raises(ValueError, match="`layout`"):
            self.load(tmp_path, target, "deepspec_dflash", lambda c: c.update(architectures=["DFlashDraftModel"]))

    def test_layout_can_be_given(self, tmp_path, target):
        drafter = self.load(
            tmp_path, target, "specforge_domino", lambda c: c["dflash_config"].pop("shift_label"), layout="shifted"
        )
        assert drafter.config.num_drafts == 4

    def test_copied_table_of_another_target_is_refused(self, toolbox, tmp_path, target):
        drafter = self.load(
            tmp_path, target, "deepspec_dspark", change_tensors=lambda t: t["lm_head.weight"].mul_(1.5)
        )
        with pytest.raises(ValueError, match="copy of its target's `lm_head`"):
            toolbox.greedy(target, toolbox.prompt(5), drafter, max_new_tokens=3)

    def test_contradicting_vocabulary_maps_are_refused(self, tmp_path, target):
        with pytest.raises(ValueError, match="`d2t` and `t2d`"):
            self.load(tmp_path, target, "specforge_eagle3", change_tensors=lambda t: t["t2d"].logical_not_())

    @pytest.mark.parametrize("name", ["speculators_dflash_reduced", "specforge_eagle3"])
    def test_missing_vocabulary_map_is_named(self, tmp_path, target, name):
        with pytest.raises(ValueError, match="has 40 rows for 96 tokens .* `d2t` .* is missing"):
            self.load(tmp_path, target, name, change_tensors=lambda t: t.pop("d2t"))

    @pytest.mark.parametrize("shift", [90, -50], ids=["beyond", "negative"])
    def test_vocabulary_map_out_of_range_is_refused(self, tmp_path, target, shift):
        def change(tensors):
            tensors["d2t"] += shift
            del tensors["t2d"]

        with pytest.raises(ValueError, match="`d2t` of this checkpoint names tokens from .* vocabulary of 96"):
            self.load(tmp_path, target, "specforge_eagle3", change_tensors=change)

    def test_missing_mask_token_is_asked_for(self, tmp_path, target):
        def remove(config):
            del config["dflash_config"]["mask_token_id"]

        with pytest.raises(ValueError, match="has no `mask_token_id`"):
            self.load(tmp_path, target, "zlab_dflash", remove)
        assert self.load(tmp_path, target, "zlab_dflash", remove, mask_token_id=3).config.mask_token_id == 3

    def test_damaged_weight_file_is_named(self, tmp_path, target):
        config, table, _, _ = PUBLIC["zlab_dflash"]
        folder = write(tmp_path / "bad", config, make_tensors(table, target))
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="model.safetensors cannot be read"):
            DRelayModel.from_pretrained(str(folder))

    @pytest.mark.parametrize("scale", [{"final_logit_softcapping": 3.0}, {"input_embedding_scale": H**0.5}])
    def test_scales_of_another_target_are_refused(self, toolbox, tmp_path, target, scale):
        drafter = self.load(tmp_path, target, "zlab_dflash", lambda c: c["dflash_config"].update(scale))
        with pytest.raises(ValueError, match=f"published for a target with `{next(iter(scale))}`"):
            toolbox.greedy(target, toolbox.prompt(5), drafter, max_new_tokens=3)

    @pytest.mark.parametrize(("aliases", "causal"), [({"causal": False}, False), ({"is_causal": True}, True)])
    def test_mask_of_the_block_has_two_names(self, tmp_path, target, aliases, causal):
        drafter = self.load(tmp_path, target, "zlab_dflash2", lambda c: c["dflash_config"].update(aliases))
        assert drafter.config.block_causal == [causal] * 2

    def test_window_for_all_layers_is_read(self, tmp_path, target):
        window = {"use_swa": True, "swa_window_size": 4}
        drafter = self.load(tmp_path, target, "zlab_dflash", lambda c: c["dflash_config"].update(window))
        assert drafter.config.layer_types == ["sliding_attention"] * 2 and drafter.config.sliding_window == 4

    def test_causal_block_has_no_place_in_the_speculators_format(self, tmp_path, target):
        model = self.load(tmp_path, target, "zlab_dflash", lambda c: c["dflash_config"].update(is_causal=True))
        with pytest.raises(ValueError, match=r"has no way to say `block_causal` \[True, True\]"):
            export_checkpoint(model.config, model.state_dict(), "speculators")

    def test_prefix_of_all_names_is_taken_away(self, target):
        for name in ("deepspec_dspark", "speculators_eagle3"):
            config, table, _, _ = PUBLIC[name]
            tensors = make_tensors(table, target)
            plain = import_checkpoint(config, tensors)
            prefixed = import_checkpoint(config, {f"model.{name}": tensor for name, tensor in tensors.items()})
            assert prefixed.fields == plain.fields and set(prefixed.tensors) == set(plain.tensors)

    def test_unknown_argument_is_refused(self, tmp_path, target):
        with pytest.raises(ValueError, match="`device_map` is no field"):
            self.load(tmp_path, target, "zlab_dflash", device_map="cpu")

    def test_a_shifted_backbone_has_no_place_in_the_zlab_format(self, target):
        config, table, _, _ = PUBLIC["deepspec_dflash"]
        model = DRelayModel.from_imported(import_checkpoint(config, make_tensors(table, target)))
        with pytest.raises(ValueError, match="`format` 'zlab' has no way to say `layout` 'shifted'"):
            export_checkpoint(model.config, model.state_dict(), "zlab")


class TestConvert:
    def test_what_was_not_compared_is_told(self, target, tmp_path):
        config, table, _, _ = PUBLIC["deepspec_dspark"]
        source = write(tmp_path / "public", config, make_tensors(table, target))
        assert "a copy of `lm_head`" in convert(str(source), tmp_path / "own")["not_compared"]
        assert "not_compared" not in convert(str(source), tmp_path / "compared", target)

    def test_zlab_format_needs_the_depth_of_the_target(self, target, tmp_path):
        config, table, _, _ = PUBLIC["speculators_dflash"]
        source = write(tmp_path / "public", config, make_tensors(table, target))
        with pytest.raises(ValueError, match="does not tell `num_target_layers`"):
            convert(str(source), tmp_path / "own", format="zlab")
        convert(str(source), tmp_path / "own", target, format="zlab")
        assert json.loads((tmp_path / "own" / "config.json").read_text())["num_target_layers"] == N

    def test_to_our_format_and_back(self, target, tmp_path):
        config, table, _, _ = PUBLIC["zlab_dflash2"]
        tensors = make_tensors(table, target)
        source = write(tmp_path / "public", config, tensors)
        report = convert(str(source), tmp_path / "own")
        assert report["kind"] == "zlab bilinear"
        assert DRelayModel.from_pretrained(tmp_path / "own").config.head == "bilinear"
        convert(str(tmp_path / "own"), tmp_path / "back", format="zlab")
        written = load_file(tmp_path / "back" / "model.safetensors")
        assert set(written) == set(tensors)
        assert all(torch.equal(written[name], tensors[name]) for name in tensors)

    def test_a_filled_folder_is_left_alone(self, target, tmp_path):
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "file").touch()
        with pytest.raises(OSError, match="`destination`.*not empty"):
            convert(str(tmp_path), tmp_path / "own")

    @pytest.mark.parametrize("layout", ["fill_in", "shifted"])
    def test_an_untold_layout_is_measured(self, toolbox, monkeypatch, target, tmp_path, layout):
        config, table, _, _ = PUBLIC["specforge_domino"]
        config = json.loads(json.dumps(config))
        config["dflash_config"].pop("shift_label")
        source = write(tmp_path / "public", config, make_tensors(table, target))

        # Random weights fit neither layout, so the replay is told what a trained drafter would show.
        class Statistics:
            def __init__(self, view):
                self.acceptance_length = 3.0 if view.config.layout == layout else 1.1

        monkeypatch.setattr(
            "hf_drelay.hub.convert.replay_response", lambda view, target, ids, length: Statistics(view)
        )
        report = convert(str(source), tmp_path / "own", target=target, tokenizer=toolbox.tokenizer(V))
        assert report["layout"] == layout
        assert report["acceptance_length"][layout] == 3.0

    def test_a_copied_table_is_compared_with_the_target(self, target, tmp_path):
        config, table, _, _ = PUBLIC["deepspec_dspark"]
        tensors = make_tensors(table, target)
        tensors["embed_tokens.weight"][-1] += 1
        source = write(tmp_path / "public", config, tensors)
        with pytest.raises(ValueError, match="copy of `embed_tokens` differs"):
            convert(str(source), tmp_path / "own", target=target)
