"""A griffe extension: `parallelize` with a parameter for each option, as `autopar.options.with_options` makes it."""

from __future__ import annotations

from typing import Any

from griffe import ExprAttribute, Extension, Module, Parameter, ParameterKind


class OptionsSignature(Extension):
    """Replaces `**options: Unpack[Options]` by the types of `Options` and the defaults of `Settings`."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        types = pkg["options.Options"].attributes
        parameters = pkg["api.parallelize"].parameters
        del parameters["options"]
        for name, default in pkg["options.Settings"].attributes.items():
            if name in types:
                value = default.value
                if isinstance(value, ExprAttribute):  # a constant of another module
                    value = pkg.modules_collection[value.canonical_path].value
                kind = ParameterKind.keyword_only
                parameters.add(Parameter(name, annotation=types[name].annotation, kind=kind, default=value))
