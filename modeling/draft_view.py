"""What `generate(assistant_model=...)` receives: shared weights, own options, statistics of its last call."""

import functools
from dataclasses import MISSING, dataclass, fields

import torch

from .candidate_generator import DRelayCandidateGenerator
from .compat import cache_argument, criteria_for_host, is_quantized, supports_static_cache
from .configuration_drelay import AUTO, check_confidence_threshold, check_draft_options, check_loop_options
from .cost_model import CostModel
from .draft_statistics import DraftStatistics
from .modeling_drafter import is_flash
from .speculative_loop import SpeculativeLoop


# Arguments of `generate()` for other assistants, with the values that the host fills in by itself.
_UNUSED_ARGUMENTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
    "max_matching_ngram_size": None,
}


@dataclass(frozen=True)
class DraftOptions:
    """
    Options of a call.

    Attributes:
        proposal (`str`): How drafts are drawn at temperature > 0. `"sample"` draws from q and hands q to the verifier,
            `"greedy"` takes the most likely candidate and lets the target sample at every position, `"coupled"` also
            drafts with the target's own random numbers. All are lossless; with the last two a seed gives the text of
            plain `generate()`, unless something else draws from torch's generator during the call.
        num_draft_tokens (`int`, *optional*): Cap of the tokens of one stage; `None` takes the whole block.
        loop_gate (`float` or `"auto"`, *optional*): DLoop: draft another stage when the log-confidence of the last one
            is at least this (at most 0; `-inf` always loops). `None` drafts one stage. `"auto"` weighs expected gains
            against measured costs, also for the length of a stage and for drafting at all.
        max_stages (`int`): Limit of stages in a round.
        use_selector (`bool`): Off drafts with the backbone alone.
        tree_budget (`int`, *optional*): Verify a tree of that many nodes for each stage; `None` verifies a chain.
        decoding_loop (`str`): `"own"` takes batches, trees, filled caches and every stopping criterion; `"host"` is
            the assisted loop of transformers.
        confidence_threshold (`float`): With a confidence head (DSpark): end a stage before the first slot whose
            confidence is below this; 0 is off.
        compile_drafter (`bool`): Compile the backbone of a parallel drafter with `torch.compile`. Its context is
            padded to a power of two (256 at least), so shapes come back: one is compiled for each length and number of
            rows that draft together, up to torch's `recompile_limit`; others run as they are, with torch's warning.
        profile (`bool`): Measure draft, select and verify ms; synchronises the device.
        trace (`bool`): Keep every round's pools and choices, of the first row of a batch, in the view's `trace`, for
            displays and analyses.
    """

    proposal: str
    num_draft_tokens: int | None
    loop_gate: float | str | None
    max_stages: int
    use_selector: bool
    confidence_threshold: float
    tree_budget: int | None = None
    decoding_loop: str = "own"
    compile_drafter: bool = False
    profile: bool = False
    trace: bool = False

    def __post_init__(self):
        check_draft_options(self.proposal, self.num_draft_tokens, self.loop_gate, self.max_stages)
        check_loop_options(self.decoding_loop, self.tree_budget, self.proposal)
        check_confidence_threshold(self.confidence_threshold)
        if self.trace and self.tree_budget is not None:
            raise ValueError(f"`trace` shows chains; leave it out, or leave out `tree_budget` {self.tree_budget}.")


