"""Workload costs that the tests of virtual boards share."""

from __future__ import annotations

from underwatt.records import WorkloadCost

# ResNet-18 at 32 × 32 with AdamW, about as counted.
SMALL = WorkloadCost(
    flops_per_sample=3.3e9,
    bytes_per_sample=43e6,
    bytes_per_step=1.07e9,
    kernels_per_step=177,
    load_bytes_per_sample=12_296,
    parameters=11.2e6,
    state_bytes=179e6,
    activation_bytes_per_sample=4.7e6,
)
# ResNet-18 at 224 × 224 with SGD, as counted: the work behind the public Orin tables, which ran it at batch size 16.
IMAGENET = WorkloadCost(
    flops_per_sample=10.7e9,
    bytes_per_sample=188e6,
    bytes_per_step=0.27e9,
    kernels_per_step=178,
    load_bytes_per_sample=602_120,
    parameters=11.2e6,
    state_bytes=90e6,
    activation_bytes_per_sample=23.8e6,
)
# Input so large that the GPU waits for it.
STARVED = WorkloadCost(1e9, 20e6, 0.1e9, 200, 3e6, 1e6, 16e6, 5e6)
