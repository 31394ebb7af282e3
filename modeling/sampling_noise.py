"""The random numbers of plain sampling, known ahead: drafts may look at them, and any loop that consumes them writes
the text of plain decoding.

`torch.multinomial` draws one token from `p` as `argmax(p / e)` with independent exponentials `e`, which is the Gumbel
trick. So the choice of the target at a step is a function of its distribution and of the numbers that the generator
yields at that step, and these can be drawn before the distribution is known. Whatever is drafted, cut, looped or
branched then changes the speed and never the text.
"""

import torch


class SamplingNoise:
    """
    Exponential numbers of the steps of one call, drawn in the order in which plain decoding draws them.

    Args:
        num_rows (`int`): Rows `B` of the batch.
        vocab_size (`int`): Width `V` of the target's logits.
        device (`torch.device`): Device on which plain decoding would draw.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.shape = (num_rows, vocab_size)
        self.device = device
        self._steps: dict[int, torch.FloatTensor] = {}
        self._next = 0  # first step that was not drawn yet
        self._states = {0: self._state()}  # of the generator before a step
        self._others_drew = False

    def at(self, step: int) -> torch.FloatTensor:
        """Numbers `(B, V)` of the `step`-th new token, counted from 0; steps are kept until `forget`."""
        while self._next <= step:
            self._look_for_others()
            self._steps[self._next] = torch.empty(self.shape, device=self.device).exponential_(1)
            self._next += 1
            self._states[self._next] = self._state()
        return self._steps[step]

    def pick(self, probs: torch.FloatTensor, step: int, rows: list[int]) -> torch.LongTensor:
        """Tokens `(G,)` that plain decoding draws at a step from `probs` `(G, V)` of the given rows of the batch."""
        noise = self.at(step)
        noise = noise if len(rows) == len(noise) else torch.stack([noise[row] for row in rows])
        return (probs / noise).argmax(dim=-1)

    def gumbel(self, step: int, row: int, token_ids: torch.LongTensor) -> torch.FloatTensor:
        """Gumbel noise `(W, C)` of the candidates `token_ids` `(W, C)` at a step."""
        noise = self.at(step)[row]
        return -noise[token_ids.to(noise.device)].log().to(token_ids.device)

    def forget(self, before: int) -> None:
        """Drop the steps before `before`."""
        for step in [s for s in self._steps if s < before]:
            del self._steps[step]
        for step in [s for s in self._states if s < before]:
            del self._states[step]

    def rewind(self, num_steps: int) -> None:
        """
        Leave the generator as plain decoding of `num_steps` tokens would. If others drew from it meanwhile, it stays
        where it is: nobody may get the same numbers twice.
        """
        self._look_for_others()
        if num_steps in self._states and not self._others_drew:
            self._set_state(self._states[num_steps])

    def _look_for_others(self) -> None:
        """Note whether the generator is where the last step left it."""
        # Such states lie in the host's memory, whatever the device.
        self._others_drew = self._others_drew or not torch.equal(self._state(), self._states[self._next])

    def _state(self) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return getattr(torch, self.device.type).get_rng_state(self.device)

    def _set_state(self, state: torch.Tensor) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            getattr(torch, self.device.type).set_rng_state(state, self.device)
