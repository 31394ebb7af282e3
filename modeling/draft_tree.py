"""Trees of draft tokens: how one grows, what the target may see of it, and how its accepted path is found.

A tree is verified in one forward. Its *places* are the rows of that forward: place 0 is the anchor, place `i + 1` is
node `i`, and every place sees the context, its ancestors and itself. The target chooses a token at every place and the
accepted path follows those choices from the anchor on, so each emitted token is the target's own and no tree, however
bad, can change the text. A chain is a tree without branches.

Trees follow DDTree (best first over independent slots) and DARTree (arXiv 2608.13524: children are scored given the
path of their parent); with a head whose slots are independent the second is the first.
"""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from .host_transfer import send, to_device


@dataclass
class DraftTree:
    """
    Draft tokens of one row.

    Attributes:
        token_ids (`list[int]`): Token of each node; a parent comes before its children.
        parents (`list[int]`): Place of the parent of each node; 0 is the anchor.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __post_init__(self):
        nodes = enumerate(zip(self.parents, self.token_ids, strict=True), start=1)
        self._children = {(parent, token): place for place, (parent, token) in nodes}

    @classmethod
    def chain(cls, token_ids: list[int]) -> "DraftTree":
        """A tree without branches."""
        return cls(list(token_ids), list(range(len(token_ids))))

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(self.num_nodes))

    def child(self, place: int, token: int) -> int | None:
        """Place of the child of `place` that holds `token`."""
        return self._children.get((place, token))

    def path(self, place: int) -> list[int]:
        """Places from the anchor to `place`."""
        path = [place]
        while path[-1]:
            path.append(self.parents[path[-1] - 1])
        return path[::-1]

    def cut(self, depth: int) -> "DraftTree":
        """The tree without the nodes deeper than `depth`."""
        depths = self.depths()[1:]
        if all(d <= depth for d in depths):
            return self
        kept = DraftTree()
        places = {0: 0}
        for place, (token, parent, own) in enumerate(zip(self.token_ids, self.parents, depths, strict=True), start=1):
            if own <= depth:
                kept.token_ids.append(token)
                kept.parents.append(places[parent])
                places[place] = kept.num_nodes
        kept.__post_init__()
        return kept

    def depths(self) -> list[int]:
        """Distance of each place from the anchor."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def visible(self, num_places: int) -> torch.BoolTensor:
        """
        Which places each place sees `(num_places, num_places)`: its ancestors and itself. Places behind the tree
        (padding) see themselves.
        """
        visible = torch.eye(num_places, dtype=torch.bool)
        for place, parent in enumerate(self.parents, start=1):
            visible[place] |= visible[parent]
        return visible

    def graft(self, place: int, other: "DraftTree") -> list[int]:
        """Hang `other` below `place`, its anchor. Returns the places of the nodes of `other`."""
        places = [place]
        for token, parent in zip(other.token_ids, other.parents, strict=True):
            self.token_ids.append(token)
            self.parents.append(places[parent])
            places.append(self.num_nodes)
        self.__post_init__()
        return places[1:]


@dataclass
class Candidate:
    """A node that may enter a tree: its depth, the candidate of its slot, its parent and the log-score of its path."""

    depth: int
    choice: int
    parent: "Candidate | None"
    token: int
    score: float

    def path(self) -> list["Candidate"]:
        """The nodes from the anchor to this one."""
        return [*(self.parent.path() if self.parent else []), self]


