"""Lets a plain `target.generate(assistant_model=drelay)` find the drafter.

Three class-level wrappers of `GenerationMixin` dispatch on *methods of the assistant object* and leave every other
call alone. They hold no model logic, so that the first installed copy of this file serves all later ones.
`uninstall()` or the environment variable `HF_DRELAY_NO_HOOK=1` leaves transformers untouched.
"""

import functools
import os

from transformers import GenerationMixin
from transformers.utils import logging

from .compat import check_hooked_signatures


logger = logging.get_logger(__name__)
_MARK = "_hf_drelay_hook"


def install() -> bool:
    """Install the wrappers once per process, whoever asks. Returns whether they are in place."""
    if os.environ.get("HF_DRELAY_NO_HOOK") == "1":
        return False
    if hasattr(GenerationMixin._assisted_decoding, _MARK):
        return True
    check_hooked_signatures(GenerationMixin)
    for name, wrap in _WRAPPERS.items():
        original = getattr(GenerationMixin, name)
        wrapper = functools.wraps(original)(wrap(original))
        setattr(wrapper, _MARK, original)
        setattr(GenerationMixin, name, wrapper)
    logger.info("hf_drelay: `generate(assistant_model=...)` now accepts DRelay drafters.")
    return True


def uninstall() -> None:
    """Restore the original methods, also when another copy of this file installed the wrappers."""
    for name in _WRAPPERS:
        original = getattr(getattr(GenerationMixin, name), _MARK, None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def _wrap_validation(original):
    """Own errors come first: the ones of the host speak of tokenizers when a vocabulary does not fit."""

    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        check = getattr(generation_mode_kwargs.get("assistant_model"), "check_generation", None)
        if check is not None:
            if check(target=self, generation_config=generation_config, arguments=generation_mode_kwargs):
                return None  # the assistant's own loop takes calls that the host's would refuse
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_assisted_decoding(original):
    """
    An assistant with a loop of its own takes the call. For one without, the host's loop would not hand the stopping
    criteria to its candidate generator; it takes them here.
    """

    def decode(self, input_ids, *args, **kwargs):
        assistant = kwargs.get("assistant_model")
        call = {k: v for k, v in kwargs.items() if k != "assistant_model"}
        own_loop = getattr(assistant, "speculative_decode", None)
        if own_loop is not None:
            output = own_loop(target=self, input_ids=input_ids, call=call)
            if output is not None:
                return output
        begin = getattr(assistant, "for_call", None)
        if begin is not None:
            kwargs |= begin(target=self, input_ids=input_ids, call=call)
        return original(self, input_ids, *args, **kwargs)

    return decode


def _wrap_candidate_generator(original):
    def get_candidate_generator(self, *args, **kwargs):
        build = getattr(kwargs.get("assistant_model"), "build_candidate_generator", None)
        return original(self, *args, **kwargs) if build is None else build(target=self, **kwargs)

    return get_candidate_generator


_WRAPPERS = {
    "_validate_generation_mode": _wrap_validation,
    "_assisted_decoding": _wrap_assisted_decoding,
    "_get_candidate_generator": _wrap_candidate_generator,
}
