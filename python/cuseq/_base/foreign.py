"""Other packages: whether they are there, and private names checked before cuseq relies on them.

A package may rename its private functions, fields and attributes in any release. Integrations read
them through this module. A release that cuseq does not know then fails when cuseq is enabled, with
the package, its version and the change, and not with an AttributeError in the middle of a step.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from torch.torch_version import TorchVersion


class _Needed(NamedTuple):
    name: str
    install: str  # what to type
    least: str | None = None  # the oldest release that cuseq works with, as in pyproject.toml


_WITH_EXTRA = "pip install 'cuseq[transformers]', or in a clone pip install '.[transformers]'"
_NEEDED = {
    "transformers": _Needed("transformers", _WITH_EXTRA, least="5.5.3"),
    "trl": _Needed("TRL", "pip install trl"),
    "megatron": _Needed("megatron-core", "pip install megatron-core"),
    "xformers": _Needed("xformers", "pip install xformers, of a build for this torch"),
}


def load(module: str, part: str) -> ModuleType:
    """Return a module of another package, which a part of cuseq needs.

    Args:
        module: its name, such as "xformers.ops.fmha.attn_bias".
        part: the part of cuseq, for the error.

    Raises:
        ImportError: the package is not installed, does not load or is too old. The message says
            what to type.

    Examples:
        >>> load("transformers", "cuseq.enable of a model").__name__
        'transformers'
    """
    package = module.partition(".")[0]
    name, install, least = _NEEDED[package]
    needs = f"{part} needs {name}" + (f" {least} or newer" if least else "")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{needs} ({error}): {install}") from error
    version = _version(package)
    if least is not None and TorchVersion(version) < least:
        raise ImportError(f"{needs}, got {version}: {install}")
    return loaded


def after_import(module: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with a module once it is imported, which it may be already, and import nothing."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        act(loaded)
    else:
        sys.meta_path.insert(0, _AfterImport(module, act))


class _AfterImport(MetaPathFinder):
    """Finds nothing itself: it adds a call to the module that the other finders find."""

    def __init__(self, module: str, act: Callable[[ModuleType], None]) -> None:
        self.module = module
        self._act = act
        self._asking = threading.local()  # the other finders, for a spec

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.module or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = find_spec(name)
        finally:
            self._asking.now = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._act(module)

        loader.exec_module = exec_module
        return spec


class UnknownRelease(ValueError):
    """The error for another package that has changed a private name that cuseq relies on."""


_MISSING = object()


def private(
    owner: Any,
    name: str,
    *,
    signature: str | Sequence[str] | None = None,
    renamed: Mapping[str, str] | None = None,
    package: str | None = None,
) -> Any:
    """Return `owner.name`, a private name of another package.

    Args:
        owner: a module, a class or an object of the other package.
        name: the attribute.
        signature: for a function, the required parameters: a list of names; or the text of the
            signature without annotations, such as "(model, trainer, *, key='x')", which also
            compares kinds and defaults. None compares nothing.
        renamed: names of parameters in other releases, and the names in `signature` for them.
        package: the package to name in the error; by default the one that defines `owner`.

    Raises:
        UnknownRelease: the name is missing, or its signature differs.

    Examples:
        >>> from transformers import PreTrainedConfig
        >>> private(PreTrainedConfig, "_attn_implementation")
        <property object at 0x...>
    """
    found = getattr(owner, name, _MISSING)
    if found is _MISSING:
        what = "is missing"
    elif signature is None:
        return found
    elif not callable(found):
        what = f"is a {type(found).__name__}, not a function"
    else:
        takes = signature_of(found, names_only=not isinstance(signature, str))
        if isinstance(signature, str):
            expected, same = signature, takes == signature
        else:
            names = [
                (renamed or {}).get(name, name) for name in inspect.signature(found).parameters
            ]
            expected, same = f"({', '.join(signature)})", names == list(signature)
        if same:
            return found
        what = f"takes {takes}, not {expected}"
    raise _unknown(package or _package(owner), f"{_symbol(owner)}.{name} {what}")


def check_fields(cls: type, fields: Collection[str]) -> None:
    """Raise UnknownRelease unless a dataclass of another package has exactly these fields.

    A field that cuseq does not know could request behaviour that cuseq does not have.
    """
    has = getattr(cls, "__dataclass_fields__", {})
    found = {field.name for field in has.values()}
    for field in sorted(found ^ set(fields)):
        what = "has a field" if field in found else "has no field"
        raise _unknown(_package(cls), f"{_symbol(cls)} {what} {field}")


def check_attribute(function: Callable[..., Any], name: str) -> None:
    """Raise UnknownRelease unless a function of another package reads or writes attribute `name`.

    This is for attributes that a package sets on other packages' objects, such as accelerate's
    `_hf_hook` on modules. Without this check, a module whose hook attribute was renamed would look
    like a module without hooks.
    """
    if name not in _attributes(inspect.unwrap(function).__code__):
        raise _unknown(_package(function), f"{_symbol(function)} does not use attribute {name}")


def check_parameter(function: Callable[..., Any], names: Collection[str]) -> None:
    """Raise UnknownRelease unless a function of another package takes one of these parameters."""
    if not set(names) & set(inspect.signature(function).parameters):
        what = f"{_symbol(function)} takes none of {', '.join(names)}"
        raise _unknown(_package(function), what)


def signature_of(function: Callable[..., Any], *, names_only: bool = False) -> str:
    """Return the text of a signature without annotations, or only its parameter names."""
    signature = inspect.signature(function)
    if names_only:
        return f"({', '.join(signature.parameters)})"
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(plain))


def _attributes(code: CodeType) -> set[str]:
    nested = (const for const in code.co_consts if isinstance(const, CodeType))
    literals = {const for const in code.co_consts if isinstance(const, str)}  # setattr(x, "name")
    return set(code.co_names).union(literals, *map(_attributes, nested))


def _unknown(package: str, what: str) -> UnknownRelease:
    return UnknownRelease(f"cuseq does not know this {package} ({_version(package)}): {what}")


def _symbol(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__
    named = owner if hasattr(owner, "__qualname__") else type(owner)
    return f"{named.__module__}.{named.__qualname__}"


def _package(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__.partition(".")[0]
    named = owner if hasattr(owner, "__module__") else type(owner)
    return named.__module__.partition(".")[0]


def _version(package: str) -> str:
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"
