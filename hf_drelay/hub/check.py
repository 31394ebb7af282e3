"""What must hold before a repository is published: safe files, importable code, and lossless drafting without us."""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


# What drafting needs of the standard library; nothing that reaches the network, other processes or pickles.
_HARMLESS = {
    *("collections", "contextlib", "copy", "dataclasses", "difflib", "functools", "inspect", "json", "math", "os"),
    *("pathlib", "struct", "sys", "time", "types", "typing", "weakref"),
}
_DYNAMIC = {"__import__", "eval", "exec"}  # could import anything, unseen
# What the Hub's loader takes for an import, line by line and without parsing, in docstrings too.
_SCANNER = re.compile(r"^\s*from\s+\.(\S+)\s+import|^\s*import\s+\.(\S+)", re.MULTILINE)
_ALLOWED_SUFFIXES = {".py", ".json", ".jsonl", ".safetensors", ".md", ".yaml", ".jinja", ".txt"}
_ALLOWED_NAMES = {"LICENSE", ".gitattributes"}
_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{20,}")  # a secret of the Hub
_PROMPTS = [[3, 7, 5, 9], [2, 4, 6, 8, 4, 6], [1, 5, 5, 3, 2, 7, 9]]
_TIE = 1e-4  # a gap of the target's two best logits below this is rounding

# Runs in a process that can import neither the package nor reach a network.
_CLEAN_RUN = """
import json, socket, sys

class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_drelay":
            raise ImportError("the package is not installed here")

def no_network(*arguments, **options):
    raise OSError("the network is blocked here")

sys.meta_path.insert(0, NoPackage())
socket.socket.connect = socket.getaddrinfo = socket.create_connection = no_network

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

repository, target_folder, prompts, num_tokens, tie = json.loads(sys.argv[1])
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
drelay = AutoModel.from_pretrained(repository, trust_remote_code=True).eval()
weights = drelay.state_dict().items()
broken = [name for name, tensor in weights if tensor.is_floating_point() and not tensor.isfinite().all()]
if isinstance(prompts[0], str):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    prompts = [tokenizer(text).input_ids for text in prompts]
report = {"class": type(drelay).__name__, "broken": broken, "prompts": []}
for prompt in prompts:
    ids = torch.tensor([prompt])
    call = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    plain = target.generate(ids, **call)[0].tolist()
    for gate in (None, float("-inf")):
        view = drelay.with_options(loop_gate=gate)
        drafted = target.generate(ids, assistant_model=view, **call)[0].tolist()
        gap = None
        if drafted != plain:
            same = next((i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b), min(len(plain), len(drafted)))
            with torch.no_grad():
                best = target(torch.tensor([plain[:same]])).logits[0, -1].topk(2).values
            gap = float(best[0] - best[1])
        report["prompts"].append(
            {"is_same": drafted == plain or gap < tie, "gap": gap, "num_rounds": view.statistics.num_rounds,
             "acceptance_length": view.statistics.acceptance_length}
        )
print(json.dumps(report))
"""


def code_problems(source: str, siblings: set[str]) -> list[str]:
    """What keeps a file from working alone in a Hub repository whose other files are `siblings`."""
    problems = []
    allowed = {"torch", "transformers"} | _HARMLESS
    relative = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            problems += [f"import {a.name}" for a in node.names if a.name.partition(".")[0] not in allowed]
        elif isinstance(node, ast.ImportFrom):
            is_sibling = node.level == 1 and node.module in siblings
            if node.level == 1:
                relative.add(node.module)
            if not is_sibling and not (node.level == 0 and node.module.partition(".")[0] in allowed):
                problems.append(f"from {'.' * node.level}{node.module or ''} import ...")
        elif isinstance(node, ast.Name) and node.id in _DYNAMIC:
            problems.append(f"use of {node.id}")
    scanned = {first or second for first, second in _SCANNER.findall(source)}
    return problems + [f"text that reads like an import of .{name}" for name in scanned - relative]


