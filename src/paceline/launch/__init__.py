"""Where workers run. The package is itself what `paceline.launch(function)` calls: the function has its name."""

import sys
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    """The type of this package, which makes the package callable."""

    def __call__(self, *given: Any, **options: Any) -> Any:
        from paceline.launch.function import launch

        return launch(*given, **options)


sys.modules[__name__].__class__ = _Launch
