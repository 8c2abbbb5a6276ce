"""Writes what clusters take: a batch script for Slurm, a manifest for KubeRay."""
