"""Training jobs as something that can run steps at a batch size, whatever they are written in."""
