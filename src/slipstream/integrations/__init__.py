"""Frameworks that slipstream works with, one file or folder each; import the one that you use.

Each needs its framework, and has an extra of its own: ``pip install 'slipstream[mlflow]'``.
"""
