"""Rules of the code base: what imports what, what is documented, how long a file and a function may be."""

import ast
import doctest
import importlib
import pathlib
import sys

import jax
import pytest

import jzero

ROOT = pathlib.Path(jzero.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}

# Each part may import itself and the parts named here. `errors`, `folders` and `mesh` are everybody's.
# `optim` casts FP8 parameters with the arithmetic of `fp8`.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "folders": set(),
    "mesh": set(),
    "optim": {"fp8"},
    "fp8": set(),
    "data": set(),
    "parallel": {"optim", "fp8"},
    "models": {"optim", "fp8", "parallel"},
    "train": {"optim", "fp8", "parallel", "models", "data"},
    "plan": {"optim", "fp8", "parallel", "models", "data", "train"},
    "cli": {"", "optim", "fp8", "parallel", "models", "data", "train", "plan"},
    "__main__": {"cli"},
}
EVERYBODYS = {"errors", "folders", "mesh"}


def part(module: str) -> str:
    """The part of jzero that a module belongs to; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imports(path: pathlib.Path, module: str) -> set[str]:
    """Names of the modules that a file imports, anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in names}
    return found


def allowed(module: str, imported: str) -> bool:
    own, other = part(module), part(imported)
    return own in ("", other) or other in LAYERS[own] or (other in EVERYBODYS and own != "optim")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    ours = {name for name in imports(MODULES[module], module) if name.split(".")[0] == "jzero"}
    upward = sorted(name for name in ours if not allowed(module, name))
    assert not upward, f"{module} imports {upward}"


@pytest.mark.parametrize("module", [m for m in MODULES if part(m) == "optim"])
def test_the_optimizer_is_usable_alone(module):
    tops = {name.split(".")[0] for name in imports(MODULES[module], module)}
    assert tops <= {"jax", "numpy", "optax", "jzero"} | sys.stdlib_module_names


@pytest.mark.parametrize("module", [m for m in MODULES if part(m) == "data"])
def test_data_needs_no_jax(module):
    tops = {name.split(".")[0] for name in imports(MODULES[module], module)}
    assert not tops & {"jax", "jaxlib", "flax", "optax"}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_private_of_others_is_imported(module):
    others = [name for name in imports(MODULES[module], module) if name.split(".")[0] not in ("jzero", "__future__")]
    private = [name for name in others if any(piece.startswith("_") for piece in name.split("."))]
    assert not private


# --- documentation ---------------------------------------------------------------------------------------------------


def test_the_public_names_exist_and_are_documented():
    for name in jzero.__all__:
        value = getattr(jzero, name)
        assert not callable(value) or value.__doc__, name


def definitions(tree: ast.AST):
    """Every function and class with its qualified name; not those inside functions."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield f"{prefix}{child.name}", child
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, f"{prefix}{child.name}.")

    yield from walk(tree, "")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_and_public_definition_has_a_docstring(module):
    tree = ast.parse(MODULES[module].read_text())
    if not tree.body:
        return  # an empty file that makes a folder a package
    assert ast.get_docstring(tree), module
    bare = [name for name, node in definitions(tree)
            if not any(p.startswith("_") for p in name.split(".")) and not ast.get_docstring(node)]  # fmt: skip
    assert not bare, bare


def test_public_functions_show_how_they_are_used():
    bare = [name for name in jzero.__all__ if name.islower() and callable(getattr(jzero, name))
            and ">>>" not in getattr(jzero, name).__doc__]  # fmt: skip
    assert not bare


@pytest.mark.parametrize("module", [m for m, path in MODULES.items() if ">>>" in path.read_text()])
def test_docstring_examples_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tested = importlib.import_module(module)
    result = doctest.testmod(tested, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    jax.effects_barrier()
    assert result.failed == 0
    assert result.attempted > 0


# --- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_short(module):
    text = MODULES[module].read_text()
    assert len(text.splitlines()) < 400
    for name, node in definitions(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            doc = node.body[0] if ast.get_docstring(node) else None
            length = node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)
            assert length < 60, f"{module}.{name} has {length} lines"
