"""Decisions before training starts: chunks, holders, costs. Pure."""
