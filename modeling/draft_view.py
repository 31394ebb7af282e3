"""What `generate(assistant_model=...)` receives: shared weights, own options, statistics of its last call."""

from dataclasses import dataclass, fields

from .candidate_generator import DRelayCandidateGenerator
from .compat import cache_argument, criteria_for_host, supports_static_cache
from .configuration_drelay import check_draft_options
from .draft_statistics import DraftStatistics


@dataclass(frozen=True)
class DraftOptions:
    """
    Options of a call.

    Attributes:
        proposal (`str`): How drafts are drawn at temperature > 0. `"sample"` draws from q and hands q to the verifier,
            `"greedy"` takes the most likely candidate and lets the target sample at every position. Both are lossless.
        num_draft_tokens (`int`, *optional*): Cap of the tokens of one stage; `None` takes the whole block.
        loop_gate (`float`, *optional*): DLoop: draft another stage when the log-confidence of the last one is at least
            this (at most 0; `-inf` always loops). `None` drafts one stage.
        max_stages (`int`): Limit of stages in a round.
        use_selector (`bool`): Off drafts with the backbone alone.
        profile (`bool`): Measure draft, select and verify ms; synchronises the device.
        trace (`bool`): Keep every round's pools and choices in the view's `trace`, for displays and analyses.
    """

    proposal: str
    num_draft_tokens: int | None
    loop_gate: float | None
    max_stages: int
    use_selector: bool
    profile: bool = False
    trace: bool = False

    def __post_init__(self):
        check_draft_options(self.proposal, self.num_draft_tokens, self.loop_gate, self.max_stages)


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
        defaults = {name: getattr(model.config, name) for name in names - {"profile", "trace"}}
        self.model = model
        self.options = DraftOptions(**(defaults | options))
        if options.get("use_selector") and model.selector is None:
            raise ValueError("`use_selector` is True, but this drafter has no selector; leave the option out.")
        self.statistics = DraftStatistics()
        self.trace = None

    @property
    def config(self):
        """Configuration of the drafter; the host reads the vocabulary and special tokens from it."""
        return self.model.config

    def with_options(self, **options) -> "DraftView":
        """Another view with these options changed."""
        current = {field.name: getattr(self.options, field.name) for field in fields(DraftOptions)}
        return DraftView(self.model, **(current | options))

    def check_generation(self, target, generation_config, arguments) -> None:
        """Raise a `ValueError` that names the argument of `generate()` that a drafter cannot serve."""
        config = generation_config
        if (config.num_beams or 1) > 1:
            raise ValueError(
                f"`num_beams` is {config.num_beams}, but `assistant_model` drafts one continuation; use `num_beams=1`."
            )
        if (config.num_return_sequences or 1) > 1:
            raise ValueError(
                f"`num_return_sequences` is {config.num_return_sequences}, but `assistant_model` drafts for one "
                "sequence; call generate() once for each."
            )
        for name in ("prompt_lookup_num_tokens", "use_mtp", "speculation_type", "assistant_early_exit"):
            if getattr(config, name, None):
                raise ValueError(
                    f"`{name}` is set to {getattr(config, name)!r}, but `assistant_model` already proposes the "
                    f"drafts; leave `{name}` unset, or call generate() without `assistant_model`."
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
        self.model.adapter(target)

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
                f"`input_ids` has a batch of {input_ids.shape[0]}, but `assistant_model` drafts for one sequence; "
                "call generate() once for each."
            )
        cache = cache_argument(call)
        if cache is None:
            raise ValueError(
                "`use_cache=False` (or a target without a cache) leaves no cache to verify drafts with; call "
                "generate() with `use_cache=True`, or without `assistant_model`."
            )
        filled = int(cache.get_seq_length())
        if filled > 0:
            raise ValueError(
                f"`past_key_values` already holds {filled} tokens; assisted decoding would feed them a second time. "
                "Pass the whole conversation with an empty cache."
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
        )
        self.statistics = generator.statistics
        self.trace = generator.trace
        return generator


class BoundCall:
    """A view together with the stopping criteria of one call, which the host's loop would not hand on."""

    def __init__(self, view: DraftView, stopping_criteria):
        self.view = view
        self.config = view.config
        self.stopping_criteria = stopping_criteria

    def build_candidate_generator(self, **call):
        return self.view.build_candidate_generator(**(call | {"stopping_criteria": self.stopping_criteria}))