class DraftView:
    """
    A drafter as one caller sees it. Threads that share a drafter take a view each.

    Args:
        model (`DRelayModel`): The drafter.
        options: Fields of [`DraftOptions`]; what is not given comes from the configuration.

    Attributes:
        statistics (`DraftStatistics`): Of the last call.
        trace (`DraftTrace`, *optional*): Rounds of the current or last call, with `trace=True` only. Another thread
            may read it while the call runs.
    """

    def __init__(self, model, **options):
        names = {field.name for field in fields(DraftOptions)}
        unknown = set(options) - names
        if unknown:
            raise TypeError(f"`with_options` got unknown option `{unknown.pop()}`; it takes {sorted(names)}.")
        self.model = model
        self._given = options
        if not isinstance(self.options.use_selector, bool):
            raise ValueError(f"`use_selector` is {self.options.use_selector!r}; expected True or False.")
        if options.get("use_selector") and model.selector is None:
            raise ValueError("`use_selector` is True, but this drafter has no selector; leave the option out.")
        if options.get("confidence_threshold") and getattr(model.selector, "confidence_head", None) is None:
            raise ValueError(
                f"`confidence_threshold` is {options['confidence_threshold']}, but this drafter has no confidence "
                "head; leave the option out."
            )
        self._check_compilation()
        self.statistics = DraftStatistics()
        self.trace = None
        self._cost_models: dict[int, CostModel] = {}  # by batch size: costs outlive a call

    @property
    def options(self) -> DraftOptions:
        """What was given to this view, and for the rest what the configuration says now."""
        in_config = [field.name for field in fields(DraftOptions) if field.default is MISSING]
        return DraftOptions(**({name: getattr(self.config, name) for name in in_config} | self._given))

    def _check_compilation(self) -> None:
        if not isinstance(self.options.compile_drafter, bool):
            raise ValueError(f"`compile_drafter` is {self.options.compile_drafter!r}; expected True or False.")
        if not self.options.compile_drafter:
            return
        if self.config.backbone != "parallel":
            raise ValueError(
                f"`compile_drafter` is True, but a drafter with `backbone` {self.config.backbone!r} grows its context "
                "with every token, so that no shape comes back; leave the option out."
            )
        if is_flash(self.config._attn_implementation):
            raise ValueError(
                f"`compile_drafter` pads the context, which {self.config._attn_implementation!r} takes no mask for; "
                "call `drelay.set_attn_implementation('sdpa')` first, or leave the option out."
            )

    def __getstate__(self) -> dict:
        """A copy compiles anew: what was compiled is bound to the weights of this one's model."""
        return {name: value for name, value in self.__dict__.items() if name != "compiled_backbone"}

    @functools.cached_property
    def compiled_backbone(self):
        """Compiled forward of the drafter; `None` if the options do not ask for it."""
        self._check_compilation()  # the attention may have been changed
        return torch.compile(self.model.drafter.forward, dynamic=False) if self.options.compile_drafter else None

    @property
    def config(self):
        """Configuration of the drafter; the host reads the vocabulary and special tokens from it."""
        return self.model.config

    def with_options(self, **options) -> "DraftView":
        """Another view with these options changed."""
        return DraftView(self.model, **(self._given | options))

    def check_generation(self, target, generation_config, arguments) -> bool:
        """
        Raise a `ValueError` that names the argument of `generate()` that a drafter cannot serve.

        Returns:
            Whether our own loop takes the call, so that the limits of the host's loop do not count.
        """
        config = generation_config
        if (config.num_beams or 1) > 1:
            raise ValueError(
                f"`num_beams` is {config.num_beams}, but `assistant_model` drafts one continuation; use `num_beams=1`."
            )
        if getattr(config, "dola_layers", None) is not None:
            raise ValueError(
                f"`dola_layers` is {config.dola_layers!r}, which decodes by other logits than those that drafts are "
                "verified with; leave it unset, or call generate() without `assistant_model`."
            )
        is_own = self._takes(arguments)
        if (config.num_return_sequences or 1) > 1 and not is_own:
            raise ValueError(
                f"`num_return_sequences` is {config.num_return_sequences}, but `assistant_model` drafts for one "
                "sequence in the host's loop; call generate() once for each, or use `decoding_loop='own'`."
            )
        for name in ("prompt_lookup_num_tokens", "use_mtp", "speculation_type", "assistant_early_exit"):
            if getattr(config, name, None):
                raise ValueError(
                    f"`{name}` is set to {getattr(config, name)!r}, but `assistant_model` already proposes the "
                    f"drafts; leave `{name}` unset, or call generate() without `assistant_model`."
                )
        for name, usual in _UNUSED_ARGUMENTS.items():
            value = getattr(config, name, None)
            if value not in (None, usual):
                raise ValueError(
                    f"`{name}` is {value!r}, but this drafter has options of its own; leave it unset, and use "
                    "`assistant_model=drelay.with_options(num_draft_tokens=..., confidence_threshold=...)`."
                )
        if arguments.get("synced_gpus") and (
            self.options.tree_budget is not None or self.options.proposal == "coupled"
        ):
            raise ValueError(
                "`synced_gpus=True` keeps to the host's loop, which has neither trees nor the coupled proposal; leave "
                "out `tree_budget` and use another `proposal`."
            )
        if getattr(config, "assistant_ensemble_weight", None) is not None:
            raise ValueError(
                f"`assistant_ensemble_weight` {config.assistant_ensemble_weight} makes decoding lossy, which "
                "this drafter does not do; leave it unset."
            )
        if arguments.get("assistant_tokenizer") is not None:
            raise ValueError(
                "`assistant_tokenizer` is not needed: the drafter uses the target's vocabulary. Leave it out."
            )
        if config.cache_implementation == "static" and not supports_static_cache():
            raise ValueError(
                "`cache_implementation='static'` cannot be rolled back by this version of transformers; "
                "install transformers>=5.24 or use a dynamic cache."
            )
        implementation = self.model.adapter(target).config._attn_implementation
        if self.options.tree_budget is not None and implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"`tree_budget` {self.options.tree_budget} needs an attention that takes any mask, but the target "
                f"uses {implementation!r}; load it with `attn_implementation='sdpa'`, or leave `tree_budget` out."
            )
        if not is_own:
            _check_layers(target)
        return is_own

    def speculative_decode(self, target, input_ids, call):
        """
        Decode with our own loop.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, P)`): The prompt.
            call (`dict`): Keyword arguments of the host's decoding loop.

        Returns:
            What `generate()` returns, or `None` when the host's loop has to take the call.
        """
        if not self._takes(call):
            return None
        _check_cache(cache_argument(call))
        self._check_length(target, call["generation_config"])
        return SpeculativeLoop(self, target, input_ids, **call).run()

    def cost_model(self, batch_size: int = 1) -> CostModel | None:
        """What the cost-aware gate knows about batches of that size; `None` for another gate."""
        if self.options.loop_gate != AUTO:
            return None
        return self._cost_models.setdefault(batch_size, CostModel(num_rows=batch_size))

    def _takes(self, call: dict) -> bool:
        """
        Whether our own loop serves a call. Processes that must keep step do so in the host's loop.
        """
        return self.options.decoding_loop == "own" and not call.get("synced_gpus")

    def _check_length(self, target, generation_config) -> None:
        limit = self.model.adapter(target).exact_length
        if limit is not None and generation_config.max_length > limit:
            raise ValueError(
                f"`max_length` {generation_config.max_length} goes beyond the {limit} positions up to which the "
                f"rotary embedding of {type(target).__name__} is the same for every length; beyond them several "
                "tokens in a forward do not give the logits of one at a time. Decode fewer, or call generate() "
                "without `assistant_model`."
            )

    def for_call(self, target, input_ids, call) -> dict:
        """
        Check a prepared call and bind what only it knows.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, P)`): The prompt.
            call (`dict`): Keyword arguments of the host's decoding loop.

        Returns:
            The arguments to replace.
        """
        if input_ids.shape[0] > 1:
            raise ValueError(
                f"`input_ids` has a batch of {input_ids.shape[0]}, but `assistant_model` drafts for one sequence in "
                "the host's loop; call generate() once for each, or use `decoding_loop='own'`."
            )
        cache = cache_argument(call)
        _check_cache(cache)
        self._check_length(target, call["generation_config"])
        filled = int(cache.get_seq_length())
        if filled > 0:
            raise ValueError(
                f"`past_key_values` already holds {filled} tokens; assisted decoding would feed them a second time. "
                "Pass the whole conversation with an empty cache, or use `decoding_loop='own'`."
            )
        criteria = call.get("stopping_criteria")
        return {
            "assistant_model": BoundCall(self, criteria),
            "stopping_criteria": criteria_for_host(criteria, input_ids.shape[1]),
        }

    def build_candidate_generator(self, target, generation_config, input_ids, logits_processor, model_kwargs, **call):
        """Generator for one call of the host's assisted loop; its statistics become this view's."""
        generator = DRelayCandidateGenerator(
            model=self.model,
            adapter=self.model.adapter(target),
            options=self.options,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=call.get("stopping_criteria"),
            cost_model=self.cost_model(),
            compiled_backbone=self.compiled_backbone,
        )
        if generator.cost_model is not None:
            generator.cost_model.begin_call()
        self.statistics = generator.statistics
        self.trace = generator.trace
        return generator


def _check_layers(target) -> None:
    text = target.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    recurrent = [kind for kind in kinds if "attention" not in kind or "linear" in kind]
    if recurrent:
        raise NotImplementedError(
            f"`assistant_model` needs a cache that the host's loop can roll back, but {type(target).__name__} has "
            f"layers of type {recurrent[0]!r}, whose state it cannot; call generate() without `assistant_model`."
        )


def _check_cache(cache) -> None:
    if cache is None:
        raise ValueError(
            "There is no cache to verify drafts with: `use_cache=False`, or a target with a cache of its own kind or "
            "none. Call generate() with `use_cache=True`, or without `assistant_model`."
        )
    if is_quantized(cache):
        raise ValueError(
            "`cache_implementation='quantized'` cannot take rejected tokens back; use a dynamic or static cache, or "
            "call generate() without `assistant_model`."
        )


class BoundCall:
    """A view together with the stopping criteria of one call, which the host's loop would not hand on."""

    def __init__(self, view: DraftView, stopping_criteria):
        self.view = view
        self.config = view.config
        self.stopping_criteria = stopping_criteria

    def build_candidate_generator(self, **call):
        return self.view.build_candidate_generator(**(call | {"stopping_criteria": self.stopping_criteria}))
