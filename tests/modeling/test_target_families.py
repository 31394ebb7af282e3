"""Families of targets beside the usual ones: exact where they are served, and an error by name where they are not."""

import pytest
import torch
import transformers

from hf_drelay import DRelayConfig
from hf_drelay.modeling.target_families import EXACT_WITH_STATE


V = 96
BASE = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3}
USUAL = BASE | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}
MAMBA |= {"mamba_d_conv": 4, "mamba_chunk_size": 4}
LINEAR = ["linear_attention", "full_attention"] * 2
LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR_HEADS |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}

RECURRENT = {
    "Bamba": USUAL | MAMBA | {"attn_layer_indices": [1, 3]},
    "FalconH1": USUAL | MAMBA | {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": USUAL
    | MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32, "num_local_experts": 0},
    "Lfm2": USUAL | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "NemotronH": USUAL
    | {"head_dim": 8, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8}
    | {"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4},
    "OlmoHybrid": USUAL | LINEAR_HEADS | {"layer_types": LINEAR},
    "Qwen3_5Moe": USUAL
    | LINEAR_HEADS
    | {"layer_types": LINEAR, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Zamba2": USUAL
    | {"num_mem_blocks": 1, "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2}
    | {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 4, "mamba_ngroups": 1}
    | {"use_mem_eff_path": False},
}
REFUSED = {
    "Jamba": USUAL
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2}
    | {"expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "RecurrentGemma": USUAL | {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "Doge": USUAL | {"keep_window_size": 8},
}
GPT_NEO = BASE | {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 256}
GPT_NEO |= {"attention_types": [[["global", "local"], 2]], "window_size": 8}
FALCON = BASE | {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "alibi": True}
BLOOM = BASE | {"hidden_size": 32, "n_layer": 4, "n_head": 4}


def build(name: str, fields: dict):
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**fields)
    target = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    target.generation_config.eos_token_id = None
    return target


def known(families: dict) -> list[str]:
    """Those that this version of transformers has."""
    return [name for name in families if hasattr(transformers, f"{name}ForCausalLM")]


@pytest.mark.parametrize("name", known(RECURRENT))
def test_recurrent_family_is_exact(toolbox, record, name):
    target, prompt = build(name, RECURRENT[name]), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt, max_new_tokens=24)
    drafter = toolbox.scripted(target, expected[0].tolist())
    for gate in (None, float("-inf")):
        ids = toolbox.greedy(target, prompt, drafter.with_options(loop_gate=gate), max_new_tokens=24)
        toolbox.assert_same_text(target, ids, expected)
    assert record.count(lambda r: r.draft_ids and r.num_accepted < len(r.draft_ids)) > 3


def test_every_family_that_is_served_with_its_state_is_tested(toolbox):
    tested = {build(name, RECURRENT[name]).config.model_type for name in known(RECURRENT)}
    tested |= {toolbox.hybrid(name).config.model_type for name in ("qwen3_next", "qwen3_5")}
    assert tested <= EXACT_WITH_STATE
    assert not [kind for kind in EXACT_WITH_STATE - tested if kind in transformers.CONFIG_MAPPING]


@pytest.mark.parametrize("name", known(REFUSED))
def test_family_that_several_tokens_change_is_refused(toolbox, name):
    target = build(name, REFUSED[name])
    drafter = toolbox.drafter(target)
    with pytest.raises(NotImplementedError, match=f"cannot draft for {name}ForCausalLM: .* without `assistant_model`"):
        toolbox.greedy(target, toolbox.prompt(8), drafter, max_new_tokens=4)


@pytest.mark.parametrize("name", ["Mamba2", "Rwkv"])
def test_target_without_attention_is_refused(name):
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(ValueError, match=f"`target_config` {name}Config has no `num_attention_heads`"):
        DRelayConfig.for_target(config)


def test_window_of_slots_keeps_the_rows_of_a_batch_together(toolbox):
    target = build("GPTNeo", GPT_NEO)
    rows = [toolbox.prompt(n, seed=n)[0] for n in (12, 5, 9)]
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 12 - len(row) :], mask[i, 12 - len(row) :] = row, 1
    call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20}
    expected = target.generate(ids, **call)
    drafter = toolbox.scripted(target, expected[0].tolist())
    assert torch.equal(target.generate(ids, assistant_model=drafter, **call), expected)
    assert drafter.statistics.num_rounds > 0


@pytest.mark.parametrize("name, fields", [("GPTNeo", GPT_NEO), ("Falcon", FALCON), ("Bloom", BLOOM)])
def test_trees_are_refused_where_more_than_the_mask_decides(toolbox, name, fields):
    target, prompt = build(name, fields), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt, max_new_tokens=12)
    drafter = toolbox.scripted(target, expected[0].tolist())
    assert torch.equal(toolbox.greedy(target, prompt, drafter, max_new_tokens=12), expected)
    with pytest.raises(ValueError, match="`tree_budget` 7 needs .* Leave `tree_budget` out"):
        toolbox.greedy(target, prompt, drafter.with_options(tree_budget=7), max_new_tokens=12)
