"""Conformance suites: what every device backend and every predictor must pass; subclass them in a test file."""
