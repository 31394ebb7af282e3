"""The evaluation commands, run in this process on a tiny target and drafter saved to disk."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_drelay import cli
from hf_drelay.evaluation import lossless, summary


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Flags that name a saved target with its tokenizer, a saved drafter, and a folder of prompts."""
    path = Path(__file__).resolve().parents[1] / "modeling" / "conftest.py"
    name = "tests_modeling_builders"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    tiny = sys.modules[name]
    folder = tmp_path_factory.mktemp("saved")
    target = tiny.build_target("llama")
    target.save_pretrained(folder / "target")
    tiny.build_tokenizer(tiny.VOCAB_SIZE).save_pretrained(folder / "target")
    tiny.build_drafter(target).save_pretrained(folder / "drafter")
    turns = {"gsm8k": [["abc"], ["def"]], "mt_bench": [["first", "second"], [""]]}
    for task, rows in turns.items():
        text = "".join(json.dumps({"turns": row}) + "\n" for row in rows)
        (folder / f"{task}.jsonl").write_text(text)
    return folder, [
        *("--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--data-dir", str(folder)),
        *("--max-new-tokens", "6", "--tasks", "gsm8k,mt_bench"),
    ]


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def read(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


class TestBenchmarkAndReport:
    def test_rows_table_settings_and_report(self, saved, tmp_path):
        output = tmp_path / "rows.json"
        result = run("benchmark", *saved[1], "--output", output, "--option", "num_draft_tokens=2")
        assert result.exit_code == 0, result.output
        rows = read(output)
        ways = {row["way"] for row in rows}
        assert {"plain", "prompt lookup", "drafter", "drafter + DLoop -0.5"} <= ways
        assert len(rows) == 5 * len(ways)
        assert all(row["num_draft_tokens"] == 2 for row in rows if row["kind"] == "drafter")
        assert "| drafter + DLoop -0.5 |" in result.stdout
        resolved = json.loads((tmp_path / "rows.json.config.json").read_text())
        assert resolved["settings"]["max_new_tokens"] == 6 and set(resolved["ways"]) == ways

        result = run("benchmark", *saved[1], "--output", output, "--option", "num_draft_tokens=2")
        assert result.exit_code == 2 and "has rows already. Add `--resume`" in result.stderr
        result = run("benchmark", *saved[1], "--output", output, "--option", "num_draft_tokens=2", "--resume")
        assert result.exit_code == 0 and read(output) == rows

        result = run("report", output, "--output", tmp_path / "r.html", "--markdown", tmp_path / "r.md")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
        assert (tmp_path / "r_figures" / "speedup.png").is_file() and "| way |" in (tmp_path / "r.md").read_text()

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--tasks", "gsm9k"), "has no gsm9k.jsonl"),
            (("--tasks", ","), "names nothing"),
            (("--option", "num_draft_tokens"), "give NAME=VALUE"),
            (("--option", "loop_gate=-1"), "the gate is what the ways differ in"),
            (("--option", "blocks=2"), "'blocks' is no option; expected one of compile_drafter, confidence_threshold"),
            (("--option", "gate=-1"), "'gate' is no option"),
            (("--option", "proposal=[a"), "whose value is no YAML"),
            (("--option", "confidence_threshold=null"), "`confidence_threshold` is None"),
            (("--max-stages", "3", "--option", "max_stages=2"), "give that as `--max-stages` instead"),
            (("--option", "max-stages=2"), "give that as `--max-stages` instead"),
            (("--option", "num-draft-tokens=2", "--option", "num_draft_tokens=1"), "'num_draft_tokens' twice"),
            (("--loop-gate", "off"), "`--loop-gate` is 'off'"),
            (("--template-mode", "loud"), "use thinking or non_thinking"),
            (("--top-p", "0.5"), "no effect at `temperature` 0"),
        ],
    )
    def test_bad_flags_end_in_one_sentence(self, saved, tmp_path, flags, message):
        result = run("benchmark", *saved[1], "--output", tmp_path / "rows.json", *flags)
        assert result.exit_code == 2 and message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1 and not (tmp_path / "rows.json").exists()

    def test_target_without_a_drafter_is_refused(self, tmp_path, saved):
        flags = ["--target", "some/target", "--data-dir", saved[0], "--tasks", "gsm8k"]
        result = run("benchmark", *flags, "--output", tmp_path / "rows.json")
        assert result.exit_code == 2 and "`--drafter` is missing" in result.stderr

    def test_report_of_a_missing_file_is_one_sentence(self, tmp_path):
        result = run("report", tmp_path / "rows.json")
        assert result.exit_code == 2 and "is no file" in result.stderr


