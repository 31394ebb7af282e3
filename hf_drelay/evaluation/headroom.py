"""Headroom: how much a selector could win over a drafter's own choice, and how much one wins.

Three analyses along responses that the target wrote greedily, on the blocks that the backbone alone drafts, the best
candidate of every slot. That is what any head starts from: independent, bilinear, recurrent, markov or relay.

1. pool coverage: at the first error of a block, is the target's token among the slot's candidates?
2. suffix evidence: do the tokens drafted *behind* the error tell which candidate is right? Every candidate is scored
   by the target's log-probability of the next four drafts after it, and again with a suffix from another prompt.
3. oracle ceiling: tokens that would be won by replacing only the first rejected token by the target's, where the pool
   holds it.

Where the drafter has a head that chooses in the light of the tokens before (here: its selector), that one drafts at
the same anchors: which share of the ceiling it captures, and how often the pool holds the target's token at the first
error that is left. The ceiling corrects one token and a selector any number, so the share can exceed 1.

Drafters that draft token by token have no such blocks: what they drafted behind an error they drafted given the error.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from hf_drelay.modeling.compat import cache_parameter


SUFFIX_LENGTH = 4


@dataclass(frozen=True)
class BlockHeadroom:
    """
    What one block could have won.

    Attributes:
        num_accepted (`int`): Drafts before the first error.
        is_error (`bool`): Whether there is one.
        is_covered (`bool`): Whether the pool of the first error holds the target's token.
        oracle_gain (`int`): Tokens more that would be accepted with the target's token there; 0 if it is not covered.
        has_right_suffix (`bool`): Whether the error is covered and the `SUFFIX_LENGTH` drafts behind it are the
            target's continuation.
    """

    num_accepted: int
    is_error: bool
    is_covered: bool
    oracle_gain: int
    has_right_suffix: bool


def analyse_block(draft_ids: list[int], pool_ids: list[list[int]], truth_ids: list[int]) -> BlockHeadroom:
    """
    Compare a block with what the target wrote.

    Args:
        draft_ids (`list[int]`): `K` drafts.
        pool_ids (`list[list[int]]`): Candidates of each slot.
        truth_ids (`list[int]`): The `K` tokens of the target at the slots.
    """
    agrees = [draft == truth for draft, truth in zip(draft_ids, truth_ids, strict=True)]
    if all(agrees):
        return BlockHeadroom(len(agrees), False, False, 0, False)
    error = agrees.index(False)
    is_covered = truth_ids[error] in pool_ids[error]
    behind = agrees[error + 1 :]
    run = behind.index(False) if False in behind else len(behind)
    has_right_suffix = is_covered and run >= SUFFIX_LENGTH
    return BlockHeadroom(error, True, is_covered, 1 + run if is_covered else 0, has_right_suffix)


@dataclass
class SuffixCase:
    """A first error whose suffix is the target's continuation; `prefix_ids` ends before the slot of the error."""

    prompt: int
    prefix_ids: list[int]
    candidate_ids: list[int]
    suffix_ids: list[int]
    truth_id: int


