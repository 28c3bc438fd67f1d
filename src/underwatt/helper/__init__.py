"""A Jetson's knobs, and the service that sets them for those who may not: standard library only, Python 3.6 up.

The folder imports nothing of the rest of Underwatt, so that a JetPack's own Python runs it alone; the Jetson driver
imports it. ``sysfs``, ``board_facts``, ``knobs``, ``sensors``, ``snapshot`` and ``board`` find, read and write;
``service`` and ``journal`` are the service, ``install`` puts it in place. docs/helper.md says what it can do.
"""

SOCKET = "/run/underwatt/helper.sock"
GROUP = "underwatt"
FOLDER, NAME = "opt/underwatt", "underwatt-helper"  # where it is installed, and what its units are called
PROTOCOL, LONGEST = 1, 4096  # what is spoken, and how many bytes a message or an answer may have
INSTALL = 'sudo "$(command -v underwatt)" helper install'
