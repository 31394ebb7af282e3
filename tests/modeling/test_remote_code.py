"""A saved drafter brings its code along: it loads in a process without the package, beside other copies of itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, pipeline

from hf_drelay.modeling.generate_hook import _MARK, install, uninstall
from hf_drelay.modeling.modeling_drafter import DRelayDrafterModel
from hf_drelay.modeling.modeling_drelay import DRelayModel
from hf_drelay.modeling.modeling_selector import DRelaySelectorModel


CODE = Path(__file__).resolve().parents[2] / "modeling"
CODE_FILES = {path.name for path in CODE.glob("*.py")} - {"__init__.py"}
HOOKED = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")
ALWAYS = float("-inf")

PREAMBLE = """
import json, os, sys

class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_drelay":
            raise ImportError("the package is not installed here")

sys.meta_path.insert(0, NoPackage())

import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
prompt = torch.tensor([[3, 7, 5, 9]])
mask = torch.ones_like(prompt)

def greedy(assistant=None, **kwargs):
    arguments = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 40} | kwargs
    return target.generate(prompt, assistant_model=assistant, **arguments)[0].tolist()

def load(folder):
    return AutoModel.from_pretrained(folder, trust_remote_code=True)

def run(drelay):
    view = drelay.with_options(loop_gate=float("-inf"))
    return {"text": greedy(view), "statistics": view.statistics.to_dict(), "module": type(drelay).__module__}

def count_hooks(mark="_hf_drelay_hook"):
    layers, method = 0, GenerationMixin._assisted_decoding
    while hasattr(method, mark):
        layers, method = layers + 1, getattr(method, mark)
    return layers
