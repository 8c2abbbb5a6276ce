"""Reads published versions in processes that take no part in training.

Other folders use `gate`, `subscription`.
"""
