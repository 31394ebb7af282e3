"""Ways of decoding that a benchmark compares: plain, compiled, prompt lookup, and drafters with their options."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from transformers import CompileConfig, GenerationConfig, StaticCache
from transformers.utils import logging

from hf_drelay.modeling.compat import cache_keyword

from .records import describe_drafter


logger = logging.get_logger(__name__)

PLAIN = "plain"
COMPILED = "plain, static cache, compiled"
PROMPT_LOOKUP = "prompt lookup"
DEFAULT_GATE = -0.5
SHORTEST_CACHE = 256  # slots of the static cache of compiled decoding


@dataclass
class Way:
    """
    How to call `generate()`.

    Attributes:
        name (`str`): Unique in a benchmark.
        kind (`str`): `"plain"`, `"compiled"`, `"prompt_lookup"` or `"drafter"`.
        generate_arguments (`dict`): Of `generate()`, beside those that all ways share.
        assistant (*optional*): `assistant_model`; has `statistics` of its last call.
        profiled_assistant (*optional*): The same with its own clocks on.
        description (`dict`): For result rows.
    """

    name: str
    kind: str
    generate_arguments: dict = field(default_factory=dict)
    assistant: object | None = None
    profiled_assistant: object | None = None
    description: dict = field(default_factory=dict)

    @property
    def has_drafts(self) -> bool:
        return self.kind in ("prompt_lookup", "drafter")

    @property
    def has_phases(self) -> bool:
        return self.kind != "compiled"

    def arguments(self, is_profiled: bool = False) -> dict:
        """Arguments of `generate()` for this way."""
        assistant = self.profiled_assistant or self.assistant if is_profiled else self.assistant
        return self.generate_arguments | ({} if assistant is None else {"assistant_model": assistant})

    def statistics(self, is_profiled: bool = False):
        """Statistics of the last call with these arguments, if the assistant counts."""
        return getattr(self.arguments(is_profiled).get("assistant_model"), "statistics", None)


def plain_way() -> Way:
    return Way(PLAIN, "plain", description={"cache": "dynamic"})


def compiled_way(target, is_asked: bool | None = None, backend: str = "inductor") -> Way | None:
    """
    Plain decoding with a static cache and compilation.

    Args:
        is_asked (`bool`, *optional*): By default where `generate()` compiles by itself, which is not on a CPU. `True`
            compiles there too; that needs a C++ compiler, and minutes for a large model.
        backend (`str`): Of `torch.compile`.

    Returns:
        `None`, with the reason logged, where it is not measured.

    Raises:
        ValueError: If it was asked for and this target cannot be compiled.
    """
    if is_asked is False:
        return None
    config = CompileConfig(backend=backend)
    if is_asked:
        config._compile_all_devices = True
    # Where it would not compile, generate() says nothing and runs the static cache eagerly: that is another way.
    cache = StaticCache(config=target.config.get_text_config(decoder=True), max_cache_len=SHORTEST_CACHE)
    if not target._valid_auto_compile_criteria({cache_keyword(): cache}, GenerationConfig(compile_config=config)):
        if is_asked:
            raise ValueError(
                f"`compiled` was asked for, but generate() cannot compile {type(target).__name__} on "
                f"{target.device.type!r} with a static cache; leave it out."
            )
        logger.warning_once(
            f"hf_drelay: {COMPILED!r} is not measured: generate() does not compile {type(target).__name__} on "
            f"{target.device.type!r} unless it is asked to."
        )
        return None
    arguments = {"cache_implementation": "static", "compile_config": config}
    return Way(COMPILED, "compiled", arguments, description={"cache": "static"})


def fix_cache_length(target, num_tokens: int) -> int:
    """
    Let the next static cache have a power of two of slots, at least `num_tokens` and `SHORTEST_CACHE`; returns it.

    Left to itself, `generate()` makes it as long as this prompt needs, or any before it needed: short prompts behind a
    long one would read its slots, and every length is compiled anew until torch gives up compiling and runs eagerly.
    """
    length = max(SHORTEST_CACHE, 1 << (num_tokens - 1).bit_length())
    target._previous_max_cache_length = length  # where the host remembers the longest cache so far
    return length


def prompt_lookup_way(target, num_tokens: int = 10) -> Way | None:
    """Drafts copied from the prompt, as transformers ships it; `None` for targets that it refuses."""
    if getattr(target, "_is_stateful", False):
        logger.warning(f"hf_drelay: {PROMPT_LOOKUP!r} is left out: transformers refuses it for recurrent layers.")
        return None
    return Way(
        PROMPT_LOOKUP,
        "prompt_lookup",
        {"prompt_lookup_num_tokens": num_tokens},
        description={"cache": "dynamic", "num_draft_tokens": num_tokens},
    )


def drafter_way(name: str, drelay, described: dict | None = None, **options) -> Way:
    """
    A drafter with options of `with_options`.

    Args:
        described (`dict`, *optional*): What `describe_drafter` says, if it is known already.
    """
    view = drelay.with_options(**options)
    description = (described or describe_drafter(drelay)) | {"cache": "dynamic"} | asdict(view.options)
    for is_measured_otherwise in ("profile", "trace"):
        del description[is_measured_otherwise]
    if description["loop_gate"] == float("-inf"):
        description["loop_gate"] = "-inf"  # infinity is no JSON
    return Way(
        name,
        "drafter",
        assistant=view,
        profiled_assistant=drelay.with_options(**(options | {"profile": True})),
        description=description,
    )


def drafter_ways(name: str, drelay, gate: float | None = None, max_stages: int | None = None, **options) -> list[Way]:
    """
    A drafter with DLoop off, at a fixed gate, and cost-aware.

    Args:
        gate (`float`, *optional*): The fixed gate; default: the configuration's, or -0.5.
        max_stages (`int`, *optional*): Limit of stages of the looping ways; default: the configuration's.
        options: Further options of `with_options`, the same for all.
    """
    own = drelay.config.loop_gate
    fixed = gate if gate is not None else own if isinstance(own, int | float) else DEFAULT_GATE
    stages = {} if max_stages is None else {"max_stages": max_stages}
    described = describe_drafter(drelay)
    ways = [
        drafter_way(name, drelay, described, loop_gate=None, **options),
        drafter_way(f"{name} + DLoop {fixed:g}", drelay, described, loop_gate=fixed, **stages, **options),
    ]
    if accepts(drelay, loop_gate="auto"):
        ways.append(drafter_way(f"{name} + DLoop auto", drelay, described, loop_gate="auto", **stages, **options))
    return ways


def accepts(drelay, **options) -> bool:
    """Whether the drafter takes these options."""
    try:
        drelay.with_options(**options)
    except (ValueError, TypeError):
        return False
    return True


def standard_ways(
    target, drafters: Iterable[tuple[str, object]], gate=None, max_stages=None, compiled: bool | None = None, **options
) -> list[Way]:
    """
    Everything the benchmark compares by default: baselines, and every drafter with DLoop off, fixed and auto.
    `compiled` is `is_asked` of [`compiled_way`].
    """
    ways = [plain_way(), compiled_way(target, compiled), prompt_lookup_way(target)]
    for name, drelay in drafters:
        ways += drafter_ways(name, drelay, gate, max_stages, **options)
    return [way for way in ways if way is not None]
