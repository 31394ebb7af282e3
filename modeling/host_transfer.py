"""What passes between host and device in a round. A copy to the host waits until the device has done all its work, so
a round makes few of them: one for each stage (`DraftBlock.numbers`) and one for the verification (`Verifier`).
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
    """Integers on `device`. Unlike `torch.tensor(values, device=device)` it does not wait for the device."""
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)


def _nested(values: list, shape: tuple[int, ...]):
    if len(shape) < 2:
        return values if shape else values[0]
    size = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


__all__ = ["look_is_free", "read", "send"]
