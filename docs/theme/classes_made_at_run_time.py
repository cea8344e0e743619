"""Layers and callbacks that are made for each Keras when the module is imported, as classes in the reference.

An extension of griffe, which reads sources and runs nothing: of `Embedding = layers_of(tf.keras).Embedding` it knows a
name. What is missing is asked of the class itself: its docstring, its arguments, and its own public methods.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import griffe

MODULES = (
    "tfplugin.keras",
    "tfplugin.sok.all2all_layer",
    "tfplugin.sok.distributed_embedding",
    "tfplugin.dynamic_embedding.keras.layers",
    "tfplugin.dynamic_embedding.keras.callbacks",
)


def _arguments(of: Any) -> str:
    try:
        signature = inspect.signature(of)
    except (TypeError, ValueError):
        return "self, *args, **kwargs"
    plain = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, (bool, int, float, str, type(None))):
            default = None
        plain.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))[1:-1]


def source_of(made: type, name: str) -> str:
    """A class as somebody would have written it who writes no bodies."""
    lines = [f"class {name}:", f"    {inspect.getdoc(made) or ''!r}"]
    lines += [f"    def __init__({_arguments(made.__init__)}): ..."]
    ours = [base for base in made.__mro__ if base.__module__.partition(".")[0] == "tfplugin"]
    methods = sorted({method for base in ours for method in vars(base) if not method.startswith("_")})
    for method in methods:
        function = inspect.getattr_static(made, method)
        if inspect.isfunction(function) and function.__doc__:
            lines += [f"    def {method}({_arguments(function)}):", f"        {inspect.getdoc(function)!r}"]
    return "\n".join(lines)


class ClassesMadeAtRunTime(griffe.Extension):
    """Replaces attributes of `MODULES` that are classes when they are imported."""

    def on_package(self, *, pkg: Any, loader: Any, **kwargs: Any) -> None:
        """Called when a package has been read."""
        for module in MODULES:
            package, _, path = module.partition(".")
            if package != pkg.path:
                continue
            static = pkg[path]
            imported = importlib.import_module(module)
            for name, member in list(static.members.items()):
                made = getattr(imported, name, None)
                if name.startswith("_") or member.is_alias or not member.is_attribute or not inspect.isclass(made):
                    continue
                source = source_of(made, name)
                ast.parse(source)
                visited = griffe.visit(
                    module,
                    filepath=static.filepath,
                    code=source,
                    docstring_parser=loader.docstring_parser,
                    docstring_options=loader.docstring_options,
                    extensions=loader.extensions,
                )
                static.set_member(name, visited[name])
