"""What a drafter needs of a target: its embedding, its head, the taps' hidden states, and a check that all fits.

The target's modules are called, never stored: quantised, wrapped or offloaded heads have no usable weight, and a
stored reference would end up in checkpoints and device maps.
"""

import weakref

import torch
import torch.nn.functional as F

from .configuration_drelay import DRelayConfig
from .target_families import check_family


class HeadRows:
    """
    Rows of target heads restricted to a shortlist, gathered once for each head and forgotten with it.

    Kept by the drafter. An entry is refreshed when the head's weight was replaced or written to.
    """

    def __init__(self):
        self._entries = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo):
        return HeadRows()

    def __reduce__(self):  # weak references cannot be pickled, and the rows can be gathered again
        return HeadRows, ()

    def get(self, head: torch.nn.Module, token_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight `(Vd, H)` and bias `(Vd,)` of `head` for `token_ids` `(Vd,)`."""
        stamp = tuple(_stamp(tensor) for tensor in (head.weight, head.bias, token_ids))
        entry = self._entries.get(head)
        if entry is None or entry[0] != stamp:
            with torch.inference_mode(False):  # rows made inside it could not be used by training later
                ids = token_ids.to(head.weight.device)
                bias = None if head.bias is None else head.bias.detach()[ids]
                entry = (stamp, head.weight.detach()[ids].contiguous(), bias)
            self._entries[head] = entry
        return entry[1:]


class TargetAdapter:
    """
    View of one target for the time of one call.

    Args:
        target (`PreTrainedModel`): A decoder-only causal language model.
        head_rows (`HeadRows`): Store of restricted head rows.
    """

    def __init__(self, target, head_rows: HeadRows):
        self.target = target
        self.config = target.config.get_text_config(decoder=True)
        self.embedding = target.get_input_embeddings()
        self.head = target.get_output_embeddings()
        self._head_rows = head_rows

    @property
    def exact_length(self) -> int | None:
        """
        Positions up to which a forward over several tokens gives the logits of one token at a time; `None` without a
        limit. Beyond it, some rotary embeddings change all their frequencies with the longest position of a forward.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        kinds = [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]
        if not kinds:
            return None
        own = getattr(self.config, "original_max_position_embeddings", None)
        limits = [kind.get("original_max_position_embeddings") or own for kind in kinds]
        return min(limit or self.config.max_position_embeddings for limit in limits)

    def embed(self, token_ids: torch.LongTensor) -> torch.Tensor:
        """Target embeddings `(..., H)` of `token_ids` `(...)`, on the device of the ids."""
        device = _device_of(self.embedding)
        return self.embedding(token_ids.to(device)).to(token_ids.device)

    def logits(self, hidden_states: torch.Tensor, token_ids: torch.LongTensor | None = None) -> torch.FloatTensor:
        """
        Raw logits, fp32, of `hidden_states` `(B, K, H)` over the vocabulary `(B, K, V)` or `token_ids` `(B, K, Vd)`.

        The scale and soft-cap that the target's own forward applies are applied here too.
        """
        device = _device_of(self.head)
        # Of a strided input and a frozen weight, torch makes one small product for each row of a batch.
        hidden_states = hidden_states.contiguous()
        if token_ids is None:
            logits = self.head(hidden_states.to(device, _dtype_of(self.head)))
        elif _has_plain_weight(self.head):
            weight, bias = self._head_rows.get(self.head, token_ids)
            logits = F.linear(hidden_states.to(device, weight.dtype), weight, bias)
        else:
            logits = self.head(hidden_states.to(device, _dtype_of(self.head)))[..., token_ids.to(device)]
        return self._post_process(logits.float()).to(hidden_states.device)

    def _post_process(self, logits: torch.FloatTensor) -> torch.FloatTensor:
        scale = getattr(self.config, "logit_scale", None)  # Cohere multiplies, Granite divides
        if scale is not None:
            logits = logits * scale
        divisor = getattr(self.config, "logits_scaling", None)
        if divisor is not None:
            logits = logits / divisor
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if not cap else torch.tanh(logits / cap) * cap

    def tapped(self, hidden_states: tuple, layer_ids: list[int]) -> torch.Tensor:
        """
        Concatenate the outputs of the tapped layers from a forward's `hidden_states`, `(B, T, L*H)`. Entry 0 of that
        tuple is the embedding output, so layer `i` is entry `i + 1`.
        """
        states = [hidden_states[i + 1] for i in layer_ids]
        if any(state is None for state in states):
            raise RuntimeError(
                f"The target {type(self.target).__name__} did not return the hidden states of `target_layer_ids` "
                f"{layer_ids}. Its forward must honour `output_hidden_states=True`."
            )
        device = states[-1].device  # layers may sit on different devices
        return torch.cat([state.to(device) for state in states], dim=-1)

    def check(self, config: DRelayConfig) -> None:
        """
        Raise a `ValueError` that names what does not fit between a drafter of this `config` and the target, or a
        `NotImplementedError` for a target that no drafter can serve.
        """
        name = type(self.target).__name__
        advice = "Load the drafter that was trained for this target, or train one for it."
        if self.target.config.is_encoder_decoder:
            raise ValueError(
                f"`assistant_model` drafts for decoder-only targets, but {name} is an encoder-decoder model. "
                "Call generate() without `assistant_model`."
            )
        if self.head is None or self.embedding is None:
            raise ValueError(
                f"`assistant_model` needs a target with an embedding and an LM head; {name} lacks one of them."
            )
        check_family(self.target)
        pairs = (
            ("vocab_size", config.vocab_size, self.config.vocab_size),
            ("hidden_size", config.hidden_size, self.config.hidden_size),
        )
        for field, own, theirs in pairs:
            if own != theirs:
                raise ValueError(
                    f"`assistant_model` has `{field}` {own}, but the target {name} has {theirs}. {advice}"
                )
        if max(config.target_layer_ids) >= self.config.num_hidden_layers:
            raise ValueError(
                f"`target_layer_ids` {config.target_layer_ids} need a target of more than "
                f"{max(config.target_layer_ids)} layers, but {name} has {self.config.num_hidden_layers}. {advice}"
            )


def _stamp(tensor: torch.Tensor | None) -> tuple | None:
    """Changes when a tensor is replaced, moved or written to; inference tensors do not count their writes."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.dtype, None if tensor.is_inference() else tensor._version


def _device_of(module: torch.nn.Module) -> torch.device:
    """Device a module computes on; offloaded weights sit on `meta`, and their hook tells the real one."""
    hook = getattr(module, "_hf_hook", None)
    if getattr(hook, "execution_device", None) is not None:
        return torch.device(hook.execution_device)
    return next(module.parameters()).device


def _dtype_of(module: torch.nn.Module) -> torch.dtype:
    """Floating dtype that a module takes; weights of quantised layers are integers or 8-bit floats."""
    floating = (p.dtype for p in module.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1)
    return next(floating, torch.get_default_dtype())


def _has_plain_weight(head: torch.nn.Module) -> bool:
    """Whether the head is a bare linear layer; subclasses and hooked modules may compute something else."""
    if type(head) is not torch.nn.Linear or type(head.weight) is not torch.nn.Parameter:
        return False
    is_hooked = bool(head._forward_hooks or head._forward_pre_hooks) or hasattr(head, "_hf_hook")
    return head.weight.device.type != "meta" and not is_hooked
