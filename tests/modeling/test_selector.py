"""The relay head against a slow oracle, and what it may and may not depend on."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_drelay.modeling.configuration_drelay import DRelayConfig, DRelaySelectorConfig
from hf_drelay.modeling.modeling_base import Pool
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.modeling_heads import HeadInputs, IndependentHead, walk_slots
from hf_drelay.modeling.modeling_selector import DRelaySelectorModel, RelativeBias


V, H, C, K, WINDOW = 30, 12, 4, 3, 5
FIELDS = {
    "vocab_size": V,
    "hidden_size": H,
    "num_target_layers": 9,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "block_size": K + 1,
    "pool_size": C,
    "selector_hidden_size": 8,
    "selector_num_heads": 2,
    "history_window": WINDOW,
    "pair_rank": 3,
}
EVERY_PART = [
    "use_global_read",
    "use_history_read",
    "use_prefix_read",
    "use_rank_head",
    "use_repair_gate",
    "pair_rank",
    "copy_order",
]
NO_READS = {"use_global_read": False, "use_history_read": False, "use_prefix_read": False}
NUMBERS = ("pair_rank", "copy_order")  # parts that a number turns off
ALL_OFF = dict.fromkeys(EVERY_PART, False) | dict.fromkeys(NUMBERS, 0)


def make_selector(seed=0, is_trained=True, **fields) -> DRelaySelectorModel:
    """`is_trained`: random weights everywhere, the layers that start at zero included, so that every path counts."""
    torch.manual_seed(seed)
    selector = DRelaySelectorModel(DRelaySelectorConfig(**FIELDS | {"initializer_range": 0.5} | fields)).eval()
    if is_trained:
        with torch.no_grad():
            for name, weight in selector.named_parameters():
                weight.normal_(mean=1.0 if "norm.weight" in name else 0.0, std=0.5)
    return selector


def make_inputs(selector, seed=0, num_blocks=1, num_history=3, **changes) -> HeadInputs:
    """Random inputs of a stage; a pool over `V` tokens, or over the shortlist if the selector has one."""
    generator = torch.Generator().manual_seed(seed)
    config = selector.config
    num_slots = config.num_drafts

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    table = noise(V, H)
    shortlist = None
    if selector.shortlist_rows is not None:
        rows = selector.shortlist_rows
        shortlist = (rows < config.draft_vocab_size).nonzero()[:, 0]
    logits = 2 * noise(num_blocks, num_slots, config.output_vocab_size)
    mask = (torch.arange(WINDOW) >= WINDOW - num_history).expand(num_blocks, -1)
    inputs = HeadInputs(
        hidden_states=noise(num_blocks, num_slots, H),
        anchor_hidden=noise(num_blocks, H) if config.layout == "fill_in" else None,
        pool=Pool.from_logits(logits, C, shortlist),
        anchor_ids=torch.randint(V, (num_blocks,), generator=generator),
        history=noise(num_blocks, WINDOW, H),
        history_mask=mask,
        offset=0,
        earlier=None,
        embed=lambda ids: table[ids],
        text_ids=make_text(generator, num_blocks),
    )
    return replace(inputs, **changes)


def make_text(generator, num_blocks) -> torch.LongTensor:
    """A text so long that tokens and pairs of them come again; every row is one shorter than that before it."""
    text = torch.randint(V, (num_blocks, 200), generator=generator)
    for row in range(num_blocks):
        text[row, :row] = -1
    return text


def random_path(inputs, seed=0) -> torch.LongTensor:
    """Anchor and random tokens of all slots but the last; they need not come from the pools."""
    generator = torch.Generator().manual_seed(100 + seed)
    num_blocks, num_slots = inputs.pool.ids.shape[:2]
    tokens = torch.randint(V, (num_blocks, num_slots - 1), generator=generator)
    return torch.cat([inputs.anchor_ids[:, None], tokens], dim=1)


@torch.no_grad()
def scores_of(selector, inputs, path, first=0) -> torch.Tensor:
    return selector.score(selector.read(inputs), path, first)


class NaiveSelector:
    """
    The selector, candidate by candidate, for one block. Of the details that the paper leaves open: embeddings are
    normed after `W_e`, slot features after the blocks, the trunk before its two readers; both parallel reads have a
    null key with a zero value.
    """

    def __init__(self, selector, inputs):
        self.config, self.weights = selector.config, dict(selector.named_parameters())
        self.rows = selector.shortlist_rows
        self.inputs = inputs
        self.ids, self.log_probs = inputs.pool.ids[0].tolist(), inputs.pool.log_probs[0]
        self.num_slots = len(self.ids)
        self.has_trunk = self.config.use_rank_head or self.config.use_repair_gate
        if self.has_trunk:
            self.e = [[self.embed(token) for token in slot] for slot in self.ids]
            self.x = self.slot_features()

    def w(self, name):
        return self.weights[f"{name}.weight"]

    def norm(self, name, x):
        return x / torch.sqrt(x.pow(2).mean() + self.config.rms_norm_eps) * self.w(name)

    def linear(self, name, x):
        bias = self.weights.get(f"{name}.bias")
        return self.w(name) @ x + (0 if bias is None else bias)

    def embed(self, token):
        return self.norm("embed_norm", self.w("embed_proj") @ self.inputs.embed(torch.tensor(token)))

    def heads(self, x):
        return x.view(self.config.selector_num_heads, -1)

    def slot_features(self):
        position = self.w("slot_embedding")
        anchor = self.w("pool_proj") @ self.embed(self.inputs.anchor_ids[0].item())
        if self.inputs.anchor_hidden is not None:
            anchor = anchor + self.w("slot_proj") @ self.inputs.anchor_hidden[0]
        x = [anchor + position[0]]
        for i in range(self.num_slots):
            mean = sum(self.log_probs[i, k].exp() * self.e[i][k] for k in range(C))
            hidden = self.inputs.hidden_states[0, i]
            x.append(self.w("slot_proj") @ hidden + self.w("pool_proj") @ mean + position[i + 1])
        for n in range(self.config.selector_num_layers if self.config.use_global_read else 0):
            x = self.block(f"blocks.{n}.", x)
        return [self.norm("slot_norm", row) for row in x]

    def block(self, prefix, x):
        width = self.config.selector_hidden_size
        projected = [self.w(prefix + "qkv_proj") @ self.norm(prefix + "attention_norm", row) for row in x]
        queries, keys, values = ([self.heads(p[n * width :][:width]) for p in projected] for n in range(3))
        rows = []
        for i, row in enumerate(x):
            scale = math.sqrt(queries[i].shape[1])
            read = []
            for h in range(self.config.selector_num_heads):
                shares = torch.stack([queries[i][h] @ key[h] / scale for key in keys]).softmax(0)
                read.append(sum(share * value[h] for share, value in zip(shares, values, strict=True)))
            row = row + self.w(prefix + "o_proj") @ torch.cat(read)
            inner = self.linear(prefix + "up_proj", self.norm(prefix + "mlp_norm", row))
            rows.append(row + self.linear(prefix + "down_proj", inner * torch.sigmoid(inner)))
        return rows

    def attend(self, query, entries, biases, null_key=None):
        """Read of one candidate: `entries` are pairs of key and value, `biases` has one row per entry, `(h,)`."""
        query, scale = self.heads(query), math.sqrt(self.config.selector_hidden_size / self.config.selector_num_heads)
        read = []
        for h in range(self.config.selector_num_heads):
            logits = [
                query[h] @ self.heads(key)[h] / scale + b[h] for (key, _), b in zip(entries, biases, strict=True)
            ]
            found = [self.heads(value)[h] for _, value in entries]
            if null_key is not None:
                logits.append(query[h] @ null_key[h] / scale)
                found.append(torch.zeros_like(query[h]))
            shares = torch.stack(logits).softmax(0)
            read.append(sum(share * value for share, value in zip(shares, found, strict=True)))
        return torch.cat(read)

    def pair(self, i, k):
        return torch.cat([self.x[i + 1], self.e[i][k]])

    def global_read(self, i, k):
        name = "candidate_read."
        entries, biases = [], []
        for j in range(self.num_slots):
            for m in range(C) if j != i else ():  # the own slot is masked
                entries.append((self.w(name + "kv_proj") @ self.pair(j, m)).chunk(2))
                distance = self.weights[name + "distance_bias.table"][:, i - j + self.config.num_drafts - 1]
                biases.append(self.weights[name + "log_prob_scale"] * self.log_probs[j, m] + distance)
        query = self.w(name + "q_proj") @ self.pair(i, k)
        read = self.attend(query, entries, biases, self.weights[name + "null_key"])
        share = torch.sigmoid(self.linear(name + "lambda_proj", self.x[i + 1]))
        return share * (self.w(name + "g_proj") @ read)

    def history_read(self, i, k):
        name, entries, biases = "history_read.", [], []
        table = self.weights[name + "distance_bias.table"]
        for p in range(WINDOW):
            if self.inputs.history_mask[0, p]:
                entries.append((self.w(name + "kv_proj") @ self.inputs.history[0, p]).chunk(2))
                biases.append(table[:, i + self.inputs.offset + WINDOW - p])
        query = self.w(name + "q_proj") @ self.pair(i, k)
        return self.w(name + "o_proj") @ self.attend(query, entries, biases, self.weights[name + "null_key"])

    def prefix_read(self, i, k, path):
        name = "prefix_read."
        prefix = list(self.inputs.earlier[0]) if self.inputs.earlier is not None else []
        prefix += [torch.cat([self.x[j], self.embed(path[j])]) for j in range(i + 1)]
        entries = [(self.w(name + "kv_proj") @ entry).chunk(2) for entry in prefix]
        table = self.weights[name + "distance_bias.table"]
        biases = [table[:, min(len(prefix) - j, table.shape[1] - 1)] for j in range(len(prefix))]
        return self.w(name + "o_proj") @ self.attend(self.w(name + "q_proj") @ self.pair(i, k), entries, biases)

    def trunk(self, i, k, path):
        evidence = torch.stack(
            [self.log_probs[i, k], self.log_probs[i, k] - self.log_probs[i, 0], torch.tensor(k / C)]
        )
        trunk = self.linear("trunk_proj", torch.cat([self.pair(i, k), evidence]))
        if self.config.use_global_read:
            trunk = trunk + self.global_read(i, k)
        if self.config.use_history_read:
            trunk = trunk + self.history_read(i, k)
        if self.config.use_prefix_read:
            trunk = trunk + self.prefix_read(i, k, path)
        return self.norm("trunk_norm", trunk)

    def table_row(self, token):
        return token if self.rows is None else int(self.rows[token])

    def rank_score(self, i, k, path, trunk):
        score = self.log_probs[i, k]
        if self.config.pair_rank:
            hidden = self.linear("pair_path.hidden_proj", self.inputs.hidden_states[0, i])
            left = self.w("pair_path.predecessor_table")[self.table_row(path[i])]
            score = score + (left * hidden) @ self.weights["pair_path.successor_table"][self.table_row(self.ids[i][k])]
        if self.config.copy_order:
            weights = self.linear("copy_path.weight_proj", self.inputs.hidden_states[0, i])
            text = [*self.inputs.text_ids[0, -self.config.copy_window :].tolist(), *map(int, path[: i + 1])]
            for n in range(1, self.config.copy_order + 1):
                last, token = text[len(text) - n :], int(self.ids[i][k])
                count = sum(text[j - n : j] == last and text[j] == token for j in range(n, len(text)))
                score = score + weights[n - 1] * math.log(1 + count)
        if self.config.use_rank_head:
            inner = self.linear("rank_up", trunk)
            score = score + (self.w("rank_down") @ (inner * torch.sigmoid(inner)))[0]
        return score

    def gate(self, i, scores, trunks):
        """Gate logit: the log-odds of the repairs, and a correction."""
        shares = scores[1:].softmax(0)
        mixed = sum(share * trunk for share, trunk in zip(shares, trunks[1:], strict=True))
        inner = self.linear("gate_up", torch.cat([self.x[i + 1], trunks[0], mixed]))
        correction = self.linear("gate_down", inner * torch.sigmoid(inner))[0]
        return scores[1:].logsumexp(0) - scores[0] + correction

    @torch.no_grad()
    def score(self, path):
        """Selection logits `(K, C)` after `path`, the anchor and the tokens of all slots but the last."""
        rows = []
        for i in range(self.num_slots):
            trunks = [self.trunk(i, k, path) if self.has_trunk else None for k in range(C)]
            scores = torch.stack([self.rank_score(i, k, path, trunks[k]) for k in range(C)])
            if not self.config.use_repair_gate:
                rows.append(scores.log_softmax(0))
                continue
            # One minus a probability close to one has few digits left in float32.
            repair = torch.sigmoid(self.gate(i, scores, trunks).double())
            row = torch.cat([(1 - repair).log()[None], repair.log() + scores[1:].double().log_softmax(0)])
            rows.append(row.float())
        return torch.stack(rows)


class TestOracle:
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"layout": "shifted", "block_size": K},
            {"selector_num_layers": 1, "selector_num_heads": 4},
            {"use_global_read": False},
            {"use_history_read": False},
            {"use_prefix_read": False},
            {"use_rank_head": False},
            {"use_repair_gate": False},
            {"pair_rank": 0},
            {"copy_order": 0},
            {"copy_window": 5},
            {"use_rank_head": False, "use_repair_gate": False} | NO_READS,
        ],
        ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()) or "all",
    )
    def test_scores_equal_the_oracle(self, fields):
        selector = make_selector(**fields)
        inputs = make_inputs(selector)
        path = random_path(inputs)
        expected = NaiveSelector(selector, inputs).score(path[0].tolist())
        torch.testing.assert_close(scores_of(selector, inputs, path)[0], expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("num_history", [0, 1, WINDOW])
    def test_scores_equal_the_oracle_when_the_history_is_short_or_full(self, num_history):
        selector = make_selector()
        inputs = make_inputs(selector, num_history=num_history)
        path = random_path(inputs)
        expected = NaiveSelector(selector, inputs).score(path[0].tolist())
        torch.testing.assert_close(scores_of(selector, inputs, path)[0], expected, rtol=1e-4, atol=1e-5)

    def test_scores_equal_the_oracle_in_a_second_stage(self):
        selector = make_selector()
        first = make_inputs(selector, seed=1)
        earlier = selector.remember(selector.read(first), random_path(first)[:, :2]).detach()
        inputs = make_inputs(selector, seed=2, earlier=earlier, offset=2)
        path = random_path(inputs)
        expected = NaiveSelector(selector, inputs).score(path[0].tolist())
        torch.testing.assert_close(scores_of(selector, inputs, path)[0], expected, rtol=1e-4, atol=1e-5)

    def test_scores_equal_the_oracle_with_a_shortlist_and_tokens_outside_it(self):
        selector = make_selector(draft_vocab_size=7)
        selector.set_shortlist(torch.tensor([2, 3, 8, 11, 20, 21, 29]))
        inputs = make_inputs(selector)
        path = torch.cat([inputs.anchor_ids[:, None], torch.tensor([[8, 4]])], dim=1)  # 4 can only be the target's
        expected = NaiveSelector(selector, inputs).score(path[0].tolist())
        torch.testing.assert_close(scores_of(selector, inputs, path)[0], expected, rtol=1e-4, atol=1e-5)

    def test_scores_of_a_batch_equal_those_of_its_blocks_alone(self):
        selector = make_selector()
        inputs = make_inputs(selector, num_blocks=3)
        path = random_path(inputs)
        together = scores_of(selector, inputs, path)
        for i in range(3):
            pool = Pool(*(getattr(inputs.pool, n)[i : i + 1] for n in ("ids", "logits", "log_probs")))
            names = ("hidden_states", "anchor_hidden", "anchor_ids", "history", "history_mask", "text_ids")
            alone = replace(inputs, pool=pool, **{n: getattr(inputs, n)[i : i + 1] for n in names})
            torch.testing.assert_close(scores_of(selector, alone, path[i : i + 1])[0], together[i])


class TestUntrained:
    @pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
    @pytest.mark.parametrize("layout", ["fill_in", "shifted"])
    def test_distribution_is_the_drafters_own_at_every_temperature(self, layout, temperature):
        selector = make_selector(is_trained=False, layout=layout)
        inputs = make_inputs(selector)
        found = (scores_of(selector, inputs, random_path(inputs)) / temperature).log_softmax(-1)
        expected = (inputs.pool.log_probs / temperature).log_softmax(-1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    def test_walk_keeps_every_draft(self):
        selector = make_selector(is_trained=False)
        inputs = make_inputs(selector)
        choices, _ = walk_slots(selector, selector.read(inputs), inputs.pool, inputs.anchor_ids, _greedy)
        assert choices.tolist() == [[0] * K]

    def test_provisional_features_are_the_rows_themselves(self):
        selector, rows = make_selector(is_trained=False), torch.randn(1, 3, H)
        assert torch.equal(
            selector.provisional_features(rows, torch.tensor([[1, 2, 3]]), torch.nn.Embedding(V, H)), rows
        )


def _greedy(logits, first):
    return logits.argmax(-1)


class TestParts:
    @pytest.mark.parametrize("part", EVERY_PART)
    def test_scores_are_a_distribution_with_one_part_off(self, part):
        selector = make_selector(**{part: 0 if part in NUMBERS else False})
        inputs = make_inputs(selector)
        scores = scores_of(selector, inputs, random_path(inputs))
        torch.testing.assert_close(scores.logsumexp(-1), torch.zeros(1, K), rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        "weight",
        [
            "candidate_read.g_proj.weight",
            "blocks.1.down_proj.weight",
            "history_read.o_proj.weight",
            "prefix_read.o_proj.weight",
            "rank_down.weight",
            "gate_down.weight",
            "pair_path.successor_table",
        ],
    )
    def test_part_changes_the_scores_when_it_is_on(self, weight):
        selector = make_selector()
        inputs = make_inputs(selector)
        before = scores_of(selector, inputs, random_path(inputs))
        with torch.no_grad():
            selector.get_parameter(weight).zero_()
        assert not torch.allclose(before, scores_of(selector, inputs, random_path(inputs)), atol=1e-3)

    @pytest.mark.parametrize("seed", range(5))
    def test_greedy_tokens_are_those_of_the_independent_head_with_every_part_off(self, seed):
        """Also with random weights in what remains: nothing of it may reach the scores."""
        selector = make_selector(seed, **ALL_OFF)
        inputs = make_inputs(selector, seed)
        walks = [
            walk_slots(head, head.read(inputs), inputs.pool, inputs.anchor_ids, _greedy)[0]
            for head in (selector, IndependentHead())
        ]
        assert torch.equal(*walks)

    def test_switched_off_parts_have_no_parameters(self):
        names = [name for name, _ in make_selector(**ALL_OFF).named_parameters()]
        parts = ("blocks", "candidate_read", "history_read", "prefix_read", "rank_", "gate_", "pair_path")
        assert not [name for name in names if name.startswith(parts)]

    def test_random_weights_repair_some_slots_and_keep_others(self):
        """Otherwise the comparisons of this file could not see a wrong choice."""
        choices = []
        for seed in range(6):
            selector = make_selector(seed)
            inputs = make_inputs(selector, seed)
            walk = walk_slots(selector, selector.read(inputs), inputs.pool, inputs.anchor_ids, _greedy)
            choices += walk[0][0].tolist()
        assert 0 < sum(choice > 0 for choice in choices) < len(choices)

    def test_scores_are_fp32_when_the_selector_is_not(self):
        selector = make_selector().to(torch.bfloat16)
        inputs = make_inputs(selector)
        assert scores_of(selector, inputs, random_path(inputs)).dtype == torch.float32


class TestCausality:
    @pytest.mark.parametrize("slot", range(1, K))
    def test_scores_do_not_depend_on_tokens_of_the_same_and_later_slots(self, slot):
        selector = make_selector()
        inputs = make_inputs(selector)
        path = random_path(inputs)
        changed = path.clone()
        changed[:, slot:] = (changed[:, slot:] + 7) % V  # entry `slot` is the token before slot `slot` (from zero)
        before, after = (scores_of(selector, inputs, p) for p in (path, changed))
        torch.testing.assert_close(after[:, :slot], before[:, :slot], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, slot], before[:, slot], atol=1e-3)

    @pytest.mark.parametrize("first", range(K))
    def test_scoring_one_slot_equals_scoring_all(self, first):
        selector = make_selector()
        inputs = make_inputs(selector)
        path = random_path(inputs)
        one = scores_of(selector, inputs, path[:, : first + 1], first)
        torch.testing.assert_close(one, scores_of(selector, inputs, path)[:, first : first + 1], rtol=1e-5, atol=1e-5)

    @settings(max_examples=15, deadline=None)
    @given(first=st.integers(0, K - 1), last=st.integers(1, K), seed=st.integers(0, 9))
    def test_scoring_a_range_of_slots_equals_scoring_all(self, first, last, seed):
        if first >= last:
            first, last = last - 1, first + 1
        selector = make_selector(seed)
        earlier = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(seed))
        inputs = make_inputs(selector, seed, earlier=earlier, offset=2)
        path = random_path(inputs, seed)
        part = scores_of(selector, inputs, path[:, :last], first)
        torch.testing.assert_close(part, scores_of(selector, inputs, path)[:, first:last], rtol=1e-5, atol=1e-5)


class TestGlobalRead:
    @pytest.mark.parametrize("slot", range(K))
    def test_other_candidates_of_the_own_slot_are_not_read(self, slot):
        """
        The odds of candidates 0 and 1 stay when 2 and 3 become other tokens, because only their own queries differ.
        The slot feature, which mixes all candidates, and what couples them later are off.
        """
        selector = make_selector(use_repair_gate=False, pair_rank=0)
        with torch.no_grad():
            selector.pool_proj.weight.zero_()
        inputs = make_inputs(selector)
        ids = inputs.pool.ids.clone()
        ids[:, slot, 2:] = (ids[:, slot, 2:] + 7) % V
        changed = replace(inputs, pool=replace(inputs.pool, ids=ids))
        path = random_path(inputs)
        before, after = (scores_of(selector, i, path) for i in (inputs, changed))
        before, after = before[..., 0] - before[..., 1], after[..., 0] - after[..., 1]
        torch.testing.assert_close(after[:, slot], before[:, slot], rtol=1e-5, atol=1e-5)
        others = [i for i in range(K) if i != slot]  # the change is real: the other slots read it
        assert not torch.isclose(after[:, others], before[:, others], atol=1e-4).any()

    @pytest.mark.parametrize("slot", range(K))
    def test_probabilities_of_the_own_slot_are_not_read(self, slot):
        selector = make_selector(use_repair_gate=False, pair_rank=0)
        with torch.no_grad():
            selector.pool_proj.weight.zero_()
        inputs = make_inputs(selector)
        log_probs = inputs.pool.log_probs.clone()
        log_probs[:, slot, 2:] -= 3.0
        changed = replace(inputs, pool=replace(inputs.pool, log_probs=log_probs))
        path = random_path(inputs)
        before, after = (scores_of(selector, i, path) for i in (inputs, changed))
        before, after = before[..., 0] - before[..., 1], after[..., 0] - after[..., 1]
        torch.testing.assert_close(after[:, slot], before[:, slot], rtol=1e-5, atol=1e-5)
        others = [i for i in range(K) if i != slot]
        assert not torch.isclose(after[:, others], before[:, others], atol=1e-5).any()

    def test_nothing_is_read_when_there_is_no_other_slot(self):
        """Only the null key is left, and its value is zero."""
        selector = make_selector(block_size=2)
        inputs = make_inputs(selector)
        before = scores_of(selector, inputs, inputs.anchor_ids[:, None])
        with torch.no_grad():
            selector.candidate_read.g_proj.weight.normal_()
        assert torch.equal(scores_of(selector, inputs, inputs.anchor_ids[:, None]), before)

    def test_scores_equal_the_oracle_when_only_some_slots_are_scored(self):
        """A distance between slots means the same however many slots of the block are asked for."""
        selector = make_selector()
        whole = make_inputs(selector)
        pool = Pool(*(getattr(whole.pool, name)[:, : K - 1] for name in ("ids", "logits", "log_probs")))
        inputs = replace(whole, pool=pool, hidden_states=whole.hidden_states[:, : K - 1])
        path = random_path(inputs)
        expected = NaiveSelector(selector, inputs).score(path[0].tolist())
        torch.testing.assert_close(scores_of(selector, inputs, path)[0], expected, rtol=1e-4, atol=1e-5)


class TestHistoryRead:
    def test_positions_outside_the_mask_are_not_read(self):
        selector = make_selector()
        inputs = make_inputs(selector, num_history=2)
        history = inputs.history.clone()
        history[:, :-2] = 1e3
        path = random_path(inputs)
        assert torch.equal(
            scores_of(selector, replace(inputs, history=history), path), scores_of(selector, inputs, path)
        )

    @pytest.mark.parametrize("place", [-2, -1])
    def test_positions_inside_the_mask_are_read(self, place):
        selector = make_selector()
        inputs = make_inputs(selector, num_history=2)
        history = inputs.history.clone()
        history[:, place] += 1.0
        path = random_path(inputs)
        changed = scores_of(selector, replace(inputs, history=history), path)
        assert not torch.allclose(changed, scores_of(selector, inputs, path), atol=1e-4)

    def test_history_is_further_away_in_a_later_stage(self):
        """The window stands still at the round's anchor while the slots move on."""
        selector = make_selector()
        inputs = make_inputs(selector)
        path = random_path(inputs)
        later = scores_of(selector, replace(inputs, offset=3), path)
        assert not torch.allclose(later, scores_of(selector, inputs, path), atol=1e-4)


