"""``underwatt helper``: install the service that sets a Jetson's knobs without sudo, remove it, look at it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.markup import escape
from typer import Exit, Option, Typer, confirm

from underwatt.cli import common
from underwatt.drivers.helper import ANSWER_S, helper_status
from underwatt.errors import NotPermittedError
from underwatt.helper import NAME
from underwatt.helper.install import BY_HAND, has_systemd, install_steps, is_current, uninstall_steps

if TYPE_CHECKING:
    from underwatt.helper.install import Step

_helper_app = Typer(
    no_args_is_help=True,
    help="The service that sets this Jetson's knobs for a group: install it, remove it, look at it.",
)
app = Typer()
app.add_typer(_helper_app, name="helper")

YES = Option(False, "--yes", "-y", help="Do not ask.")
DRY = Option(False, "--dry-run", help="Say what would be done, and do nothing.")
ROOT = Option("/", "--root", help="Where the system's files are.", hidden=True)


@_helper_app.command("install")
def install(
    user: str = Option("", help="Whom to let use it; by default who has called sudo."),
    yes: bool = YES,
    dry_run: bool = DRY,
    root: str = ROOT,
) -> None:
    """Install the helper, or the newer one: says what it will do, asks, does it, and sees whether it answers."""
    who = user or os.environ.get("SUDO_USER", "")
    if not _do(install_steps(root, "" if who == "root" else who), "install", yes=yes, dry_run=dry_run):
        return
    if not has_systemd(root):
        common.say("[green]✓[/] The helper is installed. Log in again, then: underwatt devices")
        common.say(f"There is no systemd here; start it by hand: {escape(BY_HAND)}")
        return
    found = helper_status(within_s=ANSWER_S)  # a slow board may take a while to start it
    if not found["answers"]:
        common.say(f"[red]✗[/] The helper is installed, but does not work: {escape(str(found['says']))}")
        common.say(f"What it said: sudo journalctl -u {NAME}; how it is: systemctl status {NAME}")
        raise Exit(1)
    common.say("[green]✓[/] The helper is installed, and answers. Log in again, then: underwatt devices")
    if found["trouble"]:
        common.say(f"[red]✗[/] {escape(str(found['trouble']))}")


@_helper_app.command("uninstall")
def uninstall(yes: bool = YES, dry_run: bool = DRY, root: str = ROOT) -> None:
    """Remove the helper, after it has put the board back: says what it will do, asks, and does it."""
    if _do(uninstall_steps(root), "uninstall", yes=yes, dry_run=dry_run):
        common.say("[green]✓[/] The helper is removed. What root's sessions keep in /var/lib/underwatt is left.")


@_helper_app.command("status")
def status(as_json: bool = common.AS_JSON, root: str = ROOT) -> None:
    """Say whether the helper is there, whether you may speak to it, who holds the board, and what is wrong."""
    found = {"installed": is_current(root) is not None, "current": bool(is_current(root)), **helper_status()}
    if as_json:
        common.say_json(found)
    else:
        installed = "installed" if found["current"] else "of another version: install it again"
        common.OUT.print(f"helper: {installed if found['installed'] else 'not installed here'}")
        common.say(f"{'[green]✓[/]' if found['answers'] else '[red]✗[/]'} {escape(str(found['says']))}")
        if found["trouble"]:
            common.say(f"[red]✗[/] {escape(str(found['trouble']))}")
    if not found["answers"] or found["trouble"]:
        raise Exit(1)


def _do(steps: list[Step], what: str, *, yes: bool, dry_run: bool) -> bool:
    """Say the steps, ask, and do them; whether they were done."""
    common.OUT.print("This will")
    for number, step in enumerate(steps, 1):
        common.OUT.print(f"  {number}. {escape(step.says)}", highlight=False, soft_wrap=True)
    if dry_run:
        return False
    if os.geteuid() != 0:
        raise NotPermittedError("Only root may do that.", hint=f'sudo "$(command -v underwatt)" helper {what}')
    if not yes and not (sys.stdin.isatty() and confirm("Go on?")):
        common.OUT.print("Nothing was done." if sys.stdin.isatty() else "Nothing was done: --yes goes on unasked.")
        raise Exit(1)
    for step in steps:
        step.act()
    return True
