"""Devices: found, read, set, and put back."""
