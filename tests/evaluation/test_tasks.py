"""Prompt forms, prompt files, and conversations as token ids."""

import json

import pytest

from hf_drelay.evaluation.tasks import TASKS, Conversation, encode_conversation, load_task, max_prompt_length


ROWS = {
    "gsm8k": {"question": "1+1?"},
    "math500": {"problem": "1+1?"},
    "aime25": {"problem": "1+1?"},
    "humaneval": {"prompt": "def f():\n"},
    "mbpp": {"prompt": "Write f."},
    "livecodebench": {"question_content": "Sort.", "starter_code": ""},
    "mt_bench": {"prompt": ["First.", "Second."]},
    "alpaca": {"instruction": "Say it.", "input": ""},
}


def write_task(folder, name, rows) -> None:
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


class TestForms:
    def test_there_are_the_eight_tasks_of_the_papers(self):
        assert set(TASKS) == set(ROWS)

    @pytest.mark.parametrize("name", ["gsm8k", "math500", "aime25"])
    def test_math_asks_for_a_boxed_answer(self, name):
        boxed = "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."
        assert TASKS[name].turns(ROWS[name]) == [boxed]

    def test_form_with_braces_in_the_question_is_left_alone(self):
        assert TASKS["math500"].turns({"problem": "{x}"})[0].startswith("{x}\n")

    def test_humaneval_puts_the_function_into_a_code_block(self):
        (turn,) = TASKS["humaneval"].turns(ROWS["humaneval"])
        assert turn.endswith("passes the tests:\n```python\ndef f():\n\n```")

    def test_mbpp_is_the_bare_prompt(self):
        assert TASKS["mbpp"].turns(ROWS["mbpp"]) == ["Write f."]

    def test_mt_bench_has_both_turns(self):
        assert TASKS["mt_bench"].turns(ROWS["mt_bench"]) == ["First.", "Second."]

    def test_alpaca_appends_an_input_only_where_there_is_one(self):
        assert TASKS["alpaca"].turns(ROWS["alpaca"]) == ["Say it."]
        assert TASKS["alpaca"].turns({"instruction": "Say it.", "input": "x"}) == ["Say it.\n\nInput:\nx"]

    def test_livecodebench_shows_the_starter_code_or_a_place_for_code(self):
        (free,) = TASKS["livecodebench"].turns(ROWS["livecodebench"])
        assert "### Question:\nSort.\n\n### Format: Write your code" in free and "# YOUR CODE HERE" in free
        (given,) = TASKS["livecodebench"].turns({"question_content": "Sort.", "starter_code": "class A:"})
        assert "```python\nclass A:\n```" in given and "YOUR CODE" not in given


