"""Look for what usually goes wrong, before hours of training are spent on it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .data import ResponseExample
from .trainer import DRelayTrainer, collate


@dataclass
class Finding:
    """Result of one test: what was looked at, whether it is as it should be, and what was seen."""

    name: str
    is_fine: bool
    detail: str


def check_run(trainer: DRelayTrainer, num_steps: int = 30) -> Iterator[Finding]:
    """
    Findings about a run that is about to start. The last test overfits one batch with `num_steps` steps on a copy of
    the drafter's weights, which it puts back.
    """
    examples = trainer.train_dataset.examples
    yield _check_text(trainer)
    yield _check_taps(trainer, examples[0])
    yield _check_mask(trainer)
    yield _check_shortlist(trainer, examples)
    yield _check_positions(trainer, examples[0])
    yield _check_learning(trainer, num_steps)


@torch.no_grad()
def _check_text(trainer: DRelayTrainer) -> Finding:
    """Whether this target would write the greedy responses, which it would not in another template."""
    right = total = 0
    for example in trainer.held_out[:8]:
        ids = example.input_ids[None].to(trainer.target.device)
        states = trainer.target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        best = trainer.adapter.logits(states[:, example.prompt_length - 1 : -1]).argmax(-1)
        right += int((best == ids[:, example.prompt_length :]).sum())
        total += best.shape[1]
    share = right / max(total, 1)
    return Finding("text", share > 0.95, f"the target itself would write {share:.1%} of the greedy response tokens")


def _check_taps(trainer: DRelayTrainer, example: ResponseExample) -> Finding:
    """Whether the tapped states are there, finite, and differ from layer to layer."""
    taps = trainer.model.config.target_layer_ids
    ids = example.input_ids[None].to(trainer.target.device)
    states, _ = trainer.features.get([f"{example.key}-{ids.shape[1]}"], ids, [ids.shape[1]])
    layers = states.float().chunk(len(taps), dim=-1)
    are_finite = all(bool(layer.isfinite().all()) for layer in layers)
    are_distinct = all(not torch.equal(a, b) for a, b in zip(layers, layers[1:], strict=False))
    norms = ", ".join(f"{tap}: {layer.norm(dim=-1).mean():.1f}" for tap, layer in zip(taps, layers, strict=True))
    return Finding("taps", are_finite and are_distinct, f"mean norm of the states by layer: {norms}")


def _check_mask(trainer: DRelayTrainer) -> Finding:
    config = trainer.model.config
    if config.use_mask_embedding:
        return Finding("mask token", True, "rows to draft start from a learned embedding")
    row = trainer.target.get_input_embeddings().weight[config.mask_token_id].float()
    return Finding("mask token", bool(row.any()), f"token {config.mask_token_id}, norm {row.norm():.2f}")


def _check_shortlist(trainer: DRelayTrainer, examples: list[ResponseExample]) -> Finding:
    """Share of response tokens that can be drafted at all, and the end tokens among them."""
    shortlist, ends = trainer.model.drafter.draft_token_ids, trainer.model.config.eos_token_ids
    if shortlist is None:
        return Finding("vocabulary", True, "every token can be drafted")
    held = trainer.held_out or examples
    tokens = torch.cat([e.response_ids for e in held])
    share = torch.isin(tokens, shortlist.cpu()).float().mean().item()
    missing = sorted(set(ends) - set(shortlist.tolist()))
    detail = f"{len(shortlist)} tokens, {share:.1%} of the held-out response tokens"
    if missing:
        detail += f"; end tokens {missing} are missing"
    return Finding("vocabulary", share > 0.9 and not missing, detail)


def _check_positions(trainer: DRelayTrainer, example: ResponseExample) -> Finding:
    """Whether a block of a batch has the rows of a draft at its anchor; of a chain, the first one."""
    model, adapter = trainer.model.eval(), trainer.adapter
    device = model.device
    anchor = example.prompt_length
    ids = example.input_ids[None].to(device)
    states, _ = trainer.features.get([f"{example.key}-{ids.shape[1]}"], ids, [ids.shape[1]])
    with torch.no_grad():
        trained = trainer.objective.block_rows(states, ids, torch.tensor([[anchor]], device=device))[:, 0]
        session = model.new_session(adapter)
        session.extend(states[:, :anchor])
        if model.config.backbone == "parallel":
            embeds = model.drafter.block_embeds(ids[:, anchor], adapter.embed)
            positions = session.positions(anchor, model.config.block_size)
            drafted = model.drafter(embeds, positions, session.cache).last_hidden_state
        else:
            drafted = model.drafter.first_state(session, ids[:, anchor : anchor + 1], ids[:, : anchor + 1])
            trained = trained[:, :1]
    difference = (drafted - trained).abs().max().item() / drafted.abs().max().item()
    return Finding("positions", difference < 1e-2, f"training and drafting differ by {difference:.1e} of the largest")


def _check_learning(trainer: DRelayTrainer, num_steps: int) -> Finding:
    """Whether the loss of one batch falls when it is repeated."""
    model = trainer.model.train()
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    rows = [trainer.train_dataset[i] for i in range(min(4, len(trainer.train_dataset)))]
    batch = trainer._prepare_inputs(collate(rows))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    # The end of a run has every loss and the deepest stages in it.
    state, before = trainer.state, (trainer.state.global_step, trainer.state.max_steps)
    state.global_step, state.max_steps = 999_999, 1_000_000
    for _ in range(num_steps):
        loss = trainer.compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state.global_step, state.max_steps = before
    model.load_state_dict(saved)
    trainer._terms.clear()
    return Finding("learning", losses[-1] < 0.9 * losses[0], f"loss of one batch {losses[0]:.2f} -> {losses[-1]:.2f}")