@dataclass
class Headroom:
    """
    Counts over complete blocks; a block at the end of a response that has no truth for every slot is left out.

    Attributes:
        num_blocks (`int`): Complete blocks.
        num_errors (`int`): Blocks with an error.
        num_covered (`int`): Blocks whose first error is covered by the pool.
        num_accepted (`int`): Accepted drafts of the backbone.
        oracle_gain (`int`): Tokens that the oracle would add.
        selector_gain (`int`, *optional*): Tokens that the drafter's selector adds at the same anchors; can be
            negative. `None`, as the next two, without a selector.
        num_selector_errors, num_selector_covered (`int`, *optional*): Blocks of the selector with an error, and those
            of them whose pool holds the target's token at the first one.
        num_suffix_cases (`int`), num_suffix_right (`int`): Suffix analysis with the block's own suffix.
        num_control_cases (`int`), num_control_right (`int`): The same cases with a suffix from another prompt.
    """

    num_blocks: int = 0
    num_errors: int = 0
    num_covered: int = 0
    num_accepted: int = 0
    oracle_gain: int = 0
    selector_gain: int | None = None
    num_selector_errors: int | None = None
    num_selector_covered: int | None = None
    num_suffix_cases: int = 0
    num_suffix_right: int = 0
    num_control_cases: int = 0
    num_control_right: int = 0
    cases: list[SuffixCase] = field(default_factory=list, repr=False)

    def add(self, block: BlockHeadroom) -> None:
        """Count a block."""
        self.num_blocks += 1
        self.num_errors += block.is_error
        self.num_covered += block.is_covered
        self.num_accepted += block.num_accepted
        self.oracle_gain += block.oracle_gain

    def to_dict(self) -> dict:
        """Counts and the shares made from them; a share without a count is `None`."""
        record = {name: value for name, value in asdict(self).items() if name != "cases"}
        suffix = _share(self.num_suffix_right, self.num_suffix_cases)
        control = _share(self.num_control_right, self.num_control_cases)
        selector = self.selector_gain
        covered = None
        if self.num_selector_errors is not None:
            covered = _share(self.num_selector_covered, self.num_selector_errors)
        return record | {
            "pool_coverage": _share(self.num_covered, self.num_errors),
            "mean_accepted": _share(self.num_accepted, self.num_blocks),
            "mean_oracle_gain": _share(self.oracle_gain, self.num_blocks),
            "suffix_share_right": suffix,
            "control_share_right": control,
            "suffix_points_over_control": None if None in (suffix, control) else 100 * (suffix - control),
            "mean_selector_gain": None if selector is None else _share(selector, self.num_blocks),
            "selector_share_of_ceiling": None if selector is None else _share(selector, self.oracle_gain),
            "selector_pool_coverage": covered,
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def check_analysis(drelay, options: dict) -> None:
    """Raise a `ValueError` for a drafter or an option for which the analyses have no meaning."""
    backbone = drelay.config.backbone
    if backbone != "parallel":
        raise ValueError(
            f"`drafter` has the backbone {backbone!r}, which drafts token by token: what stands behind an error was "
            "drafted given that error, so it tells nothing about the right candidate, and it is not what would stand "
            "behind the right one. Measure a drafter with a parallel backbone, or this one with `hf-drelay benchmark`."
        )
    if strange := sorted(set(options) - {"num_draft_tokens"}):
        raise ValueError(
            f"`{strange[0]}` {options[strange[0]]!r} has no meaning in a headroom analysis, which is about whole "
            "greedy blocks with and without the selector; leave it out. `num_draft_tokens` shortens the blocks."
        )


@torch.no_grad()
def measure_headroom(
    drelay, target, responses: Iterable[tuple[list[int], int]], max_cases: int = 100, quiet: bool = True, **options
) -> Headroom:
    """
    The analyses over greedy responses of the target.

    Args:
        drelay (`DRelayModel`): Drafter with a parallel backbone; its selector, if it has one, is measured too.
        target (`PreTrainedModel`): The target that wrote the responses.
        responses (`Iterable[tuple[list[int], int]]`): Prompt and response ids, and the length of the prompt.
        max_cases (`int`): Suffix cases that are scored.
        options: Of `with_options`: `num_draft_tokens` shortens the blocks. All others decide how much of a block is
            drafted, or how, and have no meaning here.

    Raises:
        ValueError: See [`check_analysis`].
    """
    check_analysis(drelay, options)
    total = Headroom()
    # Whole blocks, whatever a call drafts by default; a caller may still ask for shorter ones.
    options = {"num_draft_tokens": None} | options | {"confidence_threshold": 0.0, "loop_gate": None}
    views = [drelay.with_options(**(options | {"use_selector": False}))]
    if drelay.selector is not None:
        views.append(drelay.with_options(**(options | {"use_selector": True})))
        total.selector_gain = total.num_selector_errors = total.num_selector_covered = 0
    for number, (ids, prompt_length) in enumerate(tqdm(list(responses), unit="response", disable=quiet)):
        _walk_response(total, number, views, target, torch.tensor(ids, device=target.device), prompt_length)
    _score_cases(total, target, max_cases)
    return total


def _walk_response(total: Headroom, number: int, views: list, target, ids: torch.LongTensor, prompt_length: int):
    """Draft at the anchors that the backbone alone would visit, with every view."""
    adapter = views[0].model.adapter(target)
    outputs = target.get_decoder()(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    states = adapter.tapped(outputs.hidden_states, views[0].config.target_layer_ids)
    # Room for whole blocks at the end, and no end token that cuts them: the analysis is about full blocks.
    config = GenerationConfig(do_sample=False, max_length=len(ids) + views[0].config.num_drafts + 2)
    generators = [
        view.build_candidate_generator(
            target=target,
            generation_config=config,
            input_ids=ids[None],
            logits_processor=LogitsProcessorList(),
            model_kwargs={},
        )
        for view in views
    ]
    length = min(views[0].options.num_draft_tokens or views[0].config.num_drafts, views[0].config.num_drafts)
    anchor, fed = prompt_length, 0
    while anchor + length < len(ids):
        truth = ids[anchor + 1 : anchor + 1 + length].tolist()
        drafts, pools, found = [], [], []
        for generator in generators:
            generator.session.extend(states[:, fed:anchor])
            (block,) = generator.draft_round(ids[None, : anchor + 1])
            drafts.append(block.draft_ids[0].tolist())
            pools.append(block.pool_ids[0].tolist())
            found.append(analyse_block(drafts[-1], pools[-1], truth))
        own = found[0]
        total.add(own)
        for selected in found[1:]:
            total.selector_gain += selected.num_accepted - own.num_accepted
            total.num_selector_errors += selected.is_error
            total.num_selector_covered += selected.is_covered
        if own.has_right_suffix:
            error = own.num_accepted
            prefix = ids[: anchor + 1 + error].tolist()
            suffix = drafts[0][error + 1 : error + 1 + SUFFIX_LENGTH]
            total.cases.append(SuffixCase(number, prefix, pools[0][error], suffix, truth[error]))
        fed = anchor
        anchor += own.num_accepted + 1


def _score_cases(total: Headroom, target, max_cases: int) -> None:
    """Score the suffix cases with their own suffix and with one of another prompt."""
    cases = total.cases[:max_cases]
    for number, case in enumerate(cases):
        others = (other for other in cases[number + 1 :] + cases[:number] if other.prompt != case.prompt)
        control = next(others, None)
        best = _best_candidate(target, case, case.suffix_ids)
        total.num_suffix_cases += 1
        total.num_suffix_right += best == case.truth_id
        if control is not None:
            total.num_control_cases += 1
            total.num_control_right += _best_candidate(target, case, control.suffix_ids) == case.truth_id


def _best_candidate(target, case: SuffixCase, suffix_ids: list[int]) -> int:
    """The candidate after which the target finds the suffix most likely."""
    scores = suffix_log_probs(target, case.prefix_ids, case.candidate_ids, suffix_ids)
    return case.candidate_ids[int(scores.argmax())]


@torch.no_grad()
def suffix_log_probs(target, prefix_ids: list[int], candidate_ids: list[int], suffix_ids: list[int]) -> torch.Tensor:
    """
    Log-probability `(C,)` of the suffix after prefix and each candidate; the prefix is computed once for all.
    """
    cache = DynamicCache(config=target.config)
    prefix = torch.tensor([prefix_ids], device=target.device)
    decoder = target.get_decoder()
    name = cache_parameter(decoder.forward)
    decoder(input_ids=prefix, use_cache=True, **{name: cache})
    # `batch_repeat_interleave` would say it better, but recurrent layers have it not.
    cache.reorder_cache(torch.zeros(len(candidate_ids), dtype=torch.long, device=target.device))
    rows = torch.tensor([[candidate, *suffix_ids] for candidate in candidate_ids], device=target.device)  # (C, 1 + n)
    logits = target(input_ids=rows, use_cache=True, **{name: cache}).logits[:, :-1].float()  # (C, n, V)
    log_probs = logits.log_softmax(dim=-1).gather(2, rows[:, 1:, None])[..., 0]
    return log_probs.sum(dim=1)


@torch.no_grad()
def greedy_responses(target, prompts: Iterable, max_new_tokens: int, quiet: bool = True):
    """Prompt and response ids of encoded prompts, with the length of the prompt."""
    found = []
    for prompt in tqdm(list(prompts), desc="responses", unit="prompt", disable=quiet):
        inputs = {name: tensor.to(target.device) for name, tensor in prompt.inputs.items()}
        ids = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        found.append((ids[0].tolist(), inputs["input_ids"].shape[1]))
    return found


def headroom_table(record: dict) -> str:
    """The figures as a Markdown table."""

    def share(value):
        return "–" if value is None else f"{100 * value:.1f} %"

    def plain(value):
        return "–" if value is None else f"{value:+.2f}"

    def counts(part: str, whole: str):
        return "–" if record.get(part) is None else f"{record[part]} / {record[whole]}"

    rows = [
        ("pool coverage at the first error", share(record["pool_coverage"]), counts("num_covered", "num_errors")),
        (
            "right candidate by its suffix",
            share(record["suffix_share_right"]),
            counts("num_suffix_right", "num_suffix_cases"),
        ),
        (
            "the same with the suffix of another prompt",
            share(record["control_share_right"]),
            counts("num_control_right", "num_control_cases"),
        ),
        ("oracle gain, tokens a block", plain(record["mean_oracle_gain"]), counts("oracle_gain", "num_blocks")),
        ("selector gain, tokens a block", plain(record["mean_selector_gain"]), counts("selector_gain", "num_blocks")),
        (
            "share of the ceiling that the selector captures",
            share(record["selector_share_of_ceiling"]),
            counts("selector_gain", "oracle_gain"),
        ),
        (
            "pool coverage at the first error of the selector",
            share(record.get("selector_pool_coverage")),
            counts("num_selector_covered", "num_selector_errors"),
        ),
    ]
    lines = ["| | | counts |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} | {numbers} |" for name, value, numbers in rows])
