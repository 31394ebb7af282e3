"""Ways of decoding that a benchmark compares: plain, compiled, prompt lookup, and drafters with their options."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from transformers import CompileConfig
from transformers.utils import logging

from .records import describe_drafter


logger = logging.get_logger(__name__)

PLAIN = "plain"
COMPILED = "plain, static cache, compiled"
PROMPT_LOOKUP = "prompt lookup"
DEFAULT_GATE = -0.5


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

    @property
    def warms_each_prompt(self) -> bool:
        return self.kind == "compiled"

    def arguments(self, is_profiled: bool = False) -> dict:
        """Arguments of `generate()` for this way."""
        assistant = self.profiled_assistant or self.assistant if is_profiled else self.assistant
        return self.generate_arguments | ({} if assistant is None else {"assistant_model": assistant})

    def profiled_statistics(self):
        """Statistics of the last profiled call, if the assistant counts."""
        return getattr(self.profiled_assistant or self.assistant, "statistics", None)


def plain_way() -> Way:
    return Way(PLAIN, "plain", description={"cache": "dynamic"})


def compiled_way(target) -> Way | None:
    """Plain decoding with a static cache and compilation; `None`, with the reason logged, where that cannot be."""
    if target.device.type != "cuda":
        logger.warning_once(f"hf_drelay: no way {COMPILED!r}: generate() compiles on a GPU only.")
        return None
    arguments = {"cache_implementation": "static", "compile_config": CompileConfig()}
    return Way(COMPILED, "compiled", arguments, description={"cache": "static"})


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
    used = view.options
    description = (described or describe_drafter(drelay)) | {"cache": "dynamic"}
    for field_name in ("num_draft_tokens", "max_stages", "loop_gate", "proposal", "use_selector"):
        description[field_name] = getattr(used, field_name)
    for field_name in ("tree_budget", "decoding_loop"):
        if hasattr(used, field_name):
            description[field_name] = getattr(used, field_name)
    gate = description["loop_gate"]
    if isinstance(gate, float) and gate == float("-inf"):
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


def standard_ways(target, drafters: Iterable[tuple[str, object]], gate=None, max_stages=None, **options) -> list[Way]:
    """Everything the benchmark compares by default: baselines, and every drafter with DLoop off, fixed and auto."""
    ways = [plain_way(), compiled_way(target), prompt_lookup_way(target)]
    for name, drelay in drafters:
        ways += drafter_ways(name, drelay, gate, max_stages, **options)
    return [way for way in ways if way is not None]
