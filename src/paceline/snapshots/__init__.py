"""Snapshots: one version of all tables on disk, for a job that goes on."""
