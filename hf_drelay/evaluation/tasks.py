"""The eight tasks of the papers: which data set, which prompt form, and how a conversation becomes token ids.

Data sets and prompt forms are those of the public evaluation script of DFlash (repository z-lab/dflash,
arXiv 2602.06036), which the later papers of the family kept, so that figures can be compared; the form of
LiveCodeBench is that benchmark's own (arXiv 2403.07974). `--data-dir` takes the place of the Hub where there is no
network: `DIR/<task>.jsonl`, one `{"turns": [...]}` per line, used word for word.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from .records import numbered_rows


# Names the summary of all tasks in tables, so no task can have it.
ALL_TASKS = "all"

# Arguments of a chat template by the mode that a drafter's configuration names. Templates without a thinking mode
# ignore them.
TEMPLATE_MODES = {None: {}, "thinking": {"enable_thinking": True}, "non_thinking": {"enable_thinking": False}}


@dataclass(frozen=True)
class Task:
    """
    Where a task comes from.

    Attributes:
        hub_id (`str`): Data set on the Hub.
        subset (`str`, *optional*), split (`str`): Part of the data set.
        turns (`Callable`): User turns of one row.
        data_files (`tuple[str]`): Files to read instead of what the repository declares; a repository that describes
            itself by a loading script can be read in no other way.
    """

    hub_id: str
    split: str
    turns: Callable[[Mapping], list[str]]
    subset: str | None = None
    data_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """
    User turns of one prompt.

    Attributes:
        task (`str`): Name of the task.
        index (`int`): Place in the data set or file, from 0.
        turns (`tuple[str]`): What the user says; the answers in between are the target's own.
    """

    task: str
    index: int
    turns: tuple[str, ...]


def _boxed(field: str) -> Callable[[Mapping], list[str]]:
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    return lambda row: [f"{row[field]}\n{instruction}"]


def _humaneval(row: Mapping) -> list[str]:
    request = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{request}\n```python\n{row['prompt']}\n```"]


def _alpaca(row: Mapping) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _livecodebench(row: Mapping) -> list[str]:
    role = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program"
    )
    if row.get("starter_code"):
        form, code = "Use the following code structure:", row["starter_code"]
    else:
        form, code = "Write your code in the following format:", "# YOUR CODE HERE"
    parts = [
        role,
        f"### Question:\n{row['question_content']}",
        f"### Format: {form}\n```python\n{code}\n```",
        "### Answer: (use the provided format with backticks)",
    ]
    return ["\n\n".join(parts)]


TASKS = {
    "gsm8k": Task("openai/gsm8k", "test", _boxed("question"), subset="main"),
    "math500": Task("HuggingFaceH4/MATH-500", "test", _boxed("problem")),
    "aime25": Task("MathArena/aime_2025", "train", _boxed("problem")),
    "humaneval": Task("openai/openai_humaneval", "test", _humaneval),
    "mbpp": Task("google-research-datasets/mbpp", "test", lambda row: [row["prompt"]], subset="sanitized"),
    "livecodebench": Task(
        "livecodebench/code_generation_lite",
        "test",
        _livecodebench,
        data_files=tuple(f"test{number}.jsonl" for number in ("", *range(2, 7))),
    ),
    "mt_bench": Task("HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
    "alpaca": Task("tatsu-lab/alpaca", "train", _alpaca),
}


def load_task(
    name: str, num_prompts: int | None = None, data_dir: str | Path | None = None, seed: int = 0
) -> list[Conversation]:
    """
    Prompts of a task.

    Args:
        name (`str`): A key of `TASKS`, or with `data_dir` the name of any file there.
        num_prompts (`int`, *optional*): That many of them in the order of a shuffle with `seed`, so that a larger
            number only adds prompts. `None`: all, in their own order.
        data_dir (`str` or `Path`, *optional*): Folder of `<task>.jsonl` files.

    Raises:
        ValueError: If the task is unknown or its name is taken, or a row has no turns.
        OSError: If the file or the data set cannot be had.
    """
    if name == ALL_TASKS:
        raise ValueError(f"`tasks` has {name!r}, the name of the summary; list the tasks, or rename the file.")
    if data_dir is not None:
        rows = _turns_of_file(Path(data_dir) / f"{name}.jsonl", name)
    elif name in TASKS:
        rows = _turns_of_hub(TASKS[name])
    else:
        raise ValueError(
            f"`tasks` has {name!r}, which is none of {sorted(TASKS)}. Choose among them, or pass `data_dir` with a "
            f"file {name}.jsonl."
        )
    conversations = [Conversation(name, index, tuple(turns)) for index, turns in enumerate(rows)]
    if not conversations:
        raise ValueError(f"`tasks` {name!r} has no prompts; check its file or data set.")
    if num_prompts is not None:
        random.Random(seed).shuffle(conversations)
    return list(islice(conversations, num_prompts))


def describe_source(name: str, data_dir: str | Path | None = None) -> str:
    """Data set id with its split, or the file's name, for result rows."""
    if data_dir is not None:
        return f"{name}.jsonl"
    task = TASKS[name]
    return ":".join(part for part in (task.hub_id, task.subset, task.split) if part)


