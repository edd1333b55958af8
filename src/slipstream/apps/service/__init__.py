"""Training as a service: labelled text in, a classifier out.

This package's files import each other one way: ``rows``, ``words`` and ``features`` know nothing of
torch or of the web, ``answers`` needs numpy only, ``learn`` trains.
"""
