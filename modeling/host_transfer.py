"""What passes between host and device in a round. A copy to the host waits until the device has done all its work, so
a round of our own code makes few of them: one for each stage (`DraftBlock.numbers`) and one for the verification
(`Verifier`). Some processors of the host look at tokens themselves.
"""

import struct

import torch


def look_is_free(device: torch.device) -> bool:
    """Whether the host can look at a tensor without waiting for a queue of work."""
    return device.type == "cpu"


def read(*tensors: torch.Tensor) -> list:
    """The values of integer, boolean and floating `tensors` (in fp32) as nested lists, by one copy for all of them."""
    columns = [(t.float().view(torch.int32) if t.is_floating_point() else t).long().flatten() for t in tensors]
    values, found, start = torch.cat(columns).tolist(), [], 0
    for tensor in tensors:
        part = values[start : start + tensor.numel()]
        start += tensor.numel()
        if tensor.is_floating_point():
            part = list(struct.unpack(f"{len(part)}f", struct.pack(f"{len(part)}i", *part)))
        found.append(_nested(part, tensor.shape))
    return found


def send(values: list, device: torch.device) -> torch.LongTensor:
    """Integers on `device`. Unlike `torch.tensor(values, device=device)` it does not wait for a CUDA device."""
    return to_device(torch.tensor(values, dtype=torch.long), device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """
    A tensor of the host on `device`. CUDA takes a copy of ordinary memory before it goes on; others may read it later,
    when it is gone.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def _nested(values: list, shape: tuple[int, ...]):
    if len(shape) < 2:
        return values if shape else values[0]
    size = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


__all__ = ["look_is_free", "read", "send", "to_device"]