"""

FIRST = """
whole, drafter, selector, again, third = sys.argv[2:]
report = {"plain": greedy()}
drelay = load(whole)
report["loaded"] = run(drelay)
drelay.save_pretrained(again)
reloaded = load(again)
report["reloaded"] = run(reloaded)
reloaded.save_pretrained(third)
report["parts"] = [type(load(folder)).__name__ for folder in (drafter, selector)]
report["package"] = [name for name in sys.modules if name.partition(".")[0] == "hf_drelay"]
print(json.dumps(report))
"""

SECOND = """
first, second, third, small = sys.argv[2:]
report = {"plain": greedy()}
one, two = load(first), load(second)
report["one"], report["two"], report["three"] = run(one), run(two), run(load(third))
report["num_hooks"] = count_hooks()
assistant = AutoModelForCausalLM.from_pretrained(small).eval()
report["ordinary_assistant"] = greedy(assistant)
report["prompt_lookup"] = greedy(prompt_lookup_num_tokens=3)
sys.modules[type(two).__module__.rpartition(".")[0] + ".generate_hook"].uninstall()
report["num_hooks_after_uninstall"] = count_hooks()
report["plain_after_uninstall"] = greedy()
print(json.dumps(report))
"""


def run_alone(script: str, module_cache: Path, *arguments) -> dict:
    """Result of a script in a new process that cannot import the package and has seen no remote code before."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(module_cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PREAMBLE + script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=module_cache, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(toolbox):
    """A target with a vocabulary so small that drafts with random weights are sometimes right, and a drafter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    target = LlamaForCausalLM(config).eval()
    return target, toolbox.drafter(target, seed=2)


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """The target, the whole drafter and its parts as folders."""
    root = tmp_path_factory.mktemp("saved")
    target, drelay = tiny
    target.save_pretrained(root / "target")
    drelay.save_pretrained(root / "whole")
    drelay.drafter.save_pretrained(root / "drafter")
    drelay.selector.save_pretrained(root / "selector")
    return root


@pytest.fixture(scope="module")
def here(toolbox, tiny):
    """What the drafter does in this process: text and statistics."""
    target, drelay = tiny
    view = drelay.with_options(loop_gate=ALWAYS)
    ids = toolbox.greedy(target, torch.tensor([[3, 7, 5, 9]]), view, max_new_tokens=40)
    statistics = view.statistics.to_dict()
    assert sum(statistics["num_committed"]) > statistics["num_rounds"], "nothing was ever accepted"
    return {"text": ids[0].tolist(), "statistics": json.loads(json.dumps(statistics))}


@pytest.fixture(scope="module")
def first_process(folders, tmp_path_factory):
    arguments = [folders / name for name in ("target", "whole", "drafter", "selector", "again", "third")]
    return run_alone(FIRST, tmp_path_factory.mktemp("modules"), *arguments)


@pytest.fixture(scope="module")
def second_process(folders, first_process, tmp_path_factory):
    """Another process loads what the first one saved, and a copy with other code, an older release for example."""
    shutil.copytree(folders / "again", folders / "changed")
    for path in (folders / "changed").glob("*.py"):
        path.write_text(path.read_text() + "\n# Another release.\n")
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(folders / "target", num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(folders / "small")
    arguments = [folders / name for name in ("target", "again", "changed", "third", "small")]
    return run_alone(SECOND, tmp_path_factory.mktemp("modules"), *arguments)


def assert_same_run(run: dict, here: dict) -> None:
    # Not a number in a share that was never reached is equal to itself here.
    assert run["text"] == here["text"]
    assert json.dumps(run["statistics"]) == json.dumps(here["statistics"])


def test_saved_folder_drafts_the_same_in_a_process_without_the_package(first_process, here):
    assert first_process["package"] == []
    assert first_process["loaded"]["module"].startswith("transformers_modules.")
    assert_same_run(first_process["loaded"], here)
    assert first_process["loaded"]["text"] == first_process["plain"]


def test_folder_saved_from_a_remote_copy_drafts_the_same(first_process, second_process, here):
    assert_same_run(first_process["reloaded"], here)
    assert_same_run(second_process["one"], here)
    assert_same_run(second_process["three"], here)


@pytest.mark.parametrize("name", ["again", "third"])
def test_folder_saved_from_a_remote_copy_holds_the_same_files(folders, first_process, name):
    def contents(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}

    assert contents(folders / name) == contents(folders / "whole")


def test_parts_load_alone_in_a_process_without_the_package(first_process):
    assert first_process["parts"] == ["DRelayDrafterModel", "DRelaySelectorModel"]


def test_two_copies_of_the_code_work_side_by_side(second_process, here):
    assert second_process["one"]["module"] != second_process["two"]["module"]
    assert_same_run(second_process["one"], here)
    assert_same_run(second_process["two"], here)


def test_two_copies_of_the_code_share_one_wrapper(second_process):
    assert second_process["num_hooks"] == 1


@pytest.mark.parametrize("kind", ["ordinary_assistant", "prompt_lookup"])
def test_other_assisted_decoding_still_works_after_the_hook(second_process, kind):
    assert second_process[kind] == second_process["plain"]


def test_one_copy_uninstalls_the_wrapper_of_another(second_process):
    assert second_process["num_hooks_after_uninstall"] == 0
    assert second_process["plain_after_uninstall"] == second_process["plain"]


def test_saved_folder_holds_weights_configuration_and_code_only(folders):
    names = {path.name for path in (folders / "whole").iterdir()}
    assert names == CODE_FILES | {"config.json", "model.safetensors"}
    for name in CODE_FILES:
        assert (folders / "whole" / name).read_text() == (CODE / name).read_text()


@pytest.mark.parametrize("part", ["drafter", "selector"])
def test_folder_of_a_part_holds_no_foreign_files(folders, part):
    names = {path.name for path in (folders / part).iterdir()}
    assert names - CODE_FILES == {"config.json", "model.safetensors"}


def test_saved_configuration_names_the_classes_and_no_path_of_this_machine(folders):
    text = (folders / "whole" / "config.json").read_text()
    assert json.loads(text)["auto_map"] == {
        "AutoConfig": "configuration_drelay.DRelayConfig",
        "AutoModel": "modeling_drelay.DRelayModel",
    }
    assert str(CODE.parent) not in text and str(folders) not in text


@pytest.mark.parametrize(
    ("part", "cls"), [("drafter", DRelayDrafterModel), ("selector", DRelaySelectorModel)], ids=["drafter", "selector"]
)
def test_part_loads_alone_with_its_weights(tiny, folders, part, cls):
    expected = getattr(tiny[1], part).state_dict()
    loaded = cls.from_pretrained(folders / part)
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_loaded_drafter_drafts_the_same_in_this_process(toolbox, tiny, folders, here):
    view = DRelayModel.from_pretrained(folders / "whole").eval().with_options(loop_gate=ALWAYS)
    ids = toolbox.greedy(tiny[0], torch.tensor([[3, 7, 5, 9]]), view, max_new_tokens=40)
    assert_same_run({"text": ids[0].tolist(), "statistics": view.statistics.to_dict()}, here)


@pytest.fixture
def hooked():
    """Leave the wrappers in place, whatever the test does."""
    install()
    yield
    uninstall()
    install()


def test_uninstall_restores_the_original_methods(hooked):
    originals = {name: getattr(getattr(GenerationMixin, name), _MARK) for name in HOOKED}
    uninstall()
    for name, original in originals.items():
        assert getattr(GenerationMixin, name) is original
        assert original.__module__ == "transformers.generation.utils"
        assert not hasattr(original, _MARK)
    uninstall()  # a second time is harmless
    assert GenerationMixin._assisted_decoding is originals["_assisted_decoding"]


def test_install_puts_one_wrapper_in_place_when_called_again(hooked, toolbox, tiny, here):
    originals = {name: getattr(getattr(GenerationMixin, name), _MARK) for name in HOOKED}
    uninstall()
    assert install() and install()
    for name, original in originals.items():
        assert getattr(getattr(GenerationMixin, name), _MARK) is original
    target, drelay = tiny
    ids = toolbox.greedy(target, torch.tensor([[3, 7, 5, 9]]), drelay, max_new_tokens=40)
    assert ids[0].tolist() == here["text"]


def test_nothing_is_hooked_when_the_environment_says_so(hooked, monkeypatch):
    uninstall()
    monkeypatch.setenv("HF_DRELAY_NO_HOOK", "1")
    assert not install()
    assert not any(hasattr(getattr(GenerationMixin, name), _MARK) for name in HOOKED)


def test_pipeline_takes_a_drafter_as_its_assistant(toolbox):
    target = toolbox.target("llama")
    tokenizer = toolbox.tokenizer(toolbox.VOCAB_SIZE)
    text = tokenizer.decode(toolbox.prompt(8)[0])
    arguments = {"do_sample": False, "max_new_tokens": 24, "return_full_text": False, "eos_token_id": 2}
    arguments["pad_token_id"] = 0
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **arguments)
    ids = toolbox.greedy(target, tokenizer(text, return_tensors="pt").input_ids, max_new_tokens=24, eos_token_id=2)
    drafter = toolbox.scripted(target, ids[0].tolist())
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert assisted(text, **arguments) == plain
    assert drafter.statistics.acceptance_length > 1.5
