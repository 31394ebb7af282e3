"""Trees: the best one is found, the target sees each path as a chain, and what is committed is the accepted path."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LogitsProcessorList

from hf_drelay.modeling.cache_rollback import CacheRollback
from hf_drelay.modeling.draft_tree import Candidate, DraftTree, TreeDraft, attention_masks, expand_rows, grow
from hf_drelay.modeling.host_transfer import read
from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_heads import IndependentHead
from hf_drelay.modeling.proposal import Proposal


VOCAB_SIZE = 20


@st.composite
def trees(draw, max_nodes=9) -> DraftTree:
    """Any tree, with siblings that differ."""
    tree = DraftTree()
    for place in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, place))
        taken = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == parent]
        tree.token_ids.append(draw(st.sampled_from([t for t in range(VOCAB_SIZE) if t not in taken])))
        tree.parents.append(parent)
    return DraftTree(tree.token_ids, tree.parents)


def random_pool(num_slots=4, size=3, seed=0) -> Pool:
    logits = 2 * torch.randn(1, num_slots, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return Pool.from_logits(logits, size)


def start_stage(pool, stock=()):
    proposal = Proposal(LogitsProcessorList(stock), VOCAB_SIZE, is_sampled=False)
    proposal.input_ids = torch.tensor([[1, 2]])
    return proposal.start_stage(pool)


class PairHead(IndependentHead):
    """Scores a candidate by the token before it."""

    table = 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(7))

    def score(self, state, path_ids, first=0):
        slots = range(first, path_ids.shape[1])
        rows = [
            state.log_probs[:, i] + self.table[path_ids[:, i]].gather(1, state.ids[:, i].expand(len(path_ids), -1))
            for i in slots
        ]
        return torch.stack(rows, dim=1)


def on_host(levels) -> TreeDraft:
    return levels.on_host(read(*levels.tensors()))


def grown(*arguments) -> TreeDraft:
    return on_host(grow(*arguments))


def every_path(head, pool, choose):
    """All paths of the pool with their log-scores, one by one."""
    paths = {}
    for depth in range(1, pool.ids.shape[1] + 1):
        for choices in itertools.product(range(pool.ids.shape[2]), repeat=depth):
            tokens = [pool.ids[0, i, c].item() for i, c in enumerate(choices)]
            path, score = torch.tensor([[5, *tokens]]), 0.0
            for slot, choice in enumerate(choices):
                logits = head.score(pool, path[:, : slot + 1], slot)[:, 0]
                score += choose.path_log_probs(logits, slot, path[:, 1 : slot + 1])[0, choice].item()
            paths[tuple(tokens)] = score
    return paths


def nodes_of(tree: DraftTree) -> set[tuple]:
    return {tuple(tree.token_ids[p - 1] for p in tree.path(place)[1:]) for place in range(1, tree.num_nodes + 1)}


class TestGrowing:
    @pytest.mark.parametrize("head", [IndependentHead(), PairHead()], ids=["independent", "conditional"])
    @pytest.mark.parametrize("budget", [1, 2, 5, 12, 30])
    @pytest.mark.parametrize("seed", range(3))
    def test_tree_holds_the_best_paths_of_all(self, head, budget, seed):
        pool = random_pool(seed=seed)
        choose = start_stage(pool)
        tree, _ = grown(head, pool, pool, torch.tensor([5]), choose, budget).select([], set())
        scores = every_path(head, pool, choose)
        best = sorted(scores, key=scores.get, reverse=True)[:budget]
        assert nodes_of(tree) == set(best)

    def test_best_path_is_the_best_of_the_longest(self):
        pool = random_pool()
        choose = start_stage(pool)
        levels = grow(PairHead(), pool, pool, torch.tensor([5]), choose, 81)
        scores = every_path(PairHead(), pool, choose)
        longest = max((p for p in scores if len(p) == 4), key=scores.get)
        assert tuple(c.token for c in on_host(levels).best_path()) == longest
        rows, depth = levels.best_path()
        assert depth.tolist() == [4]
        assert tuple(t[row].item() for t, row in zip(levels.token_ids, rows, strict=True)) == longest

    @pytest.mark.parametrize("depth", range(4))
    def test_best_path_ends_where_nothing_can_be_drawn(self, depth):
        pool = random_pool()
        pool.logits[0, depth] = pool.log_probs[0, depth] = float("-inf")
        levels = grow(PairHead(), pool, pool, torch.tensor([5]), start_stage(pool), 9)
        rows, found = levels.best_path()
        best = on_host(levels).best_path()
        assert found.tolist() == [depth] and len(best) == depth
        tokens = [t[row].item() for t, row in zip(levels.token_ids, rows, strict=True)]
        assert tokens[:depth] == [candidate.token for candidate in best]

    def test_kept_path_is_in_the_tree_though_others_score_more(self):
        root = Candidate(1, 0, None, 3, -5.0)
        leaf = Candidate(2, 0, root, 4, -9.0)
        others = [Candidate(1, i, None, 10 + i, -1.0) for i in range(1, 5)]
        tree, place = TreeDraft([root, leaf, *others], 4).select([root, leaf], set())
        assert tree.num_nodes == 4 and {(3,), (3, 4)} <= nodes_of(tree)
        assert tree.token_ids[place - 1] == 4

    def test_nothing_follows_an_end_token(self):
        root = Candidate(1, 0, None, 3, -0.1)
        tree, _ = TreeDraft([root, Candidate(2, 0, root, 4, -0.2), Candidate(1, 1, None, 6, -3.0)], 3).select([], {3})
        assert nodes_of(tree) == {(3,), (6,)}

    def test_banned_candidates_are_no_nodes(self):
        pool = random_pool()
        pool.logits[0, 1, 0] = float("-inf")
        pool.log_probs[0, 1, 0] = float("-inf")
        tree, _ = grown(IndependentHead(), pool, pool, torch.tensor([5]), start_stage(pool), 30).select([], set())
        assert all(len(path) < 2 or path[1] != pool.ids[0, 1, 0] for path in nodes_of(tree))

    def test_state_of_a_head_is_expanded_whatever_it_is(self):
        pool = random_pool()
        state = (pool, [torch.zeros(1, 3)], {"a": torch.zeros(2, 1)}, None, 4)
        expanded = expand_rows(state, 5)
        assert expanded[0].ids.shape[0] == 5 and expanded[1][0].shape == (5, 3)
        assert expanded[2]["a"].shape == (2, 1) and expanded[3:] == (None, 4)
        assert pool.ids.shape[0] == 1


class TestStructure:
    @given(trees())
    def test_places_see_their_path_and_nothing_else(self, tree):
        visible = tree.visible(tree.num_nodes + 2)
        for place in range(tree.num_nodes + 1):
            assert visible[place].nonzero().flatten().tolist() == sorted(tree.path(place))
            assert len(tree.path(place)) == tree.depths()[place] + 1

    @given(trees())
    def test_children_are_found_by_their_token(self, tree):
        for place, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True), start=1):
            assert tree.child(parent, token) == place
        assert tree.child(0, VOCAB_SIZE) is None

    @given(trees(), st.integers(0, 5))
    def test_cut_leaves_the_paths_that_are_short_enough(self, tree, depth):
        assert nodes_of(tree.cut(depth)) == {path for path in nodes_of(tree) if len(path) <= depth}

    @given(trees(), trees())
    def test_graft_continues_a_path(self, tree, other):
        place = tree.num_nodes
        stem = tuple(tree.token_ids[p - 1] for p in tree.path(place)[1:])
        before = nodes_of(tree)
        places = tree.graft(place, other)
        assert nodes_of(tree) == before | {stem + path for path in nodes_of(other)}
        assert [tree.token_ids[p - 1] for p in places] == other.token_ids

    def test_chain_is_a_tree_without_branches(self):
        chain = DraftTree.chain([4, 4, 5])
        assert chain.is_chain and nodes_of(chain) == {(4,), (4, 4), (4, 4, 5)}
        assert not DraftTree([4, 5], [0, 0]).is_chain


class TestForward:
    """One forward over a tree gives every place what a forward over its path alone gives it."""

    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
    @settings(max_examples=12, deadline=None)
    @given(tree=trees(), length=st.integers(1, 14), seed=st.integers(0, 3))
    def test_logits_and_cache_are_those_of_the_chain(self, toolbox, name, tree, length, seed):
        target, prompt = toolbox.target(name), toolbox.prompt(length, seed=seed)
        places, keyword = tree.num_nodes + 1, toolbox.cache_keyword()
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(prompt[:, :-1], **{keyword: cache}) if length > 1 else None
            rollback = CacheRollback(cache)
            ids = torch.tensor([[prompt[0, -1].item(), *tree.token_ids]])
            positions = torch.tensor([tree.depths()]) + length - 1
            seen = torch.ones(1, length - 1, dtype=torch.bool)
            masks = attention_masks(target, cache, [tree], [length - 1], places, seen)
            logits = target(ids, attention_mask=masks, position_ids=positions, **{keyword: cache}).logits[0]
            for place in range(places):
                chain = [tree.token_ids[p - 1] for p in tree.path(place)[1:]]
                alone = target(torch.cat([prompt, torch.tensor([chain], dtype=torch.long)], dim=1)).logits[0, -1]
                torch.testing.assert_close(logits[place], alone, atol=1e-4, rtol=1e-4)
            path = tree.path(places - 1)
            order = torch.tensor([path + list(range(len(path), places))])
            rollback.move(places, order, torch.arange(places)[None])
            rollback.keep(places, len(path))
            chain = [tree.token_ids[p - 1] for p in path[1:]]
            whole = torch.cat([prompt, torch.tensor([[*chain, 7]], dtype=torch.long)], dim=1)
            after = target(whole[:, -1:], **{keyword: cache}).logits[0, -1]
            torch.testing.assert_close(after, target(whole).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_tree_is_refused_when_the_attention_takes_no_mask(toolbox, monkeypatch):
    target, prompt = toolbox.target("llama"), toolbox.prompt(5)
    view = toolbox.drafter(target).with_options(tree_budget=4)
    monkeypatch.setattr(target.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match=r"`tree_budget` 4 needs an attention that takes any mask.*'sdpa'"):
        toolbox.greedy(target, prompt, view)


def test_tree_accepts_more_than_a_chain_of_the_same_slots(toolbox):
    target, prompt = toolbox.target("llama"), toolbox.prompt(12)
    expected = toolbox.greedy(target, prompt, max_new_tokens=96)
    drafter = toolbox.scripted(target, expected[0].tolist())
    lengths = []
    for budget in (None, 4, 16):
        view = drafter.with_options(tree_budget=budget, use_selector=False)
        assert torch.equal(toolbox.greedy(target, prompt, view, max_new_tokens=96), expected)
        lengths.append(view.statistics.acceptance_length)
    assert lengths[0] < lengths[2] and lengths[1] <= lengths[2]
    assert max(view.statistics.num_nodes) <= 16 and view.statistics.to_dict()["num_nodes"]
