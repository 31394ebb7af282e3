"""Every difference between the supported transformers versions, and nothing else (supported: >= 5.17, < 6)."""

import inspect

import torch
import transformers
from transformers import StoppingCriteriaList, cache_utils


_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
_STATIC_CACHE_SINCE = (5, 24)
_CACHE_NAME_SINCE = (5, 24)
_TUPLE_INDICES_SINCE = (5, 23)
_CRITERIA_AFTER_VERIFICATION_SINCE = (5, 18)


def supports_static_cache() -> bool:
    """Whether the stock assisted loop can roll back a static cache."""
    return _VERSION >= _STATIC_CACHE_SINCE


def hidden_states_request(layer_ids: list[int], forward) -> bool | list[int]:
    """
    Value of `output_hidden_states` that makes a target return at least the outputs of `layer_ids`.

    Since 5.23 a list selects entries of the usual tuple (0 = embedding output), so that nothing else is kept; before,
    a list had another meaning and no entry for the embedding. A forward without the capturing decorator takes a flag
    only.
    """
    if _VERSION >= _TUPLE_INDICES_SINCE and _captures_outputs(forward):
        return [i + 1 for i in layer_ids]
    return True


def _captures_outputs(forward) -> bool:
    """Whether a (decorated) forward method comes from `transformers.utils.output_capturing`."""
    while forward is not None:
        if "output_capturing" in getattr(getattr(forward, "__code__", None), "co_filename", ""):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


class _BehindPrompt(StoppingCriteriaList):
    """Criteria that a prompt alone never meets."""

    prompt_length = 0

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] <= self.prompt_length:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return super().__call__(input_ids, scores, **kwargs)


def criteria_for_host(criteria: StoppingCriteriaList, prompt_length: int) -> StoppingCriteriaList:
    """
    Criteria to hand to the host's loop. Before 5.18 it asked them about the candidates before verification, and a
    prompt that already met one (a prompt that ends with an end token, say) then yielded no token at all.
    """
    if _VERSION >= _CRITERIA_AFTER_VERIFICATION_SINCE or criteria is None:
        return criteria
    behind_prompt = _BehindPrompt(criteria)
    behind_prompt.prompt_length = prompt_length
    return behind_prompt


def cache_keyword() -> str:
    """Name of the cache among the arguments of a forward."""
    return "cache" if _VERSION >= _CACHE_NAME_SINCE else "past_key_values"


def is_quantized(cache) -> bool:
    """Whether a cache has layers that cannot be rolled back; before 5.24 those claimed that they could."""
    return isinstance(cache, cache_utils.QuantizedCache)


def cache_argument(model_kwargs: dict):
    """The cache among the prepared keyword arguments of a call; called `past_key_values` before 5.24."""
    cache = model_kwargs.get("cache")
    return cache if cache is not None else model_kwargs.get("past_key_values")


def cache_parameter(forward) -> str:
    """Name of the argument under which a forward takes its cache; `past_key_values` before 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def check_hooked_signatures(mixin: type) -> None:
    """Raise a `RuntimeError` when the methods that our hook wraps no longer take the arguments it relies on."""
    needed = {
        "_get_candidate_generator": {"generation_config", "input_ids", "logits_processor", "model_kwargs"},
        "_assisted_decoding": {"input_ids", "stopping_criteria", "generation_config", "assistant_model"},
        "_validate_generation_mode": {"generation_mode", "generation_config", "generation_mode_kwargs"},
    }
    for name, arguments in needed.items():
        missing = arguments - set(inspect.signature(getattr(mixin, name)).parameters)
        if missing:
            raise RuntimeError(
                f"transformers {transformers.__version__} changed `GenerationMixin.{name}` (no longer takes "
                f"{sorted(missing)}), so `generate(assistant_model=...)` cannot reach the drafter. "
                "Install a supported version: transformers>=5.17,<6."
            )
