"""The parallel backbone against a slow oracle, its cache, its tensors, and its start from a target."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_drelay.modeling.configuration_drelay import DRelayConfig, DRelayDrafterConfig
from hf_drelay.modeling.modeling_drafter import DRelayDrafterModel


FULL, SLIDING = "full_attention", "sliding_attention"


def make_drafter(implementation="sdpa", seed=0, **fields) -> DRelayDrafterModel:
    """A drafter of two layers in which no weight is trivial: norms start at one, where a missing norm weight hides."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_target_layers": 9,
        "target_layer_ids": [1, 4, 7],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 5,
        "pool_size": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    torch.manual_seed(seed)
    config = DRelayDrafterConfig(**sizes | fields)
    config._attn_implementation = implementation
    drafter = DRelayDrafterModel(config).eval()
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            weight.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return drafter


def draft_rows(drafter, features, embeds) -> torch.Tensor:
    """Rows `(B, S, H)` of one block right behind context `features` `(B, T, H)`."""
    cache, length = drafter.new_cache(), features.shape[1]
    if length:
        drafter.extend(features, torch.arange(length).expand(len(features), -1), cache)
    positions = torch.arange(length, length + embeds.shape[1]).expand(len(features), -1)
    with torch.no_grad():
        return drafter(embeds, positions, cache).last_hidden_state


def rms_norm(x, weight, eps) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean() + eps) * weight