def _turns_of_file(path: Path, name: str) -> Iterable[list[str]]:
    if not path.is_file():
        raise OSError(
            f"`data_dir` {path.parent} has no {path.name} for the task {name!r}. Put the prompts there, one "
            '{"turns": [...]} per line, or leave the task out.'
        )
    for number, row in numbered_rows(path):
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(
                f'{path}, line {number}: expected {{"turns": [...]}} with at least one string, got '
                f"{str(row)[:80]!r}. Fix or remove the line."
            )
        if any("\ud800" <= character <= "\udfff" for turn in turns for character in turn):
            raise ValueError(
                f"{path}, line {number}: `turns` hold half of a surrogate pair (\\ud800 to \\udfff), which is no "
                "text. Fix or remove the line."
            )
        yield turns


def _turns_of_hub(task: Task) -> list[list[str]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "Reading a task from the Hub needs `datasets`. Install it with `pip install 'hf-drelay[bench]'`, or pass "
            "`data_dir` with the prompts."
        ) from error
    try:
        if task.data_files:
            files = [f"hf://datasets/{task.hub_id}/{file}" for file in task.data_files]
            rows = load_dataset("json", data_files={task.split: files}, split=task.split)
        else:
            rows = load_dataset(task.hub_id, task.subset, split=task.split)
    except Exception as error:
        # Whatever `datasets` and its HTTP library report, the remedy is the same.
        raise OSError(
            f"The data set {task.hub_id} cannot be had from the Hub ({str(error).splitlines()[0][:200]}). Connect to "
            "the network, or pass `data_dir` with a folder that holds the prompts."
        ) from error
    return [task.turns(row) for row in rows]


@dataclass(frozen=True)
class EncodedPrompt:
    """
    Token ids of a conversation up to the next answer.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(1, P)`): The prompt.
        num_cut (`int`): Tokens that were cut from its beginning to leave room for the answer.
    """

    input_ids: torch.LongTensor
    num_cut: int = 0

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": torch.ones_like(self.input_ids)}


def encode_conversation(
    tokenizer,
    turns: Iterable[str],
    answers: Iterable[str] = (),
    template_mode: str | None = None,
    max_length: int | None = None,
) -> EncodedPrompt:
    """
    Encode user turns and the answers between them.

    Args:
        turns (`Iterable[str]`): User turns, one more than `answers`.
        template_mode (`str`, *optional*): `"thinking"` or `"non_thinking"` for templates that know the difference.
        max_length (`int`, *optional*): Longest prompt that fits; a longer one loses its beginning, as the end holds
            the question and the template's invitation to answer.
    """
    turns, answers = list(turns), list(answers)
    if tokenizer.chat_template is None:
        texts = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair][:-1]
        ids = tokenizer("\n\n".join(texts))["input_ids"]
    else:
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, **TEMPLATE_MODES.get(template_mode, {})
        )["input_ids"]
    ids = list(ids) or _start_ids(tokenizer)
    num_cut = 0 if max_length is None else max(0, len(ids) - max_length)
    return EncodedPrompt(torch.tensor([ids[num_cut:]], dtype=torch.long), num_cut)


def _start_ids(tokenizer) -> list[int]:
    """What an empty prompt without a template consists of: a model needs one token to start from."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        if token_id is not None:
            return [token_id]
    return [0]


def max_prompt_length(target, max_new_tokens: int) -> int | None:
    """Longest prompt that leaves room for `max_new_tokens` in the target's context; `None` without a known limit."""
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None:
        return None
    if limit <= max_new_tokens:
        raise ValueError(
            f"`max_new_tokens` {max_new_tokens} fills the target's context of {limit} positions; use a smaller number."
        )
    return limit - max_new_tokens