class TestRelativeBias:
    def test_distances_beyond_the_table_share_its_last_entry(self):
        bias = RelativeBias(2, 4)
        with torch.no_grad():
            bias.table.copy_(torch.arange(8.0).view(2, 4))
        assert bias(torch.tensor([0, 3, 4, 99])).tolist() == [[0, 3, 3, 3], [4, 7, 7, 7]]

    def test_distances_below_zero_share_its_first_entry(self):
        bias = RelativeBias(1, 4)
        with torch.no_grad():
            bias.table.copy_(torch.arange(4.0)[None])
        assert bias(torch.tensor([[-5], [0]])).tolist() == [[[0], [0]]]


class TestEarlierStages:
    @staticmethod
    def _second_stage(selector, first_path, num_kept=2):
        first = make_inputs(selector, seed=1)
        earlier = selector.remember(selector.read(first), first_path[:, :num_kept])
        inputs = make_inputs(selector, seed=2, earlier=earlier, offset=num_kept)
        return scores_of(selector, inputs, random_path(inputs))

    @pytest.mark.parametrize("place", [0, 1])
    def test_tokens_of_an_earlier_stage_are_read(self, place):
        selector = make_selector()
        path = random_path(make_inputs(selector, seed=1))
        changed = path.clone()
        changed[:, place] = (changed[:, place] + 7) % V
        before, after = self._second_stage(selector, path), self._second_stage(selector, changed)
        assert not torch.isclose(after, before, atol=1e-4).all(-1).any()

    def test_tokens_that_were_cut_are_not_remembered(self):
        selector = make_selector()
        path = random_path(make_inputs(selector, seed=1))
        changed = path.clone()
        changed[:, 2] = (changed[:, 2] + 7) % V
        assert torch.equal(self._second_stage(selector, changed), self._second_stage(selector, path))

    def test_third_stage_remembers_both_before_it(self):
        selector = make_selector()
        first = make_inputs(selector, seed=1)
        earlier = selector.remember(selector.read(first), random_path(first)[:, :2])
        second = make_inputs(selector, seed=2, earlier=earlier, offset=2)
        both = selector.remember(selector.read(second), random_path(second)[:, :1])
        assert both.shape == (1, 3, 16)
        assert torch.equal(both[:, :2], earlier)

    def test_nothing_is_remembered_without_a_prefix_read(self):
        selector = make_selector(use_prefix_read=False)
        inputs = make_inputs(selector)
        assert selector.remember(selector.read(inputs), random_path(inputs)) is None

    def test_provisional_features_add_the_projected_tokens(self):
        selector, table = make_selector(), torch.nn.Embedding(V, H)
        rows, tokens = torch.randn(1, 2, H), torch.tensor([[4, 5]])
        with torch.no_grad():
            expected = rows + table(tokens) @ selector.repaired_proj.weight.T
            torch.testing.assert_close(selector.provisional_features(rows, tokens, table), expected)

    def test_provisional_features_are_the_rows_themselves_when_switched_off(self):
        selector, rows = make_selector(use_repaired_feature=False), torch.randn(1, 2, H)
        assert selector.provisional_features(rows, torch.tensor([[4, 5]]), None) is rows


