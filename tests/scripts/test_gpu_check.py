"""The GPU check at tiny shapes on the CPU: what it records, and what it does when something is broken or missing."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).resolve().parents[2]
LOSSLESS = "losslessness_float32"


@pytest.fixture(scope="module")
def gpu_check():
    """The script as a module; its neighbour is imported beside it."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in ("gpu_check", "round_cost"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(gpu_check):
    """Circumstances of a tiny run with time left."""
    return gpu_check.Run(torch.device("cpu"), is_tiny=True, seed=0, deadline_s=float("inf"))


@pytest.fixture(scope="module")
def tiny_record(gpu_check, tmp_path_factory):
    """Exit code and record of one complete tiny run."""
    folder = tmp_path_factory.mktemp("results")
    code = gpu_check.main(["--tiny", "--output", str(folder)])
    assert [path.name for path in folder.iterdir()] == ["gpu_check.json"]
    return code, json.loads((folder / "gpu_check.json").read_text())


def run_main(gpu_check, folder, *arguments):
    """Exit code and sections of a run of the current `SECTIONS`."""
    code = gpu_check.main(["--tiny", "--output", str(folder), *arguments])
    return code, json.loads((folder / "gpu_check.json").read_text())["sections"]


def test_tiny_run_passes_every_section(gpu_check, tiny_record):
    code, record = tiny_record
    assert code == 0
    assert {name: section["status"] for name, section in record["sections"].items()} == dict.fromkeys(
        gpu_check.SECTIONS, "ok"
    )
    assert all(section["seconds"] > 0 for section in record["sections"].values())


def test_record_names_its_circumstances(tiny_record):
    _, record = tiny_record
    assert {"device", "device_type", "torch", "transformers", "python"} <= set(record["environment"])
    assert (record["seed"], record["is_tiny"]) == (0, True)
    assert record["command"] == "bash scripts/gpu_check.sh --tiny"
    assert {section["result"]["dtype"] for name, section in record["sections"].items() if "cost" in name} == {
        "bfloat16"
    }


def test_losslessness_covers_targets_layouts_and_loop_gates(tiny_record):
    cases = tiny_record[1]["sections"][LOSSLESS]["result"]["cases"]
    assert len({(case["target"], case["layout"], case["loop_gate"]) for case in cases}) == 8
    assert all(case["divergence"] is None and case["num_tokens"] == 16 for case in cases)
    assert sum(case["num_accepted"] for case in cases) > 50
    assert sum(case["num_repaired_right"] for case in cases) > 1
    assert sum(case["num_crossings"] for case in cases) > 1
    assert sum(case["num_late_rejections"] for case in cases) > 1


def test_losslessness_in_bfloat16_records_the_gap_that_rounding_explains(tiny_record):
    cases = tiny_record[1]["sections"]["losslessness_bfloat16"]["result"]["cases"]
    assert all(1e-3 < case["explained_gap"] < 0.2 for case in cases)


def test_every_backend_is_compared_or_missing_with_a_reason(gpu_check, tiny_record):
    result = tiny_record[1]["sections"]["attention_backends"]["result"]
    compared = {row["backend"] for row in result["rows"]}
    assert compared | set(result["missing"]) == set(gpu_check.BACKENDS)
    assert all(result["missing"].values())
    rows = [row for row in result["rows"] if row["backend"] == "sdpa"]
    assert len(rows) == 2 * len(gpu_check.LAYOUTS) * len(gpu_check.LAYER_KINDS)
    assert all(row["is_close"] and row["max_abs_diff"] <= row["tolerance"] for row in rows)


def test_layer_kinds_differ(gpu_check, run):
    """Otherwise the comparison of one kind would say nothing about the others."""
    float32 = torch.float32
    states = [gpu_check.slot_states("eager", float32, float32, "fill_in", kind, run) for kind in gpu_check.LAYER_KINDS]
    distances = [(a - b).abs().max() for i, a in enumerate(states) for b in states[:i]]
    assert min(distances) > 0.1


@pytest.mark.parametrize("name", ["cost_qwen3-4b", "cost_qwen3-8b"])
def test_cost_has_every_phase_and_its_share(tiny_record, name):
    result = tiny_record[1]["sections"][name]["result"]
    drafting = {"extend", "backbone", "head", "global_read", "score_pass", "walk_fixed_point", "walk_sequential"}
    assert set(result["phases"]) == drafting | {"target_1"} | {f"verify_{n}" for n in (2, 4, 8, 16, 32)}
    assert all(phase["median_ms"] > 0 for phase in result["phases"].values())
    assert result["fixed_point_passes"] >= 1
    share = result["shares"]["median_ms"]
    assert share["target_1"] == 1
    assert share["draft_and_select"] == pytest.approx(share["draft"] + share["select"])
    assert result["walltime"]["round_ms"] > 0
    assert set(result["walltime"]["profiled_round_ms"]) == {"draft", "select", "verify"}
    overhead = result["overhead"]["median_ms"]
    assert overhead["round_overhead_ms"] == pytest.approx(result["walltime"]["round_ms"] - overhead["phases_ms"])
    assert 0 < result["weight_traffic"]["select_share"] < result["weight_traffic"]["draft_share"]


