"""Our own decoding loop: draft, verify, commit, for a whole batch, chains and trees, from an empty or a filled cache.

A round drafts for every row, runs the target once over all drafts, walks the logits as plain decoding would have
(`verification.py`) and leaves only committed tokens in the cache (`cache_rollback.py`). Rows advance in one of two
ways. In *lockstep* the batch is one group: it advances by what all rows accepted, every call into user code is that of
plain decoding, and any cache works. *Ragged*, every row is a group of its own: it advances by what it accepted itself,
its tokens end at its own length in the cache, and the slots behind them are masked.

Invariant: between rounds the cache of a group holds its tokens but the newest (and but those that wait for a replay).
"""

import contextlib
import copy

import torch
from transformers.cache_utils import StaticLayer

from .batch_drafting import draft_rounds
from .cache_rollback import CacheRollback
from .candidate_generator import DRelayCandidateGenerator
from .compat import cache_argument, cache_keyword, hidden_states_request
from .draft_statistics import DraftStatistics, PhaseClock
from .draft_tree import DraftTree, attention_masks
from .host_transfer import send
from .proposal import for_row, is_row_wise
from .sampling_noise import SamplingNoise
from .step_outputs import StepOutputs
from .target_families import bears_holes, bears_trees
from .verification import GreedyPicker, NoisePicker, RejectionPicker, RowDraft, RowGroup, StopRule, Verifier, Walk


# Tokens that may wait for a replay; beyond that they are fed in a forward of their own.
_MAX_PENDING = 32
# Kinds of tokens, one for each token of the text.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Arguments of the prompt that later forwards do not take, or that this file makes for each forward.
_PROMPT_ONLY = ("inputs_embeds", "attention_mask", "position_ids", *_TOKEN_TYPES)


