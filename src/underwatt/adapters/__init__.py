"""Underwatt inside somebody else's loop: ``tune``, Lightning, Transformers."""
