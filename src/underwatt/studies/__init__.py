"""Trainings on proxy data, to learn how many samples the target takes at each batch size."""
