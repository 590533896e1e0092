"""The repository's shape: imports go one way, files are short, no name leaks at top level."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("dscale", "compiled", "kernels", "recipes", "bench", "tests")
MAX_LINES = 300


def sources(folder: str) -> list[Path]:
    """Python files of a top-level folder. Symlinked folders are not entered: no file twice."""
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            # `from dscale import x` may name the module dscale.x, so look at both.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def offences(folder: str, own: tuple[str, ...], others: tuple[str, ...] | None) -> list[str]:
    """Imports of dscale outside `own`, and of third parties outside `others` (None: any)."""
    found = []
    for path in sources(folder):
        for line, name in imports(path):
            top = name.split(".")[0]
            if top == "dscale":
                allowed = within(name, own)
            else:
                allowed = others is None or top in sys.stdlib_module_names or top in others
            if not allowed:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


def test_kernels_import_kernels_torch_triton_numpy_only() -> None:
    assert offences("kernels", ("dscale.kernels",), ("torch", "triton", "numpy")) == []


def test_compiled_imports_kernels_and_compiled_only() -> None:
    own = ("dscale.kernels", "dscale.compiled")
    assert offences("compiled", own, ("torch", "numpy", "safetensors")) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_imports_outwards(folder: str) -> None:
    """The package knows no script, scripts know no test, and no bare `kernels` or `compiled`."""
    inner = ("dscale", "compiled", "kernels")
    outer = {"kernels", "compiled"} | ({"recipes", "bench"} if folder in inner else set())
    outer |= {"tests", "conftest"} if folder != "tests" else set()
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        for line, name in imports(path)
        if name.split(".")[0] in outer
    ]
    assert found == []


def test_import_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "bad.py").write_text("def f():\n    from dscale import load\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert offences("kernels", ("dscale.kernels",), ()) == ["kernels/bad.py:2 imports dscale.load"]


def test_every_folder_was_looked_at() -> None:
    assert [folder for folder in ("dscale", "compiled", "kernels") if not sources(folder)] == []


def test_files_are_short() -> None:
    lengths = {p: len(p.read_text().splitlines()) for f in FOLDERS for p in sources(f)}
    long = {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_LINES}
    assert long == {}, f"at most {MAX_LINES} lines a file"


def test_assertions_only_look() -> None:
    """`python -O` leaves them out, so nothing may happen in one."""
    harmless = {"isinstance", "len", "all", "any"}
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno} calls {ast.unparse(call.func)}"
        for folder in ("dscale", "compiled", "kernels")
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) not in harmless
    ]
    assert found == []


@pytest.mark.parametrize("name", ["kernels", "compiled"])
def test_linked_folders(name: str) -> None:
    link = ROOT / "dscale" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert not (ROOT / name / "__init__.py").exists()
    # packages in pyproject.toml lists these two; code in a subfolder would not be installed.
    assert {p.parent for p in sources(name)} == {ROOT / name}


def test_names_from_another_folder(tmp_path: Path) -> None:
    """Installed, the code answers to dscale.* alone and never to its folders' bare names."""
    code = """
from importlib.util import find_spec
import dscale, dscale.kernels, dscale.compiled
bare = ("kernels", "compiled", "bench", "tests", "recipes")
specs = {name: find_spec(name) for name in bare}
print(sorted(n for n, s in specs.items() if s and {root!r} in str(s.submodule_search_locations)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code.replace("{root!r}", repr(str(ROOT)))],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_installed_names() -> None:
    """The distribution provides the single top-level package dscale."""
    top = metadata.distribution("dscale").read_text("top_level.txt")
    assert top is not None
    assert top.split() == ["dscale"]
