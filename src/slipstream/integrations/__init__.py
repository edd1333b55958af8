"""Integrations of frameworks, one file or folder each; import the one that you use.

Each needs its framework, and has an extra: ``pip install 'slipstream[mlflow]'``.
"""
