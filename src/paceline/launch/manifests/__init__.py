"""Writes what other launchers take: a batch script for Slurm, a manifest for KubeRay."""