def test_broken_backend_is_reported_and_the_others_go_on(gpu_check, run, monkeypatch):
    monkeypatch.setattr(gpu_check, "BACKENDS", ("broken", "sdpa"))
    monkeypatch.setattr(gpu_check, "missing_reason", lambda backend, device: None)
    monkeypatch.setattr(gpu_check, "LAYOUTS", ("fill_in",))
    record = gpu_check.run_section(gpu_check.check_backends, run)
    rows = record["result"]["rows"]
    assert record["status"] == "failed" and "of broken" in record["reason"]
    assert all("broken" in row["error"] for row in rows if row["backend"] == "broken")
    assert [row["is_close"] for row in rows if row["backend"] == "sdpa"] == [True] * 8


def test_backend_that_computes_something_else_is_not_close(gpu_check, run, monkeypatch):
    right = gpu_check.slot_states
    offset = {"eager": 0.0, "off": 1.0, "nan": float("nan")}
    monkeypatch.setattr(
        gpu_check, "slot_states", lambda backend, *arguments: right("eager", *arguments) + offset[backend]
    )
    rows = [gpu_check.compare_backend(name, torch.bfloat16, "shifted", "full", run) for name in offset]
    assert [row["is_close"] for row in rows] == [True, False, False]


def test_exit_code_is_1_when_decoding_is_not_lossless(gpu_check, tmp_path, monkeypatch):
    right, sections = gpu_check.greedy, gpu_check.SECTIONS

    def wrong(*arguments, assistant_model=None, **others):
        ids = right(*arguments, **others)
        return ids if assistant_model is None else [*ids[:10], (ids[10] + 1) % 128, *ids[11:]]

    monkeypatch.setattr(gpu_check, "greedy", wrong)
    monkeypatch.setattr(gpu_check, "SECTIONS", {LOSSLESS: sections[LOSSLESS], "later": lambda run, result: None})
    code, recorded = run_main(gpu_check, tmp_path)
    assert code == 1
    assert recorded[LOSSLESS]["status"] == "failed"
    assert "unexplained difference (llama, fill_in, off)" in recorded[LOSSLESS]["reason"]
    assert recorded[LOSSLESS]["result"]["cases"][0]["divergence"]["position"] == 10
    assert recorded["later"]["status"] == "ok"


@pytest.mark.parametrize("name, expected", [(LOSSLESS, 1), ("attention_backends", 0)])
def test_section_that_breaks_is_recorded_and_the_others_go_on(gpu_check, tmp_path, monkeypatch, name, expected):
    def broken(run, result):
        result["figure"] = 1
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(gpu_check, "SECTIONS", {name: broken, "later": lambda run, result: None})
    code, recorded = run_main(gpu_check, tmp_path)
    assert code == expected
    assert recorded[name]["status"] == "error" and recorded[name]["reason"] == "RuntimeError: no kernel image"
    assert recorded[name]["result"] == {"figure": 1}
    assert recorded["later"]["status"] == "ok"


def test_differences_within_rounding_pass_and_idle_drafts_do_not(gpu_check):
    events = dict.fromkeys(("num_accepted", "num_repaired_right", "num_crossings", "num_late_rejections"), 1)
    case = events | {"target": "llama", "layout": "shifted", "loop_gate": "off", "explained_gap": 1e-5}
    gpu_check.judge_losslessness([case | {"divergence": {"logit_gap": 9e-6}}])
    with pytest.raises(gpu_check.CheckFailed, match="unexplained"):
        gpu_check.judge_losslessness([case | {"divergence": {"logit_gap": 1e-5}}])
    with pytest.raises(gpu_check.CheckFailed, match="num_crossings"):
        gpu_check.judge_losslessness([case | {"divergence": None, "num_crossings": 0}])


def test_sizes_that_do_not_fit_are_skipped(gpu_check, run, monkeypatch):
    monkeypatch.setattr(sys.modules["round_cost"], "free_bytes", lambda device: 2**30)
    record = gpu_check.run_section(gpu_check.SECTIONS["cost_qwen3-8b"], run)
    assert record["status"] == "skipped" and record["reason"].startswith("needs 2.0 GiB")
    assert "phases" not in record["result"]


def test_spent_budget_keeps_what_was_measured(gpu_check, run):
    def section(run, result):
        result["figure"] = 1
        run.deadline_s = 0.0
        run.check_time()

    record = gpu_check.run_section(section, run)
    assert (record["status"], record["reason"]) == ("incomplete", "the time budget is spent")
    assert record["result"] == {"figure": 1}


def test_step_that_cannot_be_recorded_keeps_its_plain_time(gpu_check, monkeypatch):
    def refuse():
        raise RuntimeError("no stream here")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    cost = sys.modules["round_cost"]
    bench = cost.Bench(torch.device("cpu"), num_repeats=2, num_rounds=1, check_time=lambda: None)
    assert cost.time_replay("head", lambda: None, bench) == {
        "replay_ms": None,
        "replay_error": "RuntimeError: no stream here",
    }


def test_without_a_device_the_full_run_says_what_to_do(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        gpu_check.main([])
    assert exit_info.value.code == 2
    assert "use --tiny" in capsys.readouterr().err


def test_shell_script_works_without_an_installation(tmp_path):
    """`-S` hides what an editable installation put in place; the libraries come back through PYTHONPATH."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    libraries = str(Path(torch.__file__).parents[1])
    environment = os.environ | {"PYTHON": str(python), "PYTHONPATH": libraries, "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--tiny", "--budget-s", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    path = tmp_path / "out" / "gpu_check.json"
    assert done.stdout.splitlines()[-1] == f"record: {path}"
    sections = json.loads(path.read_text())["sections"].values()
    assert {(section["status"], section["reason"]) for section in sections} == {
        ("skipped", "the time budget is spent")
    }
