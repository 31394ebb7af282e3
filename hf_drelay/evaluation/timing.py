"""Walltime of one `generate()` call, measured the same way everywhere."""

import time

import torch
from transformers import set_seed


def timed_generate(model, inputs, seed: int = 0, **arguments) -> tuple[list[int], float]:
    """
    Generate once after setting the seed.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`Mapping`): `input_ids (1, P)` and `attention_mask (1, P)`.
        arguments: Of `generate()`.

    Returns:
        The new token ids, and the walltime in seconds, prefill included.
    """
    set_seed(seed)
    _synchronize(model.device)
    start = time.perf_counter()
    output_ids = model.generate(**inputs, **arguments)
    _synchronize(model.device)
    elapsed_s = time.perf_counter() - start
    return output_ids[0, inputs["input_ids"].shape[1] :].tolist(), elapsed_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