class TestGate:
    @pytest.mark.parametrize("seed", range(3))
    def test_selection_is_the_plain_softmax_of_the_scores_when_the_correction_is_zero(self, seed):
        selector = make_selector(seed)
        with torch.no_grad():
            selector.gate_down.weight.zero_()
            selector.gate_down.bias.zero_()
        inputs = make_inputs(selector, seed)
        gated = scores_of(selector, inputs, random_path(inputs))
        selector.config.use_repair_gate = False  # `score` then returns log_softmax of the same scores
        plain = scores_of(selector, inputs, random_path(inputs))
        torch.testing.assert_close(gated, plain, rtol=1e-5, atol=1e-5)

    def test_correction_moves_mass_between_keep_and_repair_only(self):
        selector = make_selector()
        inputs = make_inputs(selector)
        before = scores_of(selector, inputs, random_path(inputs))
        with torch.no_grad():
            selector.gate_down.bias += 2.0
        after = scores_of(selector, inputs, random_path(inputs))
        assert (after[..., 0] < before[..., 0]).all()
        torch.testing.assert_close(after[..., 1:].log_softmax(-1), before[..., 1:].log_softmax(-1))

    @pytest.mark.parametrize("bias", [-1e4, 1e4])
    def test_extreme_gates_stay_finite(self, bias):
        """A saturated sigmoid would give log(0), and the loss of a wrong sure choice would be infinite."""
        selector = make_selector()
        with torch.no_grad():
            selector.gate_down.bias.fill_(bias)
        inputs = make_inputs(selector)
        assert scores_of(selector, inputs, random_path(inputs)).isfinite().all()


