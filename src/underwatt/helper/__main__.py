"""``python3 -m underwatt_helper``: run the service by hand, or as systemd does."""

import argparse
import grp
import os
import sys

from . import GROUP, SOCKET
from .board import JetsonBoard
from .board_facts import is_jetson
from .keeper import Keeper, say
from .service import Service, is_member, listen, listener_from_systemd
from .sysfs import Sysfs


def main() -> int:
    """Serve until SIGTERM; then everything is put back."""
    parser = argparse.ArgumentParser(prog="underwatt-helper", description="Sets the knobs of this Jetson for a group.")
    parser.add_argument("--group", default=GROUP, help="who may speak to it, beside root")
    parser.add_argument("--socket", default=SOCKET, help="where it listens, unless systemd hands it a socket")
    parser.add_argument("--root", default="/", help="where the board's files are")
    options = parser.parse_args()
    sysfs = Sysfs(os.path.abspath(options.root))
    if not is_jetson(sysfs):
        say(f"there is no Jetson at {sysfs.root}")
        return 2
    try:
        group = int(options.group) if options.group.isdigit() else grp.getgrnam(options.group).gr_gid
    except KeyError:
        say(f"there is no group {options.group}: groupadd --system {options.group}")
        return 2
    keeper = Keeper(JetsonBoard(sysfs), heeds=lambda user: is_member(user, group))
    try:
        listener = listener_from_systemd() or listen(options.socket, group)
    except OSError as exc:
        say(f"cannot listen at {options.socket}: {exc.strerror}")
        return 1
    say(f"serves {keeper.board.identity.name} to root and the group {options.group}")
    return Service(keeper, listener, group).run()


if __name__ == "__main__":
    sys.exit(main())
