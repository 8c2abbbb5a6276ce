"""Snapshots: one version of all tables on disk, for a job that goes on.

Other folders use `files`, `folder`, `increments`, `options`, `reading`, `taking`, `writing`.
"""
