"""Profiling: a device and a workload become measurements that an engineer would trust."""
