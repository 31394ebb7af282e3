"""Drafters that come with their target: the MTP module of Qwen3.5 shards, and the Gemma-4 assistant."""

import inspect

import pytest
import torch

from hf_drelay.modeling.modeling_drelay import DRelayModel


ALWAYS = float("-inf")


@pytest.fixture(scope="module")
def qwen(toolbox, tmp_path_factory):
    layers = ["full_attention"] * 2
    target = toolbox.publish(tmp_path_factory.mktemp("qwen"), toolbox.qwen3_5(layers), toolbox.mtp_tensors())
    target._is_stateful = False  # the host refuses the whole family; without linear attention there is no state
    return target


@pytest.fixture(scope="module")
def mtp(qwen):
    return DRelayModel.from_target(qwen, block_size=4)


def follow(drafter, text, spoiled=(3, 4, 11, 12, 13)):
    """Pools that hold the text's token first, but at some places second."""
    right = type(drafter.drafter).pool

    def pool(states, session, slot):
        pool = right(drafter.drafter, states, session, slot)
        place = session.stage_start + slot
        if place < len(text):
            others = [i for i in pool.ids[0, 0].tolist() if i != text[place]][: pool.ids.shape[-1] - 1]
            ids = [*others[:1], text[place], *others[1:]] if place % 17 in spoiled else [text[place], *others]
            pool.ids[0, 0] = torch.tensor(ids)
        return pool

    draft = type(drafter.drafter).draft

    def counted(anchor_ids, session, proposal):
        session.stage_start = proposal.input_ids.shape[1]
        return draft(drafter.drafter, anchor_ids, session, proposal)

    drafter.drafter.pool, drafter.drafter.draft = pool, counted


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "loop"])
def test_mtp_drafts_losslessly(toolbox, qwen, mtp, record, gate):
    prompt = toolbox.prompt(8)
    expected = toolbox.greedy(qwen, prompt, max_new_tokens=40)
    follow(mtp, expected[0].tolist())
    ids = toolbox.greedy(qwen, prompt, mtp.with_options(loop_gate=gate), max_new_tokens=40)
    toolbox.assert_same_text(qwen, ids, expected)
    assert record.count(lambda r: r.num_accepted > 0) >= 3
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 1


@torch.no_grad()
def test_mtp_rows_are_the_formula_of_the_module(toolbox, qwen, mtp):
    # One forward over all rows against rows that arrive in rounds.
    adapter = mtp.adapter(qwen)
    ids = toolbox.prompt(10)
    states = qwen(ids, output_hidden_states=True).hidden_states[-1]
    drafter = mtp.drafter
    cache = drafter.new_cache()
    whole = drafter.advance(states[:, :-1], ids[:, 1:], torch.arange(9)[None], cache, adapter)
    cache = drafter.new_cache()
    parts = [
        drafter.advance(states[:, a:b], ids[:, a + 1 : b + 1], torch.arange(a, b)[None], cache, adapter)
        for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    first = states[:, :1] * torch.rsqrt(states[:, :1].pow(2).mean(-1, keepdim=True) + 1e-6)
    first = first * (1 + drafter.pre_fc_norm_hidden.weight)  # the family's norms are centred at zero
    torch.testing.assert_close(drafter.pre_fc_norm_hidden(states[:, :1]), first)


def test_mtp_is_saved_and_loaded_like_any_drafter(toolbox, qwen, mtp, tmp_path):
    fresh = DRelayModel.from_target(qwen, block_size=4)
    fresh.save_pretrained(tmp_path)
    again = DRelayModel.from_pretrained(tmp_path)
    assert again.config.backbone == "mtp"
    for name, tensor in fresh.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_target_without_a_module_is_named(toolbox, tmp_path):
    target = toolbox.publish(tmp_path, toolbox.qwen3_5(["full_attention"] * 2), {})
    with pytest.raises(ValueError, match=r"`target`.*no tensors `mtp\.\*`"):
        DRelayModel.from_target(target)


def test_a_missing_tensor_of_the_module_is_named(toolbox, tmp_path):
    tensors = toolbox.mtp_tensors()
    tensors.pop("mtp.fc.weight")
    target = toolbox.publish(tmp_path, toolbox.qwen3_5(["full_attention"] * 2), tensors)
    with pytest.raises(ValueError, match=r"`drafter\.fc\.weight` \(1 missing, 0 unknown\)"):
        DRelayModel.from_target(target)


def test_another_family_is_refused(toolbox):
    with pytest.raises(NotImplementedError, match="model type 'llama'"):
        DRelayModel.from_target(toolbox.target("llama"))


@pytest.fixture(scope="module")
def hybrid(toolbox, tmp_path_factory):
    """A target as the family has them: most layers keep a state that cannot be rolled back."""
    layers = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    return toolbox.publish(tmp_path_factory.mktemp("hybrid"), toolbox.qwen3_5(layers), toolbox.mtp_tensors())


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "loop"])
def test_mtp_drafts_losslessly_for_a_target_with_recurrent_layers(toolbox, hybrid, record, gate):
    prompt = toolbox.prompt(8)
    expected = toolbox.greedy(hybrid, prompt, max_new_tokens=40)
    drafter = DRelayModel.from_target(hybrid, block_size=4)
    follow(drafter, expected[0].tolist())
    ids = toolbox.greedy(hybrid, prompt, drafter.with_options(loop_gate=gate), max_new_tokens=40)
    toolbox.assert_same_text(hybrid, ids, expected)
    assert record.count(lambda r: r.num_accepted > 0) >= 3
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 1