class TestSweep:
    def test_points_are_measured_and_the_best_is_written(self, saved, tmp_path):
        grid = ["--loop-gates", "off,-0.5", "--max-stages", "2", "--num-draft-tokens", "1,all"]
        result = run("sweep", *saved[1], *grid, "--num-prompts", 1, "--output", tmp_path / "rows.json", "--write-best")
        assert result.exit_code == 0, result.output
        assert len({row["way"] for row in read(tmp_path / "rows.json")}) == 5
        assert "Fastest: block 5, drafts" in result.stdout and "Written into the configuration" in result.stdout
        best = next(line for line in result.stdout.splitlines() if line.startswith("Fastest"))
        config = json.loads((saved[0] / "drafter" / "config.json").read_text())
        assert (config["num_draft_tokens"] == 1) == ("drafts 1," in best)
        assert (config["loop_gate"] is None) == ("DLoop off" in best)

    def test_block_size_of_weights_that_depend_on_it_is_refused(self, saved, tmp_path):
        result = run("sweep", *saved[1], "--block-sizes", "3", "--output", tmp_path / "rows.json")
        assert result.exit_code == 2 and "belong to `block_size` 5" in result.stderr

    def test_option_that_the_grid_sets_is_refused(self, saved, tmp_path):
        result = run("sweep", *saved[1], "--option", "num_draft_tokens=1", "--output", tmp_path / "rows.json")
        assert result.exit_code == 2 and "give that as `--num-draft-tokens` instead" in result.stderr


class TestHeadroomAndLossless:
    @pytest.mark.parametrize("name", ["benchmark", "sweep", "headroom", "check-lossless"])
    def test_help_speaks_of_resuming_where_there_is_such_a_flag(self, name):
        """The flag itself, and the output that it goes on with."""
        text = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
        assert text.count("--resume") == (0 if name == "headroom" else 2)

    def test_headroom_is_written_with_its_circumstances(self, saved, tmp_path):
        result = run("headroom", *saved[1], "--num-prompts", 2, "--output", tmp_path / "headroom.json")
        assert result.exit_code == 0, result.output
        record = json.loads((tmp_path / "headroom.json").read_text())
        assert record["headroom"]["num_errors"] <= record["headroom"]["num_blocks"] and record["num_prompts"] == 4
        assert record["target_weights_sha256"] and "oracle gain" in result.stdout

    def test_prompts_that_lost_their_beginning_are_counted(self, saved, tmp_path):
        """The target has room for 512 tokens; the last prompt does not fit."""
        (tmp_path / "own.jsonl").write_text('{"turns": ["abc"]}\n' + json.dumps({"turns": ["abc " * 600]}) + "\n")
        flags = [*saved[1], "--data-dir", tmp_path, "--tasks", "own", "--max-cases", 0]
        result = run("headroom", *flags, "--output", tmp_path / "headroom.json")
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / "headroom.json").read_text())["num_prompts_cut"] == 1
        words = "1 prompt lost its beginning"
        assert f"2 prompts; {words}" in result.stdout
        for name, circumstances in (("check-lossless", lossless.circumstances), ("benchmark", summary.circumstances)):
            result = run(name, *flags[:-2], "--output", tmp_path / f"{name}.jsonl")
            assert result.exit_code == 0, result.output
            rows = read(tmp_path / f"{name}.jsonl")
            assert [row["prompt"] for row in rows if row["prompt_tokens_cut"]].count(1) * 2 == len(rows)
            assert f"2 of own{'.jsonl' if name == 'benchmark' else ''}; {words}" in "".join(circumstances(rows))

    def test_lossless_in_two_types(self, saved, tmp_path):
        types = ["--dtype", "float32", "--dtype", "bfloat16"]
        flags = [*saved[1], "--num-prompts", 1, "--output", tmp_path / "rows.json"]
        result = run("check-lossless", *flags, *types)
        assert result.exit_code in (0, 1), result.output
        rows = read(tmp_path / "rows.json")
        assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
        unexplained = [row for row in rows if row["divergence"] and not row["divergence"]["is_explained"]]
        assert result.exit_code == bool(unexplained)
        assert not [row for row in rows if row["dtype"] == "float32" and row["divergence"]]
        assert "float32, drafter: 2 prompts" in result.stdout
