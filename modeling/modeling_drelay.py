"""DRelay: the parallel drafter and the selector together, and what `generate(assistant_model=...)` needs of them."""

import torch
from transformers import AutoConfig, AutoModel

from .configuration_drelay import DRelayConfig, DRelayDrafterConfig, DRelaySelectorConfig
from .draft_session import DraftSession
from .draft_view import DraftView
from .generate_hook import install
from .modeling_base import DraftBlock, DRelayPreTrainedModel, Pool
from .modeling_chain import ChainSession
from .modeling_drafter import DRelayDrafterModel
from .modeling_eagle3 import Eagle3Drafter
from .modeling_heads import HeadInputs, IndependentHead, walk_fixed_point, walk_slots
from .modeling_mtp import MtpDrafter, SharedCacheDrafter, SharedCacheSession, module_weights
from .modeling_selector import DRelaySelectorModel
from .modeling_token_heads import BilinearHead, MarkovHead, RecurrentHead
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
        self.drafter = _BACKBONES[config.backbone](_part_config(config, DRelayDrafterConfig))
        self.selector = _build_head(config)
        self.head_rows = HeadRows()
        self.default_view = DraftView(self)
        self.post_init()

    def with_options(self, **options) -> DraftView:
        """
        A light view with its own drafting options and statistics; the weights are shared.

        Args:
            options: Any of `loop_gate`, `max_stages`, `num_draft_tokens`, `proposal`, `use_selector`,
                `confidence_threshold`, `profile`, see [`DraftOptions`]. What is not given keeps the value of the
                configuration.
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

    @classmethod
    def from_target(cls, target, assistant=None, **fields) -> "DRelayModel":
        """
        The drafter that was published with a target.

        Args:
            target (`PreTrainedModel`): A target whose weight files hold an MTP module (Qwen3.5).
            assistant (`PreTrainedModel`, *optional*): Its assistant, for targets with a separate one (Gemma 4).
            fields: Fields of the configuration, such as `block_size`, the length of a chain (default 3).

        Raises:
            ValueError: If the target has no such module.
            NotImplementedError: If the module is of another family.
        """
        text = target.config.get_text_config(decoder=True)
        if assistant is None and text.model_type != "qwen3_5_text":
            raise NotImplementedError(
                f"`target` {type(target).__name__} has model type {text.model_type!r}; modules are read from targets "
                "of type 'qwen3_5_text'. Pass `assistant` for Gemma 4, or load a drafter with `from_pretrained`."
            )
        derived = {
            "backbone": "mtp" if assistant is None else "shared_kv",
            "layout": "shifted",
            "block_size": 3,
            "num_hidden_layers": 1,
            "target_layer_ids": [text.num_hidden_layers - 1],
            "use_mask_embedding": False,
            "module_config": (text if assistant is None else assistant.config).to_dict(),
        }
        model = cls(DRelayConfig.for_target(target.config, **(derived | fields)))
        if assistant is None:
            weights = {f"drafter.{name}": tensor for name, tensor in module_weights(target).items()}
        else:
            weights = {f"drafter.assistant.{name}": tensor for name, tensor in assistant.state_dict().items()}
        problems = model.load_state_dict(weights, strict=False)
        wrong = sorted([*problems.missing_keys, *problems.unexpected_keys])
        if wrong:
            raise ValueError(
                f"`target` {target.config._name_or_path!r}: the module's tensors do not fit, first `{wrong[0]}` "
                f"({len(problems.missing_keys)} missing, {len(problems.unexpected_keys)} unknown). Its files and its "
                "configuration belong to different models; load both from one place."
            )
        return model.to(target.device, target.dtype).eval()

    def new_session(self, adapter: TargetAdapter, clock=None):
        """State of one call, see [`DraftSession`] and [`ChainSession`]."""
        sessions = {"parallel": DraftSession, "shared_kv": SharedCacheSession}
        return sessions.get(self.config.backbone, ChainSession)(self.drafter, adapter, clock)

    def adapter(self, target) -> TargetAdapter:
        """View of `target` for one call; raises a `ValueError` when drafter and target do not fit."""
        adapter = TargetAdapter(target, self.head_rows)
        adapter.check(self.config)
        return adapter

    @torch.no_grad()
    def draft(
        self,
        anchor_ids: torch.LongTensor,
        session: DraftSession,
        proposal,
        use_selector: bool = True,
        confidence_threshold: float = 0.0,
    ) -> DraftBlock:
        """
        One stage: backbone forward, pool, head, walk.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(B,)`): Token at `session.anchor_position`.
            session (`DraftSession`): State of the call.
            proposal (`Proposal`): Draws the tokens; `proposal.start_stage(pool)` makes this stage's chooser.
            use_selector (`bool`): Off walks the independent head.
            confidence_threshold (`float`): End the block before the first slot whose confidence is below this.
        """
        if self.config.backbone != "parallel":
            return self.drafter.draft(anchor_ids, session, proposal)
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
        if confidence_threshold and block.num_tokens and getattr(head, "confidence_head", None) is not None:
            # Each confidence was known before the token of its slot was drawn, so this cut leaves q exact.
            path = torch.cat([anchor_ids[:, None], block.draft_ids[:, :-1]], dim=1)
            survives = head.confidence(state, path).sigmoid() >= confidence_threshold
            block = block.first(int(survives.long().cumprod(dim=1).sum(dim=1).min()))
        session.clock.lap("select")
        return block

    @torch.no_grad()
    def continue_after(self, block: DraftBlock, session: DraftSession, use_selector=True) -> None:
        """Prepare another stage after the (cut) `block`: provisional features and the head's memory."""
        if self.config.backbone != "parallel":
            return self.drafter.continue_after(block, session)
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
        logits = self.drafter.logits(hidden, session.adapter)
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
        )


_BACKBONES = {
    "parallel": DRelayDrafterModel,
    "eagle3": Eagle3Drafter,
    "mtp": MtpDrafter,
    "shared_kv": SharedCacheDrafter,
}


def _build_head(config: DRelayConfig):
    """The head that `config.head` names; `None` for the independent one, which has no weights."""
    heads = {"bilinear": BilinearHead, "recurrent": RecurrentHead, "markov": MarkovHead}
    if config.head in heads:
        return heads[config.head](config)
    return DRelaySelectorModel(_part_config(config, DRelaySelectorConfig)) if config.head == "relay" else None


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
