"""The commands of training on a tiny target: files in, files out, and sentences for bad input."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from hf_drelay.cli import app
from hf_drelay.training.data import read_jsonl


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def recipe_file(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


class TestPrepareData:
    def arguments(self, target_folder, tmp_path, *more):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"turns": [f"w{i} w6"]}) + "\n" for i in range(5, 10)))
        output = tmp_path / "responses"
        common = ["--target", target_folder, "--output", output, "--max-new-tokens", 6, "--dtype", "float32"]
        return ["prepare-data", "--prompts", prompts, *common, *more], output

    def test_prompts_are_answered(self, target_folder, tmp_path):
        arguments, output = self.arguments(target_folder, tmp_path, "--shard-size", 2)
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        files = sorted(output.glob("*.jsonl.gz"))
        assert len(files) == 3
        assert {row["prompt"] for file in files for row in read_jsonl(file)} == {f"w{i} w6" for i in range(5, 10)}

    def test_text_files_serve_as_prompts_and_can_be_cut(self, target_folder, tmp_path):
        path = tmp_path / "prompts.txt"
        path.write_text("w5 w6\n\nw7\nw8\n")
        output = tmp_path / "responses"
        result = run(
            "prepare-data", "--prompts", path, "--num-prompts", 2, "--target", target_folder, "--output", output
        )
        assert result.exit_code == 0, result.output
        assert {row["prompt"] for row in read_jsonl(next(output.glob("*.gz")))} == {"w5 w6", "w7"}

    def test_other_decoding_in_the_same_folder_is_refused(self, target_folder, tmp_path):
        arguments, _ = self.arguments(target_folder, tmp_path)
        assert run(*arguments).exit_code == 0
        result = run(*arguments, "--temperature", 0.7)
        assert result.exit_code == 2 and "another `decoding`" in result.stderr

    @pytest.mark.parametrize(
        ("content", "message"),
        [("", "holds no prompt"), ('{"text": 1}\n', "needs `turns` or `prompt`"), ("{\n", "not valid JSON")],
    )
    def test_bad_prompt_files_are_named(self, target_folder, tmp_path, content, message):
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        result = run("prepare-data", "--prompts", path, "--target", target_folder, "--output", tmp_path / "r")
        assert result.exit_code == 2
        assert "bad.jsonl" in result.stderr and message in result.stderr

    def test_nothing_to_answer_is_an_error(self, tmp_path):
        result = run("prepare-data", "--output", tmp_path)
        assert result.exit_code == 2 and "`--self-synthesise`" in result.stderr


class TestTrain:
    def test_flags_win_over_the_file(self, recipe_file, tmp_path):
        result = run("train", "--config", recipe_file, "--max_steps", 2, "--output_dir", tmp_path / "other")
        assert result.exit_code == 0, result.output
        log = json.loads((tmp_path / "other" / "training_log.json").read_text())
        assert log["recipe"]["max_steps"] == 2 and log["recipe"]["num_anchors"] == 3

    def test_fields_of_the_drafter_can_be_given_as_json(self, recipe_file, tmp_path):
        fields = '{"num_hidden_layers": 1, "block_size": 2, "layout": "shifted", "pool_size": 3}'
        result = run("train", "--config", recipe_file, "--drafter_config", fields, "--dry-run")
        assert result.exit_code == 0, result.output
        assert "drafter parameters" in result.output

    def test_dry_run_writes_nothing(self, recipe_file, recipe, tmp_path):
        before = set(tmp_path.iterdir())
        result = run("train", "--config", recipe_file, "--dry-run")
        assert result.exit_code == 0, result.output
        assert "steps: 6" in result.output and set(tmp_path.iterdir()) == before

    def test_unknown_flag_is_named_with_the_closest_one(self, recipe_file):
        result = run("train", "--config", recipe_file, "--max_stepss", 3)
        assert result.exit_code == 2 and "did you mean `--max_steps`" in result.stderr

    def test_missing_file_is_named(self, tmp_path):
        result = run("train", "--config", tmp_path / "none.yaml")
        assert result.exit_code == 2 and "none.yaml" in result.stderr

    def test_responses_of_another_target_are_named(self, recipe_file, tmp_path):
        path = tmp_path / "foreign.jsonl"
        path.write_text(json.dumps({"prompt": "w5", "response_ids": [5, 6, 7, 400]}) + "\n")
        result = run("train", "--config", recipe_file, "--responses", path)
        assert result.exit_code == 2
        assert "token 400" in result.stderr and "another target" in result.stderr


class TestCheck:
    def test_sound_run_passes(self, recipe_file, written_file):
        result = run("check", "--config", recipe_file, "--responses", written_file)
        assert result.exit_code == 0, result.output
        assert result.output.count("fine ") == 6

    def test_finding_makes_the_exit_code_1(self, recipe, tmp_path):
        recipe["drafter_config"]["draft_vocab_size"] = 8
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        result = run("check", "--config", path)
        assert result.exit_code == 1 and "WRONG  vocabulary" in result.output
