"""From an address such as ``train.py:job`` to the ``Job`` that it makes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt.errors import JobError, UnderwattError
from underwatt.jobs.job import Job

if TYPE_CHECKING:
    from types import ModuleType

USAGE_HINT = "Write it as file.py:factory or module:factory, where factory() returns an underwatt Job."


def load_job(address: str) -> Job:
    """The job at ``file.py:factory`` or ``module:factory``."""
    where, colon, factory_name = address.rpartition(":")
    if not colon or not where or not factory_name:
        raise JobError(f"{address!r} does not name a job.", hint=USAGE_HINT)
    is_file = where.endswith(".py") or "/" in where
    module = _load_file(Path(where)) if is_file else _load_module(where)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise JobError(f"There is no factory {factory_name!r} in {where}.", hint=_others_hint(module))
    try:
        job = factory()
    except UnderwattError:
        raise
    except (Exception, SystemExit) as exc:
        raise JobError(
            f"{factory_name}() in {where} failed: {_last_line(exc)}.",
            hint="Call it on its own in Python to see the whole traceback.",
        ) from exc
    if not isinstance(job, Job):
        raise JobError(
            f"{factory_name}() in {where} returned {type(job).__name__}, not a Job.",
            hint="End it with: return underwatt.Job(model, data, target=…).",
        )
    return job if job.name else replace(job, name=factory_name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise JobError(f"There is no file {path}.", hint=USAGE_HINT)
    # As for a script: what lies beside the file can be imported, also later, from within the factory.
    _put_on_path(path.parent)
    name = f"underwatt_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is not a Python file.", hint=USAGE_HINT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[name]
        raise _does_not_import(str(path), exc) from exc
    return module


def _load_module(name: str) -> ModuleType:
    _put_on_path(Path())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        if isinstance(exc, ModuleNotFoundError) and f"{name}.".startswith(f"{exc.name}."):
            raise JobError(f"There is no module {name!r}.", hint=USAGE_HINT) from exc
        raise _does_not_import(name, exc) from exc


def _put_on_path(folder: Path) -> None:
    resolved = str(folder.resolve())
    if resolved not in sys.path:
        sys.path.insert(0, resolved)


def _does_not_import(where: str, exc: BaseException) -> JobError:
    if isinstance(exc, SystemExit):
        return JobError(
            f"{where} ends Python while it is imported ({_last_line(exc)}).",
            hint='Put what it runs under if __name__ == "__main__":, so that it can be imported.',
        )
    return JobError(f"{where} does not import: {_last_line(exc)}.", hint="Mend it until it imports in Python.")


def _last_line(exc: BaseException) -> str:
    """The last line of the traceback as its author would read it, with the place it points to."""
    text = traceback.format_exception_only(exc)[-1].strip().rstrip(".")
    # Frames of the import machinery have angle brackets for a file, and are nobody's fault.
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename != __file__ and "<" not in f.filename]
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{text} ({Path(exc.filename).name}, line {exc.lineno})"
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _others_hint(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if _could_be_factory(module, name, value)]
    return f"It has: {', '.join(names)}." if names else "It has no function that could be one."


def _could_be_factory(module: ModuleType, name: str, value: Any) -> bool:
    if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
