"""``python -m underwatt`` is the command ``underwatt``."""

from underwatt.cli import main

main()