def test_the_loop_of_the_host_refuses_recurrent_layers(toolbox, hybrid):
    view = DRelayModel.from_target(hybrid).with_options(decoding_loop="host")
    with pytest.raises(NotImplementedError, match="layers of type 'linear_attention'"):
        toolbox.greedy(hybrid, toolbox.prompt(5), view, max_new_tokens=4)


@pytest.fixture(scope="module")
def gemma(toolbox):
    return toolbox.gemma4()[0]


@pytest.fixture(scope="module")
def assistant(toolbox):
    return toolbox.gemma4()[1]


@pytest.mark.parametrize("gate", [None, ALWAYS], ids=["one_stage", "loop"])
def test_assistant_drafts_losslessly(toolbox, gemma, assistant, record, gate):
    drafter = DRelayModel.from_target(gemma, assistant=assistant, block_size=3)
    prompt = toolbox.prompt(11)
    expected = toolbox.greedy(gemma, prompt, max_new_tokens=40)
    follow(drafter, expected[0].tolist())
    ids = toolbox.greedy(gemma, prompt, drafter.with_options(loop_gate=gate), max_new_tokens=40)
    toolbox.assert_same_text(gemma, ids, expected)
    assert record.count(lambda r: r.num_accepted > 0) >= 3
    assert record.count(lambda r: r.num_accepted < len(r.draft_ids)) >= 1


def test_assistant_drafts_what_the_host_drafts_first(toolbox, gemma, assistant, record):
    # In the first round the host's own candidate generator reads the same states and caches.
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    prompt = toolbox.prompt(11)
    drafter = DRelayModel.from_target(gemma, assistant=assistant, block_size=3)
    ids = toolbox.greedy(gemma, prompt, drafter, max_new_tokens=8)
    assistant.generation_config.num_assistant_tokens = 3
    if "model_kwargs" in inspect.signature(SinglePositionMultiTokenCandidateGenerator.__init__).parameters:
        pytest.skip("the host's class of older versions drafts other tokens behind the first")
    host = SinglePositionMultiTokenCandidateGenerator(assistant, gemma.get_input_embeddings(), gemma.generation_config)
    host.main_model_max_length = 100
    with torch.no_grad():
        outputs = gemma(prompt, output_hidden_states=True, return_shared_kv_states=True)
        drafts, _ = host.get_candidates(ids[:, :12], {}, outputs, False, 0)
    assert record.rounds[0].draft_ids == drafts[0, 12:].tolist()


