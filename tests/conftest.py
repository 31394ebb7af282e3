"""What every test needs: one torch thread (unless told otherwise), a Hub client that stays off the network; and a tiny
target on disk with responses it could have written, for those that run whole commands."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit


# Before the Hub client is imported, which reads this once. Tests marked `hub` are run with HF_HUB_OFFLINE=0.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402


if "OMP_NUM_THREADS" not in os.environ:
    # Tiny models gain nothing from threads and lose to their overhead.
    torch.set_num_threads(1)


VOCAB_SIZE = 32
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium. CI installs it, so there its absence is a failure."""
    if CHROMIUM is None:
        if "CI" in os.environ:
            pytest.fail("no Chromium; install it with apt-get install chromium")
        pytest.skip("needs a browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    """Folder of a Llama target of three layers and 32 words; every response ends with token 2."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = ["<pad>", "<bos>", "<eos>", "<user>", "<answer>", *(f"w{i}" for i in range(5, VOCAB_SIZE))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = (
        "{% for message in messages %}<user> {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<answer> {% endif %}"
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def responses_file(tmp_path_factory):
    """Twelve responses of different lengths, of random words."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(12):
        ids = torch.randint(5, VOCAB_SIZE, (8 + i % 5,), generator=generator).tolist()
        rows.append({"mode": "greedy", "prompt": f"w{5 + i} w6 w7", "response_ids": [*ids, 2]})
    path = tmp_path_factory.mktemp("responses") / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def written_file(target_folder, tmp_path_factory):
    """Twelve responses that the target itself wrote greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_drelay.training.responses import Decoding, write_responses

    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    prompts = [f"w{5 + i} w6 w7" for i in range(12)]
    folder = tmp_path_factory.mktemp("written")
    (path,) = write_responses(target, tokenizer, prompts, folder, Decoding(12), quiet=True)
    return path


@pytest.fixture
def recipe(target_folder, responses_file, tmp_path):
    """Arguments of a run of a second."""
    return {
        "output_dir": str(tmp_path / "run"),
        "target": str(target_folder),
        "target_dtype": "float32",
        "responses": [str(responses_file)],
        "num_held_out": 2,
        "num_replayed": 2,
        "drafter_config": {
            "num_hidden_layers": 1,
            "block_size": 3,
            "layout": "shifted",
            "pool_size": 4,
            "draft_vocab_size": 24,
            "selector_hidden_size": 8,
            "selector_num_heads": 2,
            "selector_num_layers": 1,
            "pair_rank": 2,
            "history_window": 4,
        },
        "num_anchors": 3,
        "num_selector_anchors": 2,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


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
    torch.manual_seed(2)  # again, so that what follows is the same whatever parts a new drafter has
    with torch.no_grad():
        drelay.drafter.mask_embedding.normal_()
        for name, parameter in drelay.selector.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    drelay.save_pretrained(root / "drafter")
    return SimpleNamespace(target=root / "target", drafter=root / "drafter")
