"""The commands, run in this process with stand-ins for the target and the drafter."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import BatchEncoding
from typer.testing import CliRunner

import hf_drelay
from hf_drelay import cli, targets
from hf_drelay.cli import environment


ANSWER = [5, 6, 7, 2]


class FakeTokenizer:
    """Knows one word per token; counts how often the chat template was used."""

    def __init__(self):
        self.chat_template = "{{ messages }}"
        self.template_calls = []

    def __call__(self, text, return_tensors):
        ids = torch.tensor([[3] * len(text.split())])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def apply_chat_template(self, messages, **kwargs):
        self.template_calls.append((messages, kwargs))
        return self(messages[0]["content"], "pt")

    def decode(self, ids, **kwargs):
        return " ".join(f"word{int(token)}" for token in ids if token != 2)


class FakeTarget:
    """Always gives `ANSWER`, and keeps the arguments of each call."""

    device = torch.device("cpu")
    dtype = torch.float32
    name_or_path = "fake-target"

    def __init__(self):
        self.calls = []

    def generate(self, input_ids, attention_mask, **kwargs):
        self.calls.append(kwargs)
        streamer = kwargs.get("streamer")
        output_ids = torch.cat([input_ids, torch.tensor([ANSWER])], dim=1)
        if streamer is not None:
            streamer.put(input_ids)
            streamer.put(output_ids[0, input_ids.shape[1] :])
            streamer.end()
        return output_ids


class FakeDrafter:
    """Refuses what the real one refuses, and keeps the options it was asked for."""

    name_or_path = "cards/fake-drafter"
    config = SimpleNamespace(chat_template_mode="non_thinking")
    statistics = SimpleNamespace(acceptance_length=2.5, mean_stages=1.25, num_repaired_right=3, num_repaired_harmful=1)

    def with_options(self, **options):
        if options.get("max_stages") == 0:
            raise ValueError("`max_stages` is 0; it must be at least 1.\nUse 1 to draft a single stage.")
        self.options = options
        return self

    def to(self, device):
        return self


@pytest.fixture
def fakes(monkeypatch):
    """Stand-ins for everything that is loaded: `target`, `tokenizer`, `drafter`, and the names they were asked by."""
    parts = SimpleNamespace(target=FakeTarget(), tokenizer=FakeTokenizer(), drafter=FakeDrafter(), asked=[])

    def load_demo_target(**kwargs):
        parts.asked.append(kwargs)
        return parts.target, parts.tokenizer

    def from_pretrained(name_or_path):
        parts.asked.append(name_or_path)
        return parts.drafter

    monkeypatch.setattr(targets, "load_demo_target", load_demo_target)
    monkeypatch.setattr(targets, "resolve_drafter", lambda name: name or "bundled")
    monkeypatch.setattr(hf_drelay, "DRelayModel", SimpleNamespace(from_pretrained=from_pretrained), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: parts.asked.append(("threads", number)))
    return parts


def _run(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


class TestGenerate:
    def test_streams_the_answer_and_prints_the_table(self, fakes):
        result = _run("generate", "two words")
        assert result.exit_code == 0, result.output
        assert "word5 word6 word7" in result.stdout
        for part in ("tokens/s", "speedup", "2.50", "1.25", "3 / 1", "without"):
            assert part in result.stdout
        assert re.search(r"same tokens as without\s+yes", result.stdout)

    def test_resolved_settings_are_told_apart_from_the_text(self, fakes):
        result = _run("generate", "two words")
        settings = " ".join(result.stderr.split())
        assert "target fake-target, drafter fake-drafter, max_new_tokens 128, do_sample False" in settings

    def test_greedy_by_default_and_the_plain_run_has_no_assistant(self, fakes):
        _run("generate", "two words")
        warm_up, drafted, plain = fakes.target.calls
        assert warm_up["max_new_tokens"] == 2
        assert drafted["assistant_model"] is fakes.drafter and drafted["max_new_tokens"] == 128
        assert plain == {"max_new_tokens": 128, "do_sample": False}

    def test_no_compare_skips_the_plain_run(self, fakes):
        result = _run("generate", "two words", "--no-compare")
        assert len(fakes.target.calls) == 2
        assert "speedup" not in result.stdout and "2.50" in result.stdout

    def test_quiet_prints_the_text_only(self, fakes):
        result = _run("generate", "two words", "--quiet")
        assert result.stdout.strip() == "word5 word6 word7" and result.stderr == ""

    def test_options_reach_their_places(self, fakes):
        result = _run(
            *["generate", "two words", "--drafter", "owner/drafter", "--temperature", "0.7", "--top-p", "0.9"],
            *["--top-k", "20", "--min-p", "0.1", "--max-new-tokens", "9", "--loop-gate", "-0.5", "--max-stages", "2"],
            *["--proposal", "greedy", "--num-draft-tokens", "3", "--dtype", "bfloat16", "--threads", "2"],
        )
        assert result.exit_code == 0, result.output
        assert fakes.drafter.options == {
            "loop_gate": -0.5,
            "max_stages": 2,
            "proposal": "greedy",
            "num_draft_tokens": 3,
        }
        plain = fakes.target.calls[-1]
        assert plain == {
            "max_new_tokens": 9,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.1,
        }
        assert fakes.asked[0] == ("threads", 2)
        assert fakes.asked[1] == "owner/drafter"
        assert fakes.asked[2]["dtype"] == torch.bfloat16
        assert "same tokens" not in result.stdout  # two samples may differ

    def test_nothing_given_leaves_the_drafter_its_defaults(self, fakes):
        _run("generate", "two words")
        assert fakes.drafter.options == {}

    def test_loop_gate_auto(self, fakes):
        _run("generate", "two words", "--loop-gate", "auto")
        assert fakes.drafter.options == {"loop_gate": "auto"}

    def test_loop_gate_off(self, fakes):
        _run("generate", "two words", "--loop-gate", "off")
        assert fakes.drafter.options == {"loop_gate": None}

    def test_chat_template_in_the_mode_of_the_drafter(self, fakes):
        _run("generate", "two words")
        messages, kwargs = fakes.tokenizer.template_calls[0]
        assert messages == [{"role": "user", "content": "two words"}]
        assert kwargs["add_generation_prompt"] and kwargs["enable_thinking"] is False

    def test_raw_and_a_tokenizer_without_template_skip_it(self, fakes):
        _run("generate", "two words", "--raw")
        fakes.tokenizer.chat_template = None
        _run("generate", "two words")
        assert fakes.tokenizer.template_calls == []

    def test_seed_is_set_before_each_run(self, fakes, monkeypatch):
        seeds = []
        monkeypatch.setattr("hf_drelay.evaluation.timing.set_seed", seeds.append)
        _run("generate", "two words", "--seed", "7")
        assert seeds == [7, 7, 7]


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--loop-gate", "wide"], "Error: `--loop-gate` is 'wide'; give a number of at most 0"),
            (["--max-stages", "0"], "Error: `max_stages` is 0; it must be at least 1. Use 1 to draft a single stage."),
            (["--top-p", "0.9"], "Error: `--top-p` 0.9 has no effect at `--temperature` 0"),
            (["--target", "owner/model"], "Error: `--drafter` is missing"),
        ],
        ids=["gate", "library error", "filter without sampling", "target without drafter"],
    )
    def test_one_sentence_and_exit_code_2(self, fakes, arguments, message):
        result = _run("generate", "two words", *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith(message) and result.stderr.count("\n") == 1
        assert fakes.target.calls == []

    def test_empty_prompt(self, fakes):
        result = _run("generate", "", "--raw")
        assert result.exit_code == 2 and "`prompt` has no tokens" in result.stderr

    @pytest.mark.parametrize("arguments", [["--max-new-tokens", "0"], ["--proposal", "beam"], ["--dtype", "int8"]])
    def test_values_out_of_range_are_refused_by_the_parser(self, fakes, arguments):
        result = _run("generate", "two words", *arguments)
        assert result.exit_code == 2 and arguments[0] in result.stderr

    def test_missing_target_is_one_sentence(self, fakes, monkeypatch):
        def fail(**kwargs):
            raise OSError("The demo target could not be had.")

        monkeypatch.setattr(targets, "load_demo_target", fail)
        result = _run("generate", "two words")
        assert result.exit_code == 2 and result.stderr.endswith("Error: The demo target could not be had.\n")

    def test_a_bug_keeps_its_trace(self, fakes, monkeypatch):
        monkeypatch.setattr(FakeTarget, "generate", lambda self, **kwargs: 1 / 0)
        result = _run("generate", "two words")
        assert isinstance(result.exception, ZeroDivisionError)


class TestEnv:
    def test_prints_every_version(self):
        result = _run("env")
        assert result.exit_code == 0
        for name in ("hf_drelay", "python", "torch", "transformers", "device", "cpu", "gpu", "torch threads"):
            assert re.search(rf"^{name}: .+", result.stdout, re.MULTILINE)

    def test_missing_library_is_said(self):
        assert environment._version("no-such-distribution") == "not installed"


def test_help_is_shown_without_a_command():
    result = _run()
    assert "generate" in result.output and "env" in result.output
