"""Networks written for these examples: plain PyTorch, each with a width that scales it down to a CPU."""