def check_files(repository: str | Path) -> None:
    """
    Look at every file of a repository without running any.

    Raises:
        ValueError: For a file that may not be published or holds a token of the Hub, or code that imports more than
            torch and transformers.
    """
    repository = Path(repository)
    for path in sorted(path for path in repository.rglob("*") if path.is_file()):
        name = path.relative_to(repository).as_posix()
        if path.suffix not in _ALLOWED_SUFFIXES and path.name not in _ALLOWED_NAMES:
            raise ValueError(
                f"{name} must not be published: weights are safetensors only, and other files text. Remove it."
            )
        if path.suffix != ".safetensors" and _TOKEN.search(path.read_text(encoding="utf-8", errors="replace")):
            raise ValueError(
                f"{name} holds what looks like a token of the Hub (`hf_...`). Remove it from the checkpoint folder, "
                "and revoke it at https://huggingface.co/settings/tokens if others have seen it."
            )
        if path.suffix == ".py":
            siblings = {other.stem for other in path.parent.glob("*.py")}
            problems = code_problems(path.read_text(encoding="utf-8"), siblings)
            if problems:
                raise ValueError(f"{name} would not load from the Hub: {problems[0]}. Mend it in `modeling/`.")


def check_loads_and_is_lossless(
    repository: str | Path, target: str, prompts=None, num_tokens: int = 48, timeout_s: float = 1800.0
) -> dict:
    """
    Load a repository in a clean process, without this package and without a network, and compare greedy texts.

    Args:
        repository (`str` or `Path`): The folder.
        target (`str`): Folder of the target, or a Hub id that is in the cache.
        prompts (`list[str]` or `list[list[int]]`, *optional*): Texts, or token ids.
        num_tokens (`int`): New tokens for each prompt; every prompt is drafted with DLoop off and wide open.

    Returns:
        `dict`: For each prompt and gate, whether the text was the same, with rounds and acceptance length.

    Raises:
        RuntimeError: If it does not load, drafts nothing, or a text differs by more than rounding.
    """
    arguments = json.dumps([str(Path(repository).resolve()), str(target), prompts or _PROMPTS, num_tokens, _TIE])
    with tempfile.TemporaryDirectory() as modules:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_TOKEN")}
        environment |= {"HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1", "HF_DRELAY_NO_HOOK": "0"}
        command = [sys.executable, "-W", "ignore", "-c", _CLEAN_RUN, arguments]
        settings = {"env": environment, "capture_output": True, "text": True, "cwd": modules, "timeout": timeout_s}
        try:
            done = subprocess.run(command, **settings)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"{repository} was not checked: the clean process took more than {timeout_s:.0f} s; check it on a "
                "faster machine."
            ) from error
    if done.returncode != 0:
        raise RuntimeError(f"{repository} does not load and draft in a clean process: {_reason(done)}")
    report = json.loads(done.stdout.splitlines()[-1])
    if report["broken"]:
        raise RuntimeError(f"{repository}: `{report['broken'][0]}` holds numbers that are not finite; train it again.")
    if not all(entry["num_rounds"] for entry in report["prompts"]):
        raise RuntimeError(f"{repository} drafted nothing for some prompt; its `config.json` may not fit the target.")
    different = [entry for entry in report["prompts"] if not entry["is_same"]]
    if different:
        raise RuntimeError(
            f"{repository} is not lossless: {len(different)} of {len(report['prompts'])} greedy texts differ from "
            f"plain decoding, one where the target's two best logits are {different[0]['gap']:.3g} apart."
        )
    return report


def _reason(done: subprocess.CompletedProcess) -> str:
    """The error that ended a process, all of its lines, or the signal that did."""
    if done.returncode < 0:
        return f"it was ended by signal {-done.returncode}, perhaps for want of memory"
    lines = done.stderr.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return " ".join(lines[starts[-1] :]) if starts else (lines or ["no message"])[-1]