class SpeculativeLoop:
    """
    One call.

    Args:
        view (`DraftView`): Drafter and options; gets the statistics of the call.
        target (`PreTrainedModel`): A decoder-only target.
        input_ids (`torch.LongTensor` of shape `(B, P)`): Prompt, padded left; empty with `inputs_embeds`.
        logits_processor (`LogitsProcessorList`), stopping_criteria (`StoppingCriteriaList`): Of the call.
        generation_config (`GenerationConfig`): Of the call; `max_length` is final.
        streamer (`BaseStreamer`, *optional*): Gets the tokens one at a time.
        model_kwargs: What the host prepared for the target's forward.
    """

    def __init__(
        self,
        view,
        target,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer=None,
        synced_gpus=False,
        inputs_tensor=None,
        tokenizer=None,
        assistant_tokenizer=None,
        **model_kwargs,
    ):
        self.view = view
        self.target = target
        self.input_ids = input_ids
        self.logits_processor = logits_processor
        self.criteria = stopping_criteria
        self.config = generation_config
        self.streamer = streamer
        self.model_kwargs = model_kwargs
        self.num_rows = _batch_size(input_ids, model_kwargs)
        self.adapter = view.model.adapter(target)
        self.clock = PhaseClock(enabled=view.options.profile)
        self.statistics = DraftStatistics(phase_ms=self.clock.phase_ms)
        self.cost_model = view.cost_model(self.num_rows)
        self.outputs = StepOutputs(generation_config)
        self.stop = StopRule(stopping_criteria)
        self.groups: list[RowGroup] = []
        self.rollback = self.noise = None
        self.is_verifying = False
        self.num_unwalked = 0  # places of the last forward, until the cache holds those that stay
        taps = view.model.config.target_layer_ids
        every_state = bool(generation_config.output_hidden_states)
        forward = target.get_decoder().forward
        self.request = {"output_hidden_states": True if every_state else hidden_states_request(taps, forward)}
        self.shares_cache = getattr(view.model.drafter, "needs_shared_cache", False)
        if self.shares_cache:
            self.request["return_shared_kv_states"] = True

    def run(self):
        """Decode until every row has met a stopping criterion; returns what `generate()` returns."""
        started_s = 0.0
        if self.cost_model is not None:
            self.cost_model.begin_call()
            started_s = self.cost_model.clock()
        outputs, states, seen = self._prefill()
        try:
            self._begin(outputs, states, seen)
            del outputs, states
            if self.cost_model is not None:
                self.cost_model.observe_prefill(1e3 * (self.cost_model.clock() - started_s))
            while any(not group.is_done for group in self.groups):
                self._round()
            return self._end()
        except BaseException:  # of user code: who stops a call this way may go on with the cache
            with contextlib.suppress(Exception):  # theirs is the one to see
                self._abandon()
            raise
        finally:
            if self.rollback is not None:
                self.rollback.end()

    # Prefill.

    def _prefill(self):
        """
        Feed the prompt, in chunks if asked for.

        Returns:
            The outputs of the last forward, the tapped states `(B, P, L*H)` of the prompt, and which of these
            positions are no padding `(B, P)`.
        """
        mask, config = self.model_kwargs.get("attention_mask"), copy.copy(self.config)
        length = self.input_ids.shape[1]
        width = mask.shape[1] if mask is not None else getattr(config, "_mask_length", length)
        cache = cache_argument(self.model_kwargs)
        filled = int(cache.get_seq_length())
        if filled >= width:
            raise ValueError(
                f"`{cache_keyword()}` already holds {filled} tokens, but the prompt has {width}: nothing is left to "
                "feed. Pass at least one new token, or crop the cache by one."
            )
        # Before a filled cache there are either all ids, which the host slices, or the new ones only.
        lead = width - length
        chunk = self.config.prefill_chunk_size if length > 0 else None
        start = 0 if lead else filled
        ends = [length] if chunk is None else [*range(start + chunk, length, chunk), length]
        config.prefill_chunk_size = None
        states, tapped = None, []
        for end in ends:
            kwargs = self.model_kwargs | self.request
            if len(ends) > 1:
                config._mask_length = lead + end
                for name in ("attention_mask", "position_ids", *_TOKEN_TYPES):
                    if kwargs.get(name) is not None:
                        kwargs[name] = kwargs[name][..., : lead + end]
            ids = self.input_ids[:, start:end] if lead and length else self.input_ids[:, :end]
            outputs = self.target._prefill(ids, config, kwargs)
            states = self.adapter.tapped(outputs.hidden_states, self.view.config.target_layer_ids)
            tapped.append(states)
            start = end
        states = torch.cat(tapped, dim=1)
        seen = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        if mask is not None and mask.dim() == 2:
            seen = mask[:, -states.shape[1] :].to(states.device).bool()
        return outputs, states, seen

    def _begin(self, outputs, states, seen) -> None:
        """Set up the rows and commit the token that the prefill yields."""
        vocab_size = outputs.logits.shape[-1]
        self.device = self.input_ids.device
        self.cache = cache_argument(self.model_kwargs)
        self.rollback = CacheRollback(self.cache)
        self.num_slots = int(self.cache.get_seq_length())  # slots in use, rejected ones excluded
        self.offset = self.num_slots - self.input_ids.shape[1]  # positions that have no id
        self._check_tree()
        if self.config.do_sample and (self.view.options.proposal != "sample" or self.view.options.tree_budget):
            self.noise = SamplingNoise(self.num_rows, vocab_size, self.device)
        self.is_ragged = self._can_be_ragged()
        rows = list(range(self.num_rows))
        self.groups = [
            RowGroup(own, self.input_ids[own], self.input_ids.shape[1], processors)
            for own, processors in (
                [([row], for_row(self.logits_processor, row)) for row in rows]
                if self.is_ragged
                else [(rows, self.logits_processor)]
            )
        ]
        self.cached_rows = rows  # rows that the cache holds, in its order
        self.cached_index = None  # their places in the batch, on the device, once some have left
        self.lengths = [self.num_slots] * self.num_rows  # slots of each row that hold its tokens
        self.generators = [self._generator(row, vocab_size) for row in rows]
        self.view.statistics = self.statistics
        mask = self.model_kwargs.get("attention_mask")
        for row in rows:
            own_states = states[row : row + 1, seen[row]]
            if mask is not None:
                self.generators[row].skip_padding(mask[row : row + 1], self.input_ids[row : row + 1])
            if self.shares_cache:
                self._share_cache(row, own_states.shape[1], outputs)
            self.generators[row].feed(own_states)
        hides = mask is not None and mask.dim() == 2 and not bool(mask.all())
        self.prompt_mask = mask if hides else None
        positions = self.model_kwargs.get("position_ids")
        self.next_position = None if positions is None else positions[..., -1:] + 1
        if self.next_position is not None and self.next_position.shape[-2] == 1:
            self.next_position = self.next_position.expand(*self.next_position.shape[:-2], self.num_rows, 1)
        self.types_of_text = self._types_of_text(outputs)
        self.pad_token_id = None if self.config._pad_token_tensor is None else int(self.config._pad_token_tensor)
        self.verifier = Verifier(self._picker(), self.stop, self.pad_token_id, self.streamer, self.outputs)
        self.fixed_kwargs = {
            name: value for name, value in self.model_kwargs.items() if name not in (*_PROMPT_ONLY, cache_keyword())
        }
        self.forward = (
            self.target.get_compiled_call(self.config.compile_config)
            if self.target._valid_auto_compile_criteria(self.model_kwargs, self.config)
            else self.target.__call__
        )
        self.clock.lap("prefill")
        nothing = [RowDraft(DraftTree()) for _ in rows]
        logits = outputs.logits[:, -1:].to(self.device, torch.float32)
        drafts = {id(group): nothing[: len(group.rows)] for group in self.groups}
        walks = self._walk(self.groups, drafts, logits, lambda group: self.outputs.whole(outputs))
        for group in self.groups:
            walk = walks[id(group)]
            for row, token_ids in zip(group.rows, walk.token_ids, strict=True):
                self.generators[row].record_prefill(token_ids)
        self._drop_finished_rows()

    def _types_of_text(self, outputs) -> dict[str, torch.LongTensor]:
        """The kind `(B, 1)` that a generated token has in each of `_TOKEN_TYPES`, as the target's own code says."""
        grown = self.target._update_model_kwargs_for_generation(outputs, dict(self.model_kwargs), False)
        changed = [name for name, value in grown.items() if value is not self.model_kwargs.get(name)]
        unknown = set(changed) - {*_PROMPT_ONLY, "cache", "past_key_values"}
        if unknown:
            raise ValueError(
                f"`{min(unknown)}` is an input of {type(self.target).__name__} that changes with every token, which "
                "drafts of several tokens do not follow; call generate() without `assistant_model`."
            )
        return {name: grown[name][:, -1:] for name in _TOKEN_TYPES if grown.get(name) is not None}

    def _generator(self, row: int, vocab_size: int) -> DRelayCandidateGenerator:
        noise = None
        if self.noise is not None and self.view.options.proposal == "coupled":

            def noise(num_tokens: int, token_ids):
                return self.noise.gumbel(num_tokens - self.input_ids.shape[1], row, token_ids)

        generator = DRelayCandidateGenerator(
            model=self.view.model,
            adapter=self.adapter,
            options=self.view.options,
            generation_config=self.config,
            logits_processor=for_row(self.logits_processor, row),
            stopping_criteria=self.criteria,
            is_walked=True,
            noise=noise,
            statistics=self.statistics,
            clock=self.clock,
            cost_model=self.cost_model,
            compiled_backbone=self.view.compiled_backbone,
        )
        generator.proposal.vocab_size = vocab_size  # a padded head is wider than the vocabulary
        # A static cache of the user may be shorter than the text may become; it must hold all tokens but the newest.
        rooms = [layer.max_cache_len for layer in self.rollback.layers if type(layer) is StaticLayer]
        generator.max_length = min([generator.max_length, *(room - self.offset + 1 for room in rooms)])
        if row == 0:
            self.view.trace = generator.trace
        return generator

    def _share_cache(self, row: int, num_fed: int, outputs) -> None:
        """Show the drafter of a row the target's cache behind the prompt, of which `num_fed` tokens are new."""
        kinds = {type(layer).__name__ for layer in self.rollback.layers} - {
            "DynamicLayer",
            "DynamicSlidingWindowLayer",
        }
        if kinds:
            raise ValueError(
                f"`cache_implementation` makes layers of type {min(kinds)!r}, which hold more than the text; a "
                "drafter that reads the target's cache needs a dynamic one. Leave `cache_implementation` unset."
            )
        mask = self.model_kwargs.get("attention_mask")
        num_seen = int(mask[row].sum()) if mask is not None and mask.dim() == 2 else self.num_slots
        session = self.generators[row].session
        session.num_verified = num_seen - num_fed  # its positions are those of the target
        session.observe(outputs, row)

    def _picker(self):
        if not self.config.do_sample:
            return GreedyPicker()
        return NoisePicker(self.noise) if self.noise is not None else RejectionPicker()

    def _can_be_ragged(self) -> bool:
        """Whether rows may advance on their own: nothing that a user sees may depend on the batch as a whole."""
        is_asked_row_wise = self.stop.is_row_wise and all(is_row_wise(p) for p in self.logits_processor)
        # Without end tokens plain decoding goes on with finished rows, and the clock ends all of them at one length.
        ends_alone = self.stop.has_eos or (not self.stop.others and self.stop.deadline_s is None)
        sees_batch = self.streamer is not None or self.outputs.is_collecting or _is_users(self.cache)
        has_positions = self.model_kwargs.get("position_ids") is not None and self.offset == 0
        return (
            self.num_rows > 1
            and self.rollback.can_be_ragged
            and is_asked_row_wise
            and ends_alone
            and has_positions
            and not sees_batch
            and not self.shares_cache  # its slots must be the text of the row, without a hole
            and bears_holes(self.target)
        )

    def _check_tree(self) -> None:
        if self.view.options.tree_budget is None:
            return
        is_served = self.rollback.can_move and bears_trees(self.target)
        if not is_served or self.model_kwargs.get("position_ids") is None:
            kinds = sorted({type(layer).__name__ for layer in self.rollback.layers})
            raise ValueError(
                f"`tree_budget` {self.view.options.tree_budget} needs a target whose cache keeps one slot for each "
                "token, that takes `position_ids`, and whose mask alone decides what a token sees; "
                f"{type(self.target).__name__} (cache layers {kinds}) is none. Leave `tree_budget` out to verify "
                "chains."
            )
        text = self.target.config.get_text_config(decoder=True)
        kinds = {kind.removesuffix("_attention") for kind in getattr(text, "layer_types", None) or []}
        if kinds - {"full", "sliding"}:
            raise ValueError(
                f"`tree_budget` {self.view.options.tree_budget} knows full and sliding attention, but the layers of "
                f"{type(self.target).__name__} are {sorted(kinds)}. Leave `tree_budget` out to verify chains."
            )

    # Rounds.

    def _round(self) -> None:
        """Draft, verify, commit."""
        started_s = self.cost_model.clock() if self.cost_model is not None else 0.0
        groups = [group for group in self.groups if not group.is_done]
        drafts = self._draft(groups)
        num_places = 1 + max(draft.tree.num_nodes for own in drafts.values() for draft in own)
        if self.rollback.num_pending > _MAX_PENDING:
            self._replay()
        num_pending = self.rollback.num_pending
        self.rollback.begin(takes_back=num_places > 1)
        handed_over_s = self.cost_model.clock() if self.cost_model is not None else 0.0
        self.is_verifying = True
        outputs = self._verify(groups, drafts, num_places)
        self.num_unwalked, self.is_verifying = num_places, False
        for group in groups:
            group.walked = [[] for _ in group.rows]
        logits = outputs.logits[:, -num_places:].to(self.device, torch.float32)
        states = self.adapter.tapped(outputs.hidden_states, self.view.config.target_layer_ids)[:, -num_places:]

        def step_outputs(group: RowGroup):
            rows, trees = self._cache_places(group), [draft.tree for draft in drafts[id(group)]]
            return self.outputs.sliced(outputs, self.cache, rows, self.num_slots, num_pending, trees)

        walks = self._walk(groups, drafts, logits, step_outputs)
        self._commit(groups, walks, num_places, states, outputs)
        self.clock.lap("verify")
        if self.noise is not None:
            self.noise.forget(min(group.num_new for group in groups))
        if self.cost_model is not None:
            now_s = self.cost_model.clock()
            committed = sum(walk.num_steps * len(g.rows) for g, walk in ((g, walks[id(g)]) for g in groups))
            committed /= sum(len(group.rows) for group in groups)
            verify_ms, round_ms = 1e3 * (now_s - handed_over_s), 1e3 * (now_s - started_s)
            self.cost_model.observe_round(num_places + num_pending, verify_ms, committed, round_ms)
        self._drop_finished_rows()

    def _walk(self, groups: list[RowGroup], drafts: dict, logits: torch.FloatTensor, step_outputs) -> dict[int, Walk]:
        """Walk the logits `(B', N, V)` of the cached rows; `step_outputs(group)` goes to the walk of a group."""
        of_groups = []
        for group in groups:
            first = self._cache_places(group)[0]  # a group is one row, or all of them
            of_groups.append(logits[first : first + len(group.rows)])
        own_drafts = [drafts[id(group)] for group in groups]
        ahead = self.verifier.choose_ahead(groups, of_groups, own_drafts)
        return {
            id(group): self.verifier.walk(group, own, draft, step_outputs(group), tokens)
            for group, own, draft, tokens in zip(groups, of_groups, own_drafts, ahead, strict=True)
        }

    def _draft(self, groups: list[RowGroup]) -> dict[int, list[RowDraft]]:
        """Drafts of the rows of all groups, by the group's `id`."""
        due = [
            (group, i)
            for group in groups
            for i, is_finished in enumerate(group.is_finished)
            if not (is_finished and self.stop.has_eos)  # such a row is padded
        ]
        generators = [self.generators[group.rows[i]] for group, i in due]
        draft_rounds(generators, [group.input_ids[i : i + 1] for group, i in due])
        drafting = {(id(group), i): generator for (group, i), generator in zip(due, generators, strict=True)}
        return {id(group): self._row_drafts(group, drafting) for group in groups}

    def _row_drafts(self, group: RowGroup, drafting: dict) -> list[RowDraft]:
        """In lockstep no row gets further than the shortest draft; padded rows agree with any token."""
        own = [drafting.get((id(group), i)) for i in range(len(group.rows))]
        depth = min((max(generator.tree.depths()) for generator in own if generator is not None), default=0)
        padding = DraftTree.chain([self.pad_token_id] * depth)
        return [RowDraft(padding) if g is None else _row_draft(g, g.cut_round(depth)) for g in own]

    def _verify(self, groups, drafts, num_places: int):
        """One forward over the pending tokens, the anchor and the drafts of every row that the cache holds."""
        num_pending = self.rollback.num_pending
        num_written = num_pending + num_places
        trees, tails = [DraftTree()] * len(self.cached_rows), [None] * len(self.cached_rows)
        offsets = [[0] * num_written for _ in self.cached_rows]
        for group in groups:
            for i, (place, draft) in enumerate(zip(self._cache_places(group), drafts[id(group)], strict=True)):
                trees[place], tails[place] = draft.tree, group.input_ids[i, -(num_pending + 1) :]
                depths = [*range(-num_pending, 0), *draft.tree.depths()]
                offsets[place][: len(depths)] = [depth + group.num_new - 1 for depth in depths]
        ids = torch.stack(tails)
        if num_places > 1:
            padding = self.pad_token_id or 0
            drafted = [tree.token_ids + [padding] * (num_places - 1 - tree.num_nodes) for tree in trees]
            ids = torch.cat([ids, send(drafted, ids.device)], dim=1)
        mask = self._mask(num_written)
        inputs = self._inputs(ids, offsets, mask, num_places)
        if not all(tree.is_chain for tree in trees):
            seen = torch.ones(len(trees), self.num_slots, dtype=torch.bool, device=self.target.device)
            if self.prompt_mask is not None:
                columns = self.prompt_mask.shape[1]
                seen[:, :columns] = self._of_cached(self.prompt_mask).to(seen.device).bool()
            lengths = [self.lengths[row] for row in self.cached_rows]
            inputs["attention_mask"] = attention_masks(self.target, self.cache, trees, lengths, num_places, seen)
        # The host swaps expert kernels for one-token steps; that trade does not hold for a draft.
        decode = self.target._optimize_model_for_decode() if num_written == 1 else contextlib.nullcontext()
        with decode:
            return self.forward(**inputs, return_dict=True)

    def _inputs(self, ids, offsets: list[list[int]], mask, num_logits: int) -> dict:
        """Arguments of a forward over `ids` `(B', M)` that stand `offsets`, as many, behind the prompt."""
        kwargs = dict(self.fixed_kwargs)
        if self.next_position is not None:
            first = self._of_cached(self.next_position, dim=-2)
            kwargs["position_ids"] = first + send(offsets, first.device)
        for name, types in self.types_of_text.items():
            kwargs[name] = self._of_cached(types).expand(-1, ids.shape[1])
        inputs = self.target.prepare_inputs_for_generation(
            ids,
            next_sequence_length=ids.shape[1],
            attention_mask=mask,
            is_first_iteration=False,
            **{cache_keyword(): self.cache},
            **kwargs,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_logits
        return inputs | self.request

    def _mask(self, num_written: int) -> torch.LongTensor | None:
        """Mask `(B', slots + written)` of a forward; `None` when there is nothing to hide."""
        lengths = [self.lengths[row] for row in self.cached_rows]
        if self.prompt_mask is None and min(lengths) == self.num_slots:
            return None
        shape = (len(lengths), self.num_slots + num_written)
        mask = torch.ones(shape, dtype=torch.long, device=self.device)
        if self.prompt_mask is not None:
            columns = min(self.prompt_mask.shape[1], self.num_slots)
            mask[:, :columns] = self._of_cached(self.prompt_mask)[:, :columns]
        for row, length in enumerate(lengths):
            mask[row, length : self.num_slots] = 0  # slots of rows that are further
        return mask

    def _commit(self, groups, walks, num_places: int, states, outputs) -> None:
        """Leave the walked places in the cache, and give their states to the drafter."""
        num_pending = self.rollback.num_pending
        num_written = num_pending + num_places
        sources = [list(range(num_places)) for _ in self.cached_rows]
        targets = [list(range(num_places)) for _ in self.cached_rows]
        for group in groups:
            walk = walks[id(group)]
            for i, place in enumerate(self._cache_places(group)):
                row, kept = group.rows[i], walk.places[i]
                sources[place][: len(kept)] = kept
                shift = self.lengths[row] - self.num_slots
                targets[place][: len(kept)] = range(shift, shift + len(kept))
                self.lengths[row] += num_pending + walk.num_steps
                is_text = not (self.stop.has_eos and group.is_finished[i])
                if is_text:
                    self.generators[row].session.observe(outputs, place, num_places - len(kept))
                    is_chain = kept == list(range(len(kept)))
                    index = slice(len(kept)) if is_chain else send(kept, states.device)
                    self.generators[row].feed(states[place, index][None])
                committed = walk.token_ids[i][: walk.num_texts[i]]
                if committed:
                    self.generators[row].record_round(committed)
        if sources != targets:
            sources, targets = (num_pending + send(places, self.device) for places in (sources, targets))
            self.rollback.move(num_written, sources, targets)
        num_slots = max(self.lengths[row] for row in self._kept_rows())
        self.rollback.keep(num_written, num_slots - self.num_slots)
        self.num_unwalked = 0
        if self.rollback.num_pending:
            for row in self.cached_rows:
                self.lengths[row] = self.num_slots
        else:
            self.num_slots = num_slots

    def _kept_rows(self) -> list[int]:
        """Rows of the cache that go on; ragged, the slots of finished ones are no longer needed."""
        if not self.is_ragged:
            return self.cached_rows
        return [g.rows[0] for g in self.groups if not g.is_done] or self.cached_rows

    def _drop_finished_rows(self) -> None:
        """Ragged, a finished row leaves the batch."""
        kept = self._kept_rows()
        if kept == self.cached_rows or not self.is_ragged:
            return
        places = [self.cached_rows.index(row) for row in kept]
        for layer in self.rollback.layers:  # which may lie on several devices
            layer.batch_select_indices(send(places, layer.keys.device))
        self.cached_rows, self.cached_index = kept, send(kept, self.device)

    def _of_cached(self, values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The rows of `values` that the cache still holds."""
        if self.cached_index is None:
            return values
        return values.index_select(dim, self.cached_index.to(values.device))

    def _cache_places(self, group: RowGroup) -> list[int]:
        return [self.cached_rows.index(row) for row in group.rows]

    def _replay(self) -> None:
        """Feed the tokens that wait for it, so that the cache holds all tokens but the newest."""
        group, num_pending = self.groups[0], self.rollback.num_pending
        ids = group.input_ids[:, -(num_pending + 1) : -1]
        first = group.num_new - 1 - num_pending
        offsets = [list(range(first, first + num_pending)) for _ in ids]
        self.target(**self._inputs(ids, offsets, self._mask(num_pending), 1), return_dict=True)
        self.rollback.keep(num_pending, num_pending)
        self.num_slots += num_pending
        self.lengths = [self.num_slots] * self.num_rows

    # End.

    def _abandon(self) -> None:
        """
        Leave cache and random numbers at the last token that user code has seen, as plain decoding would. A cache that
        the target was writing to stays as it is.
        """
        if self.noise is not None:
            self.noise.rewind(max((group.num_new for group in self.groups), default=0))
        if not self.groups or not _is_users(self.cache) or self.is_verifying:
            return
        (group,) = self.groups  # rows advance on their own in caches of ours only
        if self.num_unwalked:
            num_pending = self.rollback.num_pending
            # Without a draft there is nothing to take back, and layers that could not do so were not asked to.
            num_steps = len(group.walked[0]) if self.num_unwalked > 1 else 1
            num_written = num_pending + self.num_unwalked
            targets = [list(range(num_steps))] * len(group.walked)
            if self.num_unwalked > 1 and group.walked != targets:
                sources, targets = (num_pending + send(places, self.device) for places in (group.walked, targets))
                self.rollback.move(num_written, sources, targets)
            self.rollback.keep(num_written, num_pending + num_steps)
            self.num_slots += num_pending + num_steps if not self.rollback.num_pending else 0
            self.lengths = [self.num_slots] * self.num_rows
        if self.rollback.num_pending:
            self._replay()

    def _end(self):
        is_returned = self.outputs.is_collecting or _is_users(self.cache)
        if self.rollback.num_pending and is_returned:
            self._replay()
        if self.noise is not None:
            self.noise.rewind(max(group.num_new for group in self.groups))
        if self.streamer is not None:
            self.streamer.end()
        sequences = self._sequences()
        return self.outputs.result(sequences, self.cache) if self.outputs.is_collecting else sequences

    def _sequences(self) -> torch.LongTensor:
        """Rows of the batch in their order, padded right to the longest."""
        if not self.is_ragged:
            return self.groups[0].input_ids
        width = max(group.input_ids.shape[1] for group in self.groups)
        sequences = self.input_ids.new_full((self.num_rows, width), self.pad_token_id or 0)
        for group in self.groups:
            sequences[group.rows[0], : group.input_ids.shape[1]] = group.input_ids[0]
        return sequences


def _row_draft(generator, blocks: list) -> RowDraft:
    """What a row wants verified, with the distributions that its tokens were drawn from if they were."""
    if not blocks or not generator.proposal.is_sampled:
        return RowDraft(generator.tree)
    pool_ids = torch.cat([block.pool_ids[0] for block in blocks])
    pool_logits = torch.cat([block.pool_logits[0] for block in blocks])
    return RowDraft(generator.tree, pool_ids, pool_logits)


def _batch_size(input_ids, model_kwargs) -> int:
    embeds = model_kwargs.get("inputs_embeds")
    return input_ids.shape[0] if embeds is None else embeds.shape[0]


def _is_users(cache) -> bool:
    """Whether the caller made the cache, and may go on with it."""
    return bool(getattr(cache, "_is_user_defined", False))
