"""What every test needs: one torch thread (unless told otherwise), and a Hub client that stays off the network."""

import os
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split


# Before the Hub client is imported, which reads this once. Tests marked `hub` are run with HF_HUB_OFFLINE=0.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402


if "OMP_NUM_THREADS" not in os.environ:
    # Tiny models gain nothing from threads and lose to their overhead.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory) -> SimpleNamespace:
    """
    Folders of a tiny target with a tokenizer (one letter for each token) and of a drafter for it.

    Weights are random, but token tables so wide that both models look mostly at the last token: some drafts are
    right, and the selector repairs some slots rightly and others harmfully.
    """
    from hf_drelay import DRelayConfig, DRelayModel

    root = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(2)  # of a few tried, one with every origin of tokens in its texts
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.25,
    )
    target = LlamaForCausalLM(config)
    with torch.no_grad():
        target.lm_head.weight.normal_()[0] = 0  # the unknown token, which has no letter
        target.model.embed_tokens.weight.normal_()
    target.save_pretrained(root / "target")
    letters = {"<unk>": 0} | {letter: i + 1 for i, letter in enumerate("abcdefghijklmnopqrstuvw")}
    backend = Tokenizer(WordLevel(letters, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(root / "target")
    drafter_config = DRelayConfig.for_target(
        config,
        num_hidden_layers=1,
        layout="shifted",
        block_size=4,
        pool_size=8,
        selector_hidden_size=32,
        selector_num_layers=1,
        pair_rank=8,
        history_window=12,
        num_draft_tokens=1,
        target_name_or_path=str(root / "target"),
    )
    drelay = DRelayModel(drafter_config)
    with torch.no_grad():
        drelay.drafter.mask_embedding.normal_()
        for name, parameter in drelay.selector.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    drelay.save_pretrained(root / "drafter")
    return SimpleNamespace(target=root / "target", drafter=root / "drafter")