class TestFiles:
    def test_rows_keep_their_text_and_their_place(self, tmp_path):
        write_task(tmp_path, "mt_bench", [{"turns": ["a", "b"]}, {"turns": [""]}, {"turns": ["你好"]}])
        assert load_task("mt_bench", data_dir=tmp_path) == [
            Conversation("mt_bench", 0, ("a", "b")),
            Conversation("mt_bench", 1, ("",)),
            Conversation("mt_bench", 2, ("你好",)),
        ]

    def test_more_prompts_only_add_to_fewer(self, tmp_path):
        write_task(tmp_path, "gsm8k", [{"turns": [str(i)]} for i in range(20)])
        few, many = (load_task("gsm8k", n, tmp_path, seed=3) for n in (4, 9))
        assert len(few) == 4 and many[:4] == few and len({c.index for c in many}) == 9
        assert load_task("gsm8k", 4, tmp_path, seed=4) != few
        assert len(load_task("gsm8k", 99, tmp_path)) == 20

    @pytest.mark.parametrize(
        "row", ['{"turns": []}', '{"turns": "text"}', '{"prompt": "x"}', "[1]", '{"turns": [1]}', "{broken"]
    )
    def test_row_of_another_form_is_named(self, tmp_path, row):
        write_task(tmp_path, "gsm8k", [{"turns": ["fine"]}, row])
        with pytest.raises(ValueError, match=r"(row|line) 2"):
            load_task("gsm8k", data_dir=tmp_path)

    def test_file_of_another_editor_reads_the_same(self, tmp_path):
        """Byte-order mark, CRLF, blank lines, no newline at the end, and characters that Python may take for one."""
        turns = ["Γειά\u2028σου", "line\nbreak\x0b\x0c\x1c\x85"]
        line = json.dumps({"turns": turns, "id": 7}, ensure_ascii=False)
        text = f"\ufeff{line}\r\n\r\n  \t\r\n{line}"
        (tmp_path / "gsm8k.jsonl").write_bytes(text.encode())
        assert load_task("gsm8k", data_dir=tmp_path) == [Conversation("gsm8k", i, tuple(turns)) for i in range(2)]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"turns": null}', r"line 4: expected \{\"turns\""),
            (b'{"turns": ["a", null]}', "line 4: expected"),
            (b'{"turns": [["a"]]}', "line 4: expected"),
            (b'{"turns": {"a": 1}}', "line 4: expected"),
            (b"null", "line 4: expected"),
            (b'"turns"', "line 4: expected"),
            (b'{"turns": ["a"]', "line 4: not valid JSON"),
            (b'{"turns": ["\\ud800"]}', "line 4: `turns` hold half of a surrogate pair"),
            (b'{"turns": ["\xff\xfe"]}', "is not UTF-8"),
            (b"[" * 100_000, "line 4: not valid JSON"),
        ],
    )
    def test_wrong_line_is_named_as_an_editor_counts(self, tmp_path, line, message):
        (tmp_path / "gsm8k.jsonl").write_bytes(b'{"turns": ["fine"]}\n\n\n' + line + b"\n")
        with pytest.raises(ValueError, match=f"gsm8k.jsonl.*{message}"):
            load_task("gsm8k", data_dir=tmp_path)

    def test_file_without_a_prompt_is_named(self, tmp_path):
        (tmp_path / "gsm8k.jsonl").write_bytes(b"\n\n")
        with pytest.raises(ValueError, match="'gsm8k' has no prompts"):
            load_task("gsm8k", data_dir=tmp_path)

    def test_name_of_the_summary_is_no_task(self, tmp_path):
        write_task(tmp_path, "all", [{"turns": ["a"]}])
        with pytest.raises(ValueError, match="`tasks` has 'all', the name of the summary"):
            load_task("all", data_dir=tmp_path)

    def test_missing_file_names_the_folder_and_the_form(self, tmp_path):
        with pytest.raises(OSError, match=r"has no gsm8k.jsonl .*one \{\"turns\": \[...\]\} per line"):
            load_task("gsm8k", data_dir=tmp_path)

    def test_unknown_task_names_the_known_ones(self):
        with pytest.raises(ValueError, match="'gsm9k', which is none of .*'gsm8k'"):
            load_task("gsm9k")


class FakeTemplate:
    """Writes down the messages; a token for each of them, and one for the invitation to answer."""

    chat_template = "template"

    def apply_chat_template(self, messages, add_generation_prompt, return_dict, **kwargs):
        self.messages, self.kwargs = messages, kwargs
        return {"input_ids": [7] * len(messages) + [9]}


class TestEncoding:
    def test_second_turn_holds_the_first_answer(self):
        tokenizer = FakeTemplate()
        prompt = encode_conversation(tokenizer, ["q1", "q2"], ["a1"])
        assert [(m["role"], m["content"]) for m in tokenizer.messages] == [
            ("user", "q1"),
            ("assistant", "a1"),
            ("user", "q2"),
        ]
        assert prompt.input_ids.tolist() == [[7, 7, 7, 9]] and prompt.inputs["attention_mask"].tolist() == [[1] * 4]

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [(None, {}), ("thinking", {"enable_thinking": True}), ("non_thinking", {"enable_thinking": False})],
    )
    def test_mode_reaches_the_template(self, mode, expected):
        tokenizer = FakeTemplate()
        encode_conversation(tokenizer, ["q"], template_mode=mode)
        assert tokenizer.kwargs == expected

    def test_long_prompt_keeps_its_end(self, tiny):
        tokenizer = tiny.build_tokenizer(96)
        whole = encode_conversation(tokenizer, ["abcdefgh"]).input_ids[0].tolist()
        cut = encode_conversation(tokenizer, ["abcdefgh"], max_length=3)
        assert cut.input_ids[0].tolist() == whole[-3:] and cut.num_cut == 5

    def test_empty_prompt_without_a_template_has_one_token(self, tiny):
        assert encode_conversation(tiny.build_tokenizer(96), [""]).input_ids.shape == (1, 1)

    def test_answer_that_fills_the_context_is_refused(self, tiny):
        assert max_prompt_length(tiny.build_target("llama"), 12) == 500
        with pytest.raises(ValueError, match="`max_new_tokens` 512 fills the target's context of 512"):
            max_prompt_length(tiny.build_target("llama"), 512)
