"""DRelay: the parallel drafter and the selector together, and what `generate(assistant_model=...)` needs of them."""

import torch
from transformers import AutoConfig, AutoModel

from .configuration_drelay import DRelayConfig, DRelayDrafterConfig, DRelaySelectorConfig
from .draft_session import DraftSession
from .draft_view import DraftView
from .generate_hook import install
from .modeling_base import DraftBlock, DRelayPreTrainedModel, Pool
from .modeling_drafter import DRelayDrafterModel
from .modeling_heads import HeadInputs, IndependentHead, walk_fixed_point, walk_slots
from .modeling_selector import DRelaySelectorModel
from .target_adapter import HeadRows, TargetAdapter


class DRelayModel(DRelayPreTrainedModel):
    """
    Drafter and selector of one target, to be passed to the target's `generate(assistant_model=...)`.

    Example:

    ```python
    drelay = AutoModel.from_pretrained("path/or/repo", trust_remote_code=True)
    target.generate(**inputs, assistant_model=drelay)
    view = drelay.with_options(loop_gate=-0.5, max_stages=3)
    target.generate(**inputs, assistant_model=view)
    view.statistics.acceptance_length
    ```
    """

    def __init__(self, config: DRelayConfig):
        super().__init__(config)
        self.drafter = DRelayDrafterModel(_part_config(config, DRelayDrafterConfig))
        self.selector = (
            DRelaySelectorModel(_part_config(config, DRelaySelectorConfig)) if config.use_selector else None
        )
        self.head_rows = HeadRows()
        self.default_view = DraftView(self)
        self.model_tags = ["speculative-decoding", "draft-model", "custom_code", "hf-drelay"]  # for `push_to_hub`
        self.post_init()

    def with_options(self, **options) -> DraftView:
        """
        A light view with its own drafting options and statistics; the weights are shared.

        Args:
            options: Any of `loop_gate`, `max_stages`, `num_draft_tokens`, `proposal`, `use_selector`, `profile`,
                `trace`, see [`DraftOptions`]. What is not given keeps the value of the configuration.
        """
        return DraftView(self, **options)

    def build_candidate_generator(self, **call):
        """Hook protocol: see [`DraftView`]."""
        return self.default_view.build_candidate_generator(**call)

    def check_generation(self, target, generation_config, arguments) -> None:
        """Hook protocol: see [`DraftView`]."""
        self.default_view.check_generation(target, generation_config, arguments)

    def for_call(self, **call):
        """Hook protocol: see [`DraftView`]."""
        return self.default_view.for_call(**call)

    @property
    def statistics(self):
        """Statistics of the last call that used the model itself as the assistant."""
        return self.default_view.statistics

    def set_shortlist(self, draft_token_ids) -> None:
        """Set the `draft_vocab_size` tokens that can be drafted, `(Vd,)`; every end token must be among them."""
        if self.config.draft_vocab_size is None:
            raise ValueError(
                "`draft_token_ids` needs a drafter with a shortlist; set `draft_vocab_size` in its config."
            )
        ids = draft_token_ids.sort().values
        missing = set(self.config.eos_token_ids) - set(ids.tolist())
        size = self.config.draft_vocab_size
        if len(ids) != size or len(ids.unique()) != len(ids) or missing:
            raise ValueError(
                f"`draft_token_ids` must hold `draft_vocab_size` ({size}) distinct tokens with "
                f"all end tokens {self.config.eos_token_ids} among them; got {len(ids)}, without {sorted(missing)}."
            )
        self.drafter.draft_token_ids.copy_(ids)
        if self.selector is not None:
            self.selector.set_shortlist(self.drafter.draft_token_ids)

    def adapter(self, target) -> TargetAdapter:
        """View of `target` for one call; raises a `ValueError` when drafter and target do not fit."""
        adapter = TargetAdapter(target, self.head_rows)
        adapter.check(self.config)
        return adapter

    @torch.no_grad()
    def draft(self, anchor_ids: torch.LongTensor, session: DraftSession, proposal, use_selector=True) -> DraftBlock:
        """
        One stage: backbone forward, pool, selector, walk.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(B,)`): Token at `session.anchor_position`.
            session (`DraftSession`): State of the call.
            proposal (`Proposal`): Draws the tokens; `proposal.start_stage(pool)` makes this stage's chooser.
            use_selector (`bool`): Off walks the independent head.
        """
        embeds = self.drafter.block_embeds(anchor_ids, session.adapter.embed)
        positions = session.positions(session.anchor_position, self.config.block_size)
        rows = self.drafter(embeds, positions, session.cache).last_hidden_state
        inputs = self.head_inputs(rows, anchor_ids, session)
        session.clock.lap("draft")
        pool = inputs.pool
        head = self.selector if use_selector and self.selector is not None else IndependentHead()
        state = head.read(inputs)
        choose = proposal.start_stage(pool)
        walk = walk_slots if choose.depends_on_path else walk_fixed_point
        choices, logits = walk(head, state, pool, anchor_ids, choose)
        block = self._draft_block(rows, anchor_ids, head, state, pool, choices, logits)
        block.pool_logits = choose.proposal_logits(block.num_tokens)
        session.clock.lap("select")
        return block

    @torch.no_grad()
    def continue_after(self, block: DraftBlock, session: DraftSession, use_selector=True) -> None:
        """Prepare another stage after the (cut) `block`: provisional features and the head's memory."""
        features = block.context_features
        if use_selector and self.selector is not None:
            known = torch.cat([session.anchor_ids[:, None], block.draft_ids[:, :-1]], dim=1)
            features = self.selector.provisional_features(features, known, session.adapter.embed)
        session.extend_provisional(features)
        session.earlier = block.remember(block.num_tokens)

    def head_inputs(self, rows: torch.Tensor, anchor_ids: torch.LongTensor, session: DraftSession) -> HeadInputs:
        """Sort backbone `rows` `(B, S, H)` into the first `session.num_slots` slots and look up their pools."""
        fill_in = self.config.layout == "fill_in"
        hidden = (rows[:, 1:] if fill_in else rows)[:, : session.num_slots]
        logits = session.adapter.logits(hidden, self.drafter.draft_token_ids)
        return HeadInputs(
            hidden_states=hidden,
            anchor_hidden=rows[:, 0] if fill_in else None,
            pool=Pool.from_logits(logits, self.config.pool_size, self.drafter.draft_token_ids),
            anchor_ids=anchor_ids,
            history=session.history,
            history_mask=session.history_mask,
            offset=session.num_provisional,
            earlier=session.earlier,
            embed=session.adapter.embed,
        )

    def _draft_block(self, rows, anchor_ids, head, state, pool, choices, logits) -> DraftBlock:
        num_tokens = choices.shape[1]
        pool_ids, picked = pool.ids[:, :num_tokens], choices[..., None]
        draft_ids = pool_ids.gather(2, picked)[..., 0]
        pool_mass = pool.log_probs[:, :num_tokens].logsumexp(dim=-1)
        path = torch.cat([anchor_ids[:, None], draft_ids], dim=1)
        return DraftBlock(
            draft_ids=draft_ids,
            choices=choices,
            pool_ids=pool_ids,
            pool_logits=None,
            context_features=rows[:, :num_tokens],
            slot_log_confidence=logits.log_softmax(dim=-1).gather(2, picked)[..., 0] + pool_mass,
            remember=lambda n: head.remember(state, path[:, :n]),
            pool_log_probs=pool.log_probs[:, :num_tokens],
            selection_logits=logits,
        )


def _part_config(config: DRelayConfig, part: type[DRelayConfig]) -> DRelayConfig:
    """The same fields as the configuration class of one part, so that the part can be saved and loaded alone."""
    own = part(**{name: getattr(config, name) for name in DRelayConfig.own_fields()})
    own._attn_implementation = config._attn_implementation
    own.dtype = config.dtype
    return own


for _config, _model in (
    (DRelayConfig, DRelayModel),
    (DRelayDrafterConfig, DRelayDrafterModel),
    (DRelaySelectorConfig, DRelaySelectorModel),
):
    _config.register_for_auto_class()
    _model.register_for_auto_class("AutoModel")
    # A registered class beats the code of every repository. That is right for an installed package; a copy that came
    # from one repository must not serve another one.
    if not __name__.startswith("transformers_modules"):
        AutoConfig.register(_config.model_type, _config, exist_ok=True)
        AutoModel.register(_config, _model, exist_ok=True)

install()

__all__ = ["DRelayModel"]
