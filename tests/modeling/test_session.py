"""The state of a call: what is verified, what is provisional, and that a round leaves only the former."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from hf_drelay.modeling.configuration_drelay import DRelayConfig
from hf_drelay.modeling.draft_session import DraftSession
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.proposal import Proposal


V, H, WINDOW = 40, 24, 4


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_drelay(target, **fields) -> DRelayModel:
    """Random weights everywhere; with a selector whose every path counts."""
    sizes = {
        "num_hidden_layers": 2,
        "target_layer_ids": [0, 2],
        "block_size": 4,
        "pool_size": 5,
        "selector_hidden_size": 8,
        "selector_num_heads": 2,
        "pair_rank": 3,
        "history_window": WINDOW,
    }
    torch.manual_seed(0)
    drelay = DRelayModel(DRelayConfig.for_target(target.config, **sizes | fields)).eval()
    with torch.no_grad():
        for name, weight in drelay.named_parameters():
            weight.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return drelay


def make_session(drelay, target, num_verified=0) -> DraftSession:
    session = DraftSession(drelay.drafter, drelay.adapter(target))
    if num_verified:
        with torch.no_grad():
            session.extend(states_of(num_verified))
    return session


def states_of(length, start=0) -> torch.Tensor:
    """Tapped states `(1, length, L*H)` of the positions from `start` on; a position always has the same one."""
    return torch.randn(1, 64, 2 * H, generator=torch.Generator().manual_seed(9))[:, start : start + length]


def cache_of(session):
    return [(layer.keys.clone(), layer.values.clone()) for layer in session.cache.layers]


def greedy_proposal(input_ids=None, stock=(), is_sampled=False) -> Proposal:
    proposal = Proposal(LogitsProcessorList(stock), V, is_sampled)
    proposal.input_ids = input_ids
    return proposal


class TestVerified:
    def test_new_session_stands_at_the_first_position_and_knows_nothing(self, target):
        session = make_session(make_drelay(target), target)
        assert (session.anchor_position, session.cache.get_seq_length()) == (0, 0)
        assert not session.history_mask.any()

    @pytest.mark.parametrize(("start", "length", "expected"), [(0, 3, [0, 1, 2]), (5, 2, [5, 6])])
    def test_positions_run_from_the_start(self, target, start, length, expected):
        assert make_session(make_drelay(target), target).positions(start, length).tolist() == [expected]

    @torch.no_grad()
    def test_cache_holds_the_fused_features_at_their_positions(self, target):
        drelay = make_drelay(target)
        session = make_session(drelay, target, 3)
        session.extend(states_of(2, start=3))
        expected = DynamicCache()
        features = drelay.drafter.fuse(states_of(5))
        drelay.drafter.extend(features, torch.arange(5)[None], expected)
        for own, other in zip(session.cache.layers, expected.layers, strict=True):
            torch.testing.assert_close((own.keys, own.values), (other.keys, other.values))
        assert (session.num_verified, session.anchor_position) == (5, 5)

    @pytest.mark.parametrize("pieces", [[1], [2, 1], [WINDOW], [3, 3], [WINDOW + 5], [1, 9, 2]])
    @torch.no_grad()
    def test_history_holds_the_last_features_whatever_the_pieces(self, target, pieces):
        drelay = make_drelay(target)
        session, start = make_session(drelay, target), 0
        for size in pieces:
            session.extend(states_of(size, start))
            start += size
        kept = min(start, WINDOW)
        features = drelay.drafter.fuse(states_of(start))
        assert session.history.shape == (1, WINDOW, H)
        assert session.history_mask[0].tolist() == [False] * (WINDOW - kept) + [True] * kept
        torch.testing.assert_close(session.history[:, WINDOW - kept :], features[:, -kept:])

    def test_states_of_another_dtype_are_cast_to_the_drafters(self, target):
        session = make_session(make_drelay(target), target)
        with torch.no_grad():
            session.extend(states_of(2).to(torch.bfloat16))
        assert session.history.dtype == session.cache.layers[0].keys.dtype == torch.float32


class TestProvisional:
    @torch.no_grad()
    def test_provisional_features_stand_behind_the_verified_ones(self, target):
        drelay = make_drelay(target, provisional_norm="final")
        session = make_session(drelay, target, 6)
        features = torch.randn(1, 3, H)
        session.extend_provisional(features[:, :2])
        session.extend_provisional(features[:, 2:])
        expected = DynamicCache()
        drelay.drafter.extend(features, torch.arange(6, 9)[None], expected)
        for own, other in zip(session.cache.layers, expected.layers, strict=True):
            torch.testing.assert_close(own.keys[:, :, 6:], other.keys)
        assert (session.num_verified, session.num_provisional, session.anchor_position) == (6, 3, 9)

    @torch.no_grad()
    def test_provisional_features_pass_the_norm_when_asked_for(self, target):
        drelay = make_drelay(target, provisional_norm="hidden")
        session, features = make_session(drelay, target, 2), torch.randn(1, 3, H)
        session.extend_provisional(features)
        expected = DynamicCache()
        drelay.drafter.extend(drelay.drafter.hidden_norm(features), torch.arange(2, 5)[None], expected)
        torch.testing.assert_close(session.cache.layers[0].keys[:, :, 2:], expected.layers[0].keys)

    @torch.no_grad()
    def test_history_shows_verified_positions_only(self, target):
        """The selector's history ends at the round's anchor in every stage."""
        session = make_session(make_drelay(target), target, 6)
        before = session.history.clone()
        session.extend_provisional(torch.randn(1, 3, H))
        assert torch.equal(session.history, before)

    @torch.no_grad()
    def test_end_of_a_round_restores_the_cache(self, target):
        session = make_session(make_drelay(target), target, 6)
        before = cache_of(session)
        session.extend_provisional(torch.randn(1, 3, H))
        session.extend_provisional(torch.randn(1, 2, H))
        session.earlier = torch.randn(1, 2, 16)
        session.end_round()
        torch.testing.assert_close(cache_of(session), before, rtol=0, atol=0)
        assert (session.num_provisional, session.anchor_position, session.earlier) == (0, 6, None)

    @torch.no_grad()
    def test_end_of_a_round_crops_once_after_several_stages(self, target, monkeypatch):
        session, crops = make_session(make_drelay(target), target, 6), []
        crop = session.cache.crop
        monkeypatch.setattr(session.cache, "crop", lambda length: (crops.append(length), crop(length)))
        for _ in range(3):
            session.extend_provisional(torch.randn(1, 2, H))
        session.end_round()
        assert len(crops) == 1

    @torch.no_grad()
    def test_end_of_a_round_of_one_stage_leaves_the_cache_alone(self, target):
        """A crop by zero tokens empties the cache in some versions of transformers."""
        session = make_session(make_drelay(target), target, 6)
        before = cache_of(session)
        session.end_round()
        torch.testing.assert_close(cache_of(session), before, rtol=0, atol=0)

    @torch.no_grad()
    def test_session_goes_on_as_if_it_had_never_looped(self, target):
        drelay = make_drelay(target, layer_types=["sliding_attention", "full_attention"], sliding_window=4)
        looped, plain = make_session(drelay, target, 6), make_session(drelay, target, 6)
        looped.extend_provisional(torch.randn(1, 7, H))
        looped.end_round()
        for session in (looped, plain):
            session.extend(states_of(2, start=6))
        torch.testing.assert_close(cache_of(looped), cache_of(plain))
        anchor = torch.tensor([3])
        drafts = [drelay.draft(anchor, session, greedy_proposal()).context_features for session in (looped, plain)]
        torch.testing.assert_close(*drafts)


class TestStages:
    """`DRelayModel.draft` and `continue_after` on a session."""

    @pytest.mark.parametrize("layout", ["fill_in", "shifted"])
    @torch.no_grad()
    def test_slots_are_the_rows_of_the_layout(self, target, layout):
        """Fill-in: row `i` is slot `i` and the anchor's row is none. Shifted: the anchor's row is slot 1."""
        drelay = make_drelay(target, layout=layout)
        session = make_session(drelay, target, 6)
        anchor = torch.tensor([3])
        embeds = drelay.drafter.block_embeds(anchor, session.adapter.embed)
        rows = drelay.drafter(embeds, torch.arange(6, 10)[None], session.cache).last_hidden_state
        hidden = rows[:, 1:] if layout == "fill_in" else rows
        block = drelay.draft(anchor, session, greedy_proposal(), use_selector=False)
        assert torch.equal(block.draft_ids, target.lm_head(hidden).argmax(-1))
        torch.testing.assert_close(block.context_features, rows[:, : hidden.shape[1]])

    @pytest.mark.parametrize("use_selector", [False, True])
    @torch.no_grad()
    def test_confidence_is_the_log_probability_over_the_vocabulary(self, target, use_selector):
        """The same meaning for every head: an untrained selector must give what the backbone gives."""
        drelay = make_drelay(target, layout="shifted")
        for name in ("successor_table", "rank_down.weight", "gate_down.weight", "gate_down.bias"):
            for own, weight in drelay.selector.named_parameters():
                if own.endswith(name):
                    weight.zero_()
        session, stock = make_session(drelay, target, 6), [TemperatureLogitsWarper(0.5)]
        block = drelay.draft(torch.tensor([3]), session, greedy_proposal(None, stock, True), use_selector)
        log_probs = target.lm_head(block.context_features).log_softmax(-1)
        expected = log_probs.gather(2, block.draft_ids[..., None])[..., 0]
        torch.testing.assert_close(block.slot_log_confidence, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("num_slots", [1, 2])
    @torch.no_grad()
    def test_only_the_asked_slots_are_drafted(self, target, num_slots):
        drelay = make_drelay(target)
        session = make_session(drelay, target, 6)
        session.num_slots = num_slots
        block = drelay.draft(torch.tensor([3]), session, greedy_proposal(is_sampled=True))
        assert block.num_tokens == num_slots
        assert block.pool_logits.shape == (1, num_slots, 5)

    @torch.no_grad()
    def test_choices_name_the_drafted_tokens(self, target):
        drelay = make_drelay(target)
        drelay.selector.gate_down.bias.fill_(50.0)  # repairs every slot
        block = drelay.draft(torch.tensor([3]), make_session(drelay, target, 6), greedy_proposal())
        assert block.choices.all()
        assert torch.equal(block.pool_ids.gather(2, block.choices[..., None])[..., 0], block.draft_ids)

    @torch.no_grad()
    def test_provisional_features_know_the_tokens_at_their_places(self, target):
        """Row `i` stands at position `a + i`, where the anchor and all drafted tokens but the last one stand."""
        drelay = make_drelay(target, provisional_norm="final")
        session = make_session(drelay, target, 6)
        session.begin_stage(torch.tensor([[3]]))
        block = drelay.draft(session.anchor_ids, session, greedy_proposal()).first(2)
        tokens = torch.tensor([[3, block.draft_ids[0, 0].item()]])
        projected = target.model.embed_tokens(tokens) @ drelay.selector.repaired_proj.weight.T
        expected = DynamicCache()
        drelay.drafter.extend(block.context_features + projected, torch.arange(6, 8)[None], expected)
        drelay.continue_after(block, session)
        torch.testing.assert_close(session.cache.layers[1].keys[:, :, 6:], expected.layers[1].keys)
        assert session.anchor_position == 8

    @torch.no_grad()
    def test_rows_of_the_backbone_are_fed_on_without_a_selector(self, target):
        drelay = make_drelay(target, use_selector=False, provisional_norm="final")
        session = make_session(drelay, target, 6)
        session.begin_stage(torch.tensor([[3]]))
        block = drelay.draft(session.anchor_ids, session, greedy_proposal())
        expected = DynamicCache()
        drelay.drafter.extend(block.context_features, torch.arange(6, 9)[None], expected)
        drelay.continue_after(block, session)
        torch.testing.assert_close(session.cache.layers[1].keys[:, :, 6:], expected.layers[1].keys)
        assert session.earlier is None

    @torch.no_grad()
    def test_next_stage_stands_behind_the_kept_tokens_and_remembers_them(self, target, monkeypatch):
        drelay = make_drelay(target)
        session, seen = make_session(drelay, target, 6), []
        forward, read = drelay.drafter.forward, drelay.selector.read
        monkeypatch.setattr(
            drelay.drafter,
            "forward",
            lambda e, p, c, masks: (seen.append((p.tolist(), c.get_seq_length())), forward(e, p, c, masks))[1],
        )
        monkeypatch.setattr(
            drelay.selector, "read", lambda inputs: (seen.append((inputs.offset, inputs.earlier)), read(inputs))[1]
        )
        session.begin_stage(torch.tensor([[3]]))
        block = drelay.draft(session.anchor_ids, session, greedy_proposal()).first(2)
        drelay.continue_after(block, session)
        session.begin_stage(torch.cat([torch.tensor([[3]]), block.draft_ids], dim=1))
        drelay.draft(session.anchor_ids, session, greedy_proposal())
        assert seen[0] == ([[6, 7, 8, 9]], 6)
        assert seen[2] == ([[8, 9, 10, 11]], 8)
        assert seen[1] == (0, None)
        offset, earlier = seen[3]
        assert offset == 2 and torch.equal(earlier, block.remember(2))