def rotate(x, position, theta) -> torch.Tensor:
    """Rotate the pairs `(j, j + D/2)` of one head `x` `(D,)`."""
    half, rotated = len(x) // 2, x.clone()
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        rotated[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        rotated[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return rotated


def is_visible(config, layer, query_position, key_position, anchor) -> bool:
    """Context is always visible and the block too, but for the window and the causality of the layer."""
    distance = query_position - key_position
    in_block = key_position >= anchor
    if in_block and config.block_causal[layer] and distance < 0:
        return False
    return config.layer_types[layer] != SLIDING or abs(distance) < config.sliding_window


@torch.no_grad()
def naive_rows(drafter, features, embeds) -> torch.Tensor:
    """The specification of the backbone, row by row and head by head; `(S, H)` from `(T, H)` and `(S, H)`."""
    config, weights = drafter.config, dict(drafter.named_parameters())
    dim, eps, theta = config.head_dim, config.rms_norm_eps, config.rope_parameters["rope_theta"]
    group = config.num_attention_heads // config.num_key_value_heads
    anchor, rows = len(features), list(embeds)

    def project(states, name, head, norm=None):
        out = weights[name][head * dim : (head + 1) * dim] @ states
        return rms_norm(out, weights[norm], eps) if norm is not None and config.use_qk_norm else out

    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}."
        attention = prefix + "self_attn."
        normed = [rms_norm(row, weights[prefix + "input_layernorm.weight"], eps) for row in rows]
        sources = list(features) + normed  # the context enters without the layer's input norm
        keys, values = [], []
        for head in range(config.num_key_value_heads):
            projected = [project(s, attention + "k_proj.weight", head, attention + "k_norm.weight") for s in sources]
            keys.append([rotate(key, position, theta) for position, key in enumerate(projected)])
            values.append([project(s, attention + "v_proj.weight", head) for s in sources])
        attended = []
        for r, row in enumerate(normed):
            outputs = []
            for head in range(config.num_attention_heads):
                query = project(row, attention + "q_proj.weight", head, attention + "q_norm.weight")
                query = rotate(query, anchor + r, theta)
                seen = [p for p in range(len(sources)) if is_visible(config, i, anchor + r, p, anchor)]
                scores = torch.stack([query @ keys[head // group][p] / math.sqrt(dim) for p in seen])
                shares = scores.softmax(0)
                outputs.append(sum(shares[n] * values[head // group][p] for n, p in enumerate(seen)))
            attended.append(weights[attention + "o_proj.weight"] @ torch.cat(outputs))
        rows = [row + out for row, out in zip(rows, attended, strict=True)]
        for r, row in enumerate(rows):
            x = rms_norm(row, weights[prefix + "post_attention_layernorm.weight"], eps)
            gate = weights[prefix + "mlp.gate_proj.weight"] @ x
            up = weights[prefix + "mlp.up_proj.weight"] @ x
            rows[r] = row + weights[prefix + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([rms_norm(row, weights["norm.weight"], eps) for row in rows])


def assert_equals_oracle(drafter, context_length):
    generator = torch.Generator().manual_seed(context_length)
    features = torch.randn(context_length, drafter.config.hidden_size, generator=generator)
    embeds = torch.randn(drafter.config.block_size, drafter.config.hidden_size, generator=generator)
    rows = draft_rows(drafter, features[None], embeds[None])[0]
    torch.testing.assert_close(rows, naive_rows(drafter, features, embeds), rtol=1e-4, atol=1e-5)


class TestOracle:
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"block_causal": [True, True]},
            {"block_causal": [False, True]},
            {"use_qk_norm": False},
            {"num_key_value_heads": 4},
            {"num_key_value_heads": 1, "use_qk_norm": False},
            {"layer_types": [SLIDING, FULL], "sliding_window": 4},
            {"layer_types": [SLIDING, SLIDING], "sliding_window": 4, "block_causal": [False, False]},
            {"layer_types": [FULL, SLIDING], "sliding_window": 7, "block_causal": [True, False]},
        ],
        ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()) or "full",
    )
    def test_rows_equal_the_oracle_behind_a_long_context(self, fields, implementation):
        assert_equals_oracle(make_drafter(implementation, **fields), context_length=9)

    @settings(max_examples=25, deadline=None)
    @given(
        window=st.integers(4, 16),
        excess=st.integers(-16, 5),
        causal=st.booleans(),
        block_size=st.integers(2, 6),
        implementation=st.sampled_from(["eager", "sdpa"]),
    )
    def test_rows_equal_the_oracle_when_the_context_is_around_the_window(
        self, window, excess, causal, block_size, implementation
    ):
        drafter = make_drafter(
            implementation,
            num_hidden_layers=1,
            layer_types=[SLIDING],
            sliding_window=window,
            block_causal=[causal],
            block_size=block_size,
        )
        assert_equals_oracle(drafter, context_length=max(0, window + excess))

    @pytest.mark.parametrize("causal", [False, True])
    def test_rows_equal_the_oracle_without_any_context(self, causal):
        assert_equals_oracle(make_drafter(block_causal=[causal] * 2), context_length=0)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize(
        "fields",
        [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 4, "block_causal": [True, False]}],
        ids=["full", "sliding"],
    )
    def test_rows_equal_the_oracle_with_flex_attention(self, fields):
        # Compiling the kernel takes half a minute, and its code for a CPU has been seen to abort the process.
        with torch.compiler.set_stance("force_eager"):
            assert_equals_oracle(make_drafter("flex_attention", **fields), context_length=9)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
    def test_rows_of_a_batch_equal_those_of_its_sequences_alone(self, implementation):
        drafter = make_drafter(implementation, layer_types=[SLIDING, FULL], sliding_window=4)
        features, embeds = torch.randn(3, 6, 24), torch.randn(3, 5, 24)
        with torch.compiler.set_stance("force_eager"):
            alone = [draft_rows(drafter, features[i : i + 1], embeds[i : i + 1]) for i in range(3)]
            together = draft_rows(drafter, features, embeds)
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)

    def test_window_is_relative_when_the_whole_is_moved(self):
        """Only distances count, so context that starts late gives the same rows; a mask by index would not."""
        drafter = make_drafter(layer_types=[SLIDING, SLIDING], sliding_window=5)
        features, embeds = torch.randn(1, 8, 24), torch.randn(1, 5, 24)
        cache = drafter.new_cache()
        drafter.extend(features, torch.arange(30, 38)[None], cache)
        with torch.no_grad():
            moved = drafter(embeds, torch.arange(38, 43)[None], cache).last_hidden_state
        torch.testing.assert_close(moved, draft_rows(drafter, features, embeds), rtol=1e-4, atol=1e-5)


class TestCache:
    @pytest.mark.parametrize("window", [None, 4])
    def test_cache_is_unchanged_after_a_forward(self, window):
        kinds = [FULL, FULL] if window is None else [SLIDING, FULL]
        drafter = make_drafter(layer_types=kinds, sliding_window=window)
        cache = drafter.new_cache()
        drafter.extend(torch.randn(1, 7, 24), torch.arange(7)[None], cache)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        with torch.no_grad():
            drafter(torch.randn(1, 5, 24), torch.arange(7, 12)[None], cache)
        after = [(layer.keys, layer.values) for layer in cache.layers]
        torch.testing.assert_close(after, before, rtol=0, atol=0)

    def test_empty_cache_stays_empty_after_a_forward(self):
        drafter = make_drafter()
        cache = drafter.new_cache()
        drafter(torch.randn(1, 5, 24), torch.arange(5)[None], cache)
        assert cache.get_seq_length() == 0

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    def test_extending_in_pieces_equals_extending_at_once(self, pieces):
        drafter = make_drafter(layer_types=[SLIDING, FULL], sliding_window=4)
        length = sum(pieces)
        features = torch.randn(1, length, 24, generator=torch.Generator().manual_seed(length))
        whole, parts = drafter.new_cache(), drafter.new_cache()
        drafter.extend(features, torch.arange(length)[None], whole)
        start = 0
        for size in pieces:
            places = torch.arange(start, start + size)
            drafter.extend(features[:, places], places[None], parts)
            start += size
        for one, other in zip(whole.layers, parts.layers, strict=True):
            torch.testing.assert_close((one.keys, one.values), (other.keys, other.values))

    def test_sliding_layer_keeps_the_whole_context_because_a_crop_brings_it_back(self):
        drafter = make_drafter(layer_types=[SLIDING, SLIDING], sliding_window=4)
        features, embeds = torch.randn(1, 6, 24), torch.randn(1, 5, 24)
        cache = drafter.new_cache()
        drafter.extend(features, torch.arange(6)[None], cache)
        drafter.extend(torch.randn(1, 8, 24), torch.arange(6, 14)[None], cache)
        cache.crop(-8)
        with torch.no_grad():
            rows = drafter(embeds, torch.arange(6, 11)[None], cache).last_hidden_state
        torch.testing.assert_close(rows, draft_rows(drafter, features, embeds))


class TestTensors:
    @staticmethod
    def _published_shapes(config) -> dict[str, tuple[int, ...]]:
        """The list of public DFlash checkpoints."""
        H, I, D = config.hidden_size, config.intermediate_size, config.head_dim  # noqa: E741
        query, key = config.num_attention_heads * D, config.num_key_value_heads * D
        shapes = {
            "fc.weight": (H, len(config.target_layer_ids) * H),
            "hidden_norm.weight": (H,),
            "norm.weight": (H,),
        }
        for i in range(config.num_hidden_layers):
            layer = {
                "input_layernorm": (H,),
                "self_attn.q_proj": (query, H),
                "self_attn.k_proj": (key, H),
                "self_attn.v_proj": (key, H),
                "self_attn.o_proj": (H, query),
                "self_attn.q_norm": (D,),
                "self_attn.k_norm": (D,),
                "post_attention_layernorm": (H,),
                "mlp.gate_proj": (I, H),
                "mlp.up_proj": (I, H),
                "mlp.down_proj": (H, I),
            }
            shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        return shapes

    @pytest.mark.parametrize("layout", ["fill_in", "shifted"])
    def test_tensors_are_those_of_public_checkpoints_when_nothing_of_ours_is_on(self, layout):
        drafter = make_drafter(num_hidden_layers=5, layout=layout, use_mask_embedding=False, draft_vocab_size=None)
        found = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        assert found == self._published_shapes(drafter.config)
        assert len(found) == 58

    def test_parameters_of_the_4b_preset_count_as_published(self):
        with torch.device("meta"):
            drafter = DRelayDrafterModel(DRelayDrafterConfig(**_fields(DRelayConfig.preset("qwen3-4b"))))
        assert round(sum(p.numel() for p in drafter.parameters()) / 1e6, 1) == 537.4

    def test_own_tensors_appear_when_they_are_on(self):
        drafter = make_drafter(use_mask_embedding=True, draft_vocab_size=16)
        own = set(drafter.state_dict()) - set(self._published_shapes(drafter.config))
        assert own == {"mask_embedding", "draft_token_ids"}

    def test_norms_of_heads_are_absent_without_qk_norm(self):
        names = make_drafter(use_qk_norm=False).state_dict()
        assert not [name for name in names if "q_norm" in name or "k_norm" in name]


class TestBlockEmbeds:
    def test_mask_rows_are_the_embedded_mask_token_without_a_mask_embedding(self):
        table = torch.nn.Embedding(40, 24)
        embeds = make_drafter(use_mask_embedding=False, mask_token_id=6).block_embeds(torch.tensor([3, 9]), table)
        assert torch.equal(embeds, table(torch.tensor([[3, 6, 6, 6, 6], [9, 6, 6, 6, 6]])))

    def test_mask_rows_are_the_learned_embedding_when_there_is_one(self):
        table, drafter = torch.nn.Embedding(40, 24), make_drafter(use_mask_embedding=True, mask_token_id=6)
        embeds = drafter.block_embeds(torch.tensor([3, 9]), table)
        assert torch.equal(embeds[:, 0], table(torch.tensor([3, 9])))
        assert torch.equal(embeds[:, 1:], drafter.mask_embedding.expand(2, 4, -1))

    @pytest.mark.parametrize("use_mask_embedding", [False, True])
    def test_rows_have_the_drafters_dtype_when_the_targets_differs(self, use_mask_embedding):
        drafter = make_drafter(use_mask_embedding=use_mask_embedding)
        embeds = drafter.block_embeds(torch.tensor([3]), torch.nn.Embedding(40, 24, dtype=torch.bfloat16))
        assert (embeds.dtype, embeds.shape) == (torch.float32, (1, 5, 24))


TARGETS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}


def make_target(kind):
    """A target of six layers in which no norm is trivial."""
    config_class, model_class = TARGETS[kind]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    config = config_class(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=6, pad_token_id=0, **sizes
    )
    torch.manual_seed(1)
    target = model_class(config).eval()
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    return target


def start_from(target, **fields) -> DRelayDrafterModel:
    config = DRelayConfig.for_target(
        target.config,
        **{"num_hidden_layers": 2, "layout": "shifted", "target_layer_ids": [1, 3], "pool_size": 4} | fields,
    )
    drafter = DRelayDrafterModel(DRelayDrafterConfig(**_fields(config))).eval()
    drafter.initialize_from_target(target)
    return drafter


def _fields(config) -> dict:
    return {name: getattr(config, name) for name in DRelayConfig.own_fields()}


def tapped_states(target, input_ids, layer_ids):
    """Concatenated taps `(1, T, L*H)` and the target's own cache after a plain forward."""
    with torch.no_grad():
        output = target(input_ids, output_hidden_states=True, use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]  # renamed in 5.24
    return torch.cat([output.hidden_states[i + 1] for i in layer_ids], dim=-1), cache


class TestInitializeFromTarget:
    @pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
    def test_layers_and_norms_are_the_targets_last_ones(self, kind):
        target = make_target(kind)
        drafter = start_from(target)
        for own, source in zip(drafter.layers, target.model.layers[4:], strict=True):
            expected = source.state_dict()
            torch.testing.assert_close(dict(own.state_dict()), dict(expected), rtol=0, atol=0)
        assert torch.equal(drafter.norm.weight, target.model.norm.weight)

    @pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
    def test_context_keys_and_values_of_the_first_layer_are_the_targets_own(self, kind):
        """The start is exact: on verified positions the first copied layer sees what it saw inside the target."""
        target = make_target(kind)
        drafter = start_from(target)
        states, target_cache = tapped_states(target, torch.randint(40, (1, 11)), [1, 3])
        cache = drafter.new_cache()
        with torch.no_grad():
            drafter.extend(drafter.fuse(states), torch.arange(11)[None], cache)
        torch.testing.assert_close(cache.layers[0].keys, target_cache.layers[4].keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cache.layers[0].values, target_cache.layers[4].values, rtol=1e-4, atol=1e-5)

    def test_target_with_other_norms_is_refused(self):
        """Norms of the Gemma family scale by `1 + weight`, and stand at other places."""
        with pytest.raises(ValueError, match="Gemma3ForCausalLM has no decoder layers of the Llama kind"):
            start_from(make_target("gemma3"))

    @pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind != "gemma3"])
    def test_fused_feature_is_what_the_copied_layer_reads_in_the_target(self, kind):
        target = make_target(kind)
        drafter = start_from(target)
        states, _ = tapped_states(target, torch.randint(40, (1, 11)), [1, 3])
        with torch.no_grad():
            expected = target.model.layers[4].input_layernorm(states[..., 24:])
            torch.testing.assert_close(drafter.fuse(states), expected, rtol=1e-4, atol=1e-5)

    def test_other_taps_do_not_matter_at_the_start(self):
        target = make_target("llama")
        drafter = start_from(target)
        states, _ = tapped_states(target, torch.randint(40, (1, 5)), [1, 3])
        changed = torch.cat([torch.randn(1, 5, 24), states[..., 24:]], dim=-1)
        assert torch.equal(drafter.fuse(changed), drafter.fuse(states))

    def test_mask_embedding_starts_at_the_mean_token(self):
        target = make_target("llama")
        expected = target.get_input_embeddings().weight.mean(0)
        torch.testing.assert_close(start_from(target).mask_embedding.data, expected.data)

    def test_whole_target_can_be_copied_when_the_embedding_is_tapped(self):
        target = make_target("llama")
        drafter = start_from(target, num_hidden_layers=6, target_layer_ids=[-1, 2])
        ids = torch.randint(40, (1, 5))
        features = torch.cat([target.get_input_embeddings()(ids), torch.randn(1, 5, 24)], dim=-1)
        expected = target.model.layers[0].input_layernorm(features[..., :24])
        torch.testing.assert_close(drafter.fuse(features), expected, rtol=1e-4, atol=1e-5)

    def test_missing_tap_raises_and_names_the_layer(self):
        with pytest.raises(ValueError, match=r"`target_layer_ids` \[1, 2\] lack layer 3, .* copied layers 4..5"):
            start_from(make_target("llama"), target_layer_ids=[1, 2])

    def test_target_of_other_sizes_raises_and_names_the_tensor(self):
        with pytest.raises(ValueError, match=r"`mlp.\w+_proj.weight` has shape .32.* in the target and .16"):
            start_from(make_target("llama"), intermediate_size=16)

    def test_target_without_llama_layers_raises(self):
        drafter = start_from(make_target("llama"))
        target = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=24, n_layer=6, n_head=4))
        with pytest.raises(ValueError, match="GPT2LMHeadModel has no decoder layers of the Llama kind"):
            drafter.initialize_from_target(target)

    def test_drafter_deeper_than_the_target_raises_and_names_its_depth(self):
        """The advice to add a tap would be wrong here: there is no layer below the embedding."""
        with pytest.raises(ValueError, match="num_hidden_layers"):
            start_from(make_target("llama"), num_hidden_layers=7)
