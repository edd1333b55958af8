"""Deliberate breaks of the code, and the tests that must see each: ``make mutants``."""
