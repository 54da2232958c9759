"""Operators over views: an op is a folder with api.py, reference.py and faster implementations.

The caller names the implementation; one that cannot run raises, none falls back to another.
"""
