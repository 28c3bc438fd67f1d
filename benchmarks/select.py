# ruff: noqa: A005 - the file name is a fixed interface; the docstring says how the clash is handled
"""The fastest power mode within a budget; ``select_modes`` says and does the rest.

    python benchmarks/select.py --reference A.csv --target B.csv --budgets 17:50:1 --repeats 3 --json out.json

Python puts this folder first on the path of every script in it, so that this file hides the standard module of the
same name: imported under that name, it hands over to the standard module.
"""

import sys

if __name__ == "select":
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would import too much here
    _spec = PathFinder.find_spec("select", [path for path in sys.path if os.path.abspath(path or ".") != _here])  # noqa: PTH100
    if _spec is None or _spec.loader is None:
        raise ImportError("the standard module select is missing")
    _standard = module_from_spec(_spec)
    _spec.loader.exec_module(_standard)
    sys.modules["select"] = _standard

if __name__ == "__main__":
    from select_modes import main

    sys.exit(main())
