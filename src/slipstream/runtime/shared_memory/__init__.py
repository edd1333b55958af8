"""Learners of one machine: the launcher's part, and the server process."""
