"""The whole story on virtual boards, with real training on the CPU."""
