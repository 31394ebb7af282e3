"""The layout that the Hub and the package rely on: who may import whom, and what `modeling/` may import at all."""

import ast
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
MODELING = ROOT / "modeling"
MODELING_FILES = sorted(MODELING.glob("*.py"))
PACKAGE_FILES = sorted((ROOT / "hf_drelay").rglob("*.py"))

# Each part may import itself and what stands on a lower level. Training measures with evaluation, never the reverse.
LEVELS = {"modeling": 0, "targets": 1, "evaluation": 2, "training": 3, "hub": 3, "demo": 4, "cli": 5}

# What the Hub's loader looks for, line by line and without parsing, in a file that it is about to download.
SCANNER = re.compile(r"^\s*from\s+\.(\S+)\s+import|^\s*import\s+\.(\S+)", re.MULTILINE)


def _imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def _absolute_names(path: Path) -> list[str]:
    """Every module or member that `path`, a file below `hf_drelay/`, imports, by its full name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = []
    for node in _imports(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
            continue
        base = list(package[: len(package) + 1 - node.level]) if node.level else []
        module = ".".join(base + ([node.module] if node.module else []))
        names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def _upward_imports(path: Path) -> list[str]:
    """Imports of `path`, a file below `hf_drelay/`, that reach a higher level, or another part of the same level."""
    own = path.relative_to(ROOT / "hf_drelay").with_suffix("").parts[0]
    bad = []
    for name in _absolute_names(path):
        parts = name.split(".")
        if parts[0] != "hf_drelay" or len(parts) < 2 or parts[1] not in LEVELS or parts[1] == own:
            continue
        if LEVELS[parts[1]] >= LEVELS[own]:
            bad.append(name)
    return bad


def _sibling_problems(source: str, siblings: set[str]) -> list[str]:
    """What keeps a file of `modeling/` from working alone in a Hub repository."""
    problems = []
    allowed = {"torch", "transformers"} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            problems += [f"import {a.name}" for a in node.names if a.name.split(".")[0] not in allowed]
        elif isinstance(node, ast.ImportFrom):
            is_sibling = node.level == 1 and node.module in siblings
            is_allowed = node.level == 0 and node.module.split(".")[0] in allowed
            if not (is_sibling or is_allowed):
                problems.append(f"from {'.' * node.level}{node.module or ''} import ...")
    parsed = {
        node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level == 1
    }
    # A line of a docstring that looks like an import would be downloaded as a file.
    scanned = {first or second for first, second in SCANNER.findall(source)}
    problems += [f"text that reads like an import of .{name}" for name in scanned - parsed]
    return problems


@pytest.mark.parametrize("path", MODELING_FILES, ids=lambda path: path.stem)
def test_modeling_file_imports_only_what_survives_on_the_hub(path):
    assert not _sibling_problems(path.read_text(), {file.stem for file in MODELING_FILES})


@pytest.mark.parametrize(
    "source",
    [
        "import numpy",
        "from hf_drelay import targets",
        "from . import compat",
        "from .. import compat",
        "from .missing import thing",
        '"""Text.\n\nfrom .missing import thing\n"""',
    ],
)
def test_modeling_check_finds_each_kind_of_fault(source):
    assert _sibling_problems(source, {"compat"})


def test_modeling_check_accepts_a_sibling_import_inside_a_function():
    assert not _sibling_problems("def f():\n    from .compat import g\n    return g", {"compat"})


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT / "hf_drelay")))
def test_package_file_imports_lower_levels_only(path):
    if path == ROOT / "hf_drelay" / "__init__.py":
        pytest.skip("the package's own names are loaded on use and stand above all levels")
    assert path.relative_to(ROOT / "hf_drelay").with_suffix("").parts[0] in LEVELS, "give the new part a level"
    assert not _upward_imports(path)


def test_package_check_finds_upward_and_sideways_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "hf_drelay" / "training" / "trainer.py"
    path.parent.mkdir(parents=True)
    path.write_text("from ..cli import app\nimport hf_drelay.hub.card\nfrom ..evaluation.replay import replay\n")
    assert _upward_imports(path) == ["hf_drelay.cli.app", "hf_drelay.hub.card"]


def test_every_package_is_installed():
    """A package that `setup.cfg` forgets works in a checkout and is missing from the wheel."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    listed = set(parser["options"]["packages"].split())
    folders = {".".join(path.relative_to(ROOT).parts[:-1]) for path in PACKAGE_FILES}
    assert listed == folders | {"hf_drelay.modeling", "hf_drelay.hub.templates"}


def test_import_of_the_package_is_light():
    code = "import sys, hf_drelay; hf_drelay.__version__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_resolve_and_unknown_ones_do_not():
    import hf_drelay

    for name in hf_drelay.__all__:
        assert getattr(hf_drelay, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = hf_drelay.missing
