"""One call's drafting: feed verified features, draft a stage, loop or stop, hand the chain or the tree over.

Lossless by construction: the verifier decides every token, this file only proposes. What it must respect is that a
*sampled* draft whose q is handed over may be cut only by what is known before the cut token is drawn.
"""

import math

import torch
import torch.nn.functional as F
from transformers.generation import stopping_criteria as host_criteria
from transformers.utils import logging

from .batch_drafting import draft_rounds
from .compat import hidden_states_request
from .draft_statistics import DraftStatistics, PhaseClock
from .draft_trace import DraftTrace
from .draft_tree import DraftTree
from .host_transfer import look_is_free
from .modeling_base import DraftBlock
from .proposal import Proposal, is_stateless
from .target_adapter import TargetAdapter


logger = logging.get_logger(__name__)


class DRelayCandidateGenerator:
    """
    Drafts for one row. It is the candidate generator of the host's assisted loop, and our own loop has one for each
    row of the batch.

    Args:
        model (`DRelayModel`): Drafter and selector.
        adapter (`TargetAdapter`): View of the target.
        options (`DraftOptions`): Options of the call.
        generation_config (`GenerationConfig`): Of the call; `max_length` is final.
        logits_processor (`LogitsProcessorList`): Processors of the target.
        stopping_criteria (`StoppingCriteriaList`, *optional*): Criteria of the call.
        is_walked (`bool`): The loop walks verified positions one by one, as ours does. Then criteria and processors
            are no concern of a draft.
        noise (`Callable`, *optional*): Random numbers of the target's choices, see [`Proposal`].
        statistics (`DraftStatistics`, *optional*), clock (`PhaseClock`, *optional*): Shared by the rows of a batch.
        cost_model (`CostModel`, *optional*): Decides for `loop_gate="auto"`.
        compiled_backbone (`Callable`, *optional*): What a stage calls instead of the drafter itself.
    """

    requires_model_outputs = True

    def __init__(
        self,
        model,
        adapter: TargetAdapter,
        options,
        generation_config,
        logits_processor,
        stopping_criteria,
        is_walked: bool = False,
        noise=None,
        statistics: DraftStatistics | None = None,
        clock: PhaseClock | None = None,
        cost_model=None,
        compiled_backbone=None,
    ):
        self.model = model
        self.adapter = adapter
        self.options = options
        criteria = list(stopping_criteria or [])
        limits = [c.max_length for c in criteria if type(c) is host_criteria.MaxLengthCriteria]
        self.max_length = min([generation_config.max_length, *limits])
        self.eos_ids = _eos_ids(getattr(generation_config, "_eos_token_tensor", None))
        self.content_criteria = [] if is_walked else [c for c in criteria if _reads_content(c, self.eos_ids)]
        self.can_draft = is_walked or (
            self._check_criteria(generation_config) and self._check_processors(logits_processor)
        )
        self.clock = clock or PhaseClock(enabled=options.profile)
        self.statistics = statistics or DraftStatistics(phase_ms=self.clock.phase_ms)
        self.trace = DraftTrace() if options.trace else None
        self.cost_model = cost_model
        self.session = model.new_session(adapter, self.clock)
        if compiled_backbone is not None:
            self.session.backbone = compiled_backbone
        # A stop string cuts drafts by their content. With q handed over that would bias the output, so those calls
        # propose greedily: the target then samples at every position and a draft counts while it is equal.
        # The tokens of a tree are not drawn, so it needs a target that samples too.
        is_sampled = bool(generation_config.do_sample) and options.proposal == "sample"
        is_sampled = is_sampled and not self.content_criteria and options.tree_budget is None
        self.proposal = Proposal(logits_processor, adapter.config.vocab_size, is_sampled, noise)
        every_state = bool(generation_config.output_hidden_states)
        forward = adapter.target.get_decoder().forward
        taps = model.config.target_layer_ids
        self._request = {"output_hidden_states": True if every_state else hidden_states_request(taps, forward)}
        if getattr(model.drafter, "needs_shared_cache", False):
            self._request["return_shared_kv_states"] = True
        self.model_kwargs_overrides = self._request  # the host reads this anew in every round
        self._is_prompt_fed = False
        self._num_padding = 0  # ids in front that are no text
        self._unread: list[torch.Tensor] = []  # verified states that no draft needed yet
        self._num_new = 0  # of them, those that the coming stage is the first to read
        self.is_planned_ahead = False  # the length of the stage is chosen from its pools, not from what was drafted
        self.blocks: list[DraftBlock] = []
        self.beliefs: list[list[float]] = []  # of the backbone in the drafted slots of each stage
        self.tree = DraftTree()
        self._started_s = cost_model.clock() if cost_model is not None else 0.0
        self._handed_over_s: float | None = None
        self._round_s = 0.0

    def get_candidates(
        self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, n_last_matches=0, **kwargs
    ):
        """
        Draft after `input_ids` `(1, T)`.

        Returns:
            `(candidate_ids (1, T + K), candidate_logits (1, K, V) or None)`: the prompt unchanged on the first
            iteration, because the target's prefill must come first; logits only for a sampled draft.
        """
        model_kwargs = model_kwargs or {}
        if is_first_iteration:
            self._keep_mask(input_ids, model_kwargs, 0)
            self.skip_padding(model_kwargs.get("attention_mask"), input_ids)
            return input_ids, None
        self.clock.lap("verify" if self._is_prompt_fed else "prefill")
        self._observe_time(int(n_last_matches) + 1)
        self._feed(model_outputs, model_kwargs, int(n_last_matches) + 1)
        blocks = self.draft_round(input_ids)
        self._keep_mask(input_ids, model_kwargs, sum(block.num_tokens for block in blocks))
        if not blocks:
            self._mark_handed_over()
            return input_ids, None
        draft_ids = torch.cat([block.draft_ids for block in blocks], dim=1).to(input_ids.device)
        candidate_ids = torch.cat([input_ids, draft_ids], dim=1)
        logits = self._vocabulary_logits() if self.proposal.is_sampled else None
        self.clock.lap("select")
        self._mark_handed_over()
        return candidate_ids, logits

    def _mark_handed_over(self) -> None:
        if self.cost_model is not None:
            self._handed_over_s = self.cost_model.clock()

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """Called by the host's loop after each verification; `input_ids` `(1, T)` ends with the committed tokens."""
        committed_ids = input_ids[0, -(int(num_matches) + 1) :].tolist()
        if self._is_prompt_fed:
            self.record_round(committed_ids)
        else:
            self.record_prefill(committed_ids)

    def record_prefill(self, committed_ids: list[int]) -> None:
        """Note the token that the prefill yields, which is no round."""
        if self.trace is not None:
            self.trace.add_round([], committed_ids)

    def record_round(self, committed_ids: list[int]) -> None:
        """Count the round that was just verified."""
        if self.trace is not None:
            self.trace.add_round(self.blocks, committed_ids)
        if not self.blocks:
            self.statistics.num_plain_rounds += 1
            return
        place, num_accepted = 0, 0
        for token in committed_ids:
            place = self.tree.child(place, token)
            if place is None:
                break
            num_accepted += 1
        if self.cost_model is not None:
            self.cost_model.observe_acceptance(self.beliefs, num_accepted, len(committed_ids))
        if self.options.tree_budget is not None:
            depth, nodes = max(self.tree.depths()), self.tree.num_nodes
            self.statistics.add_tree_round(len(committed_ids), num_accepted, depth, nodes, len(self.blocks))
            return
        self.statistics.add_round(
            draft_ids=[i for block in self.blocks for i in block.numbers.draft_ids[0]],
            choices=[i for block in self.blocks for i in block.numbers.choices[0]],
            pool_ids=[i for block in self.blocks for i in block.numbers.kept_ids[0]],
            chosen_ids=committed_ids,
            num_stages=len(self.blocks),
        )

    def _observe_time(self, num_committed: int) -> None:
        """The host's loop tells nobody how long a round took: it is the time from one call of ours to the next."""
        if self.cost_model is None:
            return
        now_s = self.cost_model.clock()
        if not self._is_prompt_fed:
            self.cost_model.observe_prefill(1e3 * (now_s - self._started_s))
        else:
            verify_ms, round_ms = 1e3 * (now_s - self._handed_over_s), 1e3 * (now_s - self._round_s)
            self.cost_model.observe_round(self.tree.num_nodes + 1, verify_ms, num_committed, round_ms)
        self._round_s = now_s

    def _keep_mask(self, input_ids, model_kwargs, num_drafts: int) -> None:
        """
        Hand the host the mask it needs. With `inputs_embeds` the ids are shorter than the mask, which the host would
        cut to their length.
        """
        mask = model_kwargs.get("attention_mask")
        self.model_kwargs_overrides = dict(self._request)
        if mask is not None and mask.dim() == 2 and mask.shape[1] != input_ids.shape[1]:
            self.model_kwargs_overrides["attention_mask"] = F.pad(mask, (0, num_drafts), value=1)

    def _feed(self, model_outputs, model_kwargs, num_verified: int) -> None:
        """Give the session the target's states of the positions that were verified since the last call."""
        states = self.adapter.tapped(model_outputs.hidden_states, self.model.config.target_layer_ids)
        self.proposal.vocab_size = model_outputs.logits.shape[-1]  # a padded head is wider than the vocabulary
        num_rejected = 0
        if self._is_prompt_fed:
            num_rejected = states.shape[1] - num_verified
            states = states[:, :num_verified]
        else:
            # The states' own length counts, not that of the ids: with `inputs_embeds` the ids are empty.
            mask = model_kwargs.get("attention_mask")
            if mask is not None and mask.dim() == 2:  # left padding is no context
                states = states[:, mask[0, : states.shape[1]].to(states.device).bool()]
            self._is_prompt_fed = True
        self.session.observe(model_outputs, 0, num_rejected)
        self.feed(states)

    def skip_padding(self, mask: torch.Tensor | None, input_ids: torch.LongTensor) -> None:
        """Take the ids of the prompt `(1, T)` that the `mask` `(1, >= T)` hides for padding, which is in front."""
        if mask is not None and mask.dim() == 2 and input_ids.shape[1]:  # embeddings have no ids
            self._num_padding = int((mask[0, -input_ids.shape[1] :] == 0).sum())

    def feed(self, states: torch.Tensor) -> None:
        """Tapped hidden states `(1, n, L*H)` of newly verified positions; they are read when something is drafted."""
        if states.shape[1]:  # a prompt may be padding only
            self._unread.append(states)

    @torch.no_grad()
    def draft_round(self, input_ids: torch.LongTensor) -> list[DraftBlock]:
        """Stages of one round after `input_ids` `(1, T)`, whose positions but the last are in the session."""
        (blocks,) = draft_rounds([self], [input_ids])
        return blocks

    def stages(self, input_ids: torch.LongTensor):
        """
        The round as a coroutine: yields whenever a stage is to be drafted from its session and proposal, takes the
        block `(1, K)`, and returns the blocks of the round. Rows of a batch can so be drafted together.

        A static cache has room for `max_length - 1` positions: that bounds the draft.
        """
        room = self.max_length - input_ids.shape[1] - 1 if self.can_draft else 0
        self.blocks, self.beliefs, self.tree = [], [], DraftTree()
        if room <= 0 or (self.cost_model is not None and not self.cost_model.drafts()):
            return []
        self._num_new = sum(states.shape[1] for states in self._unread)
        if self._unread:
            self.session.extend(torch.cat(self._unread, dim=1))
            self._unread = []
        end = 0  # place in the tree that the next stage starts from
        while room > 0:
            num_slots = self._begin_stage(input_ids, room)
            block = yield
            is_short = block.num_tokens < num_slots  # a slot had nothing left to draw, or was not worth it
            block, is_cut = self._cut_stage(block, input_ids)
            if self.cost_model is not None:  # a slot that was cut is not one that was rejected
                self.beliefs[-1] = self.beliefs[-1][: block.num_tokens]
            if block.num_tokens == 0:
                break
            self.blocks.append(block)
            is_final = is_short or is_cut
            loops = not is_final and room > block.num_tokens and self._loops(block, len(self.blocks))
            num_nodes = self.tree.num_nodes
            end = self._grow(block, end, is_extended=loops)
            room -= self.tree.num_nodes - num_nodes
            if not loops or room <= 0:
                break
            self.model.continue_after(block, self.session, self.options.use_selector)
            input_ids = torch.cat([input_ids, block.draft_ids.to(input_ids.device)], dim=1)
        self.session.end_round()
        return self.blocks

    def cut_round(self, depth: int) -> list[DraftBlock]:
        """Forget what is deeper in the tree of the round than `depth`, which is not verified; returns what is left."""
        if depth < max(self.tree.depths()):
            self.tree, blocks = self.tree.cut(depth), []
            for block in self.blocks:
                blocks.append(block.first(depth))
                depth -= blocks[-1].num_tokens
            self.blocks = [block for block in blocks if block.num_tokens]
            self.beliefs = [own[: b.num_tokens] for own, b in zip(self.beliefs, blocks, strict=False)]
        return self.blocks

    def _grow(self, block: DraftBlock, place: int, is_extended: bool) -> int:
        """Hang the stage below `place` of the round's tree; returns the place of the last token of its path."""
        if block.tree is None:
            return self.tree.graft(place, DraftTree.chain(block.numbers.draft_ids[0]))[-1]
        path = block.tree.best_path()[: block.num_tokens] if is_extended else []
        stage, end = block.tree.select(path, self.eos_ids)
        places = self.tree.graft(place, stage)
        return places[end - 1]

    def _begin_stage(self, input_ids, room: int) -> int:
        """Tell session and proposal about the stage that is drafted next; returns how many slots it has."""
        num_slots = min(room, self.model.config.num_drafts, self.options.num_draft_tokens or room)
        self.session.num_slots = num_slots
        if self.options.tree_budget is not None:
            self.session.tree_budget = min(self.options.tree_budget, room)
        # Where a look at the pools is free, slots that are not worth it are not even scored.
        # The paths of a chain's tree have pools of their own; it is cut behind the slots that are worth it.
        is_chain, has_tree = self.model.config.backbone != "parallel", self.options.tree_budget is not None
        is_free = self.cost_model is not None and look_is_free(self.model.drafter.device)
        self.is_planned_ahead = is_free and not (is_chain and has_tree)
        self.session.plan = self._plan_slot if self.is_planned_ahead and is_chain else None
        self.beliefs.append([])
        self.session.begin_stage(input_ids[:, self._num_padding :].to(self.model.drafter.device))
        self.proposal.input_ids = input_ids
        return num_slots

    def observe_draft(self, started_s: float, num_slots: int, is_alone: bool) -> None:
        """
        Tell the cost-aware gate that the stage took until now; it looked at `num_slots` slots. Of a batch whose rows
        are drafted alone there are as many such stages as rows.
        """
        ms = 1e3 * (self.cost_model.clock() - started_s)
        self.cost_model.observe_draft(ms * self.cost_model.num_rows if is_alone else ms)
        # A stage that reads more than a round leaves, such as a prompt, tells nothing about the price of a slot.
        if self.model.config.backbone != "parallel" and self._num_new <= self.model.config.num_drafts + 1:
            self.cost_model.observe_slots(num_slots, ms)
        self._num_new = 0

    def _cut_stage(self, block: DraftBlock, input_ids) -> tuple[DraftBlock, bool]:
        """A stage cut to what may be drafted, and whether nothing may follow it."""
        ids = block.numbers.draft_ids[0]
        # Drafting on after an end token is useless; the token itself stays, so nothing is dropped for its value.
        ends = [i for i, token in enumerate(ids) if token in self.eos_ids]
        if ends:
            return self._cut_before_stop(block.first(ends[0] + 1), input_ids)[0], True
        return self._cut_before_stop(block, input_ids)

    def _cut_before_stop(self, block: DraftBlock, input_ids) -> tuple[DraftBlock, bool]:
        """
        Cut strictly before the token that completes a stopping criterion, so that it arrives as the target's own bonus
        token, where the host's loop tests it. Only deterministic drafts come here with criteria, which must be
        functions of the ids: they are asked about unverified ones.
        """
        for criterion in self.content_criteria:
            for n in range(1, block.num_tokens + 1):
                prefix = torch.cat([input_ids, block.draft_ids[:, :n].to(input_ids.device)], dim=1)
                if bool(torch.as_tensor(criterion(prefix, None)).any()):
                    return block.first(n - 1), True
        return block, False

    def _loops(self, block: DraftBlock, num_stages: int) -> bool:
        """The DLoop gate: whether a confident stage is followed by another one."""
        gate = self.options.loop_gate
        if gate is None or num_stages >= self.options.max_stages:
            return False
        if self.cost_model is not None:
            return self.cost_model.loops(self.reach(), self.num_drafted)
        return sum(block.numbers.log_confidence[0]) >= gate

    def plan_chain(self, best_log_probs: list[float]) -> int:
        """Length of a stage of a drafter that goes token by token, which was drafted already."""
        # Whether a slot is worth it may depend on the tokens before it, and not on its own.
        for i, own in enumerate(best_log_probs):
            if not self._is_worth(own, self.session.num_slots):
                return i
        return len(best_log_probs)

    def _plan_slot(self, pool) -> bool:
        """Whether a chain goes on, from the pool of its next slot."""
        return self._is_worth(pool.log_probs[0, 0, 0].item(), self.session.num_slots)

    def _is_worth(self, best_log_prob: float, num_slots: int) -> bool:
        belief, known = math.exp(best_log_prob), self.beliefs[-1]
        stage, before = len(self.blocks), self.num_drafted
        is_worth = self.cost_model.goes_on(known, belief, num_slots, stage, before, self.reach())
        if is_worth:
            known.append(belief)
        return is_worth

    @property
    def num_drafted(self) -> int:
        """Tokens in the stages of the round so far."""
        return sum(block.num_tokens for block in self.blocks)

    def reach(self) -> float:
        """Probability that everything drafted so far is accepted, by what the stages believe of their tokens."""
        return math.prod(
            self.cost_model.calibration.acceptance(stage, slot, math.exp(log_belief))
            for stage, block in enumerate(self.blocks)
            for slot, log_belief in enumerate(block.numbers.log_confidence[0])
        )

    def _vocabulary_logits(self) -> torch.FloatTensor:
        """Log of q over the vocabulary `(1, K, V)`: the pool's logits, `-inf` everywhere else."""
        ids = torch.cat([block.pool_ids for block in self.blocks], dim=1)
        logits = torch.cat([block.pool_logits for block in self.blocks], dim=1)
        full = logits.new_full((*ids.shape[:2], self.proposal.vocab_size), float("-inf"))
        return full.scatter_(2, ids, logits)

    def _check_processors(self, logits_processor) -> bool:
        """
        Whether drafts leave the processors of the call alone. The host calls them on rejected positions too, with
        prefixes that go backwards, which breaks a processor with a state; without drafts it calls them as plain
        decoding does.
        """
        stateful = [p for p in logits_processor or [] if not is_stateless(p)]
        if stateful:
            logger.warning_once(
                f"hf_drelay: the logits processor {type(stateful[0]).__name__} may keep a state from call to call; "
                "decoding without drafts. If it is a function of its arguments, give it `is_stateless = True`."
            )
        return not stateful

    def _check_criteria(self, generation_config) -> bool:
        """Whether drafts can be cut right: criteria that may read the scores cannot be asked about a draft."""
        known = (host_criteria.StopStringCriteria, host_criteria.EosTokenCriteria)
        collects = generation_config.return_dict_in_generate and generation_config.output_scores
        if collects and any(type(c) not in known for c in self.content_criteria):
            logger.warning_once(
                "hf_drelay: a custom stopping criterion together with `output_scores=True` may read the scores, which "
                "a draft does not have; decoding without drafts."
            )
            return False
        return True


def _eos_ids(tensor: torch.LongTensor | None) -> set[int]:
    return set() if tensor is None else set(tensor.flatten().tolist())


def _reads_content(criterion, eos_ids: set[int]) -> bool:
    """
    Whether a token inside a draft may complete the criterion; the host's loop tests it behind the block only. Exact
    types, because a subclass may test anything.
    """
    if type(criterion) is host_criteria.EosTokenCriteria:  # the end tokens of the call cut drafts anyway
        return not _eos_ids(criterion.eos_token_id) <= eos_ids
    return type(criterion) not in (host_criteria.MaxLengthCriteria, host_criteria.MaxTimeCriteria)