class TreeDraft:
    """
    Scored candidates of one stage.

    Args:
        candidates (`list[Candidate]`): Prefix-closed; a path never scores more than its own beginning.
        budget (`int`): Nodes that a tree may have.
    """

    def __init__(self, candidates: list[Candidate], budget: int):
        self.candidates = candidates
        self.budget = budget

    def best_path(self) -> list[Candidate]:
        """The best of the longest paths, which another stage would extend."""
        depth = max((c.depth for c in self.candidates), default=0)
        deepest = [c for c in self.candidates if c.depth == depth]
        return max(deepest, key=lambda c: c.score).path() if deepest else []

    def select(self, kept: list[Candidate], ends: set[int]) -> tuple[DraftTree, int]:
        """
        The best tree within the budget that contains `kept`, a path, with nothing behind the tokens `ends`.

        Returns:
            `(tree, place)`: the place of the last node of `kept`, 0 without one.
        """
        chosen = {id(c) for c in kept}
        # A child can tie with its parent but never beat it: the shallower one comes first.
        for candidate in sorted(self.candidates, key=lambda c: (-c.score, c.depth)):
            if len(chosen) >= self.budget:
                break
            if candidate.parent is None or (id(candidate.parent) in chosen and candidate.parent.token not in ends):
                chosen.add(id(candidate))
        places: dict[int, int] = {}
        tree = DraftTree()
        for candidate in sorted((c for c in self.candidates if id(c) in chosen), key=lambda c: (c.depth, -c.score)):
            tree.token_ids.append(candidate.token)
            tree.parents.append(places[id(candidate.parent)] if candidate.parent else 0)
            places[id(candidate)] = tree.num_nodes
        tree.__post_init__()
        return tree, places[id(kept[-1])] if kept else 0


@dataclass
class TreeLevels:
    """
    Scored paths of every depth of one stage, as they lie on the device.

    Attributes:
        budget (`int`): Nodes that a tree may have.
        parents, choices, token_ids (`list[torch.LongTensor]` of shape `(W,)`): Of the last node of each path: its
            parent among the paths one shorter, its place in the pool, its token.
        scores (`list[torch.FloatTensor]` of shape `(W,)`): Log-scores of the paths, best first; `-inf` is impossible.
    """

    budget: int
    parents: list[torch.LongTensor] = field(default_factory=list)
    choices: list[torch.LongTensor] = field(default_factory=list)
    token_ids: list[torch.LongTensor] = field(default_factory=list)
    scores: list[torch.FloatTensor] = field(default_factory=list)

    def add(self, scores, parents, choices, token_ids) -> None:
        """One more depth."""
        self.scores.append(scores)
        self.parents.append(parents)
        self.choices.append(choices)
        self.token_ids.append(token_ids)

    def best_path(self) -> tuple[torch.LongTensor, torch.LongTensor]:
        """
        The best of the longest paths.

        Returns:
            `(rows (D,), depth (1,))`: which path of each level its nodes are; what is behind `depth` means nothing.
        """
        depth = torch.stack([scores[:1] > float("-inf") for scores in self.scores]).long().sum(dim=0)
        row, rows = torch.zeros_like(depth), []
        for level in range(len(self.scores), 0, -1):
            row = torch.where(depth > level, row, 0)  # at its last level it is the best, which comes first
            rows.append(row)
            row = self.parents[level - 1].index_select(0, row)
        return torch.cat(rows[::-1]), depth

    def tensors(self) -> list[torch.Tensor]:
        """What `on_host` needs the values of."""
        columns = (self.parents, self.choices, self.token_ids, self.scores)
        return [torch.cat(column) for column in columns]

    def on_host(self, columns: list[list]) -> "TreeDraft":
        """The possible paths as candidates, from the values of `tensors`."""
        candidates: list[Candidate] = []
        above: list[Candidate | None] = [None]
        start = 0
        for depth, scores in enumerate(self.scores, start=1):
            level = zip(*(column[start : start + len(scores)] for column in columns), strict=True)
            start += len(scores)
            above = [
                Candidate(depth, choice, above[parent], token, score) if score > float("-inf") else None
                for parent, choice, token, score in level
            ]
            candidates += [candidate for candidate in above if candidate is not None]
        return TreeDraft(candidates, self.budget)