class TestShortlist:
    @staticmethod
    def _model(**fields):
        return DRelayModel(DRelayConfig(**FIELDS | {"draft_vocab_size": 7, "eos_token_id": [28, 29]} | fields))

    def test_table_rows_follow_the_shortlist(self):
        model = self._model()
        model.set_shortlist(torch.tensor([29, 2, 20, 11, 8, 3, 28]))
        assert model.drafter.draft_token_ids.tolist() == [2, 3, 8, 11, 20, 28, 29]
        assert model.selector.shortlist_rows[model.drafter.draft_token_ids].tolist() == list(range(7))
        assert (model.selector.shortlist_rows == 7).sum() == V - 7

    def test_tokens_outside_share_one_predecessor_row(self):
        model = self._model()
        model.set_shortlist(torch.tensor([2, 3, 8, 11, 20, 28, 29]))
        assert model.selector.pair_path.predecessor_table.weight.shape == (8, 3)
        assert model.selector.pair_path.successor_table.shape == (7, 3)

    def test_second_shortlist_replaces_the_first(self):
        model = self._model()
        model.set_shortlist(torch.tensor([2, 3, 8, 11, 20, 28, 29]))
        model.set_shortlist(torch.tensor([1, 4, 5, 6, 7, 28, 29]))
        assert (model.selector.shortlist_rows < 7).nonzero()[:, 0].tolist() == [1, 4, 5, 6, 7, 28, 29]

    def test_drafter_and_selector_agree_before_a_shortlist_is_set(self):
        """A new drafter drafts from its first tokens; the pair tables must know these, or drafting fails."""
        model = self._model(eos_token_id=0)
        rows = model.selector.shortlist_rows[model.drafter.draft_token_ids]
        assert rows.tolist() == list(range(7))

    @pytest.mark.parametrize(
        ("ids", "match"),
        [
            ([1, 2, 3, 4, 28, 29], "`draft_vocab_size` .7. distinct tokens.*got 6, without \\[\\]"),
            ([1, 2, 3, 4, 4, 28, 29], "distinct tokens"),
            ([1, 2, 3, 4, 5, 6, 28], "all end tokens .28, 29. among them; got 7, without .29."),
        ],
    )
    def test_wrong_shortlist_raises_and_says_what_is_missing(self, ids, match):
        with pytest.raises(ValueError, match=match):
            self._model().set_shortlist(torch.tensor(ids))
