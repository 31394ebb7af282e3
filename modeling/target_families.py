"""Families of targets that need care: what each was found to bear when it was run beside its own plain decoding.

Nothing in a class tells whether a forward over several tokens gives the logits of one token at a time, or whether an
attention mask is all that decides which slots a token sees. Families were run instead, tiny and with random weights;
the lists hold what came out. A family that keeps a state (of recurrent or convolutional layers) and was not run is
refused, for a wrong state is wrong text without an error.
"""

# Layers with a state that continue from their cache over several tokens, and whose state is all in the cache.
EXACT_WITH_STATE = {
    *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "olmo_hybrid", "zamba2"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
}
# The mask of a token depends on which other tokens are in the forward.
_TOKENS_SEE_THE_FORWARD = {"doge"}
# Attention windows by the number of a slot and not by the mask: a slot without a token, or of a sibling, shifts them.
_WINDOWS_OF_SLOTS = {"gpt_neo"}
# Attention biases made from a mask of two dimensions.
_ALIBI = {"bloom", "mpt"}


def check_family(target) -> None:
    """Raise a `NotImplementedError` for a target that several tokens in a forward would give other text."""
    name, kind = type(target).__name__, _text_config(target).model_type
    if kind in _TOKENS_SEE_THE_FORWARD:
        reason = "several tokens in a forward do not give the logits of one at a time"
    elif _keeps_state(target) and kind not in EXACT_WITH_STATE:
        reason = (
            f"its layers keep a state, and the family {kind!r} was not found to continue exactly over several tokens"
        )
    else:
        return
    raise NotImplementedError(
        f"`assistant_model` cannot draft for {name}: {reason}. Call generate() without `assistant_model`."
    )


def _keeps_state(target) -> bool:
    """Whether a class or its layers say that more than keys and values of tokens goes on from step to step."""
    layers = getattr(_text_config(target), "layer_types", None) or []
    kinds = ("linear", "conv", "mamba", "recurrent")
    return getattr(target, "_is_stateful", False) or any(kind in layer for layer in layers for kind in kinds)


def bears_holes(target) -> bool:
    """Whether slots of the cache may be left out of a row by the mask alone."""
    return _text_config(target).model_type not in _WINDOWS_OF_SLOTS


def bears_trees(target) -> bool:
    """Whether a mask of four dimensions and positions are all that decides what a token sees."""
    config = _text_config(target)
    return bears_holes(target) and config.model_type not in _ALIBI and not getattr(config, "alibi", False)


def _text_config(target):
    return target.config.get_text_config(decoder=True)


__all__ = ["EXACT_WITH_STATE", "bears_holes", "bears_trees", "check_family"]
