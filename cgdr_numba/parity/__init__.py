"""Recorded calls, error measures and named cases."""
