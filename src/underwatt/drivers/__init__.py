"""Devices: Jetson boards, NVIDIA GPUs, simulated boards and recorded tables."""
