"""Reads published versions in processes that take no part in training, and hands them on.

Other folders use `gate`, `places`, `relay`, `subscription`.
"""
