"""Test the structure of the tree: no import cycles, no use of private names."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cuseq
from cuseq.integrations._enabled import DEFAULTS, Options

ROOT = Path(__file__).parents[3]
PACKAGE = Path(cuseq.__file__).parent
PUBLIC = [cuseq, cuseq.data, cuseq.ops, cuseq.cache, cuseq.distributed, cuseq.vision]


def modules() -> dict[str, ast.Module]:
    """Parse each module of the package; return them by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("cuseq", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = modules()


# ------------------------------------------------------------------------------- circles


def imports_when_loaded(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield imports that run on loading a module, not in functions or for type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_when_loaded(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from imports_when_loaded(node.body)
            yield from imports_when_loaded(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from imports_when_loaded(handler.body)


def all_imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield imports that run at any time, in functions too, but not those for type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from all_imports(node.orelse)
        else:
            children = ast.iter_child_nodes(node)
            yield from all_imports([child for child in children if isinstance(child, ast.stmt)])
            for handler in getattr(node, "handlers", []):
                yield from all_imports(handler.body)
            for case in getattr(node, "cases", []):
                yield from all_imports(case.body)


def parsed(sources: dict[str, str]) -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources.items()}


def imported(
    name: str, tree: ast.Module, known: dict[str, ast.Module], imports: Any = imports_when_loaded
) -> set[str]:
    """Return the package's modules that a module imports, of the imports that are looked at."""
    needed = set()
    for node in imports(tree.body):
        if isinstance(node, ast.Import):
            needed |= {alias.name for alias in node.names}
        elif node.module is not None:
            targets = {f"{node.module}.{alias.name}" for alias in node.names} - {"cuseq._C"}
            # The package itself is needed too, unless only its submodules are imported.
            needed |= {t for t in targets if t in known}
            if not targets <= known.keys():
                needed.add(node.module)
    return {one for one in needed if one in known and one != name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for one in sorted(graph[name]):
            found = visit(one, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    for name in sorted(graph):
        found = visit(name, [])
        if found:
            return found
    return []


def test_modules_import_each_other_in_one_direction():
    found = circle({name: imported(name, tree, MODULES) for name, tree in MODULES.items()})
    assert not found, " -> ".join(found)


def test_no_function_imports_a_module_that_imports_its_own():
    """Only `enable` does: it loads a framework's integration, which uses the public `cuseq`."""
    found = circle(
        {
            name: imported(name, tree, MODULES, all_imports) - {"cuseq"}
            for name, tree in MODULES.items()
        }
    )
    assert not found, " -> ".join(found)


def folder(name: str) -> str:
    """Return the module or package of cuseq itself that a module belongs to."""
    return ".".join(name.split(".")[:2])


def test_the_package_has_few_rooms():
    """Each product is a folder or a module; not the command, the version, what the build writes.

    16 products, and `_base`, on which they stand.
    """
    others = {"cuseq", "cuseq._base", "cuseq.__main__", "cuseq._version", "cuseq._build_config"}
    rooms = {folder(name) for name in MODULES} - others
    assert len(rooms) <= 16, rooms


def between_folders(known: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return the folders that each folder imports, in its functions too."""
    graph: dict[str, set[str]] = {folder(name): set() for name in known if name != "cuseq"}
    for name, tree in known.items():
        for one in imported(name, tree, known, all_imports):
            if "cuseq" not in (name, one) and folder(one) != folder(name):
                graph[folder(name)].add(folder(one))
    return graph


def test_no_folder_imports_upward():
    """An import in a function hides a circle from Python, and not from a reader."""
    found = circle(between_folders(MODULES))
    assert not found, " -> ".join(found)


def test_an_import_upward_is_found():
    sources = {
        "cuseq": "from cuseq.top import door",
        "cuseq.base.one": "",
        "cuseq.low.one": "def late():\n    try:\n        import cuseq.top.inside\n    finally: ...",
        "cuseq.low.two": "if TYPE_CHECKING:\n    import cuseq.top.door",
        "cuseq.top.door": "def late():\n    from cuseq.top import inside",
        "cuseq.top.inside": "import cuseq.top.door, cuseq.low.two, cuseq.base.one",
    }
    trees = parsed(sources)
    assert circle(between_folders(trees)) == ["cuseq.low", "cuseq.top", "cuseq.low"]
    del trees["cuseq.low.one"]
    assert circle(between_folders(trees)) == []


def test_a_circle_is_found():
    sources = {
        "cuseq.a": "from cuseq import b",
        "cuseq.b": "if True:\n    from cuseq.c import x",
        "cuseq.c": "import cuseq.a",
        "cuseq.d": "def late():\n    import cuseq.d",
        "cuseq": "",
    }
    trees = parsed(sources)
    graph = {name: imported(name, tree, trees) for name, tree in trees.items()}
    assert circle(graph) == ["cuseq.a", "cuseq.b", "cuseq.c", "cuseq.a"]
    del graph["cuseq.c"]
    graph["cuseq.b"] = set()
    assert circle(graph) == []


def test_imports_name_modules_that_there_are():
    """Also those in functions, which run when somebody needs them."""
    wanted = set()
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuseq"):
                wanted.add((name, node.module))
            elif isinstance(node, ast.Import):
                wanted |= {(name, a.name) for a in node.names if a.name.startswith("cuseq.")}
    assert [one for one in sorted(wanted) if one[1] not in {*MODULES, "cuseq._C"}] == []


# ------------------------------------------------------------------------------- private names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_attributes(tree: ast.Module) -> set[str]:
    """Return the private names of a module's classes: methods, fields, attributes set on self."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for one in ast.walk(node):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(one.name)
            elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                names.add(one.attr)
            elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                names.add(one.target.id)
    return {name for name in names if is_private(name)}


def room(name: str) -> str:
    """Return the package that a module belongs to; each module of cuseq itself is a room."""
    depth = 3 if name.startswith("cuseq.integrations.") else 2
    return ".".join(name.split(".")[:depth])


def reaches(known: dict[str, ast.Module]) -> list[str]:
    """Return uses of the private names of another room's modules, as "module: what"."""
    owners: dict[str, set[str]] = {}
    for name, tree in known.items():
        for attribute in private_attributes(tree):
            owners.setdefault(attribute, set()).add(room(name))
    found = []
    for name, tree in known.items():
        aliases = {}  # names here that stand for modules of the package
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuseq"):
                is_outside = room(node.module) != room(name)
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    if target in known:
                        aliases[alias.asname or alias.name] = target
                    elif is_private(alias.name) and target != "cuseq._C" and is_outside:
                        found.append(f"{name}: from {node.module} import {alias.name}")
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in known and alias.asname:
                        aliases[alias.asname] = alias.name
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            left = node.value.id if isinstance(node.value, ast.Name) else None
            target = f"{aliases[left]}.{node.attr}" if left in aliases else None
            of_module = (
                target is not None and target not in known and room(aliases[left]) != room(name)
            )
            of_class = room(name) not in owners.get(node.attr, {room(name)})
            if of_module or of_class:
                found.append(f"{name}: {ast.unparse(node)}")
    return found


# Private names of torch that are used on torch's own objects.
TORCH = {"_version"}


def test_no_module_reaches_into_another():
    found = [one for one in reaches(MODULES) if one.rpartition(".")[2] not in TORCH]
    assert not found, "\n".join(found)


def test_a_reach_is_found():
    sources = {
        "cuseq.a": "_x = 1\nclass A:\n    def __init__(self):\n        self._y = self._z = 2",
        "cuseq.b": "from cuseq.a import _x",
        "cuseq.c": "from cuseq import a\na._x\nother._y",
        "cuseq.d": "from cuseq import _e, _C\n_e.f(_C._g, torch._h)",
        "cuseq._e": "def f(*args): ...",
        "cuseq.f.one": "class F:\n    def _k(self): ...",
        "cuseq.f.two": "def g(f):\n    return f._k()",
        "cuseq.h": "def g(f):\n    return f._k()",
        "cuseq": "",
    }
    assert reaches(parsed(sources)) == [
        "cuseq.b: from cuseq.a import _x",
        "cuseq.c: a._x",
        "cuseq.c: other._y",
        "cuseq.h: f._k",
    ]


# ------------------------------------------------------------------------------- files


def library_files() -> list[Path]:
    found = list(PACKAGE.rglob("*.py"))
    for folder in ("csrc", "include"):
        for kind in ("cpp", "cu", "cuh", "h"):
            found += (ROOT / folder).rglob(f"*.{kind}")
    return sorted(found)


def test_the_library_has_files_of_both_languages():
    kinds = {path.suffix for path in library_files()}
    assert {".py", ".cpp", ".cu", ".h", ".cuh"} <= kinds


def test_names_of_test_files_are_unique():
    """pytest and processes of a test import a file by its name alone, whatever its folder is."""
    by_name: dict[str, list[str]] = {}
    for path in (ROOT / "tests" / "python").rglob("*.py"):
        by_name.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert by_name and not {name: paths for name, paths in by_name.items() if len(paths) > 1}


# ------------------------------------------------------------------------------- the voice

# "None is no window" has to be decoded; "None is not a window" need not.
INVERTED = re.compile(r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b)\w+")


def inverted(source: str) -> list[str]:
    """Return phrases such as "is no window", which house rules forbid, also across lines."""
    return INVERTED.findall(re.sub(r"\s+(?:(?://|#)\s+)?", " ", source))


def test_nothing_is_no_something():
    files = [path for name in ("examples", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): inverted(path.read_text()) for path in files}
    found |= {str(path): inverted(path.read_text()) for path in library_files()}
    assert not {name: phrases for name, phrases in found.items() if phrases}


def test_an_inverted_phrase_is_found():
    assert inverted("# None is no\n    # window, there is no copy and it is no longer here") == [
        "is no window"
    ]


# ------------------------------------------------------------------------------- public names


def public_callables() -> dict[str, object]:
    found = {}
    for module in PUBLIC:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType):
                found[f"{module.__name__}.{name}"] = value
    return found


CALLABLES = public_callables()


def test_there_is_one_small_front_door():
    names = [name for name in cuseq.__all__ if not inspect.ismodule(getattr(cuseq, name))]
    assert len(names) <= 24, names
    for module in PUBLIC:
        assert len(set(module.__all__)) == len(module.__all__), module.__name__


def untyped(function: object) -> list[str]:
    signature = inspect.signature(function)
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is inspect.Parameter.empty and name not in ("self", "cls")
    ]
    is_constructor = getattr(function, "__name__", "") == "__init__"
    if signature.return_annotation is inspect.Signature.empty and not is_constructor:
        missing.append("return")
    return missing


@pytest.mark.parametrize("name", CALLABLES)
def test_public_names_are_typed(name):
    value = CALLABLES[name]
    functions = {name: value}
    if inspect.isclass(value):
        functions = {
            f"{name}.{key}": getattr(method, "fget", None) or getattr(method, "__func__", method)
            for key, method in vars(value).items()
            if (not key.startswith("_") or key == "__init__")
            and isinstance(method, types.FunctionType | classmethod | staticmethod | property)
        }
    missing = {key: untyped(function) for key, function in functions.items()}
    missing = {key: names for key, names in missing.items() if names}
    assert not missing, missing


def test_the_options_of_enable_are_typed_described_and_have_defaults():
    options = typing.get_type_hints(Options)
    assert options.keys() == DEFAULTS.keys()
    arguments = cuseq.enable.__doc__.partition("    Args:\n")[2].partition("\n\n")[0]
    _, _, _, *parts = re.split(r"^        (\w+): ", arguments, flags=re.M)  # the first is x
    assert parts[::2] == list(DEFAULTS)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        default = re.search(r"default\s+(the|\S+?)[\s.,:]", text)[1]
        assert default == "the" or ast.literal_eval(default) == DEFAULTS[name], name


def test_no_function_has_the_name_of_a_module():
    """`import cuseq.x as m` binds the package's attribute of that name."""
    optional = "cuseq.integrations"
    clashes = []
    for found in pkgutil.walk_packages([str(PACKAGE)], "cuseq.", onerror=lambda name: None):
        parent, _, name = found.name.rpartition(".")
        if found.name.startswith(optional) or name == "__main__":
            continue
        value = getattr(importlib.import_module(parent), name, None)
        if value is not None and not isinstance(value, types.ModuleType):
            clashes.append(found.name)
    assert not clashes, clashes


def test_the_stub_has_the_names_of_the_compiled_module():
    stub = ast.parse((PACKAGE / "_C.pyi").read_text())
    written = {n.name for n in stub.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assert written == {name for name in dir(cuseq._C) if not name.startswith("_")}
