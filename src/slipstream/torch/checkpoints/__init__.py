"""Checkpoints: files, their sections, their checks, and the state that they hold."""
