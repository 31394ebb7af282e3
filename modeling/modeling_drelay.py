"""DRelay: the parallel drafter and the selector together, and what `generate(assistant_model=...)` needs of them."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file, logging

from .checkpoint_formats import Imported, import_checkpoint, is_public_format
from .configuration_drelay import DRelayConfig, DRelayDrafterConfig, DRelaySelectorConfig
from .draft_session import DraftSession
from .draft_tree import grow
from .draft_view import DraftView
from .generate_hook import install
from .host_transfer import look_is_free
from .modeling_base import DraftBlock, DRelayPreTrainedModel, Pool
from .modeling_chain import ChainSession
from .modeling_drafter import DRelayDrafterModel
from .modeling_eagle3 import Eagle3Drafter
from .modeling_heads import HeadInputs, IndependentHead, walk_fixed_point, walk_passes, walk_slots
from .modeling_mtp import MtpDrafter, SharedCacheDrafter, SharedCacheSession, module_weights
from .modeling_selector import DRelaySelectorModel
from .modeling_token_heads import BilinearHead, MarkovHead, RecurrentHead
from .target_adapter import HeadRows, TargetAdapter


logger = logging.get_logger(__name__)

# Passes over the slots of a stage on a device that must not be waited for; most drafts settle in two or three.
_MAX_PASSES = 4


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
        self.frozen_copies: dict[str, tuple] = {}  # sample of target tables that a public file stored
        self.target_scales: dict[str, float] = {}  # what such a file states of its target
        self.model_tags = ["speculative-decoding", "draft-model", "custom_code", "hf-drelay"]  # for `push_to_hub`
        self.post_init()

    def with_options(self, **options) -> DraftView:
        """
        A light view with its own drafting options and statistics; the weights are shared.

        Args:
            options: Any of `loop_gate`, `max_stages`, `num_draft_tokens`, `proposal`, `tree_budget`, `use_selector`,
                `confidence_threshold`, `decoding_loop`, `profile`, `trace`, see [`DraftOptions`]. What is not given
                keeps the value of the configuration.
        """
        return DraftView(self, **options)

    def build_candidate_generator(self, **call):
        """Hook protocol: see [`DraftView`]."""
        return self.default_view.build_candidate_generator(**call)

    def check_generation(self, target, generation_config, arguments) -> bool:
        """Hook protocol: see [`DraftView`]."""
        return self.default_view.check_generation(target, generation_config, arguments)

    def speculative_decode(self, **call):
        """Hook protocol: see [`DraftView`]."""
        return self.default_view.speculative_decode(**call)

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
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        other = [name for name, tensor in weights.items() if tensor.shape != shapes.get(name, tensor.shape)]
        if other:
            raise ValueError(
                f"`target` {target.config._name_or_path!r}: `{other[0]}` of the module has shape "
                f"{tuple(weights[other[0]].shape)}, but its configuration asks for {tuple(shapes[other[0]])}; load "
                "both from one place."
            )
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
        self._check_frozen_copies(target)
        return adapter

    def forward(self, objective, **batch):
        """
        What `objective` computes for a `batch`, usually `(loss, terms)`. Training goes through here, so that wrappers
        of the model (mixed precision, data parallelism) see a forward pass; drafting does not.
        """
        return objective(**batch)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        As in transformers; checkpoints of the public formats load too (see `checkpoint_formats.py`).

        For these, `kwargs` may hold `dtype`, the Hub's `revision`, `subfolder`, `token`, `cache_dir`,
        `local_files_only`, `force_download`, and any field of [`DRelayConfig`] that the file does not tell, such as
        `layout`.
        """
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        if args or "config" in kwargs:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        try:
            config, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **hub)
        except OSError:  # the host's own message names the missing file
            config = {}
        if not is_public_format(config):
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        fields = {name: kwargs[name] for name in kwargs if name not in hub and name != "dtype"}
        unknown = set(fields) - set(DRelayConfig.own_fields())
        if unknown:
            raise ValueError(
                f"`{sorted(unknown)[0]}` is no field of a drafter and is not supported for a checkpoint of a public "
                "format; convert the checkpoint first (`hf-drelay convert SRC DST`), or leave the argument out."
            )
        tensors = read_tensors(pretrained_model_name_or_path, **hub)
        return cls.from_imported(import_checkpoint(config, tensors, **fields), dtype=kwargs.get("dtype"))

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers, but publishing is `push_to_hub` alone, because it needs a card and a check."""
        if kwargs.get("push_to_hub"):
            raise ValueError(
                "`push_to_hub=True` would publish a folder without a card that nobody checked; save first, then call "
                "`push_to_hub(repo_id)`."
            )
        return super().save_pretrained(save_directory, *args, **kwargs)

    def push_to_hub(self, repo_id: str, **options):
        """
        Publish the drafter as a complete repository: weights, configuration, code, model card and measured results,
        uploaded only when it loads in a clean process and drafts losslessly there.

        That takes the package `hf_drelay`. A model whose code came with a repository (`trust_remote_code=True`) is
        pushed as transformers pushes any other: weights, configuration and that code, unchecked; `private` is refused.

        Args:
            repo_id (`str`): `owner/name`, or a name under the account that is logged in.
            options: Those of `push_to_hub` in transformers; with the package also `card`, the words of the model card
                (by default the `card.yaml` of the folder that the model was loaded from), and `target`, the folder or
                Hub id of the target to check with.

        Returns:
            `CommitInfo`: The commit, or the pull request.
        """
        # These files are a part of the package, or of a repository, which has no such function.
        push_model = getattr(sys.modules.get(__name__.partition(".")[0]), "push_model", None)
        if push_model is not None:
            return push_model(self, repo_id, **options)
        if options.get("private") is not None:
            # The Hub ignores it where the repository exists, and this code can reach no client that would tell.
            raise ValueError(
                f"`private` is {options['private']}, which cannot be ensured without `hf_drelay`: a repository that "
                "exists keeps its visibility. Make the repository with the one you want and leave `private` out, or "
                "install `hf_drelay` and load the drafter with `hf_drelay.DRelayModel.from_pretrained`."
            )
        logger.warning(
            "Pushing weights, configuration and code without a model card and unchecked. For a complete repository "
            "install `hf_drelay` and load the drafter with `hf_drelay.DRelayModel.from_pretrained`."
        )
        return super().push_to_hub(repo_id, **options)

    @classmethod
    def from_imported(cls, imported: Imported, dtype=None) -> "DRelayModel":
        """
        A drafter from a public checkpoint that was read by `import_checkpoint`.

        Raises:
            ValueError: For unknown or missing tensors, or ones of another shape.
        """
        model = cls(DRelayConfig(**imported.fields))
        states = model.state_dict()
        unknown = sorted(set(imported.tensors) - set(states))
        missing = sorted(set(states) - set(imported.tensors))
        if unknown or missing:
            raise ValueError(
                f"This {imported.kind} checkpoint has unknown tensors {_listed(unknown)} and lacks "
                f"{_listed(missing)} (our names). Its configuration and weights belong to different models, or it is "
                "a variant that is not supported."
            )
        for name, tensor in imported.tensors.items():
            if tensor.shape != states[name].shape:
                raise ValueError(
                    f"`{name}` of this {imported.kind} checkpoint has shape {tuple(tensor.shape)}, but its "
                    f"configuration asks for {tuple(states[name].shape)}; take both from one place."
                )
        if dtype in (None, "auto"):
            dtype = imported.tensors["drafter.fc.weight"].dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        model = model.to(dtype)
        model.load_state_dict(imported.tensors)
        model.config.dtype = dtype
        model.target_scales = imported.scales
        for name, table in imported.frozen.items():
            rows = torch.linspace(0, len(table) - 1, min(len(table), 64)).long()
            model.frozen_copies[name] = (len(table), rows, table[rows].float())
        return model.eval()

    def _check_frozen_copies(self, target) -> None:
        """Compare a sample of the target tables that a public file stored with the target, at the first use."""
        modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        for name, (size, rows, copy) in self.frozen_copies.items():
            weight = getattr(modules[name], "weight", None)
            if weight is None or weight.device.type == "meta" or not weight.dtype.is_floating_point:
                continue  # quantised or offloaded: nothing to compare with
            own = weight[rows.to(weight.device)].float().cpu() if len(weight) == size else None
            if own is None or not torch.allclose(own, copy, rtol=2e-2, atol=1e-2 * copy.abs().max()):
                raise ValueError(
                    f"`assistant_model` was published with a copy of its target's `{name}` that differs from the one "
                    f"of {type(target).__name__} {target.config._name_or_path!r}; load the target "
                    f"{self.config.target_name_or_path or 'that it was trained for'}."
                )
        self.frozen_copies = {}
        if self.target_scales:
            self._check_target_scales(target)

    @torch.no_grad()
    def _check_target_scales(self, target) -> None:
        """Compare what a public file states of its target's embedding and head with the target, at the first use."""
        cap = getattr(target.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        own = {"final_logit_softcapping": float(cap or 0.0)}
        embedding = target.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        if weight is not None and weight.device.type != "meta" and weight.dtype.is_floating_point:
            row = weight[:256].float().norm(dim=-1).argmax().reshape(1)  # that of a padding token is often zero
            own["input_embedding_scale"] = float(embedding(row).float().norm() / weight[row].float().norm())
        for name, stated in self.target_scales.items():
            if name in own and abs(own[name] - stated) > 1e-2 * max(abs(stated), 1.0):
                raise ValueError(
                    f"`assistant_model` was published for a target with `{name}` {stated:g}, but that of "
                    f"{type(target).__name__} {target.config._name_or_path!r} is {own[name]:g}; load the target "
                    f"{self.config.target_name_or_path or 'that it was trained for'}."
                )
        self.target_scales = {}

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
            session (`DraftSession` or `BatchSession`): State of the call.
            proposal (`Proposal`): Draws the tokens; `proposal.start_stage(pool)` makes this stage's chooser.
            use_selector (`bool`): Off walks the independent head.
            confidence_threshold (`float`): End the block before the first slot whose confidence is below this.

        Returns:
            `DraftBlock`; its `num_usable` slots may be drafted. Nothing is copied to the host for it.
        """
        if self.config.backbone != "parallel":
            return self.drafter.draft(anchor_ids, session, proposal)
        embeds = self.drafter.block_embeds(anchor_ids, session.adapter.embed)
        positions = session.positions(session.anchor_position, self.config.block_size)
        masks = session.masks(self.config.block_size)
        rows = session.backbone(embeds, positions, session.cache, masks).last_hidden_state
        inputs = self.head_inputs(rows, anchor_ids, session)
        if session.plan is not None:
            inputs = inputs.first(session.plan(inputs.pool))
        session.clock.lap("draft")
        pool = inputs.pool
        if not pool.ids.shape[1]:
            nothing = pool.ids[:, :0, 0]
            return self._draft_block(rows, anchor_ids, IndependentHead(), pool, pool, nothing, pool.logits[:, :0])
        head = self.selector if use_selector and self.selector is not None else IndependentHead()
        state = head.read(inputs)
        choose = proposal.start_stage(pool)
        tree = num_usable = None
        if session.tree_budget is not None:
            tree = grow(head, state, pool, anchor_ids, choose, session.tree_budget)
            places, num_usable = tree.best_path()
            levels = zip(tree.choices, places[:, None], strict=True)
            choices = torch.stack([choices.index_select(0, place) for choices, place in levels], dim=1)
            path = torch.cat([anchor_ids[:, None], pool.ids.gather(2, choices[..., None])[:, :-1, 0]], dim=1)
            logits = head.score(state, path)
        elif choose.depends_on_path:
            choices, logits = walk_slots(head, state, pool, anchor_ids, choose)
            num_usable = choose.num_possible(choices.shape[1])
        elif look_is_free(pool.ids.device):
            choices, logits = walk_fixed_point(head, state, pool, anchor_ids, choose)
        else:
            choices, logits, num_usable = walk_passes(head, state, pool, anchor_ids, choose, _MAX_PASSES)
        block = self._draft_block(rows, anchor_ids, head, state, pool, choices, logits)
        block.pool_logits = choose.proposal_logits(block.num_tokens)
        block.tree = tree
        if confidence_threshold and getattr(head, "confidence_head", None) is not None:
            # Each confidence was known before the token of its slot was drawn, so this cut leaves q exact.
            path = torch.cat([anchor_ids[:, None], block.draft_ids[:, :-1]], dim=1)
            survives = head.confidence(state, path).sigmoid() >= confidence_threshold
            survivors = survives.long().cumprod(dim=1).sum(dim=1)
            num_usable = survivors if num_usable is None else torch.minimum(num_usable, survivors)
        block.num_usable = num_usable
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
            text_ids=session.text_ids,
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


_HUB_ARGUMENTS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download")


def read_tensors(name_or_path, **hub) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's weight files, on the CPU."""
    hub["_raise_exceptions_for_missing_entries"] = False
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = cached_file(name_or_path, single + ".index.json", **hub)
        files = [single]
        if index is not None:
            files = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [cached_file(name_or_path, file, **hub) for file in files]
        if all(path is not None for path in paths):
            return {name: tensor for path in paths for name, tensor in _read_weight_file(path).items()}
    raise ValueError(
        f"`pretrained_model_name_or_path` {str(name_or_path)!r} has no complete weight file (model.safetensors or "
        "pytorch_model.bin); download the checkpoint again."
    )


def _read_weight_file(path: str) -> dict[str, torch.Tensor]:
    try:
        return load_state_dict(path)
    except Exception as error:  # of the formats below, each with errors of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read ({reason}); download the checkpoint again.") from error


def _listed(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{names[:limit]}{more}"


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