def grow(head, state: Any, pool, anchor_ids: torch.LongTensor, choose, budget: int) -> TreeLevels:
    """
    Score the best `budget` paths of every depth, each given its own tokens.

    Args:
        head (`DraftHead`): Scores the candidates of a slot given the tokens before it.
        state: What `head.read` returned for one row.
        pool (`Pool`): Candidates of each slot, for one row.
        anchor_ids (`torch.LongTensor` of shape `(1,)`): Last token before slot 1.
        choose (`StageDraw`): `choose.path_log_probs` turns selection logits into log-probabilities.
        budget (`int`): Nodes that the tree may have. More paths of one depth cannot be in it.
    """
    path_ids, scores = anchor_ids[:, None], torch.zeros(1, device=anchor_ids.device)
    levels = TreeLevels(budget)
    for slot in range(pool.ids.shape[1]):
        logits = head.score(expand_rows(state, len(path_ids)), path_ids, slot)[:, 0]  # (W, C)
        total = scores[:, None] + choose.path_log_probs(logits, slot, path_ids[:, 1:])
        scores, flat = total.flatten().topk(min(budget, total.numel()))
        parents, choices = flat // total.shape[1], flat % total.shape[1]
        tokens = pool.ids[0, slot, choices]
        path_ids = torch.cat([path_ids[parents], tokens[:, None]], dim=1)
        levels.add(scores, parents, choices, tokens)
    return levels


def expand_rows(value: Any, num_rows: int) -> Any:
    """`value` with every tensor in it repeated, without a copy, from one row to `num_rows`; a head's state is any."""
    if num_rows == 1:
        return value
    if isinstance(value, torch.Tensor):
        return value.expand(num_rows, *value.shape[1:]) if value.dim() and value.shape[0] == 1 else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        expanded = copy.copy(value)
        for name, part in vars(value).items():
            setattr(expanded, name, expand_rows(part, num_rows))
        return expanded
    if isinstance(value, (list, tuple)):
        return type(value)(expand_rows(part, num_rows) for part in value)
    if isinstance(value, dict):
        return {key: expand_rows(part, num_rows) for key, part in value.items()}
    return value


def attention_masks(target, cache, trees: list[DraftTree], lengths: list[int], num_places: int, seen: torch.Tensor):
    """
    Masks of a forward over trees, for the attention layers of `target`.

    Args:
        cache (`Cache`): Cache of the target; the places are written behind all its slots.
        trees (`list[DraftTree]`): Of each row.
        lengths (`list[int]`): Slots of the cache that hold committed tokens, for each row.
        num_places (`int`): Places `N` of the forward.
        seen (`torch.BoolTensor` of shape `(B, T)`): Slots that may be attended to, padding excluded.

    Returns:
        A mask `(B, 1, N, T')`, or one for each kind of layer in a dictionary, as the target takes them.
    """
    config = target.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    own = to_device(torch.stack([tree.visible(num_places) for tree in trees]), seen.device)  # (B, N, N)
    depths = [tree.depths() + [0] * (num_places - 1 - tree.num_nodes) for tree in trees]
    depths, ends = send(depths, seen.device), send(lengths, seen.device)[:, None]

    def mask(layer_idx: int, window: int | None) -> torch.Tensor:
        kv_length, kv_offset = cache.get_mask_sizes(num_places, layer_idx)
        num_slots = seen.shape[1]
        slots = torch.arange(kv_offset, kv_offset + kv_length, device=seen.device)
        context = (slots < num_slots) & (slots[None] < ends)  # (B, T')
        context = context & seen[:, slots.clamp(max=num_slots - 1)] if num_slots else context
        place = (slots - num_slots).clamp(0, num_places - 1)
        is_place = (slots >= num_slots) & (slots < num_slots + num_places)
        visible = context[:, None] | (is_place & own[:, :, place])
        if window is not None:  # distances are those of positions: siblings stand at the same one
            key = torch.where(is_place, num_slots + depths[:, place], slots[None])
            visible &= (num_slots + depths)[:, :, None] - key[:, None] < window
        return _as_backend_mask(visible[:, None], target)

    window = getattr(config, "sliding_window", None)
    if len(kinds) < 2:
        # Without kinds of layers a model masks with its window whatever the cache keeps.
        is_windowed = "sliding" in kinds[0] if kinds else getattr(config, "use_sliding_window", True)
        return mask(0, window if is_windowed else None)
    layers = {kind: config.layer_types.index(kind) for kind in kinds}
    return {kind: mask(i, window if "sliding" in kind else None) for kind, i in layers.items()}


def _as_backend_mask(visible: torch.BoolTensor, target) -> torch.Tensor:
    implementation = target.config.get_text_config(decoder=True)._attn_implementation
    if implementation == "sdpa":
        return visible
    dtype = target.dtype
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )
