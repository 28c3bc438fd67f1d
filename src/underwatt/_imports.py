"""Optional packages: imported when first used, with the pip command in the error where they are absent."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from underwatt.errors import MissingExtraError

if TYPE_CHECKING:
    from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional module, or say which extra brings it."""
    try:
        return import_module(module)
    except ImportError as exc:
        raise MissingExtraError(
            f"This needs the package {module.split('.')[0]!r}, which cannot be imported ({exc}).",
            hint=f"Install it with: pip install 'underwatt[{extra}]'",
        ) from exc
