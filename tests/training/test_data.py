"""Response files: reading, splitting, the shortlist."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_drelay.training.data import (
    ResponseExample,
    encode_prompt,
    frequent_tokens,
    load_responses,
    read_jsonl,
    read_prompts,
    split_by_prompt,
)


class FakeTokenizer:
    """One token for each character; a chat template, if there is one, puts 1 in front and 3 behind."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def __len__(self):
        return 50

    def __call__(self, text):
        return {"input_ids": [10 + ord(c) % 20 for c in text]}

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert add_generation_prompt and return_dict
        (message,) = messages
        assert message["role"] == "user"
        return {"input_ids": [1, *self(message["content"])["input_ids"], 3]}


def example(prompt, response=(5, 6), mode="greedy") -> ResponseExample:
    return ResponseExample(torch.tensor([1, *response]), 1, prompt, mode)


def write_jsonl(path: Path, rows) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.write(text)
    return path


class TestReadJsonl:
    def test_damaged_file_is_named(self, tmp_path):
        path = write_jsonl(tmp_path / "rows.jsonl.gz", [{"prompt": str(i)} for i in range(500)])
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(ValueError, match="rows.jsonl.gz is damaged"):
            list(read_jsonl(path))

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
    def test_rows_are_read_from_plain_and_compressed_files(self, tmp_path, name):
        rows = [{"prompt": "ä"}, {"prompt": "b"}]
        assert list(read_jsonl(write_jsonl(tmp_path / name, rows))) == rows

    def test_empty_lines_are_passed_over(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text('{"a": 1}\n\n  \n{"a": 2}\n')
        assert [row["a"] for row in read_jsonl(path)] == [1, 2]

    def test_broken_line_raises_and_names_file_and_line(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text('{"a": 1}\n\n{"a": \n')
        with pytest.raises(ValueError, match=r"rows.jsonl, line 3: not valid JSON .*Fix or remove"):
            list(read_jsonl(path))


class TestPrompts:
    def test_first_turn_or_prompt_is_read(self, tmp_path):
        path = write_jsonl(tmp_path / "p.jsonl", [{"turns": ["a", "b"]}, {"prompt": "c"}, {"prompt": "d"}])
        assert read_prompts(path) == ["a", "c", "d"]
        assert read_prompts(path, 2) == ["a", "c"]

    def test_prompt_passes_the_chat_template_when_there_is_one(self):
        assert encode_prompt(FakeTokenizer("template"), "ab") == [1, 27, 28, 3]

    def test_prompt_is_plain_text_without_a_chat_template(self):
        assert encode_prompt(FakeTokenizer(), "ab") == [27, 28]


class TestLoadResponses:
    def test_example_is_prompt_and_response(self, tmp_path):
        row = {"prompt": "ab", "response_ids": [4, 5, 6, 7], "mode": "sample"}
        (loaded,) = load_responses(write_jsonl(tmp_path / "r.jsonl", [row]), FakeTokenizer("template"))
        assert loaded.input_ids.tolist() == [1, 27, 28, 3, 4, 5, 6, 7]
        assert (loaded.prompt_length, loaded.prompt, loaded.mode) == (4, "ab", "sample")
        assert loaded.response_ids.tolist() == [4, 5, 6, 7]

    def test_mode_is_greedy_when_the_file_does_not_say(self, tmp_path):
        path = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "a", "response_ids": [4, 5, 6, 7]}])
        assert load_responses(path, FakeTokenizer())[0].mode == "greedy"

    def test_short_responses_are_left_out(self, tmp_path):
        rows = [{"prompt": "a", "response_ids": [4] * n} for n in (3, 4)]
        path = write_jsonl(tmp_path / "r.jsonl", rows)
        assert [len(e.response_ids) for e in load_responses(path, FakeTokenizer())] == [4]

    def test_long_sequences_are_cut_and_left_out_when_little_remains(self, tmp_path):
        rows = [{"prompt": "a" * n, "response_ids": [4] * 9} for n in (2, 6, 20)]
        path = write_jsonl(tmp_path / "r.jsonl", rows)
        loaded = load_responses(path, FakeTokenizer(), max_length=8)
        assert [(len(e.input_ids), len(e.response_ids)) for e in loaded] == [(8, 6)]

    def test_file_without_a_usable_response_raises(self, tmp_path):
        path = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "a", "response_ids": [4]}])
        with pytest.raises(ValueError, match="No response of at least 4 tokens in .*r.jsonl`; check .*`max_length`"):
            load_responses(path, FakeTokenizer())


class TestSplit:
    @settings(max_examples=25, deadline=None)
    @given(
        prompts=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=20),
        num_held_out=st.integers(0, 12),
        seed=st.integers(0, 5),
    )
    def test_parts_share_no_prompt_and_lose_no_example(self, prompts, num_held_out, seed):
        examples = [example(prompt) for prompt in prompts]
        train, held_out = split_by_prompt(examples, num_held_out, seed)
        assert not {e.prompt for e in train} & {e.prompt for e in held_out}
        assert {id(e) for e in train + held_out} == {id(e) for e in examples}
        assert len(train) + len(held_out) == len(examples)
        assert len(held_out) >= min(num_held_out, len(examples))

    def test_no_more_prompts_are_held_out_than_needed(self):
        examples = [example(prompt) for prompt in "aabbccdd"]
        assert len(split_by_prompt(examples, 3)[1]) == 4

    def test_split_depends_on_the_seed_and_not_on_the_order(self):
        examples = [example(str(i)) for i in range(30)]
        first = {e.prompt for e in split_by_prompt(examples, 10, seed=1)[1]}
        assert first == {e.prompt for e in split_by_prompt(examples[::-1], 10, seed=1)[1]}
        assert first != {e.prompt for e in split_by_prompt(examples, 10, seed=2)[1]}


class TestFrequentTokens:
    def test_most_used_tokens_are_chosen_and_sorted(self):
        examples = [example("a", [30, 7, 7, 7]), example("b", [9, 9, 7, 30, 4])]
        assert frequent_tokens(examples, 3).tolist() == [7, 9, 30]

    def test_tokens_of_prompts_do_not_count(self):
        prompt_heavy = ResponseExample(torch.tensor([8] * 9 + [5, 5, 6]), 9, "a", "greedy")
        assert frequent_tokens([prompt_heavy], 2).tolist() == [5, 6]

    def test_end_tokens_are_always_chosen(self):
        assert frequent_tokens([example("a", [7, 7, 8])], 2, always=[99]).tolist() == [7, 99]

    def test_lowest_unused_tokens_fill_it_up(self):
        assert frequent_tokens([example("a", [1, 7])], 5, always=[0]).tolist() == [0, 1, 2, 3, 7]

    @settings(max_examples=25, deadline=None)
    @given(
        tokens=st.lists(st.integers(0, 20), max_size=25),
        size=st.integers(3, 21),
        always=st.sets(st.integers(0, 20), max_size=3),
    )
    def test_size_is_met_with_distinct_tokens(self, tokens, size, always):
        chosen = frequent_tokens([example("a", tokens)], size, always).tolist()
        assert chosen == sorted(set(chosen))
        assert len(chosen) == size and always <= set(chosen)