class TestAssistantInOurOwnLoop:
    """The target's caches that it reads are cut to what was verified, for every row."""

    OPTIONS = {
        "chain": {},
        "loop": {"loop_gate": ALWAYS},
        "tree": {"tree_budget": 5},
        "loop+tree": {"loop_gate": ALWAYS, "tree_budget": 5},
    }

    @pytest.fixture
    def drafter(self, gemma, assistant):
        return DRelayModel.from_target(gemma, assistant=assistant, block_size=3)

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_batch_is_that_of_plain_sampling(self, toolbox, gemma, drafter, options):
        ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), toolbox.prompt(6)], dim=1)
        ids = torch.cat([ids, toolbox.prompt(11, seed=1)])
        kwargs = {"do_sample": True, "attention_mask": (ids != 0).long(), "max_new_tokens": 24, "top_k": 0}
        torch.manual_seed(1)
        expected = gemma.generate(ids, **kwargs)
        torch.manual_seed(1)
        view = drafter.with_options(proposal="coupled", **options)
        assert torch.equal(gemma.generate(ids, assistant_model=view, **kwargs), expected)
        assert view.statistics.num_rounds > 4

    @pytest.mark.parametrize("num_rejected", [0, 1, 2])
    def test_it_reads_what_a_forward_over_the_verified_text_returns(
        self, toolbox, gemma, drafter, monkeypatch, num_rejected
    ):
        prompt = toolbox.prompt(11)
        expected = toolbox.greedy(gemma, prompt, max_new_tokens=30)
        text = expected[0].tolist()
        follow(drafter, text, spoiled=())
        right = type(drafter.drafter).first_state
        seen = []

        def first_state(session, token, input_ids):
            seen.append((input_ids[0].tolist(), session.shared, session.num_verified))
            return right(drafter.drafter, session, token, input_ids)

        drafter.drafter.first_state = first_state
        if num_rejected:  # the same number of drafts is wrong in every round
            pool = drafter.drafter.pool

            def spoiled(states, session, slot):
                found = pool(states, session, slot)
                if slot >= 3 - num_rejected:
                    found.ids[0, 0] = found.ids[0, 0].roll(1)
                return found

            drafter.drafter.pool = spoiled
        assert torch.equal(toolbox.greedy(gemma, prompt, drafter.with_options(), max_new_tokens=30), expected)
        assert len(seen) > 4
        for ids, shared, num_verified in seen:
            with torch.no_grad():
                whole = gemma(torch.tensor([ids[:-1]]), return_shared_kv_states=True).shared_kv_states
            assert num_verified == len(ids) - 1
            for kind, pair in shared.items():
                for own, other in zip(pair, whole[kind], strict=True):
                    size = min(own.shape[2], other.shape[2])  # a window keeps the end of the text only
                    assert size >= min(num_verified, 7)
                    torch.testing.assert_close(own[:, :, -size:], other[:, :, -size:], rtol=1e-4, atol=1e-4)

    def test_second_turn_with_the_returned_cache_equals_a_fresh_run(self, toolbox, gemma, drafter):
        prompt = toolbox.prompt(9)
        first = toolbox.greedy(gemma, prompt, max_new_tokens=13)
        whole = torch.cat([first, toolbox.prompt(4, seed=8)], dim=1)
        expected = toolbox.greedy(gemma, whole, max_new_tokens=20)
        turn = toolbox.greedy(gemma, prompt, drafter, max_new_tokens=13, return_dict_in_generate=True)
        kwargs = {toolbox.cache_keyword(): turn.past_key_values, "max_new_tokens": 20}
        assert torch.equal(toolbox.greedy(gemma, whole, drafter, **kwargs), expected)

    def test_host_serves_it_too(self, toolbox, gemma, drafter):
        prompt = toolbox.prompt(11)
        expected = toolbox.greedy(gemma, prompt, max_new_tokens=30)
        view = drafter.with_options(decoding_loop="host")
        assert torch.equal(toolbox.greedy(gemma, prompt, view, max_new_tokens=30), expected)
        assert view.statistics.num_rounds > 0

    def test_static_cache_is_refused(self, toolbox, gemma, drafter):
        if toolbox.version < (5, 24):
            pytest.skip("refused for every drafter")
        with pytest.raises(ValueError, match="`cache_implementation` makes layers of type 'Static"):
            toolbox.greedy(gemma, toolbox.prompt(5), drafter, max_new_tokens=4, cache_implementation="static")
