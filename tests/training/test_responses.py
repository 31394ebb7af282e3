"""The target's own responses: decoding in spans, shards that resume, synthesised prompts."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay.training import responses
from hf_drelay.training.data import load_responses, read_jsonl
from hf_drelay.training.responses import Decoding, generate_responses, synthesise_prompts, write_responses


class FakeTokenizer:
    """One token for each character, no chat template."""

    chat_template = None

    def __len__(self):
        return 40

    def __call__(self, text):
        return {"input_ids": [10 + ord(c) % 20 for c in text]}


@pytest.fixture
def target():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


PROMPTS = ["a", "longer prompt", "bcd", "another", "x"]


@torch.no_grad()
def greedy_alone(target, prompt, num_tokens=8) -> list[int]:
    """Greedy tokens of one prompt, one full forward for each."""
    prompt_ids = FakeTokenizer()(prompt)["input_ids"]
    ids = prompt_ids
    for _ in range(num_tokens):
        ids = ids + [target(torch.tensor([ids])).logits[0, -1].argmax().item()]
    return ids[len(prompt_ids) :]


def cut_behind_end(text, ends) -> list[int]:
    return text[: min([text.index(end) + 1 for end in ends if end in text], default=len(text))]


class TestGenerateResponses:
    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    def test_responses_equal_those_of_each_prompt_alone(self, target, batch_size):
        rows = generate_responses(
            target, FakeTokenizer(), PROMPTS, Decoding(8, batch_size=batch_size, span=3), quiet=True
        )
        expected = [{"mode": "greedy", "prompt": p, "response_ids": greedy_alone(target, p)} for p in PROMPTS]
        assert sorted(rows, key=str) == sorted(expected, key=str)

    @pytest.mark.parametrize("num_ends", [1, 2])
    def test_responses_end_behind_the_first_end_token(self, target, num_ends):
        """Rows of a batch end at different places, some at the length limit, and no padding is left behind."""
        texts = {prompt: greedy_alone(target, prompt) for prompt in PROMPTS}
        ends = [texts["a"][3], texts["bcd"][5]][:num_ends]
        target.generation_config.eos_token_id = ends if num_ends > 1 else ends[0]
        rows = generate_responses(target, FakeTokenizer(), PROMPTS, Decoding(8, span=2), quiet=True)
        found = {row["prompt"]: row["response_ids"] for row in rows}
        assert found == {prompt: cut_behind_end(text, ends) for prompt, text in texts.items()}
        assert len({len(ids) for ids in found.values()}) > 1

    def test_longest_prompts_come_first(self, target):
        rows = generate_responses(target, FakeTokenizer(), PROMPTS, Decoding(2, batch_size=2), quiet=True)
        lengths = [len(row["prompt"]) for row in rows]
        assert lengths == sorted(lengths, reverse=True)

    def test_sampled_responses_say_so(self, target):
        torch.manual_seed(0)
        rows = list(generate_responses(target, FakeTokenizer(), PROMPTS, Decoding(8, temperature=5.0), quiet=True))
        assert {row["mode"] for row in rows} == {"sample"}
        assert any(row["response_ids"] != greedy_alone(target, row["prompt"]) for row in rows)

    def test_target_without_a_padding_token_works(self, target):
        """Llama 3 and others name none; masked positions may hold any token."""
        expected = {prompt: greedy_alone(target, prompt, 4) for prompt in PROMPTS}
        target.generation_config.pad_token_id = None
        rows = generate_responses(target, FakeTokenizer(), PROMPTS, Decoding(4, batch_size=5), quiet=True)
        assert {row["prompt"]: row["response_ids"] for row in rows} == expected

    def test_rows_make_a_response_file(self, target, tmp_path):
        rows = list(generate_responses(target, FakeTokenizer(), PROMPTS, Decoding(6, span=2), quiet=True))
        path = tmp_path / "r.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        loaded = load_responses(path, FakeTokenizer())
        assert {e.prompt for e in loaded} == set(PROMPTS)

    def test_rows_that_ended_leave_the_batch(self, target, monkeypatch):
        texts = {prompt: greedy_alone(target, prompt) for prompt in PROMPTS}
        target.generation_config.eos_token_id = texts["a"][1]
        sizes = []
        generate = target.generate

        def counted(ids, **arguments):
            sizes.append(len(ids))
            return generate(ids, **arguments)

        monkeypatch.setattr(target, "generate", counted)
        rows = list(generate_responses(target, FakeTokenizer(), PROMPTS, Decoding(8, span=1), quiet=True))
        assert sizes[0] == len(PROMPTS) and sizes[-1] < len(PROMPTS)
        assert sizes == sorted(sizes, reverse=True)
        # A row takes part in as many spans of one token as its response has tokens.
        assert sum(sizes) == sum(len(row["response_ids"]) for row in rows)

    def test_attention_of_the_target_is_restored(self, target):
        own = target.config._attn_implementation
        list(generate_responses(target, FakeTokenizer(), PROMPTS, Decoding(4), quiet=True))
        assert target.config._attn_implementation == own

    @pytest.mark.parametrize("fields", [{"max_new_tokens": 0}, {"batch_size": 0}, {"span": 0}, {"temperature": -1.0}])
    def test_impossible_settings_raise(self, fields):
        with pytest.raises(ValueError, match=f"`{next(iter(fields))}` is"):
            Decoding(**fields)


class TestWriteResponses:
    ARGUMENTS = {"decoding": Decoding(6, temperature=1.0, batch_size=2, span=2), "shard_size": 2, "quiet": True}

    def read(self, folder) -> dict[str, list]:
        return {path.name: list(read_jsonl(path)) for path in sorted(folder.glob("*.jsonl.gz"))}

    def test_shards_hold_every_prompt_once(self, target, tmp_path):
        paths = write_responses(target, FakeTokenizer(), [*PROMPTS, "a"], tmp_path, **self.ARGUMENTS)
        rows = [row for path in paths for row in read_jsonl(path)]
        assert len(paths) == 3
        assert sorted(row["prompt"] for row in rows) == sorted(PROMPTS)

    def test_interrupted_run_ends_with_the_same_files(self, target, tmp_path, monkeypatch):
        write_responses(target, FakeTokenizer(), PROMPTS, tmp_path / "whole", **self.ARGUMENTS)
        calls = []
        decode = responses.decode_batch

        def interrupted(*arguments):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return decode(*arguments)

        monkeypatch.setattr(responses, "decode_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_responses(target, FakeTokenizer(), PROMPTS, tmp_path / "parts", **self.ARGUMENTS)
        assert len(self.read(tmp_path / "parts")) == 1
        write_responses(target, FakeTokenizer(), PROMPTS, tmp_path / "parts", **self.ARGUMENTS)
        assert len(calls) == 2 + 2  # the shard that was whole is not decoded again
        assert self.read(tmp_path / "parts") == self.read(tmp_path / "whole")

    def test_folder_of_another_plan_is_refused(self, target, tmp_path):
        write_responses(target, FakeTokenizer(), PROMPTS, tmp_path, **self.ARGUMENTS)
        with pytest.raises(ValueError, match="another `seed`"):
            write_responses(target, FakeTokenizer(), PROMPTS, tmp_path, seed=5, **self.ARGUMENTS)
        with pytest.raises(ValueError, match="another `decoding`"):
            write_responses(target, FakeTokenizer(), PROMPTS, tmp_path, **self.ARGUMENTS | {"decoding": Decoding(5)})


class TemplateTokenizer(FakeTokenizer):
    """Characters as tokens, and a template that frames the user's text with `<` and `>`."""

    chat_template = "{{ messages }}"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) % 40 for c in text]}

    def apply_chat_template(self, messages, tokenize):
        return f"<{messages[0]['content']}>"

    def decode(self, ids, skip_special_tokens):
        return " ".join(f"word{token}" for token in ids)


class TestSynthesisePrompts:
    @pytest.fixture
    def talker(self, target):
        target.generation_config.eos_token_id = list(range(8))
        return target

    def test_prompts_are_distinct_texts_written_after_the_opening_of_a_user_turn(self, talker, monkeypatch):
        seen = []
        decode = responses.decode_batch
        monkeypatch.setattr(responses, "decode_batch", lambda t, p, d: seen.append(p) or decode(t, p, d))
        prompts = synthesise_prompts(talker, TemplateTokenizer(), 12, batch_size=16, max_length=24, quiet=True)
        assert len(prompts) == len(set(prompts)) == 12
        assert all(len(prompt.split()) >= 3 for prompt in prompts)
        assert {tuple(ids) for batch in seen for ids in batch} == {(ord("<") % 40,)}

    def test_target_that_never_ends_a_turn_raises(self, target):
        target.generation_config.eos_token_id = 45  # outside the vocabulary
        with pytest.raises(ValueError, match="usable"):
            synthesise_prompts(target, TemplateTokenizer(), 5, batch_size=4, max_length=6, quiet=True)

    def test_tokenizer_without_a_template_raises(self, target):
        with pytest.raises(ValueError, match="chat template"):
            synthesise_prompts(target, FakeTokenizer(), 5)
